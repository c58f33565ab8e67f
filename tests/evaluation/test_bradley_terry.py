import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from tunesmith.core.errors import InputError
from tunesmith.evaluation.bradley_terry import (
    MAX_VERSIONS,
    NOT_COMPARABLE,
    PRIOR_STD,
    Contest,
    standings,
)


def by_version(contests, base=0, **options):
    return {one.version: one for one in standings(contests, base, **options)}


def drawn_contests(strengths, num, seed, num_prompts=10_000):
    dice = random.Random(seed)
    found = []
    for _ in range(num):
        first, second = dice.sample(range(len(strengths)), 2)
        chance = 1 / (1 + math.exp(strengths[second] - strengths[first]))
        found.append(Contest(first, second, float(dice.random() < chance), dice.randrange(num_prompts)))
    return found


def independent_mode(contests, num_versions):
    def loss(strength):
        total = float(strength @ strength) / (2 * PRIOR_STD**2)
        for one in contests:
            gap = strength[one.first] - strength[one.second]
            total += one.score * math.log1p(math.exp(-gap)) + (1 - one.score) * math.log1p(math.exp(gap))
        return total

    return minimize(loss, np.zeros(num_versions), method="BFGS", options={"gtol": 1e-8}).x


def test_strengths_equal_those_of_an_independent_optimiser_with_ties():
    contests = [*drawn_contests([0.0, 0.7, -0.4, 1.5], 120, seed=1), Contest(0, 3, 0.5, 1), Contest(2, 1, 0.5, 2)]
    expected = independent_mode(contests, 4)
    for one in standings(contests, num_resamples=0):
        assert one.strength == pytest.approx(expected[one.version] - expected[0], abs=1e-5)
        assert one.win_rate == pytest.approx(1 / (1 + math.exp(-one.strength)))


def test_the_base_wins_half_against_itself_for_certain():
    base = by_version(drawn_contests([0.0, 1.0], 40, seed=2))[0]
    assert (base.strength, base.win_rate, base.low, base.high) == (0.0, 0.5, 0.5, 0.5)


def test_no_votes_leave_the_base_alone():
    assert [(one.version, one.num_votes) for one in standings([], base=3)] == [(3, 0)]


def test_votes_within_one_version_say_nothing():
    contests = drawn_contests([0.0, 1.0], 40, seed=3)
    assert standings([*contests, Contest(1, 1, 1.0, 5), Contest(7, 7, 0.0, 6)]) == standings(contests)


def test_a_version_that_never_lost_is_finite_and_its_interval_wide():
    few = by_version([Contest(1, 0, 1.0, prompt) for prompt in range(3)])[1]
    many = by_version([Contest(1, 0, 1.0, prompt) for prompt in range(300)])[1]
    assert 0.5 < few.win_rate < many.win_rate < 1
    assert few.low < 0.5 < many.low
    assert few.high - few.low > 0.4


def test_a_version_without_a_chain_of_votes_to_the_base_has_no_win_rate_but_a_reason():
    found = by_version([Contest(1, 0, 1.0, 0), Contest(2, 3, 1.0, 1), Contest(2, 3, 0.0, 2), Contest(3, 2, 0.5, 3)])
    assert found[1].win_rate is not None
    assert (found[2].win_rate, found[2].low, found[2].note, found[2].num_votes) == (None, None, NOT_COMPARABLE, 3)


def test_a_chain_compares_versions_that_never_met():
    contests = [Contest(1, 0, float(i % 4 > 0), i) for i in range(80)]
    contests += [Contest(2, 1, float(i % 4 > 0), i) for i in range(80)]
    found = by_version(contests)
    assert found[2].low > 0.5
    assert found[2].strength == pytest.approx(2 * found[1].strength, rel=0.05)


def test_a_cycle_of_preferences_leaves_all_equal():
    contests = [Contest(*pair, 1.0, i) for i, pair in enumerate([(0, 1), (1, 2), (2, 0)] * 5)]
    assert all(one.win_rate == pytest.approx(0.5) for one in standings(contests))


def test_votes_on_one_prompt_widen_the_interval_as_they_go_together():
    spread = [Contest(1, 0, float(i % 3 > 0), i) for i in range(90)]
    heaped = [Contest(1, 0, float(i % 3 > 0), i % 3) for i in range(90)]
    wide, narrow = by_version(heaped)[1], by_version(spread)[1]
    assert wide.win_rate == pytest.approx(narrow.win_rate)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    truth = 1 / (1 + math.exp(-0.6))
    found = [by_version(drawn_contests([0.0, 0.6], 120, seed), num_resamples=100)[1] for seed in range(150)]
    covered = sum(one.low <= truth <= one.high for one in found)
    assert covered >= 0.9 * len(found)


def test_of_many_versions_the_base_and_the_newest_are_fitted():
    contests = [Contest(version, 0, 1.0, version) for version in range(1, MAX_VERSIONS + 20)]
    versions = [one.version for one in standings(contests, num_resamples=2)]
    assert versions == [0, *range(20 + 1, MAX_VERSIONS + 20)]


def test_the_same_votes_give_the_same_figures():
    contests = drawn_contests([0.0, 0.4, 0.8], 100, seed=4)
    assert standings(contests) == standings(contests)


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match=r"score 2.0; give 1 for a win"):
        standings([Contest(0, 1, 2.0, 0)])
    with pytest.raises(InputError, match=r"confidence is 1\.5"):
        standings([], confidence=1.5)


one_contest = st.builds(
    Contest, st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 8)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(one_contest, max_size=60))
def test_every_table_of_votes_gives_finite_ordered_figures_that_do_not_depend_on_who_is_named_first(contests):
    turned = [Contest(one.second, one.first, 1 - one.score, one.prompt) for one in contests]
    for one, other in zip(standings(contests, num_resamples=20), standings(turned, num_resamples=20), strict=True):
        assert (one.win_rate is None) == (other.win_rate is None)
        if one.win_rate is not None:
            assert 0 < one.low <= one.win_rate <= one.high < 1
            assert one.win_rate == pytest.approx(other.win_rate, abs=1e-6)
