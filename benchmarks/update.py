"""`python -m benchmarks.update`: the update of one GRPO step of our trainer against TRL's, from the same completions.

Time: TRL's weights are bfloat16 without autocast and it recomputes nothing, which is faster than its defaults; it is
tried with each micro-batch, then with eager attention, and keeps what was fastest. Memory: the peak above the resting
state, in which weights and optimizer states are in place; compared with TRL at our micro-batch, in its own default
precision, float32 weights with autocast, because those are masters as ours are. What it takes as it is timed is shown
too.
"""

import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.figures import paired
from benchmarks.machine import Load, machine_facts
from benchmarks.process import Process
from benchmarks.rounds import Rounds, Say, alternate, fastest_setting, load_facts
from benchmarks.step import exported
from benchmarks.step_contenders import load_trl
from benchmarks.update_contenders import (
    WORKLOADS,
    OurUpdate,
    TakeUpdate,
    TRLUpdate,
    UpdateSize,
    UpdateTaken,
    batch_of,
    recipe,
)
from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.models.load import compute_dtype, load_policy
from tunesmith.runs.environment import usable_cores

_CONTENDERS = "benchmarks.update_contenders"
_MICRO_BATCHES = (4, 8, 16, 32)
_WARM_UP_UPDATES = 2  # the first makes optimizer states and primitives, the second finds its memory fragmented
_MEMORY_UPDATES = 2
_SAME_NORM = 0.1
"""By which share gradient norms may part: both are in bfloat16, rounded in other places."""


@dataclass(frozen=True, slots=True)
class UpdateBench:
    """What to measure. `micro_batch_size` is of our side; `quick` is a smoke run that says nothing."""

    model: str = "smollm2"
    against: str = "trl"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    micro_batch_size: int | None = None
    num_threads: int | None = None
    num_rounds: int = 5
    seed: int = 0
    quick: bool = False


@dataclass(slots=True)
class Measured:
    """Timed updates of both sides without the first ones, and memory of each."""

    ours: list[UpdateTaken]
    theirs: list[UpdateTaken]
    memory_gb: float
    trl_memory_gb: float
    default_precision: list[UpdateTaken]
    equal_micro_batch_size: int
    setting: TRLUpdate
    calibration: Mapping[str, float]
    loads: list[Load]

    def to_json(self) -> dict[str, object]:
        """Figures of a workload, seconds as medians over rounds."""
        ours_s, theirs_s = [update.seconds for update in self.ours], [update.seconds for update in self.theirs]
        stages = {name for update in self.ours for name in update.stages_s if "update" in name}
        default_gb = max(update.memory_gb for update in self.default_precision)
        return {
            **paired(theirs_s, ours_s).facts("ratio"),
            "memory_ratio": self.memory_gb / default_gb,
            "memory_ratio_as_timed": self.memory_gb / self.trl_memory_gb,
            "update_s": statistics.median(ours_s),
            "memory_gb": self.memory_gb,
            "stages": {
                name.removeprefix("time/update/").removesuffix("_s"): statistics.median(
                    update.stages_s[name] for update in self.ours
                )
                for name in sorted(stages)
            },
            "tokens": self.setting.batch.num_tokens,
            "grad_norm": self.ours[0].grad_norm,
            "trl": {
                "update_s": statistics.median(theirs_s),
                "memory_gb": self.trl_memory_gb,
                "grad_norm": self.theirs[0].grad_norm,
                "dtype": self.setting.dtype,
                "attention": self.setting.attention,
                "micro_batch_size": self.setting.micro_batch_size,
                "calibration_s": self.calibration,
                "default_precision": {
                    "update_s": statistics.median(update.seconds for update in self.default_precision),
                    "memory_gb": default_gb,
                    "micro_batch_size": self.equal_micro_batch_size,
                },
            },
            "rounds": len(self.ours),
            "load": load_facts(self.loads),
        }


def run_update_bench(options: UpdateBench, say: Say = lambda _: None) -> dict[str, object]:
    """All figures of the benchmark as plain numbers and text; `say` gets a line now and then.

    Raises:
        InputError: for an unknown opponent, workload, model or number, or if TRL is not installed; before anything is
            measured.
        TrainingError: if the gradients of the two are not of one size.
    """
    _check(options)
    load_trl()
    num_threads = options.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    vocabulary_size = int(load_policy(ModelSection(name=options.model)).model.config.get_text_config().vocab_size)
    workloads: dict[str, object] = {}
    with exported(options.model) as folder:
        dtype = str(compute_dtype("auto")).removeprefix("torch.")
        for name in options.workloads:
            say(f"{name}:")
            size = _quick(WORKLOADS[name]) if options.quick else WORKLOADS[name]
            batch = batch_of(size, vocabulary_size, options.seed)
            ours = OurUpdate(options.model, batch, num_threads, options.micro_batch_size)
            theirs = TRLUpdate(str(folder), batch, num_threads, size.num_rows, dtype)
            workloads[name] = {
                "prompts": size.num_prompts,
                "prompt_tokens": size.num_prompt_tokens,
                "completions_per_prompt": size.num_completions,
                "micro_batch_size": recipe(ours).grpo.micro_batch_size,
                **_measure(options, ours, theirs, say).to_json(),
            }
    return {
        "bench": "update",
        "model": options.model,
        "against": options.against,
        "quick": options.quick,
        "workloads": workloads,
        "machine": machine_facts(("torch", "transformers", "trl", "numpy")),
    }


def _check(options: UpdateBench) -> None:
    if options.against != "trl":
        raise InputError(f"there is no opponent {options.against!r}; there is trl")
    for name in options.workloads:
        if name not in WORKLOADS:
            raise InputError(f"there is no workload {name!r}; give {', '.join(WORKLOADS)}")
    numbers = {
        "rounds": options.num_rounds,
        "threads": options.num_threads,
        "micro_batch_size": options.micro_batch_size,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")


def _quick(size: UpdateSize) -> UpdateSize:
    return replace(size, num_prompt_tokens=min(size.num_prompt_tokens, 20), num_completions=4, shortest=3, longest=8)


def _measure(options: UpdateBench, ours: OurUpdate, first: TRLUpdate, say: Say) -> Measured:
    sizes = [size for size in _MICRO_BATCHES if size <= first.num_rows and first.num_rows % size == 0]
    setting, calibration = fastest_setting(
        first,
        sizes[-1:] if options.quick else sizes,
        partial(_second_update, say=say),
        tries_eager=not options.quick,
    )
    rows, micro = setting.num_rows, recipe(ours).grpo.micro_batch_size
    equal = max(size for size in range(1, rows + 1) if rows % size == 0 and size <= micro)
    with _trl(replace(setting, dtype="float32", autocasts=True, micro_batch_size=equal)) as process:
        default = _warm(process)
    say(f"  trl in its default precision: {default[0].seconds:.2f} s, {default[0].memory_gb:.2f} GB above rest")
    with Process(f"{_CONTENDERS}:serve_ours", ours, num_threads=ours.num_threads) as us, _trl(setting) as them:
        my_memory, their_memory = _warm(us), _warm(them)
        for process in (us, them):
            process.ask(TakeUpdate())  # memory was given back before
        done: Rounds[UpdateTaken] = alternate(us, them, TakeUpdate(), options.num_rounds, say)
    _check_same_gradient(my_memory[0].grad_norm, their_memory[0].grad_norm)
    peaks = [max(update.memory_gb for update in updates) for updates in (my_memory, their_memory)]
    return Measured(done.ours, done.theirs, peaks[0], peaks[1], default, equal, setting, calibration, done.loads)


def _warm(process: Process) -> list[UpdateTaken]:
    """Updates whose memory is measured, once optimizer states are in place."""
    for _ in range(_WARM_UP_UPDATES):
        process.ask(TakeUpdate())
    return [process.ask(TakeUpdate(measures_memory=True)) for _ in range(_MEMORY_UPDATES)]


def _second_update(setting: TRLUpdate, say: Say) -> float:
    with _trl(setting) as process:
        seconds = [process.ask(TakeUpdate()).seconds for _ in range(2)]
    say(f"  trl, {setting.attention}, micro-batch of {setting.micro_batch_size}: {seconds[-1]:.2f} s")
    return seconds[-1]


def _trl(setting: TRLUpdate) -> Process:
    return Process(f"{_CONTENDERS}:serve_trl", setting, num_threads=setting.num_threads)


def _check_same_gradient(ours: float, theirs: float) -> None:
    """Raises TrainingError unless the two worked on the same thing."""
    if not math.isclose(ours, theirs, rel_tol=_SAME_NORM):
        raise TrainingError(
            f"the gradient of our update has norm {ours:g} and TRL's {theirs:g}, so they cannot be compared; this is a "
            "defect of the benchmark or of a trainer"
        )


if __name__ == "__main__":
    from benchmarks.cli import main  # imports this module under its own name: a worker unpickles what is sent to it

    sys.exit(main(["update", *sys.argv[1:]]))
