"""Statistics of paired comparisons: permutation test, bootstrap interval, McNemar's test, distinct-2.

Shape suffixes: P prompts. The unit of every test is the prompt, because completions of one prompt are not independent.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

import numpy as np
from scipy.special import stdtrit

MAX_EXACT_PROMPTS = 16
"""Up to this many prompts all 2^P sign patterns are enumerated: 65,536 sums, a few milliseconds."""

CONFIDENCE = 0.95
"""Of every interval."""

_CHUNK = 1_000
"""Random sign patterns or resamples held in memory at a time."""


def paired_permutation_p(diff_P: Sequence[float], seed: int = 0, num: int = 10_000) -> float:
    """The two-sided p-value of a mean difference under random signs (Fisher's paired permutation test).

    The null hypothesis is that before and after are exchangeable within each prompt. With at most `MAX_EXACT_PROMPTS`
    prompts every sign pattern is counted; with more, `num` random ones are drawn from `seed` and the observed pattern
    counts as one of them, (1 + k) / (1 + num), so that p is never zero (Phipson and Smyth 2010).
    """
    diff = np.asarray(diff_P, dtype=np.float64)
    observed = abs(float(diff.sum()))
    # Sums of the same numbers in another order differ in the last bits; such a sum counts as equally extreme.
    threshold = observed - 1e-12 * float(np.abs(diff).sum())
    if is_exact(len(diff)):
        # Flipping every sign leaves |sum| as it is, so the first sign can stay positive.
        patterns = np.arange(2 ** (len(diff) - 1))[:, None]
        bits = np.arange(len(diff) - 1)[None, :]
        sums = diff[0] + (1.0 - 2.0 * ((patterns >> bits) & 1)) @ diff[1:]
        return float(np.mean(np.abs(sums) >= threshold))
    random = np.random.default_rng(seed)
    num_extreme = 0
    for start in range(0, num, _CHUNK):
        shape = (min(_CHUNK, num - start), len(diff))
        sums = (1.0 - 2.0 * random.integers(0, 2, size=shape)) @ diff
        num_extreme += int(np.count_nonzero(np.abs(sums) >= threshold))
    return (1 + num_extreme) / (1 + num)


def is_exact(num_prompts: int) -> bool:
    """True if `paired_permutation_p` enumerates all sign patterns for this many prompts."""
    return num_prompts <= MAX_EXACT_PROMPTS


def bootstrap_interval(diff_P: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval (low, high) of the mean difference, from 10,000 resamples of the prompts."""
    diff = np.asarray(diff_P, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = np.empty(10_000)
    for start in range(0, len(means), _CHUNK):
        means[start : start + _CHUNK] = diff[random.integers(0, len(diff), size=(_CHUNK, len(diff)))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval (low, high) of the mean of two independent values or more, such as one for each seed."""
    found = np.asarray(values, dtype=np.float64)
    half = float(stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2) * found.std(ddof=1) / math.sqrt(len(found)))
    return float(found.mean()) - half, float(found.mean()) + half


def proportion_interval(hits: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """The interval (low, high) of a share: `hits` are 0 to 1, one for each item, those of one cluster go together.

    Wilson's score interval (1927) at the effective sample size p (1 - p) / v, where v is the variance of the share when
    whole clusters are drawn (Korn and Graubard 1998); at most the number of items, and where v is 0 the number of
    clusters.
    """
    _, cluster_N = np.unique(np.asarray(clusters), return_inverse=True)
    hit_N = np.asarray(hits, dtype=np.float64)
    share, num_clusters = float(hit_N.mean()), int(cluster_N.max()) + 1
    excess_C = np.bincount(cluster_N, hit_N - share)
    variance = float(excess_C @ excess_C) / len(hits) ** 2 * num_clusters / max(1, num_clusters - 1)
    effective = min(len(hits), share * (1 - share) / variance) if variance > 0 else num_clusters
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (share + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(num_only_first: int, num_only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test from the two discordant counts; 1 if there are none.

    `num_only_first` items are right by the first rater or model alone, `num_only_second` by the second alone. Under the
    null hypothesis the split is a fair coin.
    """
    total = num_only_first + num_only_second
    term = tail = 1  # Integer binomial coefficients: exact at any size.
    for k in range(1, min(num_only_first, num_only_second) + 1):
        term = term * (total - k + 1) // k
        tail += term
    return min(1.0, 2 * tail / 2**total)


def distinct_2(token_id_lists: Sequence[Sequence[int]], num_tokens: int) -> float:
    """The share of different bigrams among all bigrams inside the lists (Li et al. 2016); 0 if there is no bigram.

    It falls with the amount of text, so two sides are comparable only at an equal `num_tokens`: the first token of each
    list, then the second of each list, until that many are taken.
    """
    kept = even_lengths([len(ids) for ids in token_id_lists], num_tokens)
    bigrams = [pair for ids, length in zip(token_id_lists, kept, strict=True) for pair in pairwise(ids[:length])]
    return len(set(bigrams)) / len(bigrams) if bigrams else 0.0


def distinct_at_equal_tokens(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> tuple[float, float, int]:
    """Distinct-2 before, distinct-2 after, and the number of tokens taken from each side: that of the shorter one."""
    num_tokens = min(sum(map(len, before)), sum(map(len, after)))
    return distinct_2(before, num_tokens), distinct_2(after, num_tokens), num_tokens


def even_lengths(lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Prefix lengths that sum to `num_tokens`, filled position by position over all lists.

    >>> even_lengths([1, 5, 3], 6)
    [1, 3, 2]
    """
    places = sorted((position, index) for index, length in enumerate(lengths) for position in range(length))
    kept = Counter(index for _, index in places[:num_tokens])
    return [kept[index] for index in range(len(lengths))]


@dataclass(frozen=True, slots=True)
class Plateau:
    """The level that a curve ends on, and the step, counted from 1, from which it stays near that level.

    `first` and `level` are means over the first and the last `window` values; the plateau begins where the mean over
    `window` values stays within a tenth of the whole change. `is_flat` is set if at least one window follows that step.
    """

    first: float
    level: float
    step: int
    is_flat: bool


def plateau(values: Sequence[float], *, window: int = 5) -> Plateau:
    """The plateau of a curve of one value or more. With fewer than twice the window, the window is half of them."""
    window = max(1, min(window, len(values) // 2))
    means = [fmean(values[start : start + window]) for start in range(len(values) - window + 1)]
    first, level = means[0], means[-1]
    bound = 0.1 * abs(level - first)
    start = next(index for index in reversed(range(-1, len(means))) if index < 0 or abs(means[index] - level) > bound)
    return Plateau(first, level, step=start + 2, is_flat=len(means) - (start + 1) > window)
