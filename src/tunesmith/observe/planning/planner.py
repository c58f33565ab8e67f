"""A plan: the layout that fits and is fastest, its memory, time and cost, and what to change first."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunesmith.base.core.errors import InputError
from tunesmith.observe.planning.memory import Layout, memory_gb, peak_gb
from tunesmith.observe.planning.shape import Shape
from tunesmith.observe.planning.step_time import Cluster, StepModel, StepTime
from tunesmith.observe.planning.workload import Workload

USABLE = 0.9
"""Share of an accelerator's memory that a plan uses; the rest is for the allocator and the libraries."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of `work` on `cluster`: layout, memory in GB by stage and part, seconds by stage."""

    shape: Shape
    work: Workload
    cluster: Cluster
    layout: Layout
    memory: dict[str, dict[str, float]]
    time: StepTime

    @property
    def num_accelerators(self) -> int:
        """All that the step occupies."""
        return (self.cluster.nodes + self.cluster.critic_nodes) * self.cluster.per_node

    @property
    def cost_per_step(self) -> float | None:
        """Price of a step; None if that of an hour is not known."""
        price = self.cluster.hardware.price_per_hour
        return self.num_accelerators * price * self.time.total_s / 3600 if price else None


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change, the seconds that a step takes then, and the accelerators it takes."""

    what: str
    step_s: float
    num_accelerators: int


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans of one model; `factors` by stage are those of a calibration. With `data_parallel` the ranks are
    replicas that share optimizer states alone, as Tunesmith's own are.
    """

    shape: Shape
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    data_parallel: bool = False

    def best(self, work: Workload, cluster: Cluster, workers: int = 0) -> Plan:
        """The fastest plan that fits. Where none fits, micro-batches become smaller, activations are computed again,
        and engines draw fewer completions at a time, in this order; `work` of the plan has what was changed.

        Raises:
            InputError: none fits; the message says what the smallest needs.
        """
        limit_gb, least_gb = USABLE * cluster.hardware.memory_gb, float("inf")
        held = replace(work, critic="none") if cluster.critic_nodes else work
        choices = list(layouts(self.shape, cluster, draws=work.draws, workers=workers))
        if self.data_parallel:
            choices = [Layout(data=cluster.num_ranks, workers=workers)]
        for smaller in _smaller(held):
            needed = {layout: peak_gb(memory_gb(self.shape, smaller, layout)) for layout in choices}
            if fitting := [layout for layout, size_gb in needed.items() if size_gb <= limit_gb]:
                return self._fastest(replace(smaller, critic=work.critic), cluster, fitting)
            least_gb = min(least_gb, *needed.values())
        raise InputError(
            f"nothing fits: a rank needs at least {least_gb:.3g} GB, and {cluster.hardware.name} has "
            f"{cluster.hardware.memory_gb:g} GB, {limit_gb:.3g} GB of them usable; give more --nodes, or a recipe with "
            "optimizer.state int8 or model.lora.rank"
        )

    def _fastest(self, work: Workload, cluster: Cluster, choices: Sequence[Layout]) -> Plan:
        rollouts: dict[int, float] = {}

        def seconds(layout: Layout) -> float:
            model = StepModel(self.shape, work, cluster, layout)
            if work.draws and layout.engine_tensor not in rollouts:
                rollouts[layout.engine_tensor] = model.rollout(0)[0]
            drawn_s = model.weights_s() + rollouts[layout.engine_tensor] if work.draws else 0.0
            return drawn_s + model.update_s() + work.num_passes * work.scored_share * model.pass_s()

        layout = min(choices, key=seconds)
        time = StepModel(self.shape, work, cluster, layout, self.factors).step()
        held = replace(work, critic="none") if cluster.critic_nodes else work
        return Plan(self.shape, work, cluster, layout, memory_gb(self.shape, held, layout), time)

    def changes(self, plan: Plan) -> list[Change]:
        """Changes that make the step at least a hundredth shorter, the largest saving first."""
        found: list[Change] = []
        for what, work, cluster in _candidates(plan):
            try:
                changed = self.best(work, cluster, plan.layout.workers)
            except InputError:
                continue  # does not fit
            if changed.time.total_s < 0.99 * plan.time.total_s:
                found.append(Change(what, changed.time.total_s, changed.num_accelerators))
        return sorted(found, key=lambda change: change.step_s)


def _smaller(work: Workload) -> Iterator[Workload]:
    """`work`, and with ever less memory."""
    for checkpointed in dict.fromkeys((work.checkpointed, True)):
        size = work.micro_batch_size
        while size:
            yield replace(work, micro_batch_size=size, checkpointed=checkpointed)
            size //= 2
    slots = work.slots // 2
    while slots:
        yield replace(work, micro_batch_size=1, checkpointed=True, slots=slots)
        slots //= 2


def layouts(shape: Shape, cluster: Cluster, *, draws: bool, workers: int = 0) -> Iterator[Layout]:
    """All layouts of the ranks of `cluster`: tensor parallel within a node, stages with equal numbers of layers."""
    ranks = cluster.num_ranks
    tensors = [n for n in _divisors(cluster.per_node) if shape.num_heads % n == 0]
    engines = tensors if draws and not workers else [1]
    for tensor, pipeline in itertools.product(tensors, _divisors(shape.num_layers)):
        if ranks % (tensor * pipeline):
            continue
        data = ranks // (tensor * pipeline)
        for shards, engine in itertools.product((False, True)[: 1 + (data > 1)], engines):
            yield Layout(data, tensor, pipeline, engine, shards, workers)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _candidates(plan: Plan) -> Iterator[tuple[str, Workload, Cluster]]:
    """Changes to try. What changes the result of the training says so."""
    work, cluster = plan.work, plan.cluster
    twice = replace(cluster, nodes=2 * cluster.nodes, critic_nodes=2 * cluster.critic_nodes)
    yield f"{2 * cluster.nodes} nodes instead of {cluster.nodes}", work, twice
    if work.draws:
        yield from _drawing_candidates(work, cluster)
    if work.has_reference:
        yield "no reference model, kl.coef 0 (changes what is learnt)", replace(work, has_reference=False), cluster
    if work.recomputes_old_policy:
        yield "the exact engine's log-probs for the old policy", replace(work, recomputes_old_policy=False), cluster
    if work.critic == "separate":
        yield "ppo.critic shared (changes what is learnt)", replace(work, critic="shared"), cluster
        if not cluster.critic_nodes and cluster.nodes > 1:
            half = replace(cluster, nodes=cluster.nodes - cluster.nodes // 2, critic_nodes=cluster.nodes // 2)
            yield f"critic on {half.critic_nodes} of the nodes, beside the policy", work, half
    if work.trained_share == 1:
        yield "model.lora.rank 16 (changes what is learnt)", replace(work, trained_share=0.01), cluster
    if work.checkpointed:
        yield "model.gradient_checkpointing false", replace(work, checkpointed=False), cluster
    if work.num_epochs > 1:
        yield "num_epochs 1 (changes what is learnt)", replace(work, num_epochs=1), cluster
    larger = replace(work, micro_batch_size=2 * work.micro_batch_size)
    yield f"micro_batch_size {larger.micro_batch_size} instead of {work.micro_batch_size}", larger, cluster


def _drawing_candidates(work: Workload, cluster: Cluster) -> Iterator[tuple[str, Workload, Cluster]]:
    """Changes of how completions are drawn."""
    if work.slots < work.num_rows:
        yield (
            f"rollout.num_slots {2 * work.slots} instead of {work.slots}",
            replace(work, slots=2 * work.slots),
            cluster,
        )
    if work.lease:
        yield f"leases of {2 * work.lease} instead of {work.lease}", replace(work, lease=2 * work.lease), cluster
    if cluster.hardware.is_cpu and not work.draws_in_int8 and work.base_itemsize is None:
        yield (
            "rollout.weights int8 (not exact: importance weights correct it)",
            replace(work, draws_in_int8=True),
            cluster,
        )
    limit = round(2 * work.mean_new_tokens)
    if limit < work.new_tokens:
        shorter = replace(work, new_tokens=limit)
        yield f"rollout.max_new_tokens {limit} (cuts the longest completions off)", shorter, cluster
