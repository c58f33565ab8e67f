"""What is known of each rater from the votes in the store: reliability, left share, weight of a vote, habits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunesmith.collect.statistics.habits import Habit, Look, habits
from tunesmith.collect.statistics.raters import Estimate, PairVotes, Reliabilities, reliabilities
from tunesmith.collect.store.vote_stats import JudgedPair

MIN_KNOWN = 10
"""Votes on gold items or items with votes of others, from which on a rater's reliability is more than a guess."""


@dataclass(frozen=True, slots=True)
class RaterReport:
    """One rater. `num_votes` decided votes say as much as `effective` votes without an error. `num_compared` of them
    are on items of which others have judged, or the better answer is known; with fewer than `MIN_KNOWN` of them
    `is_known` is False, and `reliability` little more than the mean of all.
    """

    rater_id: int
    num_votes: int
    effective: float
    reliability: Estimate
    left_share: Estimate
    num_compared: int
    num_gold: int
    habits: tuple[Habit, ...]

    @property
    def is_known(self) -> bool:
        """True if the reliability rests on evidence."""
        return self.num_compared >= MIN_KNOWN

    def figures(self) -> dict[str, Any]:
        """All of it as JSON values; without evidence the reliability and what votes are worth are None."""
        found = asdict(self) | {"habits": [asdict(one) for one in self.habits], "is_known": self.is_known}
        return found if self.is_known else found | {"reliability": None, "effective": None}


@dataclass(frozen=True, slots=True)
class CrowdReport:
    """All raters, by id, and the number of decided votes with what they are worth: None where too few can be compared.
    `weight_of` has the weight of each vote by its id, from -1 to 1, as in `Reliabilities`.
    """

    raters: Mapping[int, RaterReport]
    num_votes: int
    effective: float | None
    weight_of: Mapping[int, float]


NOBODY = CrowdReport({}, 0, None, {})
"""The report of no votes."""


def crowd_report(judged: Sequence[JudgedPair]) -> CrowdReport:
    """The report of votes in the order of their ids."""
    if not judged:
        return NOBODY
    raters = sorted({one.rater_id for one in judged})
    decided = [one for one in judged if one.prefers_first is not None]
    votes = _arrays(decided, {rater: place for place, rater in enumerate(raters)})
    found = reliabilities(votes)
    looks: dict[int, list[Look]] = {rater: [] for rater in raters}
    for one in judged:
        looks[one.rater_id].append(Look(one.side, one.dwell_ms, one.num_characters))
    compared_W = _num_compared(votes)
    reports = {
        rater: RaterReport(
            rater_id=rater,
            num_votes=estimate.num_votes,
            effective=estimate.effective,
            reliability=estimate.reliability,
            left_share=estimate.left_share,
            num_compared=int(compared_W[place]),
            num_gold=estimate.num_gold,
            habits=habits(looks[rater]),
        )
        for place, (rater, estimate) in enumerate(zip(raters, found.raters, strict=True))
    }
    is_known = compared_W.sum() >= MIN_KNOWN
    return CrowdReport(reports, len(decided), found.effective if is_known else None, _weights(decided, found))


def known_weights(report: CrowdReport) -> Mapping[int, float]:
    """The weights of the votes by their ids; none where too little is known of the raters."""
    return {} if report.effective is None else report.weight_of


def _weights(decided: Sequence[JudgedPair], found: Reliabilities) -> dict[int, float]:
    return {one.vote_id: float(weight) for one, weight in zip(decided, found.weight_N, strict=True)}


def _num_compared(votes: PairVotes) -> np.ndarray:
    """num_W: votes of each rater on gold items and on items with votes of others."""
    is_shared_I = np.bincount(votes.item_N, minlength=votes.num_items) > 1
    is_compared_I = is_shared_I | ~np.isnan(votes.gold_I)
    return np.bincount(votes.rater_N[is_compared_I[votes.item_N]], minlength=votes.num_raters)


def _arrays(decided: Sequence[JudgedPair], place_of: Mapping[int, int]) -> PairVotes:
    items: dict[int, int] = {}
    item_N = [items.setdefault(one.item_id, len(items)) for one in decided]
    gold_I, answers_I2 = np.full(len(items), np.nan), np.full((len(items), 2), -1)
    sources: dict[str, int] = {}
    for item, one in zip(item_N, decided, strict=True):
        if one.gold_is_first is not None:
            gold_I[item] = one.gold_is_first
        first, second = one.sources
        # Answers of two versions or models: which of these is the stronger one says something of the answers.
        if first and second and first != second:
            answers_I2[item] = [sources.setdefault(name, len(sources)) for name in one.sources]
    return PairVotes(
        item_N=np.array(item_N, dtype=np.int64),
        rater_N=np.array([place_of[one.rater_id] for one in decided], dtype=np.int64),
        first_N=np.array([bool(one.prefers_first) for one in decided], dtype=bool),
        side_N=np.array([one.side for one in decided], dtype=np.int64),
        num_raters=len(place_of),
        gold_I=gold_I,
        answers_I2=answers_I2,
    )
