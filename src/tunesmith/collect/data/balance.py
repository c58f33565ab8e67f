"""Weights and margins of pairs by which a reward model has nothing to learn from the length of answers."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.special import expit

from tunesmith.base.core.log import get_logger
from tunesmith.collect.data.collate import EncodedPreference

_NUM_BINS = (4, 2, 1)
_LEAST = 5
"""Pairs of a bin in which the longer answer won, and in which it lost, at least: the others would weigh too much."""

_NEWTON_STEPS = 50

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


def beside_length(
    pairs: Sequence[EncodedPreference], source_of: Callable[[EncodedPreference], str], *, keeps_margins: bool = False
) -> list[EncodedPreference]:
    """The pairs in their order, with margins that stand for what length alone says: a product of experts (Clark et al.
    2019, arXiv 1909.03683, "bias product"; for length Shen et al. 2023, arXiv 2310.05199).

    In each source the probability that an answer of n tokens is better than one of m is taken to be
    sigmoid(slope ln(n / m)). The slope is that of logistic regression on the decided pairs with their weights, with a
    normal prior of mean 0 and deviation 1. The margin of a pair is -slope ln(n / m), so that its loss is that of the
    difference of rewards and of what length says together. With `keeps_margins` it is added to the pair's own.
    """
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        if not pair.is_tie:
            places.setdefault(source_of(pair), []).append(place)
    ratio_N = np.array([_log_ratio(pair) for pair in pairs])
    if not ratio_N.any():
        _log.warning("the answers to each prompt are equally long, so that length says nothing of which is better")
    weight_N, said_N = np.array([pair.weight for pair in pairs]), np.zeros(len(pairs))
    for own in places.values():
        said_N[own] = _slope(ratio_N[own], weight_N[own]) * ratio_N[own]
    return [
        replace(pair, margin=(pair.margin or 0.0 if keeps_margins else 0.0) - said)
        for pair, said in zip(pairs, said_N.tolist(), strict=True)
    ]


def _log_ratio(pair: EncodedPreference) -> float:
    better, worse = (max(1, length) for length in pair.answer_lengths)
    return math.log(better / worse)


def _slope(x_N: np.ndarray, weight_N: np.ndarray) -> float:
    """The maximum over a of sum weight ln sigmoid(a x) - a^2 / 2, by Newton's method on a concave function."""
    slope = 0.0
    for _ in range(_NEWTON_STEPS):
        wrong_N = expit(-slope * x_N)
        gradient = float((weight_N * x_N * wrong_N).sum()) - slope
        curvature = float((weight_N * x_N**2 * wrong_N * (1 - wrong_N)).sum()) + 1
        slope += max(-1.0, min(1.0, gradient / curvature))  # a whole step may overshoot where few pairs decide
    return slope


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
