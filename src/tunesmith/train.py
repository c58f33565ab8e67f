"""Training from Python. These functions, their arguments and `RunResult` are the public API; a test pins their
signatures.

    from tunesmith import train

    def cheerful(completions, **_):
        return [float("!" in text) for text in completions]

    run = train.ppo(model="smollm2", prompts=["The movie was", "I thought the film"], reward=cheerful, steps=20)
    print(run.generate("The movie was"))
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tunesmith.base.config.load import DEFAULT, Resolved, load_recipe, origins_of
from tunesmith.base.config.recipe import ENVIRONMENT_REWARD
from tunesmith.base.config.sections import (
    DataSection,
    DemonstrationsSection,
    MixedPairsSection,
    PromptsSection,
    RewardSource,
)
from tunesmith.base.core.errors import InputError
from tunesmith.collect.data.demonstrations import DemonstrationLike
from tunesmith.collect.data.prompts import PromptLike
from tunesmith.collect.data.tables import as_rows
from tunesmith.learn.environments.contract import EnvironmentFactory
from tunesmith.learn.rewards.sources import RewardLike, reward_list
from tunesmith.learn.trainers import resume as _resume
from tunesmith.learn.trainers.api import Inputs, Listener
from tunesmith.learn.trainers.setup import RunResult

__all__ = ["RunResult", "best_of_n", "distill", "dpo", "grpo", "online_dpo", "ppo", "resume", "reward", "sft"]

Prompts = str | Path | Iterable[PromptLike]
Tool = Callable[..., Any]
Rewards = RewardLike | Sequence[RewardLike]
Rows = str | Path | Mapping[str, object] | Iterable[Mapping[str, object]]
"""The name of a source, a list of rows, or a table: a DataFrame, a Dataset, or a mapping of columns. A mapping of
settings, such as `{"sources": ["a.jsonl", "b.jsonl"]}`, is the section of a recipe."""


def ppo(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactory | None = None,
    demonstrations: str | Path | Iterable[DemonstrationLike] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy by PPO; returns the run's folder, metrics and summary.

    `model` is a hub id, folder, GGUF file or alias. `prompts` is a file, a list of texts, message lists or rows, or a
    table: a DataFrame of pandas or polars, a Dataset, or a mapping of columns.
    `reward` is one or several of: a Python function that is called as TRL calls it, `./file.py:name`, a built-in, a
    reward model's name or folder. `tools` are functions that the model may call, and `environment_factory` makes an
    environment that it talks to, or is a dictionary of such by the rows' `environment`, both in TRL's form
    (docs/environments.md); what the environment gives is a reward beside the others. `recipe` names a shipped recipe,
    `config` a YAML file. Every key of the recipe can be overridden, whole sections as a dict
    (`rollout={"max_new_tokens": 16}`) or one key by its path (`**{"rollout.max_new_tokens": 16}`).
    `callbacks=[...]` are callbacks of transformers' Trainer (docs/trl.md). With `run_id="..."` a run that has this
    id and a checkpoint is resumed in place of starting one. `demonstrations`, as of `sft`, are learnt beside the
    rewards with the weight `ptx.coef`.
    Raises `tunesmith.base.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    inputs = _PolicyInputs(prompts, reward, tools, environment_factory, demonstrations)
    given = {**overrides, "model": model, "run.steps": steps}
    return _train_policy("ppo", inputs, recipe, config, given, progress)


def grpo(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactory | None = None,
    demonstrations: str | Path | Iterable[DemonstrationLike] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy by GRPO. Arguments, result and errors are those of `ppo`."""
    inputs = _PolicyInputs(prompts, reward, tools, environment_factory, demonstrations)
    given = {**overrides, "model": model, "run.steps": steps}
    return _train_policy("grpo", inputs, recipe, config, given, progress)


def best_of_n(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactory | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy on the best of n completions by the reward. Arguments, result and errors are those of `ppo`."""
    inputs = _PolicyInputs(prompts, reward, tools, environment_factory)
    given = {**overrides, "model": model, "run.steps": steps}
    return _train_policy("best_of_n", inputs, recipe, config, given, progress)


def online_dpo(
    *,
    model: str | None = None,
    prompts: Prompts | None = None,
    reward: Rewards | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactory | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy by DPO on pairs of its own completions, which the reward compares. Arguments, result and errors
    are those of `ppo`.
    """
    inputs = _PolicyInputs(prompts, reward, tools, environment_factory)
    given = {**overrides, "model": model, "run.steps": steps}
    return _train_policy("online_dpo", inputs, recipe, config, given, progress)


def distill(
    *,
    model: str | None = None,
    teacher: str | Sequence[str] | None = None,
    prompts: Prompts | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a student to follow one or several teachers on its own completions; returns the run's folder, metrics and
    summary.

    `teacher` is a model's name or folder, or several of equal weight; `self` is the student, which reads the column
    `privileged_context` of the prompts as its own teacher. The other arguments and the errors are those of
    `ppo`.
    """
    names = [teacher] if isinstance(teacher, str) else teacher
    teachers = None if names is None else [{"model": name} for name in names]
    named, rows = _named_or_given(prompts, "prompts")
    given = {**overrides, "model": model, "prompts": named, "distill.teachers": teachers, "run.steps": steps}
    return _train("distill", recipe, config, given, Inputs(prompts=rows), progress)


def reward(
    *,
    model: str | None = None,
    pairs: Rows | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a reward model on preference pairs; returns the run's folder, metrics and summary.

    `pairs` is a file, or rows or a table with `chosen` and `rejected`, and where known `prompt`, `margin` and `tie`.
    The other arguments are those of `ppo`. Raises `tunesmith.base.core.errors.InputError` for anything that cannot be
    used, before a run folder is made.
    """
    named, rows = _named_or_given(pairs, "pairs")
    given = {**overrides, "model": model, "pairs": named, "run.steps": steps}
    return _train("reward", recipe, config, given, Inputs(pairs=rows), progress)


def dpo(
    *,
    model: str | None = None,
    pairs: Rows | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Train a policy on preferences directly, without a reward model; returns the run's folder, metrics and summary.

    `pairs` is a file, or rows or a table with `chosen` and `rejected`, and where known `prompt` and `tie`; for the loss
    `kto` also of rows with `prompt`, `completion` and `label`. The other arguments are those of `ppo`. Raises
    `tunesmith.base.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    named, rows = _named_or_given(pairs, "pairs")
    given = {**overrides, "model": model, "pairs": named, "run.steps": steps}
    return _train("dpo", recipe, config, given, Inputs(pairs=rows), progress)


def sft(
    *,
    model: str | None = None,
    demonstrations: str | Path | Iterable[DemonstrationLike] | None = None,
    recipe: str | None = None,
    config: str | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Fine-tune a language model on demonstrations; returns the run's folder, metrics and summary.

    `demonstrations` is a file, or rows or a table with `prompt` and `completion`, with `messages`, or with `text` (a
    plain text in the list is such a row). The other arguments are those of `ppo`. Raises
    `tunesmith.base.core.errors.InputError` for anything that cannot be used, before a run folder is made.
    """
    named, rows = _named_or_given(demonstrations, "demonstrations")
    given = {**overrides, "model": model, "demonstrations": named, "run.steps": steps}
    return _train("sft", recipe, config, given, Inputs(demonstrations=rows), progress)


def resume(
    run: str | Path,
    *,
    prompts: Iterable[PromptLike] | None = None,
    reward: Rewards | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactory | None = None,
    pairs: Iterable[Mapping[str, object]] | None = None,
    demonstrations: Iterable[DemonstrationLike] | None = None,
    steps: int | None = None,
    progress: bool = True,
    **overrides: object,
) -> RunResult:
    """Continue the run in the folder `run` from its newest whole checkpoint, exactly as if it had not stopped.

    What the run was given as Python objects (prompts, rewards, tools, an environment, pairs, demonstrations) must be
    given again. `overrides` may change the learning rate, the number of steps and the logging, and may hold
    `callbacks` as those of `ppo`; anything else raises `tunesmith.base.core.errors.RunError` with the difference.
    """
    listener, given = _listener({**overrides, "run.steps": steps})
    rewards = None if reward is None else reward_list(reward)
    if rewards is not None and environment_factory is not None:
        rewards = _with_environment(rewards)
    inputs = Inputs(
        prompts=None if prompts is None else as_rows(prompts, "prompts"),
        rewards=rewards,
        tools=tools,
        environment_factory=environment_factory,
        pairs=None if pairs is None else as_rows(pairs, "pairs"),
        demonstrations=None if demonstrations is None else as_rows(demonstrations, "demonstrations"),
    )
    told = {"overrides": _set(given), "origins": _origins(given)}
    return _resume.resume(Path(run), **told, inputs=inputs, progress=progress, listener=listener)


@dataclass(frozen=True, slots=True)
class _PolicyInputs:
    """The inputs from Python of an algorithm that draws completions."""

    prompts: Prompts | None
    reward: Rewards | None
    tools: Sequence[Tool] | None
    environment_factory: EnvironmentFactory | None
    demonstrations: str | Path | Iterable[DemonstrationLike] | None = None


def _train_policy(
    algorithm: str,
    inputs: _PolicyInputs,
    recipe: str | None,
    config: str | None,
    given: Mapping[str, object],
    progress: bool,
) -> RunResult:
    """Train by an algorithm that draws completions. What is given by name becomes an override."""
    rewards: list[Any] | None = None if inputs.reward is None else reward_list(inputs.reward)
    by_name = all(isinstance(item, str) for item in rewards or ())
    if inputs.environment_factory is not None and rewards is not None:
        rewards = _with_environment(rewards)
    named, rows = _named_or_given(inputs.prompts, "prompts")
    shown, shown_rows = _named_or_given(inputs.demonstrations, "demonstrations")
    given = {**given, "prompts": named, "reward": _as_values(rewards) if by_name else None, "demonstrations": shown}
    objects = Inputs(
        prompts=rows,
        rewards=None if by_name else rewards,
        demonstrations=shown_rows,
        tools=inputs.tools,
        environment_factory=inputs.environment_factory,
    )
    return _train(algorithm, recipe, config, given, objects, progress)


def _as_values(rewards: Sequence[Any] | None) -> list[Any] | None:
    """`rewards` as a recipe writes them."""
    if rewards is None:
        return None
    return [one.model_dump(exclude_unset=True) if isinstance(one, RewardSource) else one for one in rewards]


def _with_environment(rewards: Sequence[Any]) -> list[Any]:
    """`rewards` and, as in TRL, that of the environment; once."""
    named = [getattr(one, "source", one) for one in rewards]
    return [*rewards, *([] if "environment" in named else [RewardSource.model_validate(ENVIRONMENT_REWARD)])]


def _rewarded_by_environment(resolved: Resolved) -> Resolved:
    """`resolved` with the reward of an environment beside those that the recipe names itself."""
    is_default = all(origin == DEFAULT for key, origin in resolved.provenance.items() if key.startswith("reward"))
    named: Sequence[RewardSource] = () if is_default else getattr(resolved.recipe, "reward", ())
    recipe = resolved.recipe.model_copy(update={"reward": tuple(_with_environment(named))})
    own = {f"reward.{len(named)}.{name}": "argument environment_factory" for name in ENVIRONMENT_REWARD}
    return Resolved(recipe, origins_of(recipe, {**resolved.provenance, **own}, others=DEFAULT))


def _train(
    algorithm: str,
    recipe: str | None,
    config: str | None,
    given: Mapping[str, object],
    inputs: Inputs,
    progress: bool,
) -> RunResult:
    listener, given = _listener(given)
    for name in inputs.given:
        if f"{name}.source" in given:
            raise InputError(f"{name} are given as rows and as {name}.source; give one of them")
    run_id: Any = given.pop("run_id", None)
    file = Path(config) if config else None
    resolved = load_recipe(algorithm, recipe=recipe, file=file, overrides=_set(given), origins=_origins(given))
    if inputs.environment_factory is not None and inputs.rewards is None and "reward" not in _set(given):
        resolved = _rewarded_by_environment(resolved)
    return _resume.start_or_resume(resolved, inputs, run_id=run_id, progress=progress, listener=listener)


def _listener(given: Mapping[str, object]) -> tuple[Listener | None, dict[str, object]]:
    """(the `callbacks` among the arguments as a listener, None without any; the other arguments)."""
    callbacks: Any = given.get("callbacks")
    others = {key: value for key, value in given.items() if key != "callbacks"}
    if not callbacks:
        return None, others
    from tunesmith.integrations.callbacks import TransformersCallbacks  # imports transformers' trainer, which is slow

    return TransformersCallbacks(callbacks), others


_DATA_SECTIONS: Mapping[str, type[DataSection]] = {
    "prompts": PromptsSection,
    "pairs": MixedPairsSection,
    "demonstrations": DemonstrationsSection,
}


def _named_or_given(rows: object, name: str) -> tuple[object, list[Any] | None]:
    """(name of a source, or settings of the section; None), or (None, rows) for rows given as Python objects."""
    if rows is None or isinstance(rows, str | Path):
        return (None if rows is None else str(rows)), None
    if isinstance(rows, Mapping) and rows and rows.keys() <= _DATA_SECTIONS[name].model_fields.keys():
        return cast(object, rows), None
    return None, as_rows(rows, name)


def _origins(given: Mapping[str, object]) -> dict[str, str]:
    return {key: f"argument {key}" for key in given}


def _set(given: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in given.items() if value is not None}
