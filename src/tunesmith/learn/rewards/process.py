"""The program of a process that calls a reward function, or a reward model, for the training."""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.child import serve
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.log import escape_what_cannot_be_encoded
from tunesmith.learn.rewards.calling import CalledReward, FunctionReward
from tunesmith.learn.rewards.functions import function_of
from tunesmith.learn.rewards.outcome import Policy, Sample, Scored

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import ModelReward


def main() -> None:
    """Answer calls with a reward, until the training closes the connection."""
    escape_what_cannot_be_encoded()  # what a function prints may be anything
    serve(_prepared)


def _prepared(setup: tuple[RewardSource, Any, int]) -> Callable[[Any], object]:
    reward = _loaded(*setup)
    return lambda call: _answer(reward, *call)


def _loaded(section: RewardSource, loading: Any, num_threads: int) -> "ModelReward | CalledReward":
    """The reward of `section`. A function needs neither torch nor transformers, which take seconds and half a GB, but
    may import them itself.
    """
    if loading is None:
        reward = FunctionReward(*function_of(section), Policy(section.on_error, section.timeout_s))
    else:
        from tunesmith.learn.rewards.sources import resolve

        reward = resolve(section, loading)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(num_threads)  # the last bits depend on it
    return reward


def _answer(
    reward: "ModelReward | CalledReward", samples: Sequence[Sample], extras: Mapping[str, object]
) -> Scored | RewardError:
    """The outcomes of a call, or why there are none, in a form that can be sent."""
    try:
        answer = reward.outcomes(samples, extras)
        pickle.dumps(answer)  # what the function logged may be anything
    except RewardError as error:
        return RewardError(str(error))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return RewardError(f"reward `{reward.name}` logged what cannot be sent to the training ({error})")
    return answer


if __name__ == "__main__":
    main()
