"""Agreement and bias of raters, as pure functions of counts. Nothing here is NaN: what is undefined says why."""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from tunesmith.store.stat_records import Agreement, BiasTest


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> Agreement:
    """Krippendorff's alpha for nominal values: 1 is full agreement, 0 what chance gives.

    `units` holds the values that each item was given, one for each rater who judged it. From the coincidence matrix o
    with margins n_c: alpha = 1 - (n - 1) * sum_{c != k} o_ck / sum_{c != k} n_c n_k (Krippendorff 2011, "Computing
    Krippendorff's Alpha-Reliability", part D).
    """
    shared = [unit for unit in units if len(unit) > 1]
    if not shared:
        return Agreement(None, 0, "no item was judged by two raters")
    margins: Counter[Hashable] = Counter()
    disagreement = 0.0
    for unit in shared:
        counts = Counter(unit)
        margins.update(counts)
        same = sum(count * (count - 1) for count in counts.values())
        disagreement += (len(unit) * (len(unit) - 1) - same) / (len(unit) - 1)
    num = sum(margins.values())
    expected = num * num - sum(count * count for count in margins.values())
    if expected == 0:
        return Agreement(None, len(shared), "all judgements are the same, so chance cannot be told from agreement")
    return Agreement(1.0 - (num - 1) * disagreement / expected, len(shared))


def cohen_kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> Agreement:
    """Cohen's kappa of two raters: (observed - chance agreement) / (1 - chance agreement) (Cohen 1960).

    `pairs` holds what the two said of each item that both judged.
    """
    if not pairs:
        return Agreement(None, 0, "no item was judged by both")
    num = len(pairs)
    observed = sum(a == b for a, b in pairs) / num
    of_a, of_b = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    by_chance = sum(of_a[value] * of_b[value] for value in of_a) / (num * num)
    if by_chance == 1.0:
        return Agreement(None, num, "both gave one and the same judgement throughout")
    return Agreement((observed - by_chance) / (1.0 - by_chance), num)


def shared_judgements(
    units: Mapping[int, Mapping[int, Hashable]],
) -> dict[tuple[int, int], list[tuple[Hashable, Hashable]]]:
    """For every two raters the judgements of the items that both judged. `units`: item -> rater -> judgement."""
    shared: dict[tuple[int, int], list[tuple[Hashable, Hashable]]] = {}
    for unit in units.values():
        for a, b in itertools.combinations(sorted(unit), 2):
            shared.setdefault((a, b), []).append((unit[a], unit[b]))
    return shared


def bias_test(num_hits: int, num: int) -> BiasTest:
    """Whether `num_hits` of `num` choices are more or fewer than a fair coin gives: the exact binomial test.

    The two-sided p-value is twice the smaller tail, at most 1 (the distribution is symmetric).
    """
    if num == 0:
        return BiasTest(0, 0, None, None)
    far = max(num_hits, num - num_hits)
    log_half = num * math.log(0.5)
    tail = math.fsum(
        math.exp(math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1) + log_half)
        for k in range(far, num + 1)
    )
    return BiasTest(num_hits, num, num_hits / num, min(1.0, 2.0 * tail))
