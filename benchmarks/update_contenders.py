"""The contenders of `bench update`: the update of one GRPO step by our trainer and by TRL's, on the same completions.

The completions are given, so nothing is drawn: each side starts from token ids and rewards and ends with new weights.
Each `serve_*` runs in a process of its own; see `process.py`.
"""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from benchmarks import baselines
from benchmarks.machine import peak_rss_since_reset_gb, reset_peak_rss
from benchmarks.process import Server, serve
from benchmarks.step_contenders import LEARNING_RATE, load_trl, token_sum
from tunesmith.algorithms.advantages import group_relative
from tunesmith.batch.pack import pack
from tunesmith.batch.rollout import Completion, Group, SamplingParams
from tunesmith.config.schema import GRPORecipe
from tunesmith.core.trace import trace
from tunesmith.rollout.engine import OnGroup, OnProgress, OnText
from tunesmith.schema.records import Prompt
from tunesmith.trainers import grpo, rollouts

_MORE_STEPS_THAN_ASKED = 100_000


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """What is learnt from: prompts of `num_prompt_tokens`, each with completions of `shortest` to `longest` tokens."""

    num_prompts: int
    num_prompt_tokens: int
    num_completions: int
    shortest: int
    longest: int

    @property
    def num_rows(self) -> int:
        """Completions in all."""
        return self.num_prompts * self.num_completions


WORKLOADS: Mapping[str, UpdateSize] = {
    "ragged": UpdateSize(num_prompts=4, num_prompt_tokens=8, num_completions=8, shortest=8, longest=64),
    "shared": UpdateSize(num_prompts=1, num_prompt_tokens=256, num_completions=8, shortest=64, longest=64),
}
"""Completion lengths are uniform; the short prompts of `ragged` keep what sharing saves out of it."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Token ids of P prompts, and of G completions of each."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows; a prompt counts as often as it has completions."""
        rows = zip(self.prompts, self.completions, strict=True)
        return sum(len(prompt) + len(ids) for prompt, group in rows for ids in group)

    def rewards(self) -> list[list[float]]:
        """The reward of each completion, `[P][G]`."""
        return [token_sum(group) for group in self.completions]


def batch_of(size: UpdateSize, vocabulary_size: int, seed: int) -> UpdateBatch:
    """Random ids and lengths, a pure function of size, vocabulary and seed."""
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary_size) for _ in range(count))

    prompts = tuple(ids(size.num_prompt_tokens) for _ in range(size.num_prompts))
    completions = tuple(
        tuple(ids(draw.randint(size.shortest, size.longest)) for _ in range(size.num_completions)) for _ in prompts
    )
    return UpdateBatch(prompts, completions)


@dataclass(frozen=True, slots=True)
class OurUpdate:
    """Our trainer. None leaves the recipe's default."""

    model: str
    batch: UpdateBatch
    num_threads: int
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class TRLUpdate:
    """TRL's trainer on the model in `folder`: dtype of the weights, attention, rows of a pass, autocast to bfloat16."""

    folder: str
    batch: UpdateBatch
    num_threads: int
    micro_batch_size: int
    dtype: str
    attention: str = "sdpa"
    autocasts: bool = False

    @property
    def num_rows(self) -> int:
        """Completions of an update."""
        return sum(map(len, self.batch.completions))


@dataclass(frozen=True, slots=True)
class TakeUpdate:
    """Take one update. With `measures_memory` free memory is given back before, so that its time means nothing."""

    measures_memory: bool = False


@dataclass(frozen=True, slots=True)
class UpdateTaken:
    """One update.

    `seconds` and its `stages_s`; `memory_gb`: peak of resident memory above what was there before, 0 if not measured;
    `grad_norm`: before clipping.
    """

    seconds: float
    memory_gb: float
    grad_norm: float
    stages_s: Mapping[str, float] = field(default_factory=dict[str, float])


class Memory:
    """The peak of resident memory above what was resident when it was made; free memory is given back before."""

    def __init__(self, *, measures: bool) -> None:
        self._rest_gb = 0.0
        self._measures = measures
        if measures:
            reset_peak_rss()
            self._rest_gb = psutil.Process().memory_info().rss / 1e9

    def above_rest_gb(self) -> float:
        """In GB (1e9 bytes); 0 where nothing is measured."""
        return peak_rss_since_reset_gb() - self._rest_gb if self._measures else 0.0


def recipe(settings: OurUpdate) -> GRPORecipe:
    """The recipe of our side: one update, no reference, as TRL's defaults are."""
    batch, micro = settings.batch, settings.micro_batch_size
    return GRPORecipe.model_validate(
        {
            "model": {"name": settings.model},
            "rollout": {
                "prompts_per_step": len(batch.prompts),
                "completions_per_prompt": len(batch.completions[0]),
                "backend": "transformers",  # nothing is drawn, so no packed weights are wanted
            },
            "grpo": {"kl": {"coef": 0.0}, **({"micro_batch_size": micro} if micro else {})},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "run": {"num_threads": settings.num_threads, "steps": _MORE_STEPS_THAN_ASKED},
        }
    )


class GivenCompletions:
    """An engine that returns completions which are there already."""

    is_exact = True

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """The completions, whatever is asked."""
        return self._groups

    def unload(self) -> None:
        """There is nothing to free."""


class OurContender:
    """Updates of `trainers.grpo`, as `tunesmith train grpo` takes them."""

    def __init__(self, settings: OurUpdate) -> None:
        batch = settings.batch
        texts = [f"prompt {index}" for index in range(len(batch.prompts))]
        self._state = grpo.build(recipe(settings), prompts=texts, rewards=[token_sum])
        self._prompts = self._state.prompts.train
        self._state.engine = GivenCompletions(given_groups(self._state, batch))
        self._index = 0

    def handle(self, request: TakeUpdate) -> UpdateTaken:
        """One update."""
        memory = Memory(measures=request.measures_memory)
        start_s = time.perf_counter()
        with trace() as times:
            result = grpo.step(self._state, self._prompts, self._index)
        seconds = time.perf_counter() - start_s
        self._index += 1
        return UpdateTaken(seconds, memory.above_rest_gb(), result.metrics["grad_norm"], dict(times.metrics()))


def given_groups(state: grpo.State, batch: UpdateBatch) -> list[Group]:
    """The batch as an engine would give it: with the log-probs that the model has now."""

    def group(index: int, logps: Sequence[Sequence[float]]) -> Group:
        completions = tuple(
            Completion(ids, tuple(logp[: len(ids)]), tuple(logp[: len(ids)]), "", "length")
            for ids, logp in zip(batch.completions[index], logps, strict=True)
        )
        return Group(Prompt(str(index), f"prompt {index}"), batch.prompts[index], completions, 0)

    groups: list[Group] = []
    for index, completions in enumerate(batch.completions):
        unknown = group(index, [[0.0] * len(ids) for ids in completions])
        logp_BT = rollouts.logps(state.policy, pack([unknown], 0, state.device), 1.0, len(completions))
        groups.append(group(index, logp_BT.tolist()))
    return groups


def serve_ours(settings: OurUpdate, server: Server) -> None:
    """Our trainer."""
    serve(OurContender, settings, server)


def serve_trl(settings: TRLUpdate, server: Server) -> None:
    """TRL's trainer; returns when the benchmark is done."""
    torch.set_num_threads(settings.num_threads)
    trl, datasets = load_trl()
    answers = _Answers(server)
    inputs = trl_inputs(settings.batch)

    class GivenGRPO(trl.GRPOTrainer):
        """TRL's trainer, to whom completions and advantages are given; the rest is its own."""

        def _generate_and_score_completions(self, _: object) -> dict[str, torch.Tensor]:
            return dict(inputs)

        def _get_grad_norm(self, *arguments: Any, **options: Any) -> Any:
            norm = super()._get_grad_norm(*arguments, **options)
            answers.grad_norm = float(norm)
            return norm

    texts = [f"prompt {index}" for index in range(len(settings.batch.prompts))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GivenGRPO(
            model=settings.folder,
            reward_funcs=token_sum,
            args=trl.GRPOConfig(output_dir=folder, **trl_arguments(settings)),
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
            callbacks=[baselines.step_callback(answers.begin, answers.end)],
        )
        server.reply(None)
        trainer.train()


def trl_inputs(batch: UpdateBatch) -> dict[str, torch.Tensor]:
    """What TRL makes of a generation batch: prompts padded on the left, completions on the right, to the longest."""
    rows = [(prompt, ids) for prompt, group in zip(batch.prompts, batch.completions, strict=True) for ids in group]
    width_P, width_C = (max(len(row[side]) for row in rows) for side in (0, 1))
    reward_PG = torch.tensor(batch.rewards())
    advantage_PG = group_relative(reward_PG, torch.ones_like(reward_PG, dtype=torch.bool)).advantage_PG
    completion_mask = torch.tensor([[1] * len(ids) + [0] * (width_C - len(ids)) for _, ids in rows])
    return {
        "prompt_ids": torch.tensor([[0] * (width_P - len(prompt)) + list(prompt) for prompt, _ in rows]),
        "prompt_mask": torch.tensor([[0] * (width_P - len(prompt)) + [1] * len(prompt) for prompt, _ in rows]),
        "completion_ids": torch.tensor([list(ids) + [0] * (width_C - len(ids)) for _, ids in rows]),
        "completion_mask": completion_mask,
        "advantages": advantage_PG.flatten().float(),
        "num_items_in_batch": completion_mask.sum(),
    }


def trl_arguments(settings: TRLUpdate) -> dict[str, object]:
    """Arguments of TRL's GRPOConfig for the work of `recipe`: nothing is saved, logged or recomputed."""
    batch = settings.batch
    num_completions = len(batch.completions[0])
    return {
        "model_init_kwargs": {"dtype": settings.dtype, "attn_implementation": settings.attention},
        "bf16": settings.autocasts,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.num_rows // settings.micro_batch_size,
        "num_generations": num_completions,
        "max_completion_length": max(len(ids) for group in batch.completions for ids in group),
        "beta": 0.0,
        "learning_rate": LEARNING_RATE,
        "max_steps": _MORE_STEPS_THAN_ASKED,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class _Answers:
    """Holds TRL's loop between two updates until the next one is asked for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._start_s = 0.0
        self._memory = Memory(measures=False)
        self.grad_norm = 0.0

    def begin(self, _: int) -> None:
        """Before the first update."""
        request = self._server.next()
        if request is None:
            raise SystemExit(0)  # the loop has no other way out before its first step
        self._memory = Memory(measures=request.measures_memory)
        self._start_s = time.perf_counter()

    def end(self, num_tokens_seen: int) -> None:
        """After each update: answer, then wait."""
        seconds = time.perf_counter() - self._start_s
        self._server.reply(UpdateTaken(seconds, self._memory.above_rest_gb(), self.grad_norm))
        self.begin(num_tokens_seen)
