"""Load a reward from a recipe's `source`: a Python function, a built-in, a reward model, or a judge."""

import difflib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from tunesmith.base.config.judge import JUDGE, is_judge
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import ModelError, RewardError
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import as_reward_model, load_reward_model
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.models.lora import round_weights
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.learn.rewards.builtin import BUILTINS, RewardFunction
from tunesmith.learn.rewards.calling import CalledReward, FunctionReward, ObjectReward
from tunesmith.learn.rewards.functions import check_callable, file_of, function_of, is_function
from tunesmith.learn.rewards.judged import judge_reward
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Policy, Reward
from tunesmith.learn.rewards.processes import Processes, ProcessReward

RewardLike = RewardSource | str | RewardModel | PreTrainedModel | Reward | RewardFunction
"""A section of a recipe, its source as text, a reward model, a classifier of transformers, an object with `name` and
`score`, or a function."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Options of loading: the policy's tokenizer, device and dtype of models, and the default failure policy."""

    policy_tokenizer: PreTrainedTokenizerBase | None
    device: str | torch.device
    dtype: torch.dtype | None
    policy: Policy


def reward_list(given: RewardLike | Sequence[RewardLike]) -> list[RewardLike]:
    """The rewards that are given: one, or several in their order. Raises RewardError for none, and for a set or a
    mapping, which have no order of rewards.
    """
    if isinstance(given, Mapping | Set):
        raise RewardError(f"the reward is a {type(given).__name__}; give one reward, or a list of them")
    rewards = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not rewards:
        raise RewardError(f"no reward is given; give at least one, for example a built-in: {', '.join(BUILTINS)}")
    return rewards


def resolve(source: RewardLike, loading: Loading) -> ModelReward | CalledReward:
    """The reward that `source` is or names. Raises RewardError for a source that leads nowhere."""
    if isinstance(source, str):
        return _from_section(RewardSource(source=source), loading, loading.policy)
    if isinstance(source, RewardSource):
        return _from_section(source, loading, Policy(source.on_error, source.timeout_s))
    if isinstance(source, PreTrainedModel):
        source = as_reward_model(source)
    if isinstance(source, RewardModel):
        return ModelReward(source, policy_tokenizer=loading.policy_tokenizer, policy=loading.policy)
    if isinstance(source, ModelReward | CalledReward):
        return source
    if isinstance(source, Reward):
        return ObjectReward(source, loading.policy)
    return FunctionReward(check_callable(source, repr(source)), policy=loading.policy)


def code_files(sources: Sequence[RewardLike]) -> dict[str, Path]:
    """The files of the loaded functions of `sources`, by the part of the source before the function's name.

    Example: `{"./rewards.py": Path("/home/me/rewards.py")}` for the rewards `./rewards.py:short` and `sentiment`.
    """
    named = [one.source if isinstance(one, RewardSource) else one for one in sources]
    functions = [source for source in named if isinstance(source, str) and is_function(source)]
    files = {source.rpartition(":")[0]: file_of(source) for source in functions}
    return {place: file for place, file in files.items() if file is not None}


def _from_section(section: RewardSource, loading: Loading, policy: Policy) -> ModelReward | CalledReward:
    source = section.source
    if is_judge(source):
        return judge_reward(section, policy)
    is_builtin = source in BUILTINS
    is_model = not is_builtin and not is_function(source)
    if section.arguments and not is_builtin:
        raise RewardError(f"reward {source!r} takes no `arguments`: only built-ins do ({', '.join(BUILTINS)})")
    if not is_model and (
        section.label is not None or section.transform != "raw" or section.pessimism != 0 or section.weights != "model"
    ):
        raise RewardError(
            f"reward {source!r} is a function; `label`, `transform`, `pessimism` and `weights` belong to reward "
            "models, remove them"
        )
    if not is_model:
        function, name = function_of(section)
        if section.workers:
            return ProcessReward(function, section, name)
        return FunctionReward(function, name, policy)
    close = difflib.get_close_matches(source, list(BUILTINS), n=1, cutoff=0.75)
    if close and not Path(source).exists():
        raise RewardError(f"reward {source!r} is no built-in and no model; did you mean {close[0]!r}?")
    if section.timeout_s is not None:
        raise RewardError(f"reward {source!r} is a reward model; `timeout_s` belongs to functions, remove it")
    try:
        model = load_reward_model(
            source, label=section.label, transform=section.transform, device=loading.device, dtype=loading.dtype
        )
        if section.weights == "int8":
            round_weights(model.model, "weights", source)
    except ModelError as error:
        raise RewardError(
            f"reward {source!r}: {error}. A reward is `./file.py:name`, `package.module:name`, a reward model, "
            f"`{JUDGE}` and a judge, or a built-in: {', '.join(BUILTINS)}"
        ) from error
    reward = ModelReward(model, policy_tokenizer=loading.policy_tokenizer, policy=policy, pessimism=section.pessimism)
    if section.workers:
        reward.begin = Processes(section, loading, reward.name).begin
    return reward
