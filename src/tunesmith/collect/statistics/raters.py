"""How far each rater's votes on pairs can be relied on, and what a vote is worth, from the votes alone.

Of every pair one answer is the better one, which nobody knows but for gold items. A rater w names it with probability
alpha_w where it is shown on the left and beta_w where it is on the right. So the reliability (alpha_w + beta_w) / 2 is
the chance that a vote names the better answer, if either side has it equally often: 1/2 for a rater who does not look,
less for one who has the answers mixed up. The left share (1 + alpha_w - beta_w) / 2 is how often they take the left
answer then. These are the confusion matrices of Dawid and Skene 1979 in terms of the sides; with alpha = beta it is the
model of Chen et al. 2013 (CrowdBT), and alpha = e + (1 - e) q, beta = e + (1 - e) (1 - q) is a rater who looks with
probability e and otherwise takes the left side with probability q (Bugakova et al. 2019, arXiv 1906.04039).

Which answer is better has the prior log odds of Bradley and Terry 1952, where something is known of the answers: the
strengths of those that occur in several pairs, which are estimated with the raters, or what a model of texts predicts.

Without torch. Shape suffixes: N votes, I items, W raters, A answers, P parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import expit

from tunesmith.base.core.errors import InputError
from tunesmith.collect.statistics.intervals import CONFIDENCE

PRIOR_VOTES = 2.0
"""Votes that the prior of a rater is worth on each side: it has the mean of all raters."""

PRIOR_RANGE = (0.6, 0.95)
"""Bounds of the mean reliability of the prior. It is above 1/2: most raters are not mixed up."""

STRENGTH_STD = 2.0
"""Standard deviation of the normal prior on the strength of an answer, in nats."""

MAX_ANSWERS = 1_000
"""Answers whose strengths are estimated: those in the most items. Each round solves equations of this size."""

MAX_JOINT = 500
"""Raters whose uncertainty is computed together; of others each alone, which is too sure where few overlap."""

_MAX_ROUNDS = 500
_TOLERANCE = 1e-7
_ODDS_ROUNDS = 25  # in which the prior log odds of the items are estimated again
_GUESS_EVERY = 5
_EDGE = 1e-9

Guess = Callable[[np.ndarray], np.ndarray]
"""Prior log odds, `[I]`, that the first answer of each item is the better one, from the chances `[I]` that the votes
give it. For each item it must be made without the chance of that item, such as by cross-fitting."""


@dataclass(frozen=True, slots=True)
class PairVotes:
    """N decided votes on I items by W raters, as arrays. An item is two answers to a prompt, in an order of its own.

    `first_N` says whether a vote prefers the first answer of its item. `side_N` is +1 where the preferred answer was
    shown on the left, -1 on the right, 0 where nobody recorded it. `gold_I` is 1 or 0 where it is known that the first
    answer is the better one, or not, and NaN elsewhere. `answers_I2` numbers the answers, -1 for one that is in no
    other item.
    """

    item_N: np.ndarray
    rater_N: np.ndarray
    first_N: np.ndarray
    side_N: np.ndarray
    num_raters: int
    gold_I: np.ndarray
    answers_I2: np.ndarray | None = None

    @property
    def num_items(self) -> int:
        """I."""
        return len(self.gold_I)

    def check(self) -> None:
        """Raise InputError for arrays that do not fit together."""
        num = len(self.item_N)
        for name in ("rater_N", "first_N", "side_N"):
            if len(getattr(self, name)) != num:
                raise InputError(f"{name} has {len(getattr(self, name))} entries for {num} votes; give one for each")
        if num and (self.item_N.min() < 0 or self.item_N.max() >= self.num_items):
            raise InputError(f"item_N names items beyond the {self.num_items} of gold_I; number them from 0")
        if num and (self.rater_N.min() < 0 or self.rater_N.max() >= self.num_raters):
            raise InputError(f"rater_N names raters beyond num_raters {self.num_raters}; number them from 0")
        if not np.isin(self.side_N, (-1, 0, 1)).all():
            raise InputError("side_N has other values than 1 (left), -1 (right) and 0 (not known)")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share from 0 to 1, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RaterEstimate:
    """Of one rater: the chance that a vote names the better answer, and the share of left answers.

    `num_votes` decided votes, which say as much as `effective` votes without an error, by estimates that are drawn to
    the mean of all raters. `num_gold` of them were on items of which the better answer is known, and `num_shared` on
    items with votes of others.
    """

    reliability: Estimate
    left_share: Estimate
    num_votes: int
    effective: float
    num_gold: int
    num_shared: int


@dataclass(frozen=True, slots=True)
class Reliabilities:
    """What votes say of their raters and items. `chance_I` is the probability that the first answer is the better one,
    by all votes on an item. `confidence_N` is the probability that a vote is right, by its rater and side alone; it is
    made from estimates that are drawn to the mean of all raters as far as they may differ by chance, so that votes of
    equally good raters count the same. `weight_N`, from -1 to 1, is twice that less 1; 0 instead of a negative weight
    where the interval of the rater does not end below 1/2. `strength_A` is None where no answers are in several items.
    """

    raters: Sequence[RaterEstimate]
    chance_I: np.ndarray
    confidence_N: np.ndarray
    weight_N: np.ndarray
    strength_A: np.ndarray | None

    @property
    def effective(self) -> float:
        """Number of votes without an error that say as much as all of these."""
        return float(sum(one.effective for one in self.raters))


@dataclass(slots=True)
class _Rates:
    """alpha_W and beta_W: the chance to name the better answer where it is on the left, and on the right."""

    alpha_W: np.ndarray
    beta_W: np.ndarray

    @property
    def either_W(self) -> np.ndarray:
        """The mean of both."""
        return (self.alpha_W + self.beta_W) / 2

    def chances(self, votes: PairVotes) -> tuple[np.ndarray, np.ndarray]:
        """The probability of each vote if it names the better answer, and if it names the other one, `[N]` each.

        They are those of its side; without one, means over both.
        """
        alpha_N, beta_N = self.alpha_W[votes.rater_N], self.beta_W[votes.rater_N]
        either_N = (alpha_N + beta_N) / 2
        is_left_N, is_right_N = votes.side_N > 0, votes.side_N < 0
        right_N = np.where(is_left_N, alpha_N, np.where(is_right_N, beta_N, either_N))
        # A worse answer taken on the left: the better one was on the right.
        wrong_N = np.where(is_left_N, 1 - beta_N, np.where(is_right_N, 1 - alpha_N, 1 - either_N))
        return right_N, wrong_N


def reliabilities(votes: PairVotes, guess: Guess | None = None) -> Reliabilities:
    """Estimates of all raters by expectation maximisation, with priors, and 95 % intervals from the curvature of the
    log posterior at its mode (Louis 1982), the coupling of raters through shared items included.

    Evidence are items with votes of several raters, gold items, answers that occur in several items, and `guess`.
    Without any of it a reliability is that of the prior, and its interval says so; the left share is always known.

    Raises:
        InputError: for arrays that do not fit together.
    """
    votes.check()
    fit = _fit(votes, guess)
    shares = _Shares.of(votes, fit)
    right_N, wrong_N = shares.shrunk().chances(votes)
    straight_W = _straight(votes, fit)
    confidence_N = _mixed(right_N / (right_N + wrong_N), straight_W[votes.rater_N])
    raters = _estimates(votes, shares, straight_W)
    is_reversed_W = np.array([one.reliability.high < 0.5 for one in raters], dtype=bool)
    weight_N = np.where(is_reversed_W[votes.rater_N], 2 * confidence_N - 1, np.maximum(2 * confidence_N - 1, 0.0))
    straight_I = np.ones(votes.num_items)
    straight_I[votes.item_N] = straight_W[votes.rater_N]
    chance_I = np.where(np.isnan(votes.gold_I), _mixed(fit.chance_I, straight_I), fit.chance_I)
    return Reliabilities(raters, chance_I, confidence_N, weight_N, fit.strength_A)


def _mixed(chance_N: np.ndarray, straight_N: np.ndarray) -> np.ndarray:
    """Chances where all is as it seems with the probability `straight_N`, and else the other way round."""
    return straight_N * chance_N + (1 - straight_N) * (1 - chance_N)


def _straight(votes: PairVotes, fit: "_Fit") -> np.ndarray:
    """straight_W: the probability that the mode has the better answers the right way round, for each rater.

    Votes are as likely if in all items that raters share the other answer is the better one, and all of these raters
    are as far below 1/2 as they are above. That most raters are not mixed up, and gold items, say which is true; what
    models of answers say does so only of raters among others with whom they share no item, since they follow the votes.
    Of two raters who always contradict each other nothing says who is right.
    """
    group_W, group_I = _groups(votes)
    num_groups = int(group_W.max(initial=0)) + 1
    slope = PRIOR_VOTES * (sum(PRIOR_RANGE) - 1)
    odds_W = np.log(fit.rates.alpha_W / (1 - fit.rates.alpha_W)) + np.log(fit.rates.beta_W / (1 - fit.rates.beta_W))
    odds_G = np.bincount(group_W, slope * odds_W, num_groups)
    right_N, wrong_N = fit.rates.chances(votes)
    evidence_N = np.where(votes.first_N, 1.0, -1.0) * np.log(right_N / wrong_N)
    evidence_I = np.bincount(votes.item_N, evidence_N, votes.num_items)
    is_known_I = ~np.isnan(votes.gold_I)
    odds_I = np.where(is_known_I, (2 * np.nan_to_num(votes.gold_I) - 1) * evidence_I, 0.0)
    if len(np.unique(group_W)) > 1:
        # log(p A + (1 - p) B) - log(p B + (1 - p) A), with the odds log(p / (1 - p)) and the evidence log(A / B).
        same_I, other_I = np.logaddexp(0.0, fit.odds_I + evidence_I), np.logaddexp(fit.odds_I, evidence_I)
        odds_I = np.where(is_known_I, odds_I, same_I - other_I)
    return expit(odds_G + np.bincount(group_I, odds_I, num_groups))[group_W]


def _groups(votes: PairVotes) -> tuple[np.ndarray, np.ndarray]:
    """(group_W, group_I): raters and items that are joined by votes have the same number."""
    group_W = np.arange(votes.num_raters)
    while True:
        group_I = np.full(votes.num_items, max(votes.num_raters, 1) - 1)
        np.minimum.at(group_I, votes.item_N, group_W[votes.rater_N])
        before_W = group_W.copy()
        np.minimum.at(group_W, votes.rater_N, group_I[votes.item_N])
        if np.array_equal(group_W, before_W):
            return group_W, group_I


def confidence(alpha: float, beta: float, side: int) -> float:
    """The chance that a vote for an answer on this side (1 left, -1 right, 0 not known) names the better one."""
    one = _Rates(np.array([alpha]), np.array([beta]))
    place = np.zeros(1, dtype=np.int64)
    right_N, wrong_N = one.chances(PairVotes(place, place, place > 0, np.array([side]), 1, np.array([np.nan])))
    return float(right_N[0] / (right_N[0] + wrong_N[0]))


@dataclass(frozen=True, slots=True)
class _Fit:
    """The mode: rates, chances of items with their prior log odds, and strengths."""

    rates: _Rates
    chance_I: np.ndarray
    odds_I: np.ndarray
    strength_A: np.ndarray | None


def _fit(votes: PairVotes, guess: Guess | None) -> _Fit:
    """Expectation maximisation from the majority of the votes on each item."""
    known_I = ~np.isnan(votes.gold_I)
    strengths = _Strengths.of(votes)
    mean = sum(PRIOR_RANGE) / 2
    rates = _Rates(np.full(votes.num_raters, mean), np.full(votes.num_raters, mean))
    odds_I, guessed_I = np.zeros(votes.num_items), np.zeros(votes.num_items)
    for round_ in range(_MAX_ROUNDS):
        chance_I = _chances(votes, rates, odds_I, known_I)
        before = np.concatenate([rates.alpha_W, rates.beta_W])
        rates, mean = _rates(votes, rates, chance_I, mean)
        if round_ < _ODDS_ROUNDS:  # then they stay, so that the rest converges
            if guess is not None and round_ % _GUESS_EVERY == 0:
                guessed_I = guess(chance_I)
            odds_I = guessed_I if strengths is None else guessed_I + strengths.without_own(chance_I)
        elif np.abs(np.concatenate([rates.alpha_W, rates.beta_W]) - before).max(initial=0.0) < _TOLERANCE:
            break
    chance_I = _chances(votes, rates, odds_I, known_I)
    return _Fit(rates, chance_I, odds_I, None if strengths is None else strengths.strength_A)


def _chances(votes: PairVotes, rates: _Rates, odds_I: np.ndarray, known_I: np.ndarray) -> np.ndarray:
    """chance_I: the probability that the first answer is the better one."""
    right_N, wrong_N = rates.chances(votes)
    evidence_N = np.where(votes.first_N, 1.0, -1.0) * np.log(right_N / wrong_N)
    total_I = odds_I + np.bincount(votes.item_N, evidence_N, votes.num_items)
    return np.where(known_I, np.nan_to_num(votes.gold_I), expit(total_I))


def _rates(votes: PairVotes, rates: _Rates, chance_I: np.ndarray, mean: float) -> tuple[_Rates, float]:
    """Rates from the expected numbers of right and wrong votes of each side, and the mean of the prior."""
    chance_N = chance_I[votes.item_N]
    right_N = np.where(votes.first_N, chance_N, 1 - chance_N)
    alpha_N, beta_N = rates.alpha_W[votes.rater_N], rates.beta_W[votes.rater_N]
    # The share of each vote that says something of alpha: the better answer was on the left.
    is_left_N, is_right_N = votes.side_N > 0, votes.side_N < 0
    of_right_N = np.where(is_left_N, 1.0, np.where(is_right_N, 0.0, alpha_N / (alpha_N + beta_N)))
    of_wrong_N = np.where(is_left_N, 0.0, np.where(is_right_N, 1.0, (1 - alpha_N) / (2 - alpha_N - beta_N)))

    def summed(value_N: np.ndarray) -> np.ndarray:
        return np.bincount(votes.rater_N, value_N, votes.num_raters)

    right_alpha_W, wrong_alpha_W = summed(right_N * of_right_N), summed((1 - right_N) * of_wrong_N)
    right_beta_W, wrong_beta_W = summed(right_N * (1 - of_right_N)), summed((1 - right_N) * (1 - of_wrong_N))
    prior_right = PRIOR_VOTES * mean
    alpha_W = (right_alpha_W + prior_right) / (right_alpha_W + wrong_alpha_W + PRIOR_VOTES)
    beta_W = (right_beta_W + prior_right) / (right_beta_W + wrong_beta_W + PRIOR_VOTES)
    found = _Rates(np.clip(alpha_W, _EDGE, 1 - _EDGE), np.clip(beta_W, _EDGE, 1 - _EDGE))
    mean = float(np.clip(found.either_W.mean(), *PRIOR_RANGE)) if votes.num_raters else mean
    return found, mean


class _Strengths:
    """Strengths of the answers that are in several items, by penalised Newton steps on the chances of the items."""

    def __init__(self, first_J: np.ndarray, second_J: np.ndarray, item_J: np.ndarray, num_answers: int) -> None:
        self._first_J, self._second_J, self._item_J = first_J, second_J, item_J
        self._kept = np.unique(np.concatenate([first_J, second_J]))
        self.strength_A = np.zeros(num_answers)

    @classmethod
    def of(cls, votes: PairVotes) -> "_Strengths | None":
        """The strengths of the answers of `votes`; None if there are none in several items."""
        if votes.answers_I2 is None or not (votes.answers_I2 >= 0).any():
            return None
        num_answers = int(votes.answers_I2.max()) + 1
        counts_A = np.bincount(votes.answers_I2[votes.answers_I2 >= 0], minlength=num_answers)
        order_A = np.argsort(-counts_A, kind="stable")
        is_kept_A = np.zeros(num_answers, dtype=bool)
        is_kept_A[order_A[:MAX_ANSWERS]] = True
        is_kept_A &= counts_A > 1
        both_I2 = (votes.answers_I2 >= 0) & is_kept_A[np.maximum(votes.answers_I2, 0)]
        item_J = np.flatnonzero(both_I2.all(axis=1) & (votes.answers_I2[:, 0] != votes.answers_I2[:, 1]))
        if not len(item_J):
            return None
        return cls(votes.answers_I2[item_J, 0], votes.answers_I2[item_J, 1], item_J, num_answers)

    def without_own(self, chance_I: np.ndarray) -> np.ndarray:
        """Log odds of each item from the strengths that the other items give: 0 where there are none.

        Strengths are fitted once to all chances; what an item has added to its own is taken off again, to first order
        (the leave-one-out of linear smoothers), and the uncertainty of the rest draws the odds towards 0.
        """
        first_J, second_J = np.searchsorted(self._kept, [self._first_J, self._second_J])
        size = len(self._kept)
        strength_A, chance_J = self.strength_A[self._kept], chance_I[self._item_J]
        places = np.concatenate([first_J * size + second_J, second_J * size + first_J])
        covariance_AA = np.eye(size)
        for _ in range(8):
            won_J = expit(strength_A[first_J] - strength_A[second_J])
            weight_J = won_J * (1 - won_J)
            # The rows of items hold 1 for one answer and -1 for another: a matrix of them is nowhere.
            information_AA = -np.bincount(places, np.tile(weight_J, 2), size * size).reshape(size, size)
            information_AA[np.diag_indices(size)] = 1 / STRENGTH_STD**2 - information_AA.sum(axis=1)
            covariance_AA = np.linalg.inv(information_AA)
            error_A = np.bincount(first_J, chance_J - won_J, size) - np.bincount(second_J, chance_J - won_J, size)
            step_A = covariance_AA @ (error_A - strength_A / STRENGTH_STD**2)
            strength_A = strength_A + step_A / max(1.0, float(np.abs(step_A).max()))
            if np.abs(step_A).max() < 1e-6:
                break
        self.strength_A[self._kept] = strength_A
        won_J = expit(strength_A[first_J] - strength_A[second_J])
        weight_J = won_J * (1 - won_J)
        variance_A = covariance_AA.diagonal()
        variance_J = variance_A[first_J] + variance_A[second_J] - 2 * covariance_AA[first_J, second_J]
        left_J = np.maximum(1 - variance_J * weight_J, 1e-3)
        odds_J = strength_A[first_J] - strength_A[second_J] - variance_J * (chance_J - won_J) / left_J
        odds_I = np.zeros(len(chance_I))
        odds_I[self._item_J] = odds_J / np.sqrt(1 + np.pi * variance_J / left_J / 8)  # MacKay 1992
        return odds_I


@dataclass(frozen=True, slots=True)
class _Shares:
    """Reliability and left share of each rater with the variances of both."""

    reliability_W: np.ndarray
    left_W: np.ndarray
    reliability_variance_W: np.ndarray
    left_variance_W: np.ndarray

    @classmethod
    def of(cls, votes: PairVotes, fit: _Fit) -> "_Shares":
        """Those of the mode, with variances to first order."""
        rates, covariance_W22 = fit.rates, _covariances(votes, fit)
        slope_W2 = np.stack([rates.alpha_W * (1 - rates.alpha_W), rates.beta_W * (1 - rates.beta_W)], axis=1) / 2
        variances = [
            np.einsum("wi,wij,wj->w", slope_W2 * signs, covariance_W22, slope_W2 * signs)
            for signs in (np.array([1.0, 1.0]), np.array([1.0, -1.0]))
        ]
        return cls(rates.either_W, (1 + rates.alpha_W - rates.beta_W) / 2, *variances)

    def shrunk(self) -> _Rates:
        """Rates from shares that are drawn to their means over all raters."""
        reliability_W = _shrunk(self.reliability_W, self.reliability_variance_W)
        excess_W = _shrunk(self.left_W, self.left_variance_W) - 0.5
        return _Rates(*(np.clip(reliability_W + side * excess_W, _EDGE, 1 - _EDGE) for side in (1, -1)))


def _shrunk(value_W: np.ndarray, variance_W: np.ndarray) -> np.ndarray:
    """Values drawn to their mean: by t^2 / (t^2 + variance), with t^2 how much they differ beyond their variances
    (DerSimonian and Laird 1986).
    """
    if len(value_W) < 2:
        return value_W
    weight_W = 1 / np.maximum(variance_W, 1e-9)
    mean = weight_W @ value_W / weight_W.sum()
    beyond = weight_W @ (value_W - mean) ** 2 - (len(value_W) - 1)
    between = max(0.0, beyond / (weight_W.sum() - weight_W @ weight_W / weight_W.sum()))
    mean = (value_W / (variance_W + between)).sum() / (1 / (variance_W + between)).sum()
    return mean + between / (between + variance_W) * (value_W - mean)


def _estimates(votes: PairVotes, shares: _Shares, straight_W: np.ndarray) -> list[RaterEstimate]:
    """Each rater's estimates: intervals are normal in the log odds of the share. That of the reliability holds both
    ways in which the votes may be read, if either may be true.
    """
    number_W = np.bincount(votes.rater_N, minlength=votes.num_raters)
    is_gold_N = ~np.isnan(votes.gold_I)[votes.item_N]
    num_gold_W = np.bincount(votes.rater_N[is_gold_N], minlength=votes.num_raters)
    is_shared_N = np.bincount(votes.item_N, minlength=votes.num_items)[votes.item_N] > 1
    num_shared_W = np.bincount(votes.rater_N[is_shared_N], minlength=votes.num_raters)
    # Fisher information of a vote on a pair of equal odds, against that of a vote without an error.
    drawn = shares.shrunk()
    left_W = (1 + drawn.alpha_W - drawn.beta_W) / 2
    worth_W = (2 * _mixed(drawn.either_W, straight_W) - 1) ** 2 / (4 * left_W * (1 - left_W))
    return [
        RaterEstimate(
            reliability=_either_way(
                _interval(shares.reliability_W[rater], shares.reliability_variance_W[rater]), float(straight_W[rater])
            ),
            left_share=_interval(shares.left_W[rater], shares.left_variance_W[rater]),
            num_votes=int(number_W[rater]),
            effective=float(number_W[rater] * worth_W[rater]),
            num_gold=int(num_gold_W[rater]),
            num_shared=int(num_shared_W[rater]),
        )
        for rater in range(votes.num_raters)
    ]


def _either_way(one: Estimate, straight: float) -> Estimate:
    """The estimate where all is as it seems with the probability `straight`."""
    value = straight * one.value + (1 - straight) * (1 - one.value)
    tail = (1 - CONFIDENCE) / 2
    low, high = (one.low, one.high) if straight > tail else (1 - one.high, 1 - one.low)
    if tail < straight < 1 - tail:
        low, high = min(low, 1 - high), max(high, 1 - low)
    return Estimate(value, min(low, value), max(high, value))


def _interval(share: float, variance: float) -> Estimate:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = float(min(max(share, _EDGE), 1 - _EDGE))
    odds, half = np.log(share / (1 - share)), z * np.sqrt(max(variance, 0.0)) / (share * (1 - share))
    return Estimate(share, float(expit(odds - half)), float(expit(odds + half)))


def _covariances(votes: PairVotes, fit: _Fit) -> np.ndarray:
    """covariance_W22 of the log odds of alpha and beta: the inverse of the negative second derivative of the log
    posterior.

    That of an item is what its votes say if it were known which answer is better, less q (1 - q) g g', where q is the
    chance of the first answer and g the difference of both gradients (Louis 1982, equation 3.2).
    """
    num = votes.num_raters
    if num == 0:
        return np.zeros((0, 2, 2))
    complete_W22, gradient_N2 = _complete(votes, fit)
    unsure_I = fit.chance_I * (1 - fit.chance_I)
    if num > MAX_JOINT:
        return _apart(votes, complete_W22, gradient_N2, unsure_I)
    information_PP = np.zeros((2 * num, 2 * num))
    for rater in range(num):
        information_PP[2 * rater : 2 * rater + 2, 2 * rater : 2 * rater + 2] = complete_W22[rater]
    order_N = np.argsort(votes.item_N, kind="stable")
    starts = np.flatnonzero(np.diff(votes.item_N[order_N], prepend=-1))
    for own_N in np.split(order_N, starts[1:]) if len(order_N) else ():
        unsure = unsure_I[votes.item_N[own_N[0]]]
        if unsure < 1e-12:
            continue
        # Added up first: raters may have judged an item many times.
        own_W, place_N = np.unique(votes.rater_N[own_N], return_inverse=True)
        sums_W2 = np.stack([np.bincount(place_N, gradient_N2[own_N, rate], len(own_W)) for rate in (0, 1)], axis=1)
        places: Any = np.add.outer(2 * own_W, np.arange(2)).ravel()
        information_PP[places[:, None], places] -= unsure * np.outer(sums_W2, sums_W2)
    covariance_PP = np.linalg.inv(_positive(information_PP))
    return np.stack([covariance_PP[2 * one : 2 * one + 2, 2 * one : 2 * one + 2] for one in range(num)])


def _apart(votes: PairVotes, complete_W22: np.ndarray, gradient_N2: np.ndarray, unsure_I: np.ndarray) -> np.ndarray:
    """covariance_W22 of each rater if those of others were known."""
    information_W22 = complete_W22.copy()
    outer_N22 = gradient_N2[:, :, None] * gradient_N2[:, None, :] * unsure_I[votes.item_N][:, None, None]
    np.subtract.at(information_W22, votes.rater_N, outer_N22)
    return np.stack([np.linalg.inv(_positive(one)) for one in information_W22])


def _positive(information_PP: np.ndarray) -> np.ndarray:
    """The matrix with eigenvalues of a hundredth of a vote at least, so that what is not known has a wide interval."""
    values_P, vectors_PP = np.linalg.eigh((information_PP + information_PP.T) / 2)
    return (vectors_PP * np.maximum(values_P, 1e-2)) @ vectors_PP.T


def _complete(votes: PairVotes, fit: _Fit) -> tuple[np.ndarray, np.ndarray]:
    """(Negative second derivatives of the log posterior for known answers, `[W, 2, 2]`; for each vote the gradient if
    the first answer of its item is the better one less that if the second is, `[N, 2]`), in the log odds of both rates.
    """
    rates = fit.rates
    alpha_N, beta_N = rates.alpha_W[votes.rater_N], rates.beta_W[votes.rater_N]
    chance_N = fit.chance_I[votes.item_N]
    right_N = np.where(votes.first_N, chance_N, 1 - chance_N)
    is_left_N, is_right_N, is_unknown_N = votes.side_N > 0, votes.side_N < 0, votes.side_N == 0
    slope_alpha_N, slope_beta_N = alpha_N * (1 - alpha_N), beta_N * (1 - beta_N)
    either_N = (alpha_N + beta_N) / 2
    num = len(alpha_N)
    gradient_right_N2, gradient_wrong_N2 = np.zeros((num, 2)), np.zeros((num, 2))
    for side_N, own, other in ((is_left_N, 0, 1), (is_right_N, 1, 0)):
        rate_N2 = np.stack([alpha_N, beta_N], axis=1)[side_N]
        gradient_right_N2[side_N, own] = 1 - rate_N2[:, own]
        gradient_wrong_N2[side_N, other] = -rate_N2[:, other]
    slopes_N2 = np.stack([slope_alpha_N, slope_beta_N], axis=1)
    gradient_right_N2[is_unknown_N] = (slopes_N2 / (2 * either_N[:, None]))[is_unknown_N]
    gradient_wrong_N2[is_unknown_N] = (-slopes_N2 / (2 * (1 - either_N)[:, None]))[is_unknown_N]
    information_W22 = np.zeros((votes.num_raters, 2, 2))
    # Of a known side: p (1 - p) of the rate that the vote is a trial of.
    for side_N, own, other in ((is_left_N, 0, 1), (is_right_N, 1, 0)):
        trials = ((own, side_N * right_N * slopes_N2[:, own]), (other, side_N * (1 - right_N) * slopes_N2[:, other]))
        for rate, value_N in trials:
            information_W22[:, rate, rate] += np.bincount(votes.rater_N, value_N, votes.num_raters)
    # Of an unknown one: minus the second derivatives of log((alpha + beta) / 2) and of log(1 - (alpha + beta) / 2).
    curve_N2 = slopes_N2 * (1 - 2 * np.stack([alpha_N, beta_N], axis=1))
    second_N22 = gradient_right_N2[:, :, None] * gradient_right_N2[:, None, :] * right_N[:, None, None]
    second_N22 += gradient_wrong_N2[:, :, None] * gradient_wrong_N2[:, None, :] * (1 - right_N)[:, None, None]
    bend_N = right_N / (2 * either_N) - (1 - right_N) / (2 * (1 - either_N))
    second_N22[:, [0, 1], [0, 1]] -= curve_N2 * bend_N[:, None]
    np.add.at(information_W22, votes.rater_N, second_N22 * is_unknown_N[:, None, None])
    slopes_W2 = np.stack([rates.alpha_W * (1 - rates.alpha_W), rates.beta_W * (1 - rates.beta_W)], axis=1)
    information_W22[:, [0, 1], [0, 1]] += PRIOR_VOTES * slopes_W2
    sign_N = np.where(votes.first_N, 1.0, -1.0)
    return information_W22, sign_N[:, None] * (gradient_right_N2 - gradient_wrong_N2)
