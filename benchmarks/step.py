"""One whole GRPO step against one of TRL's, in alternation: 4 prompts x 8 completions x 64 tokens, with a KL penalty.

Both draw the same number of tokens for the same prompts, with the same reward, KL coefficient and model. TRL's weights
are bfloat16 without autocast and it recomputes nothing, which is faster than its defaults; it is tried with each
micro-batch, then with eager attention, and keeps its fastest. Memory is compared with TRL in its own default
precision, float32 weights with autocast, because those are masters as ours are; its faster setting is shown too.
Leave the machine alone meanwhile; with smollm2 on two cores it takes about a quarter of an hour.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from benchmarks.common import Say, command, in_turns, load_facts, load_warning, paired, parser, run, spread_text
from benchmarks.machine import machine_facts, peak_rss_since_reset_gb, reset_peak_rss
from benchmarks.process import Process
from benchmarks.trl import (
    LEARNING_RATE,
    MANY_STEPS,
    Taken,
    TRLSettings,
    exported,
    fastest,
    load_trl,
    stage_medians,
    token_sum,
)
from tunesmith.batch.rollout import Group
from tunesmith.config.schema import GRPORecipe
from tunesmith.core.errors import TrainingError
from tunesmith.core.trace import trace
from tunesmith.models.load import compute_dtype
from tunesmith.rollout.engine import Engine
from tunesmith.runs.environment import usable_cores
from tunesmith.trainers import setup
from tunesmith.trainers.api import Inputs
from tunesmith.trainers.grpo import GRPO
from tunesmith.trainers.rollouts import PolicyTask

PROMPTS = (
    "The old house at the end",
    "My favourite part of the trip was",
    "She opened the letter and",
    "In my opinion,",
)
"""Short ones, because a long prompt that is computed once for each completion would flatter us."""

KL_COEF = 0.04
MICRO_BATCHES = (4, 8, 16, 32)
_QUICK_MICRO_BATCHES = (8, 16)
_WARM_UP_STEPS = 1  # the first step builds primitives and touches memory for the first time


@dataclass(frozen=True, slots=True)
class OurStep:
    """Our trainer; completions of each prompt, of exactly so many tokens. None leaves the recipe's default."""

    model: str
    num_completions: int
    num_tokens: int
    num_threads: int
    seed: int = 0
    backend: str | None = None
    micro_batch_size: int | None = None

    def recipe(self) -> GRPORecipe:
        """The recipe of our side."""
        micro = {"micro_batch_size": self.micro_batch_size} if self.micro_batch_size else {}
        return GRPORecipe.model_validate(
            {
                "model": {"name": self.model},
                "rollout": {
                    "prompts_per_step": len(PROMPTS),
                    "completions_per_prompt": self.num_completions,
                    "max_new_tokens": self.num_tokens,
                    "min_new_tokens": self.num_tokens,
                    **({"backend": self.backend} if self.backend else {}),
                },
                "grpo": {
                    "num_epochs": 1,
                    "num_minibatches": 1,
                    "kl": {"coef": KL_COEF, "estimator": "k3", "place": "loss"},
                    **micro,
                },
                "optimizer": {"learning_rate": LEARNING_RATE},
                "run": {"seed": self.seed, "num_threads": self.num_threads, "steps": MANY_STEPS},
            }
        )

    def trl(self, folder: str, dtype: str) -> TRLSettings:
        """TRL's settings for the same work, with all rows in one micro-batch."""
        num_rows = len(PROMPTS) * self.num_completions
        arguments = {
            "num_generations": self.num_completions,
            "max_completion_length": self.num_tokens,
            "generation_kwargs": {"min_new_tokens": self.num_tokens},
            "beta": KL_COEF,
            "seed": self.seed,
        }
        return TRLSettings(folder, PROMPTS, num_rows, self.num_threads, num_rows, dtype, arguments)


def our_task(cfg: GRPORecipe, prompts: Sequence[str]) -> PolicyTask:
    """The task of our GRPO learner, as `tunesmith train grpo` makes it."""
    return PolicyTask(GRPO, cfg, Inputs(prompts=prompts, rewards=[token_sum]), setup.prepare(cfg))


class _CountingEngine:
    """An engine that counts the tokens of a call; a prompt as often as it has completions."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.num_tokens = engine, 0

    @property
    def is_exact(self) -> bool:
        """Whether the engine's log-probs are the trainer's."""
        return self._engine.is_exact

    def generate(self, *arguments: Any, **options: Any) -> list[Group]:
        """The engine's completions."""
        groups = self._engine.generate(*arguments, **options)
        rows = ((group, item) for group in groups for item in group.completions)
        self.num_tokens = sum(len(group.prompt_token_ids) + len(item.token_ids) for group, item in rows)
        return groups

    def unload(self) -> None:
        """Free the engine's memory."""
        self._engine.unload()


class Ours:
    """Steps of our GRPO learner."""

    def __init__(self, settings: OurStep) -> None:
        self._task = our_task(settings.recipe(), PROMPTS)
        self._learner = cast(GRPO, self._task.build())
        self._engine = _CountingEngine(self._learner.rollouts.engine)
        self._learner.rollouts = replace(self._learner.rollouts, engine=self._engine)
        self._index = 0
        reset_peak_rss()

    def take(self) -> Taken:
        """One step."""
        start_s = time.perf_counter()
        with trace() as times:
            result = self._learner.step(self._task.batch(self._index), self._index)
        seconds = time.perf_counter() - start_s
        self._index += 1
        if result.metrics["frac_reward_zero_std"] > 0:
            raise TrainingError(
                "a group of equal rewards was left out, so this step did less than TRL's; change --seed"
            )
        return Taken(seconds, self._engine.num_tokens, peak_rss_since_reset_gb(), stages_s=dict(times.metrics()))


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark.

    Raises:
        InputError: for an unknown model, or if TRL is not installed; before anything is measured.
        TrainingError: if the two do not work on the same number of tokens.
    """
    load_trl()
    num_threads = options.threads or usable_cores()
    torch.set_num_threads(num_threads)
    size = (4, 8) if options.quick else (8, 64)
    ours = OurStep(options.model, *size, num_threads, options.seed, options.backend, options.micro_batch_size)
    section = ours.recipe().grpo
    with exported(options.model) as folder:
        measured = _measured(
            ours, ours.trl(str(folder), str(compute_dtype("auto")).removeprefix("torch.")), options, say
        )
    return {
        "bench": "step",
        "model": options.model,
        "against": options.against,
        "quick": options.quick,
        "prompts": len(PROMPTS),
        "completions_per_prompt": ours.num_completions,
        "new_tokens": ours.num_tokens,
        "beta": section.kl.coef,
        "micro_batch_size": section.micro_batch_size,
        "machine": machine_facts(("torch", "transformers", "trl", "numpy")),
        **measured,
    }


def _measured(ours: OurStep, first: TRLSettings, options: Namespace, say: Say) -> dict[str, object]:
    setting, calibration = fastest(first, _QUICK_MICRO_BATCHES if options.quick else MICRO_BATCHES, say)
    with replace(setting, dtype="float32", autocasts=True).start() as process:
        default = [process.call("take") for _ in range(1 + _WARM_UP_STEPS)][-1]
    say(f"  trl in its default precision: {default.seconds:.2f} s, {default.peak_gb:.2f} GB")
    with Process("benchmarks.step:Ours", ours, num_threads=ours.num_threads) as us, setting.start() as them:
        for process in (us, them):
            process.call("take")
        sides = {"ours": lambda _: us.call("take"), "trl": lambda _: them.call("take")}
        done, loads = in_turns(sides, options.rounds, say, round_line)
    check_same_work([*done["ours"], *done["trl"]])
    seconds = {name: [one.seconds for one in taken] for name, taken in done.items()}
    peaks_gb = {name: max(one.peak_gb for one in taken) for name, taken in done.items()}
    return {
        **paired(seconds["trl"], seconds["ours"]).facts("ratio"),
        "step_s": statistics.median(seconds["ours"]),
        "peak_rss_gb": peaks_gb["ours"],
        "peak_rss_ratio": peaks_gb["ours"] / default.peak_gb,
        "stages": stage_medians(done["ours"], "time/"),
        "tokens_per_step": done["ours"][0].num_tokens,
        "trl": {
            "step_s": statistics.median(seconds["trl"]),
            "peak_rss_gb": peaks_gb["trl"],
            "dtype": setting.dtype,
            "attention": setting.attention,
            "micro_batch_size": setting.micro_batch_size,
            "calibration_s": calibration,
            "default_precision": {"step_s": default.seconds, "peak_rss_gb": default.peak_gb},
        },
        "rounds": options.rounds,
        "load": load_facts(loads),
    }


def round_line(done: Mapping[str, list[Taken]]) -> str:
    """Seconds of both sides in the newest round."""
    return f"{done['ours'][-1].seconds:.2f} s against {done['trl'][-1].seconds:.2f} s"


def check_same_work(taken: Sequence[Taken]) -> None:
    """Raises TrainingError unless every step of both sides had the same number of tokens."""
    counts = {one.num_tokens for one in taken}
    if len(counts) > 1:
        raise TrainingError(
            f"the steps had {', '.join(map(str, sorted(counts)))} tokens, so they cannot be compared; this is a defect "
            "of the benchmark or of a trainer: a tokenizer that adds tokens, or an end of sequence before its time"
        )


def show_pair(label: str, figures: Mapping[str, Any], seconds: str, memory: str, ratio: str) -> None:
    """Print time, memory and stages of our side beside TRL's; the last three name keys of `figures`."""
    trl = figures["trl"]
    print(
        f"{label:<10}{figures[seconds]:.2f} s against TRL's {trl[seconds]:.2f} s: {spread_text(figures)}\n"
        f"memory    {figures[memory]:.2f} GB, {figures[ratio]:.2f} of TRL's "
        f"{trl['default_precision'][memory]:.2f} GB in its default precision "
        f"({trl[memory]:.2f} GB with {trl['dtype']} weights)\n"
        f"TRL       {trl['attention']} attention, micro-batch of {trl['micro_batch_size']}{load_warning(figures)}"
    )
    for name, stage_s in figures["stages"].items():
        print(f"  {name:<24}{stage_s:8.3f} s")


def main(words: Sequence[str]) -> int:
    """Exit code of the benchmark."""
    flags = parser(
        "step",
        __doc__,
        *("model", "micro_batch_size", "threads", "rounds", "seed", "quick", "out", "json", "quiet"),
        against={"choices": ("trl",), "default": "trl", "help": "whose step"},
        backend={"choices": ("native", "transformers"), "help": "engine of our side; the recipe's default if left out"},
    )
    return command(
        flags, words, measure, lambda facts: show_pair("step", facts, "step_s", "peak_rss_gb", "peak_rss_ratio")
    )


if __name__ == "__main__":
    run("step")
