"""Weights of pairs by which length says nothing of which answer is better."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from tunesmith.base.core.log import get_logger
from tunesmith.collect.data.collate import EncodedPreference

_NUM_BINS = (4, 2, 1)
_LEAST = 5
"""Pairs of a bin in which the longer answer won, and in which it lost, at least: the others would weigh too much."""

_log = get_logger(__name__)


def balanced(
    pairs: Sequence[EncodedPreference], source_of: Callable[[EncodedPreference], str]
) -> list[EncodedPreference]:
    """The pairs in their order, with weights by which the longer answer wins as often as it loses.

    That holds in each source, and among pairs whose lengths differ about as much: those of a source are divided into
    four bins by the difference in tokens, or into two or one where a bin has too few of either kind. In a bin of n
    pairs, of which the longer answer won w, those weigh n / (2 w), and the others n / (2 (n - w)). Pairs of equal
    length and ties keep their weight, and so do all of a source in which the longer answer hardly ever wins, or loses.
    """
    weights = [pair.weight for pair in pairs]
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        if not pair.is_tie and _difference(pair) != 0:
            places.setdefault(source_of(pair), []).append(place)
    if not places:
        _log.warning("the answers to each prompt are equally long, so that nothing is to be balanced")
    for name, own in places.items():
        own.sort(key=lambda place: (abs(_difference(pairs[place])), place))
        bins = _bins([_difference(pairs[place]) > 0 for place in own])
        if not bins:
            _log.warning("%s: too few pairs whose longer answer won, or lost, to balance them", name or "the pairs")
        for places_of_bin in (own[start:end] for start, end in bins):
            num_won = sum(_difference(pairs[place]) > 0 for place in places_of_bin)
            num_pairs = len(places_of_bin)
            for place in places_of_bin:
                num_alike = num_won if _difference(pairs[place]) > 0 else num_pairs - num_won
                weights[place] *= num_pairs / (2 * num_alike)
    return [replace(pair, weight=weight) for pair, weight in zip(pairs, weights, strict=True)]


def _difference(pair: EncodedPreference) -> int:
    """Tokens by which the better side is longer."""
    return len(pair.sequences[0]) - len(pair.sequences[1])


def _bins(longer_won: Sequence[bool]) -> list[tuple[int, int]]:
    """As many bins of equal size as have enough pairs of either kind; none if there are too few at all."""
    for count in _NUM_BINS:
        edges = [len(longer_won) * number // count for number in range(count + 1)]
        bins = list(itertools.pairwise(edges))
        if all(_LEAST <= sum(longer_won[start:end]) <= end - start - _LEAST for start, end in bins):
            return bins
    return []
