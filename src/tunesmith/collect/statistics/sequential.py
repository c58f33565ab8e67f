"""Sequential test of two shares, valid however often one looks and whenever one stops.

For values from 0 to 1 with the sum s and the complement f = n - s, the mixture B(1/2 + s, 1/2 + f) / (B(1/2, 1/2)
p^s (1 - p)^f) over all other shares (Robbins 1970; with the prior of Krichevsky and Trofimov 1981) is a supermartingale
if the mean is p: it is one for values of 0 and 1, and convex in each value. The product of that of two groups, at the
pair of shares of the hypothesis that fits best, is an e-process (Wasserman, Ramdas and Balakrishnan 2020, Universal
inference, section 8; Turner, Ly and Grünwald 2024): that it ever reaches 1 / alpha under the hypothesis has at most the
probability alpha (Ville 1939).
"""

import math
from dataclasses import dataclass

_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of values from 0 to 1 and their sum."""

    num: int = 0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        """The mean; a half without values."""
        return self.sum / self.num if self.num else 0.5


def evidence_against(first: Tally, second: Tally, gap: float, *, is_lower: bool) -> float:
    """The natural logarithm of the e-value against the hypothesis that the mean of `first` is that of `second` plus
    `gap` or lower, with `is_lower`, else or higher. -1 < gap < 1.
    """
    shares = first.mean, second.mean
    holds = shares[0] <= shares[1] + gap if is_lower else shares[0] >= shares[1] + gap
    if not holds:
        shares = _nearest(first, second, gap)
    return sum(_log_mixture(one) - _log_likelihood(one, p) for one, p in zip((first, second), shares, strict=True))


def _nearest(first: Tally, second: Tally, gap: float) -> tuple[float, float]:
    """The most likely pair of shares that differ by `gap`: the likelihood is concave, so its slope is bisected."""
    low, high = max(0.0, -gap), min(1.0, 1 - gap)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _slope(first, middle + gap) + _slope(second, middle) > 0:
            low = middle
        else:
            high = middle
    middle = (low + high) / 2
    return middle + gap, middle


def _slope(tally: Tally, p: float) -> float:
    p = min(max(p, 1e-12), 1 - 1e-12)
    return tally.sum / p - (tally.num - tally.sum) / (1 - p)


def _log_mixture(tally: Tally) -> float:
    return _log_beta(0.5 + tally.sum, 0.5 + tally.num - tally.sum) - _log_beta(0.5, 0.5)


def _log_likelihood(tally: Tally, p: float) -> float:
    lost = tally.num - tally.sum
    with_p = tally.sum * math.log(max(p, 1e-300)) if tally.sum > 0 else 0.0
    return with_p + (lost * math.log1p(-min(p, 1 - 1e-16)) if lost > 0 else 0.0)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
