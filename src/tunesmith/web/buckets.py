"""Limits of how often: token buckets, one for each rater or network address."""

import math
import time
from collections import OrderedDict
from dataclasses import dataclass

MAX_KEYS = 10_000
"""Buckets that are kept; the one that was used longest ago makes room. A bucket that is gone is a full one."""


@dataclass(slots=True)
class _Bucket:
    left: float
    time: float


class Buckets:
    """`burst` at once, `rate_per_s` on average, for each key."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> int:
        """0 if `key` may go on, which uses up one; else after how many whole seconds it may try again."""
        bucket = self._filled(key)
        if bucket.left >= 1:
            bucket.left -= 1
            return 0
        return self._wait_s(bucket)

    def wait_s(self, key: str) -> int:
        """As `take`, but nothing is used up."""
        bucket = self._filled(key)
        return 0 if bucket.left >= 1 else self._wait_s(bucket)

    def _wait_s(self, bucket: _Bucket) -> int:
        return max(1, math.ceil((1 - bucket.left) / self._rate_per_s))

    def _filled(self, key: str) -> _Bucket:
        now = time.monotonic()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._burst, now)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.left = min(self._burst, bucket.left + (now - bucket.time) * self._rate_per_s)
        bucket.time = now
        return bucket
