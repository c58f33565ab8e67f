"""A work queue that hands out leases: longest first, copies for idle workers at the end, those of the dead again.

It has no threads and no clock: the caller passes the time, in seconds by any clock.
"""

import bisect
from collections.abc import MutableMapping, Sequence

Rates = MutableMapping[int, float]
"""Work per second of each worker, as it was with its last leases; kept by the caller from queue to queue."""

_MAX_HOLDERS = 2
_NEWEST_SHARE = 0.5
"""Weight of the newest lease in a worker's rate."""


def lease_size(num_completions: int, largest: int) -> int:
    """Completions of a lease: `largest`, but of more than 8 at most a quarter of the request, so that a few workers
    share a small one too.
    """
    return min(largest, max(8, -(-num_completions // 4)))


class WorkQueue:
    """Leases 0 to `len(work) - 1`, of which lease i is expected to take `work[i]` units of work (such as tokens).

    A worker holds one lease at a time. `num_stolen` counts leases that an idle worker got while another held them.
    """

    def __init__(self, work: Sequence[float], rates: Rates | None = None) -> None:
        self._work = work
        self._rates: Rates = {} if rates is None else rates
        self._waiting = sorted(range(len(work)), key=self._order)
        self._held: dict[int, tuple[int, float]] = {}  # lease and time of its begin, by worker
        self._is_answered = [False] * len(work)
        self._num_left = len(work)
        self.num_stolen = 0

    @property
    def is_done(self) -> bool:
        """True if every lease has been answered."""
        return self._num_left == 0

    def take(self, worker: int, now: float) -> int | None:
        """A lease for `worker`, which holds none; None if there is nothing useful to do.

        The longest that waits; then a copy of the one that is expected to end last, if `worker` would end it sooner.
        """
        if worker in self._held:
            raise ValueError(f"worker {worker} holds lease {self._held[worker][0]}; finish or release it first")
        lease = self._waiting.pop(0) if self._waiting else self._to_steal(worker, now)
        if lease is not None:
            self._held[worker] = lease, now
        return lease

    def finish(self, worker: int, now: float, work: float) -> bool:
        """The lease of `worker` is answered, and took `work` units; True if this is its first answer."""
        lease, since = self._held.pop(worker)
        rate, known = work / max(now - since, 1e-9), self._rates.get(worker)
        self._rates[worker] = rate if known is None else known + _NEWEST_SHARE * (rate - known)
        if self._is_answered[lease]:
            return False
        self._is_answered[lease] = True
        self._num_left -= 1
        return True

    def release(self, worker: int) -> None:
        """The lease of `worker`, if it holds one, is handed out again: the worker died, or could not answer."""
        lease, _ = self._held.pop(worker, (None, 0.0))
        if lease is not None and not self._is_answered[lease] and not self._holders(lease):
            bisect.insort(self._waiting, lease, key=self._order)

    def _order(self, lease: int) -> tuple[float, int]:
        return -self._work[lease], lease

    def _holders(self, lease: int) -> list[int]:
        return [worker for worker, (held, _) in self._held.items() if held == lease]

    def _to_steal(self, worker: int, now: float) -> int | None:
        """The lease that is expected to end last, unless `worker` would need as long for it."""
        left_s: dict[int, float] = {}
        for holder, (lease, since) in self._held.items():
            if not self._is_answered[lease] and len(self._holders(lease)) < _MAX_HOLDERS:
                left_s[lease] = self._left_s(holder, lease, now - since)
        lease = max(left_s, key=left_s.__getitem__, default=None)
        if lease is None or self._expected_s(worker, lease) >= left_s[lease]:
            return None
        self.num_stolen += 1
        return lease

    def _left_s(self, holder: int, lease: int, elapsed_s: float) -> float:
        """Seconds that `holder` is expected to need yet: if it is late already, as long as it took so far."""
        left_s = self._expected_s(holder, lease) - elapsed_s
        return left_s if left_s > 0 else elapsed_s

    def _expected_s(self, worker: int, lease: int) -> float:
        """Seconds that `worker` needs for `lease`; a worker without a rate is as fast as the mean."""
        known = self._rates.values()
        if not known:
            return 0.0
        return self._work[lease] / max(self._rates.get(worker, sum(known) / len(known)), 1e-9)
