"""The stages of a step cover its work, and completions that teach nothing are counted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from operations import Operations
from recipes import (
    PROMPTS,
    Started,
    best_of_n_recipe,
    demonstrations,
    distill_recipe,
    dpo_recipe,
    groups_of,
    grpo_recipe,
    pairs,
    ppo_recipe,
    reward_recipe,
    sft_recipe,
)

from tunesmith.base.core.trace import trace, watching
from tunesmith.learn.trainers.run import batch_of

UPDATE = {"update", "update/forward", "update/backward", "update/optimizer"}


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def started(trainer: str, folder: Path) -> Started:
    if trainer == "sft":
        return Started(sft_recipe(folder), demonstrations=demonstrations())
    if trainer in ("reward", "dpo"):
        recipe = {"reward": reward_recipe, "dpo": dpo_recipe}[trainer]
        return Started(recipe(folder), pairs=pairs())
    if trainer == "distill":
        return Started(distill_recipe(folder), prompts=PROMPTS)
    recipe = {"ppo": ppo_recipe, "grpo": grpo_recipe, "best_of_n": best_of_n_recipe}[trainer]
    return Started(recipe(folder), prompts=PROMPTS, rewards=[low_ids])


@pytest.mark.parametrize(
    ("trainer", "stages"),
    [
        ("sft", {"data", "metrics"}),
        ("reward", {"data", "metrics"}),
        ("dpo", {"data", "reference", "kl", "metrics"}),
        ("ppo", {"data", "rollout", "reward", "pack", "old_policy", "reference", "advantages", "metrics"}),
        ("grpo", {"data", "rollout", "reward", "pack", "reference", "advantages", "metrics"}),
        ("best_of_n", {"data", "rollout", "reward", "advantages", "pack", "metrics"}),
        ("distill", {"data", "rollout", "pack", "update/teachers", "metrics"}),
    ],
)
def test_the_stages_of_every_trainer_cover_its_operations(trainer: str, stages: set[str], tmp_path: Path) -> None:
    state, operations = started(trainer, tmp_path), Operations()
    with watching(operations), trace() as times, operations:
        state.step(batch_of(state.task, 0), 0)
    inner = {path for path in times.seconds if path.startswith(("rollout/", "reward/"))}
    assert set(times.seconds) - inner == stages | UPDATE
    operations.check()


def test_completions_of_groups_without_a_gradient_are_unused(tmp_path: Path) -> None:
    def same_for_films(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [0.5 if "film" in prompt else max(ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]

    state = Started(grpo_recipe(tmp_path), prompts=PROMPTS[:2], rewards=[same_for_films])
    result = state.step(state.data.train, 0)
    (film,) = [group for group in groups_of(result) if group.prompt.content == "The film"]
    assert result.metrics["rollout/unused_tokens"] == sum(len(one.token_ids) for one in film.completions) > 0
    assert result.metrics["num_tokens"] > result.metrics["rollout/unused_tokens"]


def test_a_step_without_any_gradient_uses_nothing(tmp_path: Path) -> None:
    def constant(completions: Sequence[str], **_: object) -> list[float]:
        return [1.0] * len(completions)

    state = Started(grpo_recipe(tmp_path), prompts=PROMPTS, rewards=[constant])
    metrics = state.step(state.data.train, 0).metrics
    assert metrics["rollout/unused_tokens"] == metrics["num_tokens"]


def test_best_of_n_leaves_the_others_unused(tmp_path: Path) -> None:
    state = Started(best_of_n_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    result = state.step(state.data.train, 0)
    unused = 0
    for group in groups_of(result):
        scores = low_ids([one.token_ids for one in group.completions])
        best = scores.index(max(scores))
        unused += sum(len(one.token_ids) for place, one in enumerate(group.completions) if place != best)
    assert result.metrics["rollout/unused_tokens"] == unused > 0
