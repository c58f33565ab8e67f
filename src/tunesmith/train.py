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

from tunesmith.config.load import Resolved, load_recipe
from tunesmith.config.schema import DPORecipe, GRPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from tunesmith.data.demonstrations import DemonstrationLike
from tunesmith.data.prompts import PromptLike
from tunesmith.rewards.sources import RewardLike
from tunesmith.trainers import dpo as _dpo
from tunesmith.trainers import grpo as _grpo
from tunesmith.trainers import ppo as _ppo
from tunesmith.trainers import resume as _resume
from tunesmith.trainers import reward as _reward
from tunesmith.trainers import sft as _sft
from tunesmith.trainers.setup import RunResult

__all__ = ["RunResult", "dpo", "grpo", "ppo", "resume", "reward", "sft"]

Prompts = str | Sequence[PromptLike]
Rewards = RewardLike | Sequence[RewardLike]


def ppo(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
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
    rows, functions, given = _policy_arguments(model, prompts, reward, steps, overrides)
    resolved = _resolved("ppo", recipe, config, given)
    assert isinstance(resolved.recipe, PPORecipe)
    return _ppo.run(resolved.recipe, provenance=resolved.provenance, prompts=rows, rewards=functions, progress=progress)


def grpo(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy by GRPO; the run's folder, metrics and summary. Arguments and errors are those of `ppo`."""
    rows, functions, given = _policy_arguments(model, prompts, reward, steps, overrides)
    resolved = _resolved("grpo", recipe, config, given)
    assert isinstance(resolved.recipe, GRPORecipe)
    return _grpo.run(
        resolved.recipe, provenance=resolved.provenance, prompts=rows, rewards=functions, progress=progress
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

    `pairs` is a file or a list of rows with `chosen` and `rejected`, and where known `prompt`, `margin` and `tie`. The
    other arguments are those of `ppo`. Raises `tunesmith.core.errors.InputError` for anything that cannot be used,
    before a run folder is made.
    """
    given = {**overrides, "model": model, "pairs": pairs if isinstance(pairs, str) else None, "run.steps": steps}
    resolved = _resolved("reward", recipe, config, given)
    assert isinstance(resolved.recipe, RewardRecipe)
    return _reward.run(
        resolved.recipe,
        provenance=resolved.provenance,
        pairs=None if pairs is None or isinstance(pairs, str) else list(pairs),
        progress=progress,
    )


def dpo(
    *,
    model: str | None = None,
    pairs: str | Sequence[Mapping[str, object]] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy on preferences directly, without a reward model; the run's folder, metrics and summary.

    `pairs` is a file or a list of rows with `chosen` and `rejected`, and where known `prompt` and `tie`; for the loss
    `kto` also of rows with `prompt`, `completion` and `label`. The other arguments are those of `ppo`. Raises
    `tunesmith.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    given = {**overrides, "model": model, "pairs": pairs if isinstance(pairs, str) else None, "run.steps": steps}
    resolved = _resolved("dpo", recipe, config, given)
    assert isinstance(resolved.recipe, DPORecipe)
    return _dpo.run(
        resolved.recipe,
        provenance=resolved.provenance,
        pairs=None if pairs is None or isinstance(pairs, str) else list(pairs),
        progress=progress,
    )


def sft(
    *,
    model: str | None = None,
    demonstrations: str | Sequence[DemonstrationLike] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Fine-tune a language model on demonstrations; the run's folder, metrics and summary.

    `demonstrations` is a file or a list of rows with `prompt` and `completion`, with `messages`, or with `text` (a
    plain text in the list is such a row). The other arguments are those of `ppo`. Raises
    `tunesmith.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    source = demonstrations if isinstance(demonstrations, str) else None
    given = {**overrides, "model": model, "demonstrations": source, "run.steps": steps}
    resolved = _resolved("sft", recipe, config, given)
    assert isinstance(resolved.recipe, SFTRecipe)
    return _sft.run(
        resolved.recipe,
        provenance=resolved.provenance,
        demonstrations=None if demonstrations is None or source is not None else list(demonstrations),
        progress=progress,
    )


def resume(
    run: str | Path,
    *,
    prompts: Sequence[PromptLike] | None = None,
    reward: Rewards | None = None,
    pairs: Sequence[Mapping[str, object]] | None = None,
    demonstrations: Sequence[DemonstrationLike] | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Go on with the run in the folder `run` from its newest whole checkpoint, exactly as if it had not stopped.

    What the run was given as Python objects (prompts, reward functions, pairs, demonstrations) must be given again.
    `overrides` may change the learning rate, the number of steps and the logging; anything else raises
    `tunesmith.core.errors.RunError` with the difference.
    """
    given = {**overrides, "run.steps": steps}
    return _resume.resume(
        Path(run),
        overrides=_set(given),
        origins=_origins(given),
        inputs=_resume.Inputs(
            prompts=None if prompts is None else list(prompts),
            rewards=_as_list(reward) or None,
            pairs=None if pairs is None else list(pairs),
            demonstrations=None if demonstrations is None else list(demonstrations),
        ),
        progress=progress,
    )


def _policy_arguments(
    model: str | None,
    prompts: Prompts | None,
    reward: Rewards | None,
    steps: int | None,
    overrides: Mapping[str, object],
) -> tuple[list[PromptLike] | None, list[RewardLike] | None, dict[str, object]]:
    """Prompts and rewards that are Python objects, None where they are named, and everything else as overrides."""
    rewards = _as_list(reward)
    by_name = all(isinstance(item, str) for item in rewards)
    given = {
        **overrides,
        "model": model,
        "prompts": prompts if isinstance(prompts, str) else None,
        "reward": rewards if rewards and by_name else None,
        "run.steps": steps,
    }
    rows = None if prompts is None or isinstance(prompts, str) else list(prompts)
    return rows, None if by_name else rewards, given


def _as_list(reward: Rewards | None) -> list[RewardLike]:
    if reward is None:
        return []
    return list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]


def _resolved(algorithm: str, recipe: str | None, config: str | None, given: Mapping[str, object]) -> Resolved:
    file = Path(config) if config else None
    return load_recipe(algorithm, recipe=recipe, file=file, overrides=_set(given), origins=_origins(given))


def _origins(given: Mapping[str, object]) -> dict[str, str]:
    return {key: f"argument {key}" for key in given}


def _set(given: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in given.items() if value is not None}
