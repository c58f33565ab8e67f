"""The number of threads that an engine on a CPU computes with: no more than there are cores that are free."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import core_numbers, core_seconds

_log = get_logger(__name__)

_PERIOD_S = 0.25
"""Seconds between two looks at the machine, whose counters have steps of a hundredth of a second."""

_STALE_S = 1.0
"""Seconds after which a look says nothing of now: in a pause of the engine others may have begun and ended."""

_FEWER_AT, _MORE_AT = -0.5, 0.6
"""Free cores beyond the threads in use at which there are fewer or more threads. A program that needs half a core is
between the two, so that the number does not swing."""


class FreeThreads:
    """`with threads.used():` computes with at most as many threads as other programs leave cores free.

    A parallel loop ends with its slowest thread. Beside a busy program that thread has half a core, so two threads on
    two cores are no faster than one that has a core for itself, and all the waiting is lost. Only for computations
    whose bits do not depend on the number of threads. Outside of the block, and where the time of cores cannot be read,
    the number is the one that torch had.
    """

    def __init__(self) -> None:
        self._number = self._most = torch.get_num_threads()
        self._looked_s = -math.inf
        self._busy_s = self._own_s = 0.0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute with that many threads."""
        self._most = torch.get_num_threads()
        self._look()
        if self._number >= self._most:
            yield
            return
        torch.set_num_threads(self._number)
        try:
            yield
        finally:
            torch.set_num_threads(self._most)

    def _look(self) -> None:
        """Adapt the number to the cores that were free since the last look, unless that is stale."""
        if self._most == 1 or (past_s := time.monotonic() - self._looked_s) < _PERIOD_S:
            return
        mine = core_numbers()
        try:
            busy_s = sum(core.busy for number, core in enumerate(core_seconds()) if number in mine)
        except OSError:  # no /proc/stat that this process may read
            return
        own_s = time.process_time()
        others = max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / past_s
        self._busy_s, self._own_s, self._looked_s = busy_s, own_s, time.monotonic()
        if past_s <= _STALE_S:
            before, self._number = self._number, adapted(self._number, len(mine) - others, self._most)
            if self._number != before:
                _log.debug("draws with %d threads: other programs use %.1f cores", self._number, others)


def adapted(number: int, free: float, most: int) -> int:
    """The number of threads, 1 to `most`, after `free` cores were free for `number` of them."""
    number = min(number, most)
    if _FEWER_AT <= free - number < _MORE_AT:
        return number
    return min(max(1, round(free)), most)
