"""Reliabilities of raters from votes on pairs, on simulated raters whose truth is known."""

import math
import tracemalloc

import numpy as np
import pytest

from tunesmith.base.core.errors import InputError
from tunesmith.collect.statistics.raters import PairVotes, confidence, reliabilities

ACCURACY = 0.85


def rates_of(kind: str) -> tuple[float, float]:
    """The chances to name the better answer on the left, and on the right."""
    looks = 0.2
    return {
        "good": (ACCURACY, ACCURACY),
        "careless": (0.5, 0.5),
        "reversed": (1 - ACCURACY, 1 - ACCURACY),
        "lazy": (1 - looks + looks * ACCURACY, looks * ACCURACY),
    }[kind]


def drawn(
    kinds: list[str], num_items: int, votes_per_item: int, seed: int, *, gold: float = 0.0, unknown: float = 0.0
) -> tuple[PairVotes, np.ndarray]:
    """Votes of raters of these kinds, and whether the first answer of each item is the better one."""
    random = np.random.default_rng(seed)
    truth_I = random.random(num_items) < 0.5
    item_N = np.repeat(np.arange(num_items), votes_per_item)
    rater_N = np.concatenate([random.permutation(len(kinds))[:votes_per_item] for _ in range(num_items)])
    alpha_W, beta_W = np.array([rates_of(kind) for kind in kinds]).T
    first_is_left_N = random.random(len(item_N)) < 0.5
    better_is_left_N = truth_I[item_N] == first_is_left_N
    takes_left_N = random.random(len(item_N)) < np.where(better_is_left_N, alpha_W[rater_N], 1 - beta_W[rater_N])
    side_N = np.where(takes_left_N, 1, -1)
    side_N[random.random(len(item_N)) < unknown] = 0
    gold_I = np.where(random.random(num_items) < gold, truth_I.astype(float), np.nan)
    return PairVotes(item_N, rater_N, takes_left_N == first_is_left_N, side_N, len(kinds), gold_I), truth_I


def crowd(share: float, num: int = 20) -> list[str]:
    """So many raters, of whom a share is careless, lazy or reversed in turns."""
    bad = ["careless", "lazy", "reversed"]
    return [bad[place % 3] if place < round(share * num) else "good" for place in range(num)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.4])
@pytest.mark.parametrize(("votes_per_item", "gold", "unknown"), [(2, 0.05, 0.0), (3, 0.0, 0.0), (2, 0.05, 1.0)])
def test_reliability_and_left_share_are_within_their_intervals(
    share: float, votes_per_item: int, gold: float, unknown: float
) -> None:
    kinds = crowd(share)
    inside: list[bool] = []
    for seed in range(5):
        votes, _ = drawn(kinds, 1800 // votes_per_item, votes_per_item, seed, gold=gold, unknown=unknown)
        for kind, one in zip(kinds, reliabilities(votes).raters, strict=True):
            alpha, beta = rates_of(kind)
            inside.append(one.reliability.low <= (alpha + beta) / 2 <= one.reliability.high)
            if not unknown:
                inside.append(one.left_share.low <= (1 + alpha - beta) / 2 <= one.left_share.high)
    assert np.mean(inside) >= 0.9


def test_a_reversed_rater_is_found_and_their_votes_count_the_other_way() -> None:
    votes, truth_I = drawn(["good"] * 5 + ["reversed"], 400, 3, 0)
    found = reliabilities(votes)
    assert found.raters[5].reliability.high < 0.5 < min(one.reliability.low for one in found.raters[:5])
    assert (found.confidence_N[votes.rater_N == 5] < 0.3).all()
    majority_I = np.bincount(votes.item_N, np.where(votes.first_N, 1, -1), votes.num_items) > 0
    assert np.mean((found.chance_I > 0.5) == truth_I) > np.mean(majority_I == truth_I) + 0.02


def test_votes_for_the_favoured_side_say_little_and_those_against_it_much() -> None:
    votes, _ = drawn(["good"] * 5 + ["lazy"], 600, 3, 1)
    found = reliabilities(votes)
    lazy_N = votes.rater_N == 5
    left, right = (found.confidence_N[lazy_N & (votes.side_N == side)].mean() for side in (1, -1))
    assert found.raters[5].left_share.low > 0.75
    assert right > left + 0.15
    assert left == pytest.approx(0.55, abs=0.08)


def test_without_evidence_a_reliability_is_the_prior_and_the_left_share_is_known() -> None:
    votes, _ = drawn(["good", "lazy", "reversed"], 300, 1, 2)
    good, lazy, other = reliabilities(votes).raters
    for one in (good, lazy, other):
        assert one.reliability.low < 0.5 < one.reliability.high
        assert one.num_shared == one.num_gold == 0
    # Who takes the left side so often cannot be right much more often than not.
    assert lazy.reliability.high < 0.8 < good.reliability.high
    assert lazy.left_share.low > 0.7
    assert good.left_share.low < 0.5 < good.left_share.high


def test_gold_items_alone_are_counted_with_the_prior() -> None:
    """30 of 40 right on either side, with two votes of the prior on each: the mean of the prior is that of all."""
    num = 80
    right_N = np.arange(num) % 4 != 0
    side_N = np.where(np.arange(num) < 40, 1, -1)
    gold_I = np.ones(num)
    votes = PairVotes(np.arange(num), np.zeros(num, dtype=int), right_N, side_N, 1, gold_I)
    one = reliabilities(votes).raters[0]
    assert one.reliability.value == pytest.approx(0.75, abs=1e-4)  # where (30 + 2 m) / 42 = m
    assert one.num_gold == num
    # The interval of a share of 84 trials in its log odds.
    half = 1.96 / math.sqrt(84 * 0.75 * 0.25)
    odds = math.log(3)
    assert one.reliability.low == pytest.approx(1 / (1 + math.exp(half - odds)), abs=2e-3)
    assert one.reliability.high == pytest.approx(1 / (1 + math.exp(-half - odds)), abs=2e-3)


def test_the_estimate_is_the_mode_of_the_posterior() -> None:
    """No single rate can be changed to a more likely one, by the likelihood summed over both truths of each item."""
    votes, _ = drawn(crowd(0.4, 6), 80, 2, 3, unknown=0.3, gold=0.1)
    found = reliabilities(votes)
    rel = np.array([one.reliability.value for one in found.raters])
    left = np.array([one.left_share.value for one in found.raters])
    rates = np.stack([rel + left - 0.5, rel - left + 0.5])
    mean = float(np.clip(rel.mean(), 0.6, 0.95))

    def log_posterior(rates_2W: np.ndarray) -> float:
        total = 2.0 * (mean * np.log(rates_2W) + (1 - mean) * np.log(1 - rates_2W)).sum()
        for item in range(votes.num_items):
            odds = [0.0, 0.0]
            for place in np.flatnonzero(votes.item_N == item):
                alpha, beta = rates_2W[:, votes.rater_N[place]]
                side = votes.side_N[place]
                right = (beta, (alpha + beta) / 2, alpha)[side + 1]
                wrong = (1 - alpha, 1 - (alpha + beta) / 2, 1 - beta)[side + 1]
                for first_is_better in (0, 1):
                    odds[first_is_better] += math.log(right if votes.first_N[place] == first_is_better else wrong)
            gold = votes.gold_I[item]
            total += math.log((math.exp(odds[0]) + math.exp(odds[1])) / 2) if math.isnan(gold) else odds[int(gold)]
        return total

    best = log_posterior(rates)
    for place in np.ndindex(*rates.shape):
        for change in (-0.01, 0.01):
            other = rates.copy()
            other[place] = np.clip(other[place] + change, 1e-6, 1 - 1e-6)
            assert log_posterior(other) <= best + 1e-6


def test_strengths_of_answers_in_many_pairs_help_to_find_careless_raters() -> None:
    """Each pair is judged once, but the same thirty answers are in all of them."""
    random = np.random.default_rng(0)
    strength_A, num, kinds = random.normal(0, 2.5, 30), 900, ["good"] * 6 + ["careless", "reversed"]
    answers_I2 = np.array([random.choice(30, 2, replace=False) for _ in range(num)])
    gap_I = strength_A[answers_I2[:, 0]] - strength_A[answers_I2[:, 1]]
    truth_I = random.random(num) < 1 / (1 + np.exp(-gap_I))
    rater_N = np.arange(num) % len(kinds)
    is_right_N = random.random(num) < np.array([rates_of(kind)[0] for kind in kinds])[rater_N]
    first_N = truth_I == is_right_N
    side_N, none_I = random.choice([-1, 1], num), np.full(num, np.nan)
    with_answers = PairVotes(np.arange(num), rater_N, first_N, side_N, len(kinds), none_I, answers_I2)
    found = reliabilities(with_answers)
    assert found.strength_A is not None
    assert np.corrcoef(found.strength_A, strength_A)[0, 1] > 0.9
    good = [one.reliability for one in found.raters[:6]]
    assert found.raters[7].reliability.high < 0.5 < min(one.low for one in good)
    assert found.raters[6].reliability.value < min(one.value for one in good) - 0.1


def test_what_a_model_of_texts_predicts_is_evidence_too() -> None:
    votes, truth_I = drawn(["good"] * 4 + ["reversed"], 1000, 1, 5)
    odds_I = np.where(truth_I, 1.0, -1.0) * np.random.default_rng(0).choice([1.4, -1.4], 1000, p=[0.8, 0.2])
    found = reliabilities(votes, lambda chance_I: odds_I)
    assert found.raters[4].reliability.high < 0.5 < min(one.reliability.low for one in found.raters[:4])


def test_effective_number_is_that_of_votes_without_an_error() -> None:
    num = 400
    side_N = np.where(np.arange(num) % 2, 1, -1)
    never_wrong = PairVotes(np.arange(num), np.zeros(num, dtype=int), np.ones(num, bool), side_N, 1, np.ones(num))
    assert reliabilities(never_wrong).effective == pytest.approx(num, rel=0.05)
    half_wrong = PairVotes(np.arange(num), np.zeros(num, dtype=int), np.arange(num) % 4 < 2, side_N, 1, np.ones(num))
    assert reliabilities(half_wrong).effective < 0.02 * num


def test_confidence_of_one_vote() -> None:
    assert confidence(0.85, 0.85, 1) == confidence(0.85, 0.85, 0) == pytest.approx(0.85)
    assert confidence(0.9, 0.1, 1) == pytest.approx(0.5)
    assert confidence(0.97, 0.17, -1) == pytest.approx(0.17 / 0.2)


def test_the_order_of_raters_items_and_answers_has_no_meaning() -> None:
    votes, _ = drawn(crowd(0.4, 6), 100, 3, 4)
    found = reliabilities(votes)
    other = PairVotes(
        votes.num_items - 1 - votes.item_N[::-1],
        votes.num_raters - 1 - votes.rater_N[::-1],
        ~votes.first_N[::-1],
        votes.side_N[::-1],
        votes.num_raters,
        1 - votes.gold_I[::-1],
    )
    again = reliabilities(other)
    assert np.allclose(again.chance_I[::-1], 1 - found.chance_I, atol=1e-5)
    for one, same in zip(found.raters, reversed(again.raters), strict=True):
        assert one.reliability.value == pytest.approx(same.reliability.value, abs=1e-5)
        assert one.left_share.high == pytest.approx(same.left_share.high, abs=1e-4)


def test_no_votes_and_arrays_that_do_not_fit() -> None:
    nothing = np.zeros(0, dtype=int)
    found = reliabilities(PairVotes(nothing, nothing, nothing > 0, nothing, 0, np.zeros(0)))
    assert (found.raters, found.effective) == ([], 0.0)
    one = np.zeros(1, dtype=int)
    with pytest.raises(InputError, match="side_N has other values"):
        reliabilities(PairVotes(one, one, one > 0, one + 2, 1, np.array([np.nan])))
    with pytest.raises(InputError, match="number them from 0"):
        reliabilities(PairVotes(one, one + 1, one > 0, one, 1, np.array([np.nan])))
    with pytest.raises(InputError, match="give one for each"):
        reliabilities(PairVotes(one, nothing, one > 0, one, 1, np.array([np.nan])))


def contradictions(camps: list[bool], gold: int = 0) -> PairVotes:
    """Votes of raters of two camps on 120 items: one names the better answer always, the other never."""
    random, num, num_items = np.random.default_rng(3), len(camps), 120
    truth_I = random.random(num_items) < 0.5
    item_N, rater_N = np.repeat(np.arange(num_items), num), np.tile(np.arange(num), num_items)
    first_N = truth_I[item_N] == np.array(camps)[rater_N]
    gold_I = np.full(num_items, np.nan)
    gold_I[:gold] = truth_I[:gold]
    return PairVotes(item_N, rater_N, first_N, random.choice([-1, 1], len(item_N)), num, gold_I)


@pytest.mark.parametrize("camps", [[True, False], [True, True, False, False]])
def test_who_is_right_of_two_camps_that_contradict_each_other_is_not_known(camps: list[bool]) -> None:
    votes = contradictions(camps)
    found = reliabilities(votes)
    for one in found.raters:
        assert one.reliability.low < 0.05 and one.reliability.high > 0.95
    assert (found.weight_N >= 0).all(), "nobody's votes are exchanged"
    assert ((found.chance_I > 0.1) & (found.chance_I < 0.9)).all()
    assert found.effective < len(votes.item_N) / 2


@pytest.mark.parametrize(("camps", "gold"), [([True, False], 5), ([True, True, False], 0)])
def test_gold_items_or_a_majority_say_who_is_right(camps: list[bool], gold: int) -> None:
    found = reliabilities(contradictions(camps, gold))
    for is_right, one in zip(camps, found.raters, strict=True):
        assert one.reliability.low > 0.9 if is_right else one.reliability.high < 0.1
    assert (found.weight_N < -0.9).any()


def test_many_votes_of_a_rater_on_one_item_take_little_memory() -> None:
    num = 3000
    place_N = np.zeros(num, dtype=np.int64)
    sides_N = np.where(np.arange(num) % 4 < 2, 1, -1)
    votes = PairVotes(place_N, np.arange(num) % 2, np.arange(num) % 2 == 0, sides_N, 2, np.array([np.nan]))
    tracemalloc.start()
    found = reliabilities(votes)
    assert tracemalloc.get_traced_memory()[1] < 20e6  # a number for each pair of votes takes 288 MB
    tracemalloc.stop()
    assert [one.num_votes for one in found.raters] == [1500, 1500]
