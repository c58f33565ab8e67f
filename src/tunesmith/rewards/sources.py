"""From what a recipe or a caller names to a reward that can be asked."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tunesmith.config.sections import RewardSource
from tunesmith.core.errors import ModelError, RewardError
from tunesmith.models.heads import RewardModel
from tunesmith.models.load import load_reward_model
from tunesmith.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.rewards.builtin import BUILTINS
from tunesmith.rewards.calling import CalledReward, ObjectReward
from tunesmith.rewards.exchange import RewardFunction
from tunesmith.rewards.functions import FunctionReward, builtin_function, check_callable, file_of, load_function
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.outcome import Policy
from tunesmith.rewards.sample import Reward

RewardLike = RewardSource | str | RewardModel | Reward | RewardFunction
"""A section of a recipe, its source as text, a reward model, an object with `name` and `score`, or a function."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How rewards are loaded: the policy's tokenizer, where models go, and the policy of what is no section."""

    policy_tokenizer: PreTrainedTokenizerBase | None
    device: str | torch.device
    dtype: torch.dtype | None
    policy: Policy


def resolve(source: RewardLike, loading: Loading) -> ModelReward | CalledReward:
    """The reward that `source` is or names. Raises RewardError for a source that leads nowhere."""
    if isinstance(source, str):
        return _from_section(RewardSource(source=source), loading, loading.policy)
    if isinstance(source, RewardSource):
        return _from_section(source, loading, Policy(source.on_error, source.timeout_s))
    if isinstance(source, RewardModel):
        return ModelReward(source, policy_tokenizer=loading.policy_tokenizer, policy=loading.policy)
    if isinstance(source, ModelReward | CalledReward):
        return source
    if isinstance(source, Reward):
        return ObjectReward(source, loading.policy)
    return FunctionReward(check_callable(source, repr(source)), policy=loading.policy)


def code_files(sources: Sequence[RewardLike]) -> dict[str, Path]:
    """The files of the functions that `sources` name and that were loaded, by what stands before the function's name.

    Example: `{"./rewards.py": Path("/home/me/rewards.py")}` for the rewards `./rewards.py:short` and `sentiment`.
    """
    named = [one.source if isinstance(one, RewardSource) else one for one in sources]
    functions = [source for source in named if isinstance(source, str) and _is_function(source)]
    files = {source.rpartition(":")[0]: file_of(source) for source in functions}
    return {place: file for place, file in files.items() if file is not None}


def _is_function(source: str) -> bool:
    is_model = Path(source).is_dir() or (":" not in source and not source.endswith(".py"))
    return source not in BUILTINS and not is_model


def _from_section(section: RewardSource, loading: Loading, policy: Policy) -> ModelReward | CalledReward:
    source = section.source
    is_builtin = source in BUILTINS
    is_model = not is_builtin and not _is_function(source)
    if section.arguments and not is_builtin:
        raise RewardError(f"reward {source!r} takes no `arguments`: only built-ins do ({', '.join(BUILTINS)})")
    if not is_model and (section.label is not None or section.transform != "raw"):
        raise RewardError(
            f"reward {source!r} is a function; `label` and `transform` belong to reward models, remove them"
        )
    if is_builtin:
        return FunctionReward(builtin_function(source, section.arguments), name=source, policy=policy)
    if not is_model:
        return FunctionReward(load_function(source), policy=policy)
    close = difflib.get_close_matches(source, list(BUILTINS), n=1, cutoff=0.75)
    if close and not Path(source).exists():
        raise RewardError(f"reward {source!r} is no built-in and no model; did you mean {close[0]!r}?")
    if section.timeout_s is not None:
        raise RewardError(f"reward {source!r} is a reward model; `timeout_s` belongs to functions, remove it")
    return _load_model(section, loading, policy)


def _load_model(section: RewardSource, loading: Loading, policy: Policy) -> ModelReward:
    try:
        model = load_reward_model(
            section.source,
            label=section.label,
            transform=section.transform,
            device=loading.device,
            dtype=loading.dtype,
        )
    except ModelError as error:
        raise RewardError(
            f"reward {section.source!r}: {error}. A reward is `./file.py:name`, `package.module:name`, a reward model, "
            f"or a built-in: {', '.join(BUILTINS)}"
        ) from error
    return ModelReward(model, policy_tokenizer=loading.policy_tokenizer, policy=policy)
