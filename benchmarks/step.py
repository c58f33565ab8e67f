"""One whole GRPO step against one of TRL's, in alternation: 4 prompts x 8 completions x 64 tokens, with a KL penalty.

Both draw the same number of tokens for the same prompts, with the same reward, KL coefficient and model. TRL's weights
are bfloat16 without autocast and it recomputes nothing, which is faster than its defaults; it is tried with each
micro-batch, then with eager attention, and keeps its fastest. Memory is compared with TRL in its own default
precision, float32 weights with autocast, because those are masters as ours are; its faster setting is shown too.
Leave the machine alone meanwhile; with smollm2 on two cores it takes about a quarter of an hour. Where bfloat16 is
emulated, TRL's default precision alone takes ten minutes: `--no-memory` leaves it out.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from benchmarks.common import Say, benchmark, head, run
from benchmarks.process import Process
from benchmarks.trl import (
    LEARNING_RATE,
    MANY_STEPS,
    MICRO_BATCHES,
    Taken,
    TRLSettings,
    alternate,
    exported,
    fastest,
    load_trl,
    our_task,
    pair_facts,
    show_pair,
)
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.models.load import compute_dtype
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.rollouts import PolicyTask

PROMPTS = (
    "The old house at the end",
    "My favourite part of the trip was",
    "She opened the letter and",
    "In my opinion,",
)
"""Short ones, because a long prompt that is computed once for each completion would flatter us."""

KL_COEF = 0.04
PACKAGES = ("torch", "transformers", "trl", "numpy")
_QUICK_MICRO_BATCHES = (8, 16)


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
    dtype: str = "auto"
    weights: str = "model"
    reference: str = "model"

    def recipe(self) -> GRPORecipe:
        """The recipe of our side."""
        micro = {"micro_batch_size": self.micro_batch_size} if self.micro_batch_size else {}
        return GRPORecipe.model_validate(
            {
                "model": {"name": self.model, "dtype": self.dtype, "reference": self.reference},
                "rollout": {
                    "prompts_per_step": len(PROMPTS),
                    "completions_per_prompt": self.num_completions,
                    "max_new_tokens": self.num_tokens,
                    "min_new_tokens": self.num_tokens,
                    "weights": self.weights,
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

    def build(self) -> tuple[GRPO, PolicyTask]:
        """The learner before its first step, and its task."""
        task = our_task(self.recipe(), PROMPTS)
        return cast(GRPO, task.build()), task

    def trl(self, folder: str) -> TRLSettings:
        """TRL's settings for the same work, with all rows in one micro-batch."""
        num_rows = len(PROMPTS) * self.num_completions
        arguments = {
            "num_generations": self.num_completions,
            "max_completion_length": self.num_tokens,
            "generation_kwargs": {"min_new_tokens": self.num_tokens},
            "beta": KL_COEF,
            "seed": self.seed,
        }
        dtype = str(compute_dtype(self.dtype)).removeprefix("torch.")
        return TRLSettings(folder, PROMPTS, num_rows, self.num_threads, num_rows, dtype, arguments)


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark.

    Raises:
        InputError: for an unknown model, or if TRL is not installed; before anything is measured.
        TrainingError: if the two do not work on the same number of tokens.
    """
    load_trl()
    size = (4, 8) if options.quick else (8, 64)
    settings = options.backend, options.micro_batch_size, options.dtype, options.weights, options.reference
    ours = OurStep(options.model, *size, options.threads, options.seed, *settings)
    section = ours.recipe().grpo
    with exported(options.model) as folder:
        measured = _measured(ours, ours.trl(str(folder)), options, say)
    return {
        **head(
            options, "step", "model", "against", "quick", "weights", packages=("torch", "transformers", "trl", "numpy")
        ),
        "prompts": len(PROMPTS),
        "completions_per_prompt": ours.num_completions,
        "new_tokens": ours.num_tokens,
        "beta": section.kl.coef,
        "micro_batch_size": section.micro_batch_size,
        **measured,
    }


def _measured(ours: OurStep, first: TRLSettings, options: Namespace, say: Say) -> dict[str, object]:
    setting, calibration = fastest(first, _QUICK_MICRO_BATCHES if options.quick else MICRO_BATCHES, say)
    default = None if options.no_memory else replace(setting, dtype="float32", autocasts=True)
    warm, done, load = alternate(ours, setting, default, _warm, options, say)
    check_same_work([*done["ours"], *done["trl"]])
    peaks_gb = {name: max(one.peak_gb for one in taken) for name, taken in done.items()}
    facts, trl = pair_facts(done, setting, calibration, "step_s", "time/")
    facts |= {
        "peak_rss_gb": peaks_gb["ours"],
        "tokens_per_step": done["ours"][0].num_tokens,
        "rounds": options.rounds,
        "load": load,
    }
    trl["peak_rss_gb"] = peaks_gb["trl"]
    if warm["default"]:
        last = warm["default"][-1]
        trl["default_precision"] = {"step_s": last.seconds, "peak_rss_gb": last.peak_gb}
        facts["peak_rss_ratio"] = peaks_gb["ours"] / last.peak_gb
    return {**facts, "trl": trl}


def check_same_work(taken: Sequence[Taken]) -> None:
    """Raises TrainingError unless every step of both sides had the same number of tokens."""
    counts = {one.num_tokens for one in taken}
    if len(counts) > 1:
        raise TrainingError(
            f"the steps had {', '.join(map(str, sorted(counts)))} tokens, so they cannot be compared; this is a defect "
            "of the benchmark or of a trainer: a tokenizer that adds tokens, or an end of sequence before its time"
        )


def _warm(process: Process) -> list[Taken]:
    """The first steps: they build primitives and touch memory for the first time."""
    return [process.call("take") for _ in range(2)]


main = benchmark(
    measure,
    lambda facts: show_pair("step", facts, "step_s", "peak_rss_gb", "peak_rss_ratio"),
    *("model", "dtype", "micro_batch_size", "threads", "rounds", "seed", "quick"),
    against={"choices": ("trl",), "default": "trl", "help": "whose step"},
    backend={"choices": ("native", "transformers"), "help": "engine of our side; the recipe's default if left out"},
    weights={"choices": get_args(Weights), "default": "model", "help": "products of our side's rollout"},
    reference={"choices": get_args(Weights), "default": "model", "help": "products of our side's reference"},
    no_memory={"action": "store_true", "help": "leave out TRL's memory in its default precision: two more steps"},
)


if __name__ == "__main__":
    run("step")
