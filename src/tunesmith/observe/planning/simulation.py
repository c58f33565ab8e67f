"""A discrete-event simulation, on simulated time, of rollout workers that take leases from a queue."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Queue(Protocol):
    """Hands out leases of work; the caller passes the time."""

    @property
    def is_done(self) -> bool:
        """True if every lease has been answered."""
        ...

    def take(self, worker: int, now: float) -> int | None:
        """A lease for `worker`, None if it has nothing to do."""
        ...

    def finish(self, worker: int, now: float, work: float) -> bool:
        """The lease of `worker` is answered; True if this is its first answer."""
        ...


class InOrder:
    """A queue that hands out leases in their order, each once: that of NeMo-Aligner's rank 0."""

    def __init__(self, num_leases: int) -> None:
        self._waiting = deque(range(num_leases))
        self._num_left = num_leases

    @property
    def is_done(self) -> bool:
        """True if every lease has been answered."""
        return self._num_left == 0

    def take(self, worker: int, now: float) -> int | None:
        """The next lease."""
        return self._waiting.popleft() if self._waiting else None

    def finish(self, worker: int, now: float, work: float) -> bool:
        """Always the first answer."""
        self._num_left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Answer:
    """The first answer to a lease: which, and when, in seconds."""

    lease: int
    at_s: float


def run_queue(
    queue: Queue, seconds: Sequence[float], speeds: Sequence[float], work: Sequence[float] | None = None
) -> list[Answer]:
    """The answers in their order. Lease i takes `seconds[i]` at speed 1; workers have `speeds`; `work` is what the
    queue is told of a lease, its seconds by default.
    """
    ends: list[tuple[float, int]] = []
    holds: dict[int, int] = {}
    answers: list[Answer] = []
    now = 0.0
    while not queue.is_done:
        for worker, speed in enumerate(speeds):
            if worker not in holds and (lease := queue.take(worker, now)) is not None:
                holds[worker] = lease
                heapq.heappush(ends, (now + seconds[lease] / speed, worker))
        now, worker = heapq.heappop(ends)
        lease = holds.pop(worker)
        if queue.finish(worker, now, (work or seconds)[lease]):
            answers.append(Answer(lease, now))
    return answers


def draw_s(lengths: Sequence[int], slots: int, step_s: Callable[[int], float]) -> float:
    """Seconds in which an engine draws completions of `lengths` tokens, at most `slots` at a time.

    A free slot takes the next one at once; a decoding step of n completions takes `step_s(n)`.
    """
    waiting, ends = deque(lengths), list[int]()
    now, seconds = 0, 0.0
    while waiting or ends:
        while waiting and len(ends) < slots:
            heapq.heappush(ends, now + waiting.popleft())
        end, num_active = ends[0], len(ends)
        heapq.heappop(ends)
        seconds, now = seconds + (end - now) * step_s(num_active), end
    return seconds


def sample_lengths(count: int, mean: float, limit: int, seed: int) -> list[int]:
    """Lengths of completions: log-normal with a spread of 0.7, cut at `limit`, with about `mean` on average."""
    if mean >= limit:
        return [limit] * count
    draw = random.Random(seed)
    shapes = [math.exp(draw.gauss(0, 0.7)) for _ in range(count)]
    scale = mean
    for _ in range(20):  # the cut takes from the mean
        scale *= mean * count / sum(min(limit, scale * shape) for shape in shapes)
    return [min(limit, max(1, round(scale * shape))) for shape in shapes]
