"""Score groups in a second thread while the engine still samples others.

The order of the calls is that in which groups end, which a seeded engine repeats, so that a reward which draws from a
random generator gives the same numbers again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from tunesmith.base.core.trace import Trace, include, span, trace
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.calling import CalledReward
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Logged, Outcome, Sample, SampleError, Scored, samples_of
from tunesmith.learn.rewards.threads import EventLoop, HangError, Worker, result_of

PORTION_ROWS = 16
"""Completions in one call of a reward model, as whole groups: enough for efficient matrix products, few enough that
scoring can begin while others are sampled."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive groups of `group_size` completions. The groups `groups` have the samples `samples`."""

    groups: range
    group_size: int

    @property
    def samples(self) -> range:
        """Places of the samples, counted over all groups."""
        return range(self.groups.start * self.group_size, self.groups.stop * self.group_size)


def portions(num_groups: int, group_size: int, *, num_rows: int = PORTION_ROWS) -> list[Portion]:
    """All groups in portions of at most `num_rows` completions, but at least one group each.

    A function of the two numbers alone: which sequences a model computes together can move the last bits of a reward,
    so that they are the same whether or not scoring waits for the last group.
    """
    size = max(1, num_rows // group_size)
    return [Portion(range(start, min(start + size, num_groups)), group_size) for start in range(0, num_groups, size)]


def one_answer(parts: Mapping[Portion, Scored]) -> Scored:
    """The answers to consecutive portions as one, in the order of the samples."""
    ordered: Sequence[tuple[Portion, Scored]] = sorted(parts.items(), key=lambda item: item[0].groups.start)
    first = ordered[0][0].samples.start if ordered else 0
    logged = Logged(sum(len(portion.samples) for portion, _ in ordered))
    outcomes: list[Outcome] = []
    retried: SampleError | None = None
    for portion, scored in ordered:
        outcomes += scored.outcomes
        logged.add(scored.logged, [place - first for place in portion.samples])
        retried = retried or scored.retried
    return Scored(outcomes, logged, retried)


@dataclass(slots=True)
class Calls:
    """The calls of one reward, one for each of `portions`; `futures` holds those that have begun."""

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
        worker: Worker,
        loop: EventLoop,
        num_groups: int,
        group_size: int,
        extras: Mapping[str, object],
    ) -> None:
        self._worker, self._loop = worker, loop
        self._extras = extras
        self._groups: dict[int, Group] = {}
        self._num_groups = num_groups
        self._trace = Trace()
        self._is_closed = False
        self._failed: tuple[int, int] | None = None  # index of the reward and its first group
        whole, single = portions(num_groups, group_size), portions(num_groups, group_size, num_rows=1)
        self._calls = [
            Calls(name, reward, whole if isinstance(reward, ModelReward) else single)
            for name, reward in rewards.items()
        ]

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
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
            if portion in calls.futures or not all(part in self._groups for part in portion.groups):
                continue
            samples = self._samples(portion)
            if isinstance(calls.reward, CalledReward) and calls.reward.is_async:
                future = self._loop.submit(calls.reward.outcomes_async(samples, self._extras))
            elif begun := calls.reward.begin(samples, self._extras):
                future = begun
            else:
                future = self._worker.submit(partial(self._score, index, portion, samples))
            calls.futures[portion] = future

    def answers(self) -> list[Scored]:
        """Outcomes of each reward for all samples, in the order of the rewards; waits for calls that still run.

        Raises what a reward raises: of several failures the one that `Scorer.score` without `ahead` would raise.
        """
        if len(self._groups) != self._num_groups:
            raise RuntimeError(f"{len(self._groups)} of {self._num_groups} groups were handed out")
        done = {
            calls.name: one_answer(
                {portion: checked(calls.reward, result_of(calls.futures[portion])) for portion in calls.portions}
            )
            for calls in self._calls
            if not calls.reward.is_async
        }
        waiting = [calls for calls in self._calls if calls.reward.is_async]
        if waiting:
            with span("async"), span("+".join(calls.name for calls in waiting)):
                done |= answers_async(waiting, self._loop, self._samples)
        include(self._trace)
        return [done[calls.name] for calls in self._calls]

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

    def _samples(self, portion: Portion) -> list[Sample]:
        return samples_of([self._groups[place] for place in portion.groups])


def checked(reward: ModelReward | CalledReward, scored: Scored) -> Scored:
    """`scored`; raises its first failure if `reward` fails on any."""
    if reward.policy.on_error == "fail":
        scored.numbers()
    return scored


def answers_async(
    waiting: Sequence[Calls], loop: EventLoop, samples_in: Callable[[Portion], Sequence[Sample]]
) -> dict[str, Scored]:
    """The outcomes of async functions by name, once all their calls, which have begun, have ended.

    If a function blocks the whole loop, what has ended counts, and the others follow their policies.
    """
    futures = [future for calls in waiting for future in calls.futures.values()]
    limits = [calls.reward.policy.timeout_s for calls in waiting if calls.reward.policy.timeout_s is not None]

    async def all_ended() -> None:
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    hang: HangError | None = None
    try:
        loop.run(all_ended(), min(limits, default=None))
    except HangError as error:
        hang = error
    found: dict[str, Scored] = {}
    for calls in waiting:
        reward = calls.reward
        assert isinstance(reward, CalledReward), "only functions are async"
        parts = {
            portion: future.result() if hang is None or future.done() else reward.hung(samples_in(portion), hang)
            for portion, future in calls.futures.items()
        }
        found[calls.name] = checked(reward, one_answer(parts))
    return found
