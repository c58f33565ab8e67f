"""`python -m benchmarks.step`: one whole GRPO step of our trainer against one of TRL's, in alternation.

Both draw the same number of tokens for the same prompts, with the same reward, KL coefficient and model. TRL's weights
are bfloat16 without autocast and it recomputes nothing, which is faster than its defaults; it is tried with each
micro-batch, then with eager attention, and keeps what was fastest. Memory is compared with TRL in its own default
precision, float32 weights with autocast, because those are masters as ours are; its faster setting is shown too.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import paired
from benchmarks.machine import Load, machine_facts
from benchmarks.process import Process
from benchmarks.rounds import Rounds, Say, alternate, fastest_setting, load_facts
from benchmarks.step_contenders import (
    PROMPTS,
    OurStep,
    StepSize,
    StepTaken,
    TakeStep,
    TRLStep,
    load_trl,
    recipe,
)
from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.load import compute_dtype, load_policy
from tunesmith.runs.environment import usable_cores

MICRO_BATCHES = (4, 8, 16, 32)
_CONTENDERS = "benchmarks.step_contenders"
_QUICK_SIZE, _QUICK_MICRO_BATCHES = StepSize(num_completions=4, num_tokens=8), (8, 16)
_WARM_UP_STEPS = 1  # the first step builds primitives and touches memory for the first time


@dataclass(frozen=True, slots=True)
class StepBench:
    """What to measure. `backend` and `micro_batch_size` are of our side; `quick` is a smoke run that says nothing."""

    model: str = "smollm2"
    against: str = "trl"
    backend: str | None = None
    micro_batch_size: int | None = None
    num_threads: int | None = None
    num_rounds: int = 5
    seed: int = 0
    quick: bool = False


@dataclass(slots=True)
class Measured:
    """All steps of both sides, without the first of each."""

    ours: list[StepTaken]
    theirs: list[StepTaken]
    default_precision: list[StepTaken]
    setting: TRLStep
    calibration: Mapping[str, float]
    loads: list[Load]

    def to_json(self) -> dict[str, object]:
        """Figures of the benchmark, seconds as medians over rounds."""
        ours_s, theirs_s = [step.seconds for step in self.ours], [step.seconds for step in self.theirs]
        peak_gb = max(step.peak_gb for step in self.ours)
        default_gb = max(step.peak_gb for step in self.default_precision)
        stages = {name for step in self.ours for name in step.stages_s}
        return {
            **paired(theirs_s, ours_s).facts("ratio"),
            "step_s": statistics.median(ours_s),
            "peak_rss_gb": peak_gb,
            "peak_rss_ratio": peak_gb / default_gb,
            "stages": {
                name.removeprefix("time/").removesuffix("_s"): statistics.median(
                    step.stages_s.get(name, 0.0) for step in self.ours
                )
                for name in sorted(stages)
            },
            "tokens_per_step": self.ours[0].num_tokens,
            "trl": {
                "step_s": statistics.median(theirs_s),
                "peak_rss_gb": max(step.peak_gb for step in self.theirs),
                "dtype": self.setting.dtype,
                "attention": self.setting.attention,
                "micro_batch_size": self.setting.micro_batch_size,
                "calibration_s": self.calibration,
                "default_precision": {
                    "step_s": statistics.median(step.seconds for step in self.default_precision),
                    "peak_rss_gb": default_gb,
                },
            },
            "rounds": len(self.ours),
            "load": load_facts(self.loads),
        }


def run_step_bench(options: StepBench, say: Say = lambda _: None) -> dict[str, object]:
    """All figures of the benchmark as plain numbers and text; `say` gets a line now and then.

    Raises:
        InputError: for an unknown opponent, model or number, or if TRL is not installed; before anything is measured.
        TrainingError: if the two do not work on the same number of tokens.
    """
    if options.against != "trl":
        raise InputError(f"there is no opponent {options.against!r}; there is trl")
    for name, value in (("rounds", options.num_rounds), ("threads", options.num_threads)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    load_trl()
    num_threads = options.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    size = _QUICK_SIZE if options.quick else StepSize()
    ours = OurStep(options.model, size, num_threads, options.seed, options.backend, options.micro_batch_size)
    section = recipe(ours).grpo
    with exported(options.model) as folder:
        dtype = str(compute_dtype("auto")).removeprefix("torch.")
        first = TRLStep(str(folder), size, num_threads, size.num_rows, dtype, seed=options.seed)
        measured = _measure(options, ours, first, say)
    return {
        "bench": "step",
        "model": options.model,
        "against": options.against,
        "quick": options.quick,
        "prompts": len(PROMPTS),
        "completions_per_prompt": size.num_completions,
        "new_tokens": size.num_tokens,
        "beta": section.kl.coef,
        "micro_batch_size": section.micro_batch_size,
        "machine": machine_facts(("torch", "transformers", "trl", "numpy")),
        **measured.to_json(),
    }


def _measure(options: StepBench, ours: OurStep, first: TRLStep, say: Say) -> Measured:
    sizes = _QUICK_MICRO_BATCHES if options.quick else MICRO_BATCHES
    setting, calibration = fastest_setting(first, sizes, partial(_second_step, say=say), tries_eager=True)
    with _trl(replace(setting, dtype="float32", autocasts=True)) as process:
        default = _steps(process, 2)[_WARM_UP_STEPS:]
    say(f"  trl in its default precision: {default[0].seconds:.2f} s, {default[0].peak_gb:.2f} GB")
    with (
        Process(f"{_CONTENDERS}:serve_ours", ours, num_threads=ours.num_threads) as us,
        _trl(setting) as them,
    ):
        for process in (us, them):
            _steps(process, _WARM_UP_STEPS)
        done: Rounds[StepTaken] = alternate(us, them, TakeStep(), options.num_rounds, say)
    _check_same_work(done.ours, done.theirs)
    return Measured(done.ours, done.theirs, default, setting, calibration, done.loads)


def _second_step(setting: TRLStep, say: Say) -> float:
    with _trl(setting) as process:
        seconds = _steps(process, 1 + _WARM_UP_STEPS)[-1].seconds
    say(f"  trl, {setting.attention}, micro-batch of {setting.micro_batch_size}: {seconds:.2f} s")
    return seconds


def _trl(setting: TRLStep) -> Process:
    return Process(f"{_CONTENDERS}:serve_trl", setting, num_threads=setting.num_threads)


def _steps(process: Process, count: int) -> list[StepTaken]:
    return [process.ask(TakeStep()) for _ in range(count)]


def _check_same_work(ours: list[StepTaken], theirs: list[StepTaken]) -> None:
    """Raises TrainingError unless every step of both sides had the same number of tokens."""
    counts = {step.num_tokens for step in ours} | {step.num_tokens for step in theirs}
    if len(counts) > 1:
        raise TrainingError(
            f"the steps had {', '.join(map(str, sorted(counts)))} tokens, so they cannot be compared; this is a defect "
            "of the benchmark or of a trainer: a tokenizer that adds tokens, or an end of sequence before its time"
        )


@contextmanager
def exported(model: str) -> Iterator[Path]:
    """A folder with the model that TRL can read, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_policy(ModelSection(name=model))
        yield save_final(loaded.model, loaded.tokenizer, Path(folder) / "model", ModelCard(model, "none"))


if __name__ == "__main__":
    from benchmarks.cli import main  # imports this module under its own name: a worker unpickles what is sent to it

    sys.exit(main(["step", *sys.argv[1:]]))
