"""The contenders of `bench step`: one GRPO step by our trainer, and one by TRL's, on the same prompts.

Each `serve_*` runs in a process of its own; see `process.py`. TRL owns its loop, so its process answers from inside
a callback: a step is timed from the request to the end of the step, with data, reward and optimizer.
"""

import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.machine import peak_rss_since_reset_gb, reset_peak_rss
from benchmarks.process import Server, serve
from tunesmith.config.schema import GRPORecipe
from tunesmith.core.errors import MissingDependencyError, TrainingError
from tunesmith.core.trace import trace
from tunesmith.trainers import grpo, rollouts

PROMPTS = (
    "The old house at the end",
    "My favourite part of the trip was",
    "She opened the letter and",
    "In my opinion,",
)
"""Four beginnings of 4 to 7 words; short ones, because a long prompt that is computed once for each completion would
flatter us."""

KL_COEF, LEARNING_RATE = 0.04, 1e-6
_MORE_STEPS_THAN_ASKED = 100_000


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one step draws: completions of each of the four prompts, each of exactly this many tokens."""

    num_completions: int = 8
    num_tokens: int = 64

    @property
    def num_rows(self) -> int:
        """Completions of a step."""
        return len(PROMPTS) * self.num_completions


@dataclass(frozen=True, slots=True)
class OurStep:
    """Our trainer. None leaves the recipe's default."""

    model: str
    size: StepSize
    num_threads: int
    seed: int = 0
    backend: str | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class TRLStep:
    """TRL's trainer on the model in `folder`: dtype of the weights, attention, rows of a pass, autocast to bfloat16."""

    folder: str
    size: StepSize
    num_threads: int
    micro_batch_size: int
    dtype: str
    attention: str = "sdpa"
    autocasts: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Take one step."""


@dataclass(frozen=True, slots=True)
class StepTaken:
    """Seconds of a step, its tokens (a prompt as often as it has completions), its stages, peak memory so far in GB."""

    seconds: float
    num_tokens: int
    peak_gb: float
    stages_s: Mapping[str, float] = field(default_factory=dict[str, float])


def token_sum(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward that costs nothing and differs within a group: a group of equal rewards would be left out by us."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def recipe(settings: OurStep) -> GRPORecipe:
    """The recipe of our side."""
    chosen = {"backend": settings.backend} if settings.backend else {}
    micro = {"micro_batch_size": settings.micro_batch_size} if settings.micro_batch_size else {}
    size = settings.size
    return GRPORecipe.model_validate(
        {
            "model": {"name": settings.model},
            "rollout": {
                "prompts_per_step": len(PROMPTS),
                "completions_per_prompt": size.num_completions,
                "max_new_tokens": size.num_tokens,
                "min_new_tokens": size.num_tokens,
                **chosen,
            },
            "grpo": {
                "num_epochs": 1,
                "num_minibatches": 1,
                "kl": {"coef": KL_COEF, "estimator": "k3", "place": "loss"},
                **micro,
            },
            "optimizer": {"learning_rate": LEARNING_RATE},
            "run": {"seed": settings.seed, "num_threads": settings.num_threads, "steps": _MORE_STEPS_THAN_ASKED},
        }
    )


class OurContender:
    """Steps of `trainers.grpo`, as `tunesmith train grpo` takes them."""

    def __init__(self, settings: OurStep) -> None:
        self._cfg = recipe(settings)
        self._state = grpo.build(self._cfg, prompts=list(PROMPTS), rewards=[token_sum])
        self._index = 0
        reset_peak_rss()

    def handle(self, request: TakeStep) -> StepTaken:
        """One step."""
        start_s = time.perf_counter()
        with trace() as times:
            prompts = rollouts.prompts_of_step(self._cfg, self._state.prompts.train, self._index)
            result = grpo.step(self._state, prompts, self._index)
        seconds = time.perf_counter() - start_s
        self._index += 1
        if result.metrics["frac_reward_zero_std"] > 0:
            raise TrainingError(
                "a group of equal rewards was left out, so this step did less than TRL's; change --seed"
            )
        num_tokens = sum(
            len(group.prompt_token_ids) + len(item.token_ids) for group in result.groups for item in group.completions
        )
        return StepTaken(seconds, num_tokens, peak_rss_since_reset_gb(), dict(times.metrics()))


def serve_ours(settings: OurStep, server: Server) -> None:
    """Our trainer."""
    serve(OurContender, settings, server)


def serve_trl(settings: TRLStep, server: Server) -> None:
    """TRL's trainer; returns when the benchmark is done."""
    torch.set_num_threads(settings.num_threads)
    trl, datasets = load_trl()
    answers = _Answers(server)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=settings.folder,
            reward_funcs=token_sum,
            args=trl.GRPOConfig(output_dir=folder, **trl_arguments(settings)),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(PROMPTS)}),
            callbacks=[baselines.step_callback(answers.begin, answers.end)],
        )
        reset_peak_rss()
        server.reply(None)
        trainer.train()


def load_trl() -> tuple[Any, Any]:
    """The modules `trl` and `datasets`.

    Raises:
        MissingDependencyError: where they are not installed.
    """
    try:
        return importlib.import_module("trl"), importlib.import_module("datasets")
    except ImportError as error:
        raise MissingDependencyError(
            f"a benchmark against trl needs it ({error}); install it with `pip install 'tunesmith[trl]'`"
        ) from error


def trl_arguments(settings: TRLStep) -> dict[str, object]:
    """Arguments of TRL's GRPOConfig for the work of `recipe`: nothing is saved, logged or recomputed."""
    size = settings.size
    return {
        "model_init_kwargs": {"dtype": settings.dtype, "attn_implementation": settings.attention},
        "bf16": settings.autocasts,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": size.num_rows // settings.micro_batch_size,
        "num_generations": size.num_completions,
        "max_completion_length": size.num_tokens,
        "generation_kwargs": {"min_new_tokens": size.num_tokens},
        "beta": KL_COEF,
        "learning_rate": LEARNING_RATE,
        "max_steps": _MORE_STEPS_THAN_ASKED,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": settings.seed,
    }


class _Answers:
    """Holds TRL's loop between two steps until the next one is asked for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._start_s = 0.0
        self._tokens_before = 0

    def begin(self, num_tokens_seen: int) -> None:
        """Before the first step."""
        self._wait(num_tokens_seen)

    def end(self, num_tokens_seen: int) -> None:
        """After each step: answer, then wait."""
        seconds = time.perf_counter() - self._start_s
        self._server.reply(StepTaken(seconds, num_tokens_seen - self._tokens_before, peak_rss_since_reset_gb()))
        self._wait(num_tokens_seen)

    def _wait(self, num_tokens_seen: int) -> None:
        if self._server.next() is None:
            raise SystemExit(0)  # the loop has no other way out before its first step
        self._tokens_before = num_tokens_seen
        self._start_s = time.perf_counter()
