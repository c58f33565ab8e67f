"""Training from Python. These functions, their arguments and `RunResult` are the public API; a test pins their
signatures.

from tunesmith import train

def cheerful(completions, **_):
    return [float("!" in text) for text in completions]

run = train.ppo(model="smollm2", prompts=["The movie was", "I thought the film"], reward=cheerful, steps=20)
print(run.generate("The movie was"))
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.config.load import load_recipe
from tunesmith.config.schema import PPORecipe, RewardRecipe
from tunesmith.data.pairs import load_pairs
from tunesmith.data.prompts import PromptLike
from tunesmith.rewards.scorer import RewardLike
from tunesmith.trainers import ppo as _ppo
from tunesmith.trainers import reward as _reward
from tunesmith.trainers.setup import RunResult

__all__ = ["RunResult", "ppo", "reward"]


def ppo(
    *,
    model: str | None = None,
    prompts: str | Sequence[PromptLike] | None = None,
    reward: RewardLike | Sequence[RewardLike] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy by PPO; the run's folder, metrics and summary.

    `model` is a hub id, folder, GGUF file or alias. `prompts` is a file or a list of texts, message lists or rows.
    `reward` is one or several of: a Python function that is called as TRL calls it, `./file.py:name`, a built-in, a
    reward model's name or folder. `recipe` names a shipped recipe, `config` a YAML file. Every key of the recipe can
    be overridden, whole sections as a dict (`rollout={"max_new_tokens": 16}`) or one key by its path
    (`**{"rollout.max_new_tokens": 16}`).
    Raises `tunesmith.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    in_memory_prompts = None if prompts is None or isinstance(prompts, str) else list(prompts)
    rewards = (
        []
        if reward is None
        else list(reward)
        if isinstance(reward, Sequence) and not isinstance(reward, str)
        else [reward]
    )
    by_name = bool(rewards) and all(isinstance(item, str) for item in rewards)
    given = {
        **overrides,
        "model": model,
        "prompts": prompts if isinstance(prompts, str) else None,
        "reward": rewards if by_name else None,
        "run.steps": steps,
    }
    resolved = load_recipe(
        "ppo", recipe=recipe, file=Path(config) if config else None, overrides=_set(given), origins=_origins(given)
    )
    assert isinstance(resolved.recipe, PPORecipe)
    return _ppo.run(
        resolved.recipe,
        provenance=resolved.provenance,
        prompts=in_memory_prompts,
        rewards=rewards if rewards and not by_name else None,
        progress=progress,
    )


def reward(
    *,
    model: str | None = None,
    pairs: str | Sequence[Mapping[str, object]] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a reward model on preference pairs; the run's folder, metrics and summary.

    `pairs` is a JSONL file or a list of rows with `chosen` and `rejected`, and where known `prompt`, `margin` and
    `tie`. The other arguments are those of `ppo`. Raises `tunesmith.core.errors.InputError` for anything that cannot
    be used, before a run folder is made.
    """
    given = {**overrides, "model": model, "pairs": pairs if isinstance(pairs, str) else None, "run.steps": steps}
    resolved = load_recipe(
        "reward", recipe=recipe, file=Path(config) if config else None, overrides=_set(given), origins=_origins(given)
    )
    assert isinstance(resolved.recipe, RewardRecipe)
    return _reward.run(
        resolved.recipe,
        provenance=resolved.provenance,
        pairs=None if pairs is None or isinstance(pairs, str) else load_pairs(pairs),
        progress=progress,
    )


def _origins(given: Mapping[str, object]) -> dict[str, str]:
    return {key: f"argument {key}" for key in given}


def _set(given: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in given.items() if value is not None}
