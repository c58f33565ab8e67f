"""Score groups in a second thread while the engine still samples others.

The order of the calls is that in which groups end, which a seeded engine repeats, so that a reward which draws from a
random generator gives the same numbers again.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from tunesmith.batch.rollout import Group
from tunesmith.core.trace import Trace, include, span, trace
from tunesmith.rewards.calling import CalledReward
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.outcome import Logged, Portion, Sample, Scored, one_answer, portions, samples_of
from tunesmith.rewards.threads import EventLoop, HangError, Worker, result_of


@dataclass(frozen=True, slots=True)
class Threads:
    """The thread that runs synchronous rewards, and the event loop that runs async ones."""

    worker: Worker
    loop: EventLoop


@dataclass(slots=True)
class _Calls:
    """The calls of one reward; `futures` holds those submitted so far."""

    name: str
    reward: ModelReward | CalledReward
    portions: Sequence[Portion]
    futures: dict[Portion, "Future[Scored]"] = field(default_factory=dict[Portion, "Future[Scored]"])


class Ahead:
    """The scores of one call of an engine, made while it draws: `add` is its `on_group`, `answers` comes afterwards.

    A function is called with one group at a time, a reward model with the portions that it always gets. Leaving the
    `with` block before `answers` drops what is not scored yet.
    """

    def __init__(
        self,
        rewards: Mapping[str, ModelReward | CalledReward],
        threads: Threads,
        num_groups: int,
        group_size: int,
        extras: Mapping[str, object],
    ) -> None:
        self._threads = threads
        self._extras = extras
        self._groups: dict[int, Group] = {}
        self._num_groups = num_groups
        self._trace = Trace()
        self._is_closed = False
        self._failed: tuple[int, int] | None = None
        whole, single = portions(num_groups, group_size), portions(num_groups, group_size, num_rows=1)
        self._calls = [
            _Calls(name, reward, whole if isinstance(reward, ModelReward) else single)
            for name, reward in rewards.items()
        ]

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        for calls in self._calls:
            for future in calls.futures.values():
                future.cancel()

    def add(self, place: int, group: Group) -> None:
        """Take the group of prompt `place`, all of whose completions have ended, and call those rewards that can begin.

        Returns at once; what goes wrong in a reward is raised by `answers`.
        """
        self._groups[place] = group
        for index, calls in enumerate(self._calls):
            portion = next(portion for portion in calls.portions if place in portion.groups)
            if portion not in calls.futures and all(part in self._groups for part in portion.groups):
                calls.futures[portion] = self._submit(index, calls, portion)

    def answers(self) -> list[Scored]:
        """Outcomes of each reward for all samples, in the order of the rewards; waits for calls that still run.

        Raises what a reward raises: of several failures the one that `Scorer.score` without `ahead` would raise.
        """
        if len(self._groups) != self._num_groups:
            raise RuntimeError(f"{len(self._groups)} of {self._num_groups} groups were handed out")
        done = {calls.name: self._answer(calls) for calls in self._calls if not calls.reward.is_async}
        waiting = [calls for calls in self._calls if calls.reward.is_async]
        if waiting:
            with span("async"):
                done |= self._answers_async(waiting)
        include(self._trace)
        return [done[calls.name] for calls in self._calls]

    def _submit(self, index: int, calls: _Calls, portion: Portion) -> "Future[Scored]":
        samples = self._samples(portion)
        if isinstance(calls.reward, CalledReward) and calls.reward.is_async:
            return self._threads.loop.submit(calls.reward.outcomes_async(samples, self._extras))
        return self._threads.worker.submit(lambda: self._score(index, portion, samples))

    def _score(self, index: int, portion: Portion, samples: Sequence[Sample]) -> Scored:
        """Outcomes of a portion, in the worker's thread. Stops after the first reward that failed."""
        place, calls = (index, portion.groups.start), self._calls[index]
        if self._is_closed or (self._failed is not None and self._failed < place):
            return Scored([], Logged(0))
        has_failed = True
        try:
            with trace() as record, span(calls.name):
                scored = checked(calls.reward, calls.reward.outcomes(samples, self._extras))
            has_failed = False
        finally:
            if has_failed:
                self._failed = place
        self._trace.include(record)
        return scored

    def _answer(self, calls: _Calls) -> Scored:
        return one_answer({portion: result_of(calls.futures[portion]) for portion in calls.portions})

    def _answers_async(self, waiting: Sequence[_Calls]) -> dict[str, Scored]:
        """The answers of async functions, all of which run by now."""
        limits = [calls.reward.policy.timeout_s for calls in waiting if calls.reward.policy.timeout_s is not None]
        futures = [future for calls in waiting for future in calls.futures.values()]
        try:
            self._threads.loop.run(_all_ended(futures), min(limits, default=None))
        except HangError as error:  # the whole loop: what has ended counts, the others follow their policies
            return {calls.name: self._outcomes_of(calls, error) for calls in waiting}
        return {calls.name: self._outcomes_of(calls, None) for calls in waiting}

    def _outcomes_of(self, calls: _Calls, error: HangError | None) -> Scored:
        reward = calls.reward
        assert isinstance(reward, CalledReward), "only functions are async"
        parts: dict[Portion, Scored] = {}
        for portion, future in calls.futures.items():
            if error is not None and not future.done():
                parts[portion] = reward.hung(self._samples(portion), error)
            else:
                parts[portion] = future.result()
        return checked(reward, one_answer(parts))

    def _samples(self, portion: Portion) -> list[Sample]:
        return samples_of([self._groups[place] for place in portion.groups])


def checked(reward: ModelReward | CalledReward, scored: Scored) -> Scored:
    """`scored`; raises its first failure if `reward` fails on any."""
    if reward.policy.on_error == "fail":
        scored.numbers()
    return scored


def _all_ended(futures: Sequence["Future[Scored]"]) -> Coroutine[object, object, object]:
    async def wait() -> None:
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    return wait()
