"""The update of one GRPO step against TRL's, from the same completions: time, and memory above the resting state.

ragged: 4 short prompts x 8 completions of 8 to 64 tokens; shared: 8 completions of a prompt of 256 tokens.
Time: TRL's weights are bfloat16 without autocast and it recomputes nothing, which is faster than its defaults; it is
tried with each micro-batch, then with eager attention, and keeps its fastest. Memory: the peak above the resting
state, in which weights and optimizer states are in place; compared with TRL at our micro-batch, in its own default
precision, float32 weights with autocast, because those are masters as ours are. As it is timed it is shown too.
Leave the machine alone meanwhile; with smollm2 on two cores it takes about a quarter of an hour.
"""

import math
import random
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

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
    token_sum,
)
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.load import compute_dtype, load_policy
from tunesmith.learn.algorithms.advantages import group_relative
from tunesmith.learn.trainers import passes
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.rollouts import PolicyTask

_WARM_UP_UPDATES = 2  # the first makes optimizer states and primitives, the second finds its memory fragmented
_MEMORY_UPDATES = 2
_SAME_NORM = 0.1
"""By which share gradient norms may part: both are in bfloat16, rounded in other places."""


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """Prompts of `num_prompt_tokens`, each with completions of `shortest` to `longest` tokens."""

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
"""Completion lengths are uniform; the short prompts of `ragged` leave nothing for sharing to save."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Token ids of P prompts, and of G completions of each."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def texts(self) -> list[str]:
        """A text for each prompt, which nothing reads."""
        return [f"prompt {index}" for index in range(len(self.prompts))]

    @property
    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(prompt, completion) of each row, group by group."""
        return [(prompt, ids) for prompt, group in zip(self.prompts, self.completions, strict=True) for ids in group]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows; a prompt counts as often as it has completions."""
        return sum(len(prompt) + len(ids) for prompt, ids in self.rows)


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

    def recipe(self) -> GRPORecipe:
        """The recipe of our side: one update, no reference, as TRL's defaults are."""
        micro = self.micro_batch_size
        return GRPORecipe.model_validate(
            {
                "model": {"name": self.model},
                "rollout": {
                    "prompts_per_step": len(self.batch.prompts),
                    "completions_per_prompt": len(self.batch.completions[0]),
                    "backend": "transformers",  # nothing is drawn, so no packed weights are needed
                },
                "grpo": {"kl": {"coef": 0.0}, **({"micro_batch_size": micro} if micro else {})},
                "optimizer": {"learning_rate": LEARNING_RATE},
                "run": {"num_threads": self.num_threads, "steps": MANY_STEPS},
            }
        )

    def build(self) -> tuple[GRPO, PolicyTask]:
        """The learner before its first step, with an engine that returns the given completions, and its task."""
        task = our_task(self.recipe(), self.batch.texts)
        learner = cast(GRPO, task.build())
        groups = given_groups(learner.policy, task.device, self.batch)
        learner.rollouts = replace(learner.rollouts, engine=GivenCompletions(groups))
        return learner, task


class GivenCompletions:
    """An engine that returns completions which are there already."""

    is_exact = True

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)

    def generate(self, *_: Any, **__: Any) -> list[Group]:
        """The completions, for any request."""
        return self._groups

    def unload(self) -> None:
        """There is nothing to free."""


def given_groups(policy: LanguageModel, device: torch.device, batch: UpdateBatch) -> list[Group]:
    """The batch as an engine would return it: with the log-probs that the model has now."""

    def group(index: int, logps: Sequence[Sequence[float]]) -> Group:
        completions = tuple(
            Completion(ids, tuple(logp[: len(ids)]), tuple(logp[: len(ids)]), "", "length")
            for ids, logp in zip(batch.completions[index], logps, strict=True)
        )
        return Group(Prompt(str(index), f"prompt {index}"), batch.prompts[index], completions, 0)

    groups: list[Group] = []
    for index, completions in enumerate(batch.completions):
        unknown = group(index, [[0.0] * len(ids) for ids in completions])
        logp_BT = passes.logps(policy, pack([unknown], 0, device), 1.0, len(completions))
        groups.append(group(index, logp_BT.tolist()))
    return groups


def trl_settings(batch: UpdateBatch, folder: str, num_threads: int, dtype: str) -> TRLSettings:
    """TRL's settings for the same work, with all rows in one micro-batch."""
    arguments = {
        "num_generations": len(batch.completions[0]),
        "max_completion_length": max(len(ids) for _, ids in batch.rows),
        "beta": 0.0,
    }
    num_rows = len(batch.rows)
    inputs = {name: tensor.tolist() for name, tensor in trl_inputs(batch).items()}
    return TRLSettings(folder, batch.texts, num_rows, num_threads, num_rows, dtype, arguments, inputs)


def trl_inputs(batch: UpdateBatch) -> dict[str, torch.Tensor]:
    """Tensors of a generation batch of TRL: prompts padded on the left, completions on the right, to the longest."""
    rows = batch.rows
    width_P, width_C = (max(len(row[side]) for row in rows) for side in (0, 1))
    reward_PG = torch.tensor([token_sum(group) for group in batch.completions])
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


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark.

    Raises:
        InputError: for an unknown workload or model, or if TRL is not installed; before anything is measured.
        TrainingError: if the gradients of the two are not of one size.
    """
    names = options.workload or tuple(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            raise InputError(f"there is no workload {name!r}; give {', '.join(WORKLOADS)}")
    load_trl()
    vocabulary_size = int(load_policy(ModelSection(name=options.model)).model.config.get_text_config().vocab_size)
    workloads: dict[str, object] = {}
    with exported(options.model) as folder:
        dtype = str(compute_dtype("auto")).removeprefix("torch.")
        for name in names:
            say(f"{name}:")
            size = WORKLOADS[name]
            if options.quick:
                few = min(size.num_prompt_tokens, 20)
                size = replace(size, num_prompt_tokens=few, num_completions=4, shortest=3, longest=8)
            batch = batch_of(size, vocabulary_size, options.seed)
            ours = OurUpdate(options.model, batch, options.threads, options.micro_batch_size)
            workloads[name] = {
                "prompts": size.num_prompts,
                "prompt_tokens": size.num_prompt_tokens,
                "completions_per_prompt": size.num_completions,
                "micro_batch_size": ours.recipe().grpo.micro_batch_size,
                **_measured(ours, trl_settings(batch, str(folder), options.threads, dtype), options, say),
            }
    return {
        **head(options, "update", "model", "against", "quick", packages=("torch", "transformers", "trl", "numpy")),
        "workloads": workloads,
    }


def _measured(ours: OurUpdate, first: TRLSettings, options: Namespace, say: Say) -> dict[str, object]:
    rows, micro = first.num_rows, ours.recipe().grpo.micro_batch_size
    sizes = [size for size in MICRO_BATCHES if size <= rows and rows % size == 0]
    setting, calibration = fastest(first, sizes[-1:] if options.quick else sizes, say, tries_eager=not options.quick)
    equal = max(size for size in range(1, rows + 1) if rows % size == 0 and size <= micro)
    precise = replace(setting, dtype="float32", autocasts=True, micro_batch_size=equal)
    warm, done, load = alternate(ours, setting, precise, _warm, options, say)
    default = warm["default"]
    _check_same_gradient(warm["ours"][0].grad_norm, warm["trl"][0].grad_norm)
    memory_gb = {name: max(one.memory_gb for one in taken) for name, taken in warm.items()}
    default_gb = max(one.memory_gb for one in default)
    facts, trl = pair_facts(done, setting, calibration, "update_s", "time/update/")
    trl |= {
        "memory_gb": memory_gb["trl"],
        "grad_norm": done["trl"][0].grad_norm,
        "default_precision": {
            "update_s": statistics.median(one.seconds for one in default),
            "memory_gb": default_gb,
            "micro_batch_size": equal,
        },
    }
    return {
        **facts,
        "memory_ratio": memory_gb["ours"] / default_gb,
        "memory_ratio_as_timed": memory_gb["ours"] / memory_gb["trl"],
        "memory_gb": memory_gb["ours"],
        "tokens": ours.batch.num_tokens,
        "grad_norm": done["ours"][0].grad_norm,
        "trl": trl,
        "rounds": options.rounds,
        "load": load,
    }


def _warm(process: Process) -> list[Taken]:
    """Updates whose memory is measured, once optimizer states are in place."""
    for _ in range(_WARM_UP_UPDATES):
        process.call("take")
    measured = [process.call("take", measures=True) for _ in range(_MEMORY_UPDATES)]
    process.call("take")  # memory was given back before
    return measured


def _check_same_gradient(ours: float, theirs: float) -> None:
    """Raises TrainingError unless the two worked on the same thing."""
    if not math.isclose(ours, theirs, rel_tol=_SAME_NORM):
        raise TrainingError(
            f"the gradient of our update has norm {ours:g} and TRL's {theirs:g}, so they cannot be compared; this is a "
            "defect of the benchmark or of a trainer"
        )


def show(facts: Mapping[str, Any]) -> None:
    """Print each workload."""
    for name, figures in facts["workloads"].items():
        show_pair(name, figures, "update_s", "memory_gb", "memory_ratio")


main = benchmark(
    measure,
    show,
    *("model", "workload", "micro_batch_size", "threads", "rounds", "seed", "quick"),
    against={"choices": ("trl",), "default": "trl", "help": "whose update"},
    workload={"help": "ragged or shared; repeatable. All if left out"},
)


if __name__ == "__main__":
    run("update")
