"""The sequential test of two shares: its level over many sequences of looks, and what it says of clear cases."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.config.algorithms.live import LiveCanarySection
from tunesmith.collect.statistics.sequential import Tally, evidence_against
from tunesmith.learn.live.canary import Trial, decide

SECTION = LiveCanarySection(share=0.5, margin=0.2, p_value=0.1)


def verdict(shares: tuple[float, float], num: int, seed: int) -> str:
    """The decision on thumbs of two versions with these shares of thumbs up, by the test alone, after each thumb."""
    draw, sums, nums = random.Random(seed), [0, 0], [0, 0]
    for _ in range(num):
        side = int(draw.random() < 0.5)
        nums[side] += 1
        sums[side] += draw.random() < shares[side]
        found, _note = decide(Trial(Tally(nums[0], sums[0]), Tally(nums[1], sums[1]), 0.0, 0.0), SECTION, 0.0)
        if found != "wait":
            return found
    return "wait"


def share_of(decision: str, shares: tuple[float, float], num_sequences: int, num: int) -> float:
    return sum(verdict(shares, num, seed) == decision for seed in range(num_sequences)) / num_sequences


@pytest.mark.parametrize("served", [0.3, 0.9])
def test_a_version_that_is_worse_by_the_margin_is_seldom_served_however_often_one_looks(served: float) -> None:
    assert share_of("serve", (served - 0.2, served), 60, 150) <= 0.1


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_one_that_is_as_good_is_seldom_taken_back(share: float) -> None:
    assert share_of("take_back", (share, share), 60, 150) <= 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("served", [0.25, 0.5, 0.75, 1.0])
def test_the_level_holds_over_long_sequences(served: float) -> None:
    assert share_of("serve", (served - 0.2, served), 400, 1000) <= 0.1
    assert share_of("take_back", (served, served), 400, 1000) <= 0.1


def test_clear_cases_are_decided_soon() -> None:
    assert share_of("take_back", (0.2, 0.9), 40, 60) > 0.9
    assert share_of("serve", (0.9, 0.5), 40, 150) > 0.9


TALLIES = st.integers(0, 200).flatmap(lambda n: st.builds(Tally, st.just(n), st.floats(0, n)))


@given(TALLIES, TALLIES, st.sampled_from([-0.3, -0.1, 0.0, 0.1]))
def test_the_evidence_is_the_least_over_the_hypothesis(first: Tally, second: Tally, gap: float) -> None:
    """Against a grid of shares under the hypothesis."""

    def log_likelihood(tally: Tally, p: float) -> float:
        p = min(max(p, 1e-9), 1 - 1e-9)
        return tally.sum * math.log(p) + (tally.num - tally.sum) * math.log1p(-p)

    def mixture(tally: Tally) -> float:
        a, b = 0.5 + tally.sum, 0.5 + tally.num - tally.sum
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) - math.log(math.pi)

    grid = [place / 20 for place in range(21)]
    for is_lower in (False, True):
        found = evidence_against(first, second, gap, is_lower=is_lower)
        under = [(p, q) for p in grid for q in grid if (p <= q + gap + 1e-9 if is_lower else p >= q + gap - 1e-9)]
        least = min(
            mixture(first) + mixture(second) - log_likelihood(first, p) - log_likelihood(second, q) for p, q in under
        )
        assert math.isfinite(found) and found <= least + 1e-6


def test_of_nothing_there_is_no_evidence() -> None:
    assert evidence_against(Tally(), Tally(), -0.1, is_lower=True) == pytest.approx(0.0)
