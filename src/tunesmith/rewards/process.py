"""The program of a process that calls a reward function, or a reward model, for the training."""

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tunesmith.config.sections import RewardSource
from tunesmith.core.errors import RewardError
from tunesmith.rewards.calling import CalledReward, FunctionReward
from tunesmith.rewards.functions import function_of
from tunesmith.rewards.outcome import Policy, Sample, Scored

if TYPE_CHECKING:
    from tunesmith.rewards.model import ModelReward

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Answer the calls that arrive at the socket whose number is the first argument, until it is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    try:
        reward = _loaded(*connection.recv())
        while True:
            connection.send(_answer(reward, *connection.recv()))
    except (EOFError, ConnectionError):
        os._exit(0)  # a thread of a call that hung would keep the process


def _loaded(section: RewardSource, loading: Any, num_threads: int) -> "ModelReward | CalledReward":
    """The reward of `section`. A function needs neither torch nor transformers, which take seconds and half a GB, but
    may import them itself.
    """
    if loading is None:
        reward = FunctionReward(*function_of(section), Policy(section.on_error, section.timeout_s))
    else:
        from tunesmith.rewards.sources import resolve

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
