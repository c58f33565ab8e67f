"""Seconds of each stage of a step on given hardware: work divided by rates, plus what does not get smaller.

A pass costs 2 operations a weight and token, backward twice that (Kaplan et al. 2020, section 2.1), and the products of
attention. A decoding step reads all weights and the cache. A pipeline of P stages and M micro-batches idles (P - 1) / M
of its time (Narayanan et al. 2021, section 2.2). A ring moves (n - 1) / n of a tensor, an all-reduce twice that.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tunesmith.engine.rollout.workers.queue import lease_size
from tunesmith.observe.planning.hardware import Hardware
from tunesmith.observe.planning.memory import Layout
from tunesmith.observe.planning.shape import Shape
from tunesmith.observe.planning.simulation import InOrder, draw_s, run_queue, sample_lengths
from tunesmith.observe.planning.workload import INT8_BYTES, INT8_RATE, Workload


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of a training. On `critic_nodes` of their own, critic and reward model work beside the policy.
    `engine_speed` is that of rollout workers that share cores.
    """

    hardware: Hardware
    nodes: int = 1
    per_node: int = 1
    critic_nodes: int = 0
    engine_speed: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks that hold the policy."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by stage, in the order in which they begin; `queue_share` is the share of the rollout in which
    a worker draws.
    """

    stages: dict[str, float]
    queue_share: float = 1.0

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class StepModel:
    """The times of one step, each stage multiplied by its factor of a calibration; `other` is in seconds."""

    shape: Shape
    work: Workload
    cluster: Cluster
    layout: Layout
    factors: Mapping[str, float] = field(default_factory=dict[str, float])

    def step(self) -> StepTime:
        """The step. With nodes of its own the critic scores while answers are drawn, and learns beside the policy."""
        work, beside = self.work, self.cluster.critic_nodes > 0
        num_critic_passes = (work.critic == "separate") + beside  # values; the reward model lives there too
        stages: dict[str, float] = {}
        share = 1.0
        if work.draws:
            stages["weights"] = self.weights_s()
            drawn_s, after_s, share = self.rollout(num_critic_passes if beside else 0)
            stages |= {"rollout": drawn_s, "critic": after_s} if beside else {"rollout": drawn_s}
        if work.num_passes:
            stages["scoring"] = work.num_passes * work.scored_share * self.pass_s()
        if num_critic_passes and not beside:
            stages["critic"] = self.pass_s()
        update_s = self.update_s()
        if work.critic == "separate":
            update_s = max(update_s, self.on_critic_nodes().update_s()) if beside else 2 * update_s
        stages["update"] = update_s
        times = {name: self.factors.get(name, 1.0) * seconds for name, seconds in stages.items()}
        return StepTime(times | ({"other": self.factors["other"]} if "other" in self.factors else {}), share)

    def on_critic_nodes(self) -> "StepModel":
        """The same step on the nodes of the critic."""
        nodes = self.cluster.critic_nodes
        data = max(1, self.layout.data * nodes // self.cluster.nodes)
        return replace(self, cluster=replace(self.cluster, nodes=nodes), layout=replace(self.layout, data=data))

    def weights_s(self) -> float:
        """Seconds until the engines have the new weights: gathered from the ranks of the trainer, and loaded."""
        size, hardware = self.shape.num_parameters * self.work.itemsize, self.cluster.hardware
        if self.cluster.num_ranks == 1 and self.layout.engine_tensor == 1:
            return size / (hardware.load_gb_per_s * 1e9)
        part = size / self.layout.engine_tensor
        moved = part * (1 - self.layout.engine_tensor / max(self.layout.num_ranks, self.layout.engine_tensor))
        across = self.layout.num_parts * self.layout.data > self.cluster.per_node
        return moved / hardware.link_rate(across_nodes=across) + part / (hardware.load_gb_per_s * 1e9)

    def rollout(self, num_scorings: int) -> tuple[float, float, float]:
        """Seconds of drawing, those of scoring behind it, and the share of the time in which an engine draws: means of
        simulations with several draws of lengths.
        """
        found = [self._simulate(num_scorings, seed) for seed in range(max(1, min(8, 8192 // self.work.num_rows)))]
        drawn_s, after_s, share = (statistics.fmean(values) for values in zip(*found, strict=True))
        return drawn_s, after_s, share

    def _simulate(self, num_scorings: int, seed: int) -> tuple[float, float, float]:
        work, engines = self.work, self.layout.num_engines
        lengths = sample_lengths(work.num_rows, work.mean_new_tokens, work.new_tokens, seed)
        size = lease_size(len(lengths), work.lease) or -(-len(lengths) // engines)
        leases = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        prefill_s = work.prompt_tokens * self.token_s(work.prompt_tokens) / self.layout.engine_tensor
        per_row_s = prefill_s / max(1, work.completions)  # a group computes its prompt once
        seconds = [draw_s(lease, work.slots, self.decode_step_s) + len(lease) * per_row_s for lease in leases]
        answers = run_queue(InOrder(len(leases)), seconds, [self.cluster.engine_speed] * engines)
        drawn_s = answers[-1].at_s
        score_s = num_scorings * self.on_critic_nodes().pass_s() / len(leases) if num_scorings else 0.0
        scored_s = 0.0
        for answer in answers:
            scored_s = max(scored_s, answer.at_s) + score_s
        return drawn_s, scored_s - drawn_s, sum(seconds) / (self.cluster.engine_speed * engines * drawn_s)

    def decode_step_s(self, num_rows: int) -> float:
        """Seconds of a step that decodes one token of each of `num_rows` completions in an engine."""
        shape, work, hardware, ranks = self.shape, self.work, self.cluster.hardware, self.layout.engine_tensor
        cached = num_rows * (work.prompt_tokens + work.mean_new_tokens / 2)
        in_int8 = work.draws_in_int8 or work.base_itemsize is not None
        weight_bytes = shape.matmul_parameters * (INT8_BYTES if in_int8 else work.itemsize)
        num_bytes = (weight_bytes + shape.cache_values(cached) * work.itemsize) / ranks
        flop_s = num_rows * self.token_s(work.row_tokens) / ranks / (INT8_RATE if in_int8 else 1.0)
        exchange_us = 2 * hardware.collective_us * (ranks > 1)
        layers_us = shape.num_layers * (hardware.layer_us + exchange_us)
        fixed_s = 1e-6 * (layers_us + hardware.decode_us + num_rows * hardware.row_us)
        return max(num_bytes / hardware.memory_rate, flop_s) + fixed_s

    def token_s(self, context: float) -> float:
        """Seconds of a forward pass over one token of rows of `context` tokens, on one rank."""
        shape = self.shape
        attention = 2 * shape.num_layers * context * shape.num_heads * shape.head_dim  # half of the scores: causal
        rate = self.cluster.hardware.matmul_rate * (0.5 if self.work.itemsize == 4 else 1.0)
        return (2 * shape.matmul_parameters + attention) / rate

    def pass_s(self) -> float:
        """Seconds of a forward pass over all rows."""
        return self._passes_s(2 * self.shape.num_layers) + self._computing_s(1.0)

    def update_s(self) -> float:
        """Seconds of all optimizer steps: passes, bubbles of the pipeline, exchange of gradients, optimizer."""
        work, layout, hardware = self.work, self.layout, self.cluster.hardware
        own = self.shape.num_parameters / layout.num_parts
        num_passes = 1 + 2 * (work.trained_share + 1) / 2 + work.checkpointed
        exchanges = (4 + 2 * work.checkpointed) * self.shape.num_layers
        passes_s = work.num_epochs * work.learnt_share * (self._computing_s(num_passes) + self._passes_s(exchanges))
        gathers = 2 * self._num_micro_batches() * work.num_minibatches if layout.shards_weights else 1
        moved = own * (4 * work.trained_share + gathers * work.itemsize) * (layout.data - 1) / layout.data
        across = layout.num_ranks > self.cluster.per_node
        exchange_s = moved / hardware.link_rate(across_nodes=across)
        states = own / layout.data * work.trained_share * (2 * (work.moment_bytes + 4) + 4)
        return passes_s + work.num_updates * (exchange_s + states / hardware.memory_rate)

    def _num_micro_batches(self) -> int:
        """Micro-batches of a replica in one optimizer step."""
        rows = self.work.learnt_share * self.work.num_rows / self.work.num_minibatches / self.layout.data
        return max(1, round(rows / self.work.micro_batch_size))

    def _computing_s(self, num_passes: float) -> float:
        work, layout = self.work, self.layout
        replicas = min(layout.data, work.num_rows)
        computing_s = num_passes * work.tokens * self.token_s(work.row_tokens) / (replicas * layout.num_parts)
        return computing_s * (1 + (layout.pipeline - 1) / self._num_micro_batches())

    def _passes_s(self, num_exchanges: int) -> float:
        """Seconds of the exchanges between tensor-parallel ranks."""
        work, layout, hardware = self.work, self.layout, self.cluster.hardware
        if layout.tensor == 1:
            return 0.0
        num_bytes = 2 * (layout.tensor - 1) / layout.tensor * work.tokens * self.shape.hidden_size * work.itemsize
        exchanges = num_exchanges / layout.pipeline / layout.data
        return exchanges * num_bytes / hardware.link_rate(across_nodes=layout.tensor > self.cluster.per_node)
