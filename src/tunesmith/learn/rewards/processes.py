"""A reward in processes of its own: it runs beside this one, does not hold its interpreter lock, and can be killed."""

import pickle
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import torch

from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.child import Child
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.log import get_logger
from tunesmith.learn.rewards.ahead import Portion, one_answer
from tunesmith.learn.rewards.builtin import RewardFunction
from tunesmith.learn.rewards.calling import ENVIRONMENTS, RETRY_S, FunctionReward
from tunesmith.learn.rewards.outcome import Logged, Policy, Sample, SampleError, Scored
from tunesmith.learn.rewards.threads import Worker, result_of

_TRIES = 2
"""Processes that are given a call before its samples count as failed."""

_GRACE_S = 10.0


class Processes:
    """`section.workers` processes that call the reward `name` of `section`: a model, loaded as `loading` says, or a
    function, for which that is None.

    A process that ends is started again, and its call is repeated once. One that hangs beyond `timeout_s` is killed.
    """

    def __init__(self, section: RewardSource, loading: object, name: str) -> None:
        self.name = name
        self.count = section.workers
        limit_s = section.timeout_s
        self._limit_s = None if limit_s is None else limit_s + RETRY_S + _GRACE_S
        alone = section.model_copy(update={"workers": 0})
        setup, env = (alone, loading, torch.get_num_threads()), {"OMP_NUM_THREADS": "1"}
        self._processes = [Child("tunesmith.learn.rewards.process", setup, env) for _ in range(self.count)]
        self._threads = [Worker(f"{name}-{number}") for number in range(self.count)]
        self._num_calls = 0
        weakref.finalize(self, _end_all, self._processes)

    def begin(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> "Future[Scored]":
        """The outcomes of one call, which the next of the processes makes."""
        number = self._num_calls % self.count
        self._num_calls += 1
        return self._threads[number].submit(partial(self._called, self._processes[number], samples, extras))

    def _called(self, process: Child, samples: Sequence[Sample], extras: Mapping[str, object]) -> Scored:
        reason = ""
        for _ in range(_TRIES):
            try:
                process.send((samples, extras))
                answer: Scored | RewardError = process.receive(self._limit_s)
            except (EOFError, OSError):
                reason = process.end()
                if process.is_closed:
                    break
                get_logger(__name__).warning("a process of the reward `%s` %s; it is started again", self.name, reason)
                continue
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RewardError(f"reward `{self.name}`: its columns cannot be sent to a process ({error})") from error
            if isinstance(answer, RewardError):
                raise answer
            if any(isinstance(one, SampleError) and one.kind == "hung" for one in answer.outcomes):
                process.end()  # what hangs would run on beside the next call
            return answer
        failure = SampleError(
            f"reward `{self.name}`: its process {reason}, {_TRIES} times, scoring {len(samples)} completions from "
            f"{samples[0]}",
            "its process ended",
        )
        return Scored([failure] * len(samples), Logged(len(samples)))


class ProcessReward(FunctionReward):
    """The function of `section`, called in `section.workers` processes, each with whole groups.

    Raises RewardError for an async function, which waits for others and needs no processes.
    """

    _NO_INSTANCES = "its processes have none of the environment's instances; remove its `workers`"

    def __init__(self, function: RewardFunction, section: RewardSource, name: str | None) -> None:
        super().__init__(function, name, Policy(section.on_error, section.timeout_s))
        if self.is_async:
            raise RewardError(
                f"reward {section.source!r} is an `async def`, whose calls overlap anyway; remove its `workers`"
            )
        self._processes = Processes(section, None, self.name)

    def check_columns(self, columns: Sequence[str]) -> None:
        """See `CalledReward.check_columns`."""
        super().check_columns([name for name in columns if name != ENVIRONMENTS])

    def begin(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> "Future[Scored]":
        """See `CalledReward.begin`."""
        return self._processes.begin(samples, extras)

    def outcomes(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """See `CalledReward.outcomes`; each process gets about as many groups."""
        starts = [place for place, sample in enumerate(samples) if sample.index == 0 or place == 0]
        count = min(self._processes.count, len(starts))
        cuts = [*(starts[len(starts) * number // count] for number in range(count)), len(samples)]
        parts = [Portion(range(first, last), 1) for first, last in pairwise(cuts)]
        begun = {part: self.begin([samples[place] for place in part.samples], extras or {}) for part in parts}
        return one_answer({part: result_of(future) for part, future in begun.items()})


def _end_all(processes: Sequence[Child]) -> None:
    for process in processes:
        process.close()
