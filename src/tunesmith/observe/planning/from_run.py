"""A recorded run as the calibration of a plan: its work, its machine, and a factor for each of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.base.config.load import load_recipe, read_algorithm
from tunesmith.base.core.errors import RunError
from tunesmith.observe.planning.calibration import Calibration
from tunesmith.observe.planning.hardware import HARDWARE, Hardware
from tunesmith.observe.planning.memory import Layout
from tunesmith.observe.planning.shape import Shape, read_shape
from tunesmith.observe.planning.step_time import Cluster, StepModel
from tunesmith.observe.planning.workload import Workload, workload_of
from tunesmith.observe.profiling.facts import Facts, MissingError, read_facts

_MEASURED = {
    "rollout": ("rollout",),
    "scoring": ("frozen", "old_policy", "reference", "teachers", "kl"),
    "update": ("forward", "backward", "optimizer"),
}
"""Stages of a run that a stage of the plan stands for; the engine takes its weights within the rollout."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run: model, work of a step, one of its processes, and how its stages compare with the model's. `ranks`
    and `workers` are the processes that train and draw, `cores` is the number of them for which its machine has cores.
    """

    shape: Shape
    work: Workload
    hardware: Hardware
    cores: float
    ranks: int
    workers: int
    step_s: float
    calibration: Calibration

    def cluster(self, nodes: int, ranks: int, workers: int) -> Cluster:
        """`nodes` machines like that of the run, each with `ranks`; the `workers` of all of them share their cores."""
        return Cluster(self.slowed(ranks), nodes, ranks, engine_speed=min(1.0, self.cores * nodes / max(1, workers)))

    def slowed(self, processes: int) -> Hardware:
        """A process beside others on the same machine."""
        share = min(1.0, self.cores / processes)
        hardware = self.hardware
        return replace(
            hardware,
            flop_per_s=share * hardware.flop_per_s,
            memory_gb_per_s=share * hardware.memory_gb_per_s,
            memory_gb=hardware.memory_gb / processes,
            layer_us=hardware.layer_us / share,
            decode_us=hardware.decode_us / share,
            row_us=hardware.row_us / share,
        )


def read_measured(path: Path) -> MeasuredRun:
    """The run in the folder `path`.

    Raises:
        RunError: the folder lacks what a plan needs, such as steps or `setup.json`.
    """
    facts = read_facts(path)
    try:
        return _measured(path, facts)
    except MissingError as error:
        raise RunError(
            f"{path} has no {error.args[0]} (of {facts.origin(str(error.args[0]))}); give a training of this release "
            "that has done some steps"
        ) from error


def _measured(path: Path, facts: Facts) -> MeasuredRun:
    recipe_file = path / "recipe.yaml"
    recipe = load_recipe(read_algorithm(recipe_file), file=recipe_file).recipe
    work, ranks = workload_of(recipe, 0.0), int(facts.number("setup.num_ranks", 1.0))
    if work.draws:
        prompts = facts.number("rollout/prefill_tokens", 0.0) + facts.number("rollout/shared_tokens", 0.0)
        prompts *= ranks  # rank 0 counts its own share
        mean = min(work.new_tokens, facts.number("completions/mean_length"))
        work = replace(work, prompt_tokens=prompts / work.num_rows, mean_new_tokens=mean)
    else:
        work = replace(work, prompt_tokens=facts.number("num_tokens") / work.num_rows)
    itemsize = 4 if facts.text("setup.dtype") == "float32" else 2
    trained = facts.number("setup.num_trained") / facts.number("setup.num_parameters")
    work = replace(work, itemsize=itemsize, trained_share=min(1.0, trained))
    if facts.values.get("setup.rollout_weights") == "int8":  # which `auto` may have chosen
        work = replace(work, draws_in_int8=True)
    threads, cores = facts.number("setup.num_threads"), facts.number("setup.usable_cores")
    rate = facts.number(f"setup.peak_flop_per_s.{facts.text('setup.dtype')}") * (2 if itemsize == 4 else 1)
    hardware = replace(
        HARDWARE["cpu"],
        name=f"machines of {path.name}",
        flop_per_s=rate,
        memory_gb=facts.number("setup.memory_gb"),
        memory_gb_per_s=HARDWARE["cpu"].memory_gb_per_s * threads,
    )
    workers = int(facts.number("recipe.scale.workers", 0.0))
    source = f"calibrated on {facts.num_steps} steps of {path.name}"
    unknown = Calibration({}, source, None)
    run = MeasuredRun(_shape(path, facts), work, hardware, cores / threads, ranks, workers, facts.step_s, unknown)
    return replace(run, calibration=Calibration(_factors(run, facts), source, None))


def _shape(path: Path, facts: Facts) -> Shape:
    """The shape of the run's model: of its config, or of `setup.json` where it has not been saved yet."""
    if (path / "final" / "config.json").is_file():
        return read_shape(str(path / "final"))
    hidden, layers, vocab, total = (
        int(facts.number(f"setup.{key}")) for key in ("hidden_size", "num_layers", "vocab_size", "num_parameters")
    )
    layer = max(1, (total - vocab * hidden) // layers)
    return Shape("unknown", vocab, hidden, layers, 1, 1, hidden, 0, layer, total)


def _factors(run: MeasuredRun, facts: Facts) -> Mapping[str, float]:
    """Measured divided by predicted seconds of each stage; `other` is what no stage explains, in seconds."""
    cluster = run.cluster(1, run.ranks, run.workers)
    model = StepModel(run.shape, run.work, cluster, Layout(data=run.ranks, workers=run.workers))
    stages = model.step().stages
    measured = {name: facts.stage_s(*spans) for name, spans in _MEASURED.items()}
    drawn = stages.get("rollout", 0.0) + stages.get("weights", 0.0)
    predicted = {**stages, "rollout": drawn, "critic": 0.0}
    factors = {name: seconds / predicted[name] for name, seconds in measured.items() if predicted.get(name)}
    explained = sum(seconds for name, seconds in measured.items() if name in factors)
    return {**factors, "weights": factors.get("rollout", 1.0), "other": max(0.0, facts.step_s - explained)}
