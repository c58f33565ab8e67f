"""Seconds of calls on one device: by events on a GPU, with its cache flushed before work that would fit into it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_ROUNDS = 3
_BUDGET_S, _MANY, _BUDGET_OF_MANY_S = 0.15, 8, 0.06
"""Seconds that one way of doing something is measured for, after its warm-up, and those of one among many; at least one
call in each round."""

_MOST_CALLS = 100
_WARM_UP_CALLS = 3
_DEFAULT_L2_BYTES = 64 * 2**20
_TIMES_L2 = 4
"""Work whose bytes are fewer than so many caches may find some of them there, so the cache is flushed before it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median and least; what the processor spent on it, and how many calls were measured.

    `host_s` near `median_s` says that the device waited for the processor.
    """

    median_s: float
    least_s: float
    host_s: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures on `device`. `quick` calls everything once or twice, and its figures say nothing."""

    device: torch.device
    quick: bool = False

    def wait(self) -> None:
        """Return when the device has done all that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, work: Work) -> None:
        """What is slow once: compiling, and memory that is new."""
        for _ in range(1 if self.quick else _WARM_UP_CALLS):
            work()
        self.wait()

    def measure(self, works: Mapping[str, Work], num_bytes: int, *, by_wall: bool = False) -> dict[str, Timing]:
        """The timing of each of `works`, which are warm and move `num_bytes`; they take turns, in three rounds.

        On a GPU a call is timed by events around it, unless `by_wall`, for work that is partly the processor's. The
        cache is flushed by reading, so that nothing is left which would have to be written back in the measured time.
        """
        flush = self._flush(num_bytes)
        budget_s = _BUDGET_S if len(works) <= _MANY else _BUDGET_OF_MANY_S
        calls = {name: self._num_calls(work, budget_s) for name, work in works.items()}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        host: dict[str, list[float]] = {name: [] for name in works}
        by_events = self.device.type == "cuda" and not by_wall
        for index in range(1 if self.quick else _ROUNDS):
            names = list(works)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                several = self._by_events if by_events else self._by_wall
                device_s, host_s = several(works[name], calls[name], flush)
                seconds[name] += device_s
                host[name] += host_s
        return {
            name: Timing(statistics.median(found), min(found), statistics.median(host[name]), len(found))
            for name, found in seconds.items()
        }

    def _num_calls(self, work: Work, budget_s: float) -> int:
        """Calls of a round."""
        if self.quick:
            return 1
        self.wait()
        start_s = time.perf_counter()
        work()
        self.wait()
        one_s = max(time.perf_counter() - start_s, 1e-6)
        return max(1, min(_MOST_CALLS, round(budget_s / _ROUNDS / one_s)))

    def _by_events(self, work: Work, num_calls: int, flush: Work) -> tuple[Sequence[float], Sequence[float]]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_calls)]
        host: list[float] = []
        self.wait()
        for start, end in events:
            flush()
            start.record()
            start_s = time.perf_counter()
            work()
            host.append(time.perf_counter() - start_s)
            end.record()
        self.wait()
        return [start.elapsed_time(end) / 1e3 for start, end in events], host

    def _by_wall(self, work: Work, num_calls: int, flush: Work) -> tuple[Sequence[float], Sequence[float]]:
        found: list[float] = []
        host: list[float] = []
        for _ in range(num_calls):
            flush()
            self.wait()
            start_s = time.perf_counter()
            work()
            host.append(time.perf_counter() - start_s)
            self.wait()
            found.append(time.perf_counter() - start_s)
        return found, host

    def _flush(self, num_bytes: int) -> Work:
        if self.device.type != "cuda":
            return lambda: None
        properties = torch.cuda.get_device_properties(self.device)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or _DEFAULT_L2_BYTES
        if num_bytes > _TIMES_L2 * l2_bytes:
            return lambda: None
        room = torch.zeros(_TIMES_L2 * l2_bytes // 4, device=self.device)
        return lambda: room.sum()
