import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from tunesmith.base.core.errors import InputError
from tunesmith.collect.statistics.bradley_terry import (
    MAX_VERSIONS,
    NOT_COMPARABLE,
    PRIOR_STD,
    WALK_STDS,
    standings,
)
from tunesmith.collect.store.vote_watch import Contest


def by_version(contests, base="v0", **options):
    return {int(one.name[1:]): one for one in standings(contests, base, **options)}


def drawn_contests(strengths, num, seed, num_prompts=10_000):
    dice = random.Random(seed)
    found = []
    for _ in range(num):
        first, second = dice.sample(range(len(strengths)), 2)
        chance = 1 / (1 + math.exp(strengths[second] - strengths[first]))
        found.append(Contest(f"v{first}", f"v{second}", float(dice.random() < chance), dice.randrange(num_prompts)))
    return found


def independent_fit(contests, num_versions):
    """The mean of the modes by scipy, weighted by Laplace's method with Hessians by finite differences."""

    def fitted(std):
        def loss(strength):
            total = float(strength @ strength) / (2 * PRIOR_STD**2)
            total += sum((b - a) ** 2 for a, b in pairwise(strength)) / (2 * std**2)
            for one in contests:
                gap = strength[int(one.first[1:])] - strength[int(one.second[1:])]
                total += one.score * math.log1p(math.exp(-gap)) + (1 - one.score) * math.log1p(math.exp(gap))
            return total

        def hessian(function, at, far=1e-3):
            steps = np.eye(num_versions) * far
            corners = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
            return [
                [sum(sign * function(at + i * a + j * b) for i, j, sign in corners) / (4 * far**2) for b in steps]
                for a in steps
            ]

        mode = minimize(loss, np.zeros(num_versions), method="BFGS", options={"gtol": 1e-8}).x
        prior = np.eye(num_versions) / PRIOR_STD**2
        for place in range(num_versions - 1):
            edge = np.eye(num_versions)[place] - np.eye(num_versions)[place + 1]
            prior += np.outer(edge, edge) / std**2
        volume = math.log(np.linalg.det(prior)) - math.log(np.linalg.det(hessian(loss, mode)))
        return math.exp(-loss(mode) + volume / 2 + 70), mode

    fits = [fitted(std) for std in WALK_STDS]
    return sum(weight * mode for weight, mode in fits) / sum(weight for weight, _ in fits)


@pytest.mark.parametrize("truth", [[0.0, 0.1, 0.2, 0.2], [0.0, 0.7, -0.4, 1.5]])
def test_strengths_equal_those_of_an_independent_optimiser_with_ties(truth):
    contests = [*drawn_contests(truth, 120, seed=1), Contest("v0", "v3", 0.5, 1), Contest("v2", "v1", 0.5, 2)]
    expected = independent_fit(contests, 4)
    for one in standings(contests, num_resamples=0):
        assert one.strength == pytest.approx(expected[int(one.name[1:])] - expected[0], abs=1e-5)
        assert one.win_rate == pytest.approx(1 / (1 + math.exp(-one.strength)))


def walk(seed, num_versions=12, num_votes=10, step=0.15):
    """Strengths of versions, each near the one before, and ten votes on each against the base."""
    dice = random.Random(seed)
    strengths = [0.0]
    for _ in range(num_versions - 1):
        strengths.append(strengths[-1] + dice.gauss(0.05, step))
    contests = [
        Contest(
            f"v{version}", "v0", float(dice.random() < 1 / (1 + math.exp(-strengths[version]))), num_votes * version + k
        )
        for version in range(1, num_versions)
        for k in range(num_votes)
    ]
    return [1 / (1 + math.exp(-one)) for one in strengths], contests


def test_votes_on_its_neighbours_make_the_estimate_of_a_version_better_and_its_interval_still_holds():
    errors, alone, covered = [], [], []
    for seed in range(60):
        truth, contests = walk(seed)
        for version, one in by_version(contests, num_resamples=0).items():
            if version:
                of_version = [vote.score for vote in contests if vote.first == one.name]
                errors.append(abs(one.win_rate - truth[version]))
                alone.append(abs(sum(of_version) / len(of_version) - truth[version]))
                covered.append(one.low <= truth[version] <= one.high)
    assert np.mean(errors) < 0.6 * np.mean(alone)
    assert np.mean(covered) >= 0.93


def test_models_are_no_neighbours_of_a_version():
    contests = [Contest("a run", "v0", 1.0, 1), Contest("a run", "smollm2", 0.5, 2), Contest("v1", "v0", 1.0, 3)]
    assert [one.name for one in standings(contests)] == ["a run", "smollm2", "v0", "v1"]
    found = {one.name: one.strength for one in standings(contests)}
    assert found["a run"] > found["smollm2"] > found["v0"]


def test_the_base_wins_half_against_itself_for_certain():
    base = by_version(drawn_contests([0.0, 1.0], 40, seed=2))[0]
    assert (base.strength, base.win_rate, base.low, base.high) == (0.0, 0.5, 0.5, 0.5)


def test_no_votes_leave_the_base_alone():
    assert [(one.name, one.num_votes) for one in standings([], base="v3")] == [("v3", 0)]


def test_votes_within_one_version_say_nothing():
    contests = drawn_contests([0.0, 1.0], 40, seed=3)
    assert standings([*contests, Contest("v1", "v1", 1.0, 5), Contest("v7", "v7", 0.0, 6)]) == standings(contests)


def test_a_version_that_never_lost_is_finite_and_its_interval_wide():
    few = by_version([Contest("v1", "v0", 1.0, prompt) for prompt in range(3)])[1]
    many = by_version([Contest("v1", "v0", 1.0, prompt) for prompt in range(300)])[1]
    assert 0.5 < few.win_rate < many.win_rate < 1
    assert few.low < 0.5 < many.low
    assert few.high - few.low > 0.4


def test_a_version_without_a_chain_of_votes_to_the_base_has_no_win_rate_but_a_reason():
    found = by_version(
        [
            Contest("v1", "v0", 1.0, 0),
            Contest("v2", "v3", 1.0, 1),
            Contest("v2", "v3", 0.0, 2),
            Contest("v3", "v2", 0.5, 3),
        ]
    )
    assert found[1].win_rate is not None
    assert (found[2].win_rate, found[2].low, found[2].note, found[2].num_votes) == (None, None, NOT_COMPARABLE, 3)


def test_a_chain_compares_versions_that_never_met():
    contests = [Contest("v1", "v0", float(i % 4 > 0), i) for i in range(80)]
    contests += [Contest("v2", "v1", float(i % 4 > 0), i) for i in range(80)]
    found = by_version(contests)
    assert found[2].low > 0.5
    assert found[2].strength == pytest.approx(2 * found[1].strength, rel=0.05)


def test_a_cycle_of_preferences_leaves_all_equal():
    contests = [Contest(*pair, 1.0, i) for i, pair in enumerate([("v0", "v1"), ("v1", "v2"), ("v2", "v0")] * 5)]
    assert all(one.win_rate == pytest.approx(0.5) for one in standings(contests))


def test_votes_on_one_prompt_widen_the_interval_as_they_go_together():
    spread = [Contest("v1", "v0", float(i % 3 > 0), i) for i in range(90)]
    heaped = [Contest("v1", "v0", float(i % 3 > 0), i % 3) for i in range(90)]
    wide, narrow = by_version(heaped)[1], by_version(spread)[1]
    assert wide.win_rate == pytest.approx(narrow.win_rate)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    truth = 1 / (1 + math.exp(-0.6))
    votes = [drawn_contests([0.0, 0.6], 120, seed) for seed in range(150)]
    # A model has no neighbours whose votes would count too.
    models = [
        [replace(one, **{side: "a run"}) for one in some for side in ("first", "second") if getattr(one, side) == "v1"]
        for some in votes
    ]
    found = [standings(some, num_resamples=100)[0] for some in models]
    covered = sum(one.low <= truth <= one.high for one in found)
    assert covered >= 0.9 * len(found)


def test_of_many_versions_the_base_and_the_newest_are_fitted():
    contests = [Contest(f"v{version}", "v0", 1.0, version) for version in range(1, MAX_VERSIONS + 20)]
    versions = [int(one.name[1:]) for one in standings(contests, num_resamples=2)]
    assert versions == [0, *range(20 + 1, MAX_VERSIONS + 20)]


def test_the_same_votes_give_the_same_figures():
    contests = drawn_contests([0.0, 0.4, 0.8], 100, seed=4)
    assert standings(contests) == standings(contests)


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match=r"score 2.0; give 1 for a win"):
        standings([Contest("v0", "v1", 2.0, 0)])


one_contest = st.builds(
    Contest,
    *[st.sampled_from(["v0", "v1", "v2", "v5", "smollm2", "a run"])] * 2,
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 8),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(one_contest, max_size=60))
def test_every_table_of_votes_gives_finite_ordered_figures_that_do_not_depend_on_who_is_named_first(contests):
    turned = [Contest(one.second, one.first, 1 - one.score, one.prompt_id) for one in contests]
    for one, other in zip(standings(contests, num_resamples=20), standings(turned, num_resamples=20), strict=True):
        assert (one.win_rate is None) == (other.win_rate is None)
        if one.win_rate is not None:
            assert 0 < one.low <= one.win_rate <= one.high < 1
            assert one.win_rate == pytest.approx(other.win_rate, abs=1e-6)
