import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.collect.statistics.intervals import (
    bootstrap_interval,
    distinct_2,
    distinct_at_equal_tokens,
    even_lengths,
    is_exact,
    mcnemar,
    paired_permutation_p,
    plateau,
    proportion_interval,
)


def brute_force_p(diff):
    observed = abs(math.fsum(diff))
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, diff, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(diff))
    ]
    return sum(total >= observed - 1e-9 for total in sums) / len(sums)


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 9])
def test_exact_permutation_p_equals_the_enumeration_of_all_sign_patterns(num_prompts):
    for seed in range(5):
        diff = np.random.default_rng(seed).normal(0.4, 1, num_prompts).round(2).tolist()
        assert paired_permutation_p(diff) == pytest.approx(brute_force_p(diff), abs=1e-12)


def test_permutation_p_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    diff = np.random.default_rng(3).normal(0.3, 1, 12)
    expected = stats.permutation_test(
        (diff,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    ).pvalue
    assert paired_permutation_p(diff) == pytest.approx(expected, abs=1e-9)


def test_fifteen_prompts_that_all_improve_give_the_smallest_exact_p():
    assert paired_permutation_p([0.1 * k for k in range(1, 16)]) == 2 / 2**15


def test_no_difference_at_all_gives_p_one():
    assert paired_permutation_p([0.0] * 7) == 1.0


def test_equal_differences_count_as_ties_in_spite_of_rounding():
    assert paired_permutation_p([0.1, 0.2, 0.3, -0.6]) == 1.0


def test_monte_carlo_p_is_near_the_exact_one_is_seeded_and_never_zero():
    assert is_exact(16) and not is_exact(17)
    diff = np.random.default_rng(0).normal(0.35, 1, 17).tolist()
    estimate = paired_permutation_p(diff, seed=1, num=20_000)
    assert estimate == paired_permutation_p(diff, seed=1, num=20_000)
    assert estimate == pytest.approx(brute_force_p(diff), abs=0.015)
    assert paired_permutation_p([1.0] * 40, num=999) == 1 / 1000


def test_permutation_p_is_uniform_enough_under_the_null():
    values = [paired_permutation_p(np.random.default_rng(seed).normal(size=10)) for seed in range(400)]
    assert 0.02 <= np.mean(np.array(values) <= 0.05) <= 0.09


def test_bootstrap_interval_agrees_with_scipy_and_is_seeded():
    stats = pytest.importorskip("scipy.stats")
    diff = np.random.default_rng(5).normal(0.5, 1, 30)
    low, high = bootstrap_interval(diff, seed=0)
    expected = stats.bootstrap((diff,), np.mean, method="percentile", n_resamples=10_000, rng=0).confidence_interval
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.03)
    assert (low, high) == bootstrap_interval(diff, seed=0) != bootstrap_interval(diff, seed=1)
    assert low < diff.mean() < high


def test_bootstrap_interval_collapses_on_constants():
    assert bootstrap_interval([0.25] * 4) == (0.25, 0.25)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (0, 12), (40, 61), (700, 800)])
def test_mcnemar_equals_the_two_sided_binomial_test(counts):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(min(counts), sum(counts), 0.5).pvalue if sum(counts) else 1.0
    assert mcnemar(*counts) == pytest.approx(expected, rel=1e-9)


def test_distinct_2_counts_different_bigrams_inside_the_lists():
    assert distinct_2([[1, 2, 1, 2], [1, 2]], 6) == 2 / 4  # 12 21 12 | 12
    assert distinct_2([[1, 2], [3, 4]], 4) == 1.0  # 2-3 across the border is no bigram
    assert distinct_2([[1], []], 1) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_even_lengths_take_position_by_position(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, 7).tolist()
    for num_tokens in range(sum(lengths) + 1):
        order = sorted((position, index) for index, length in enumerate(lengths) for position in range(length))
        taken = [index for _, index in order[:num_tokens]]
        assert even_lengths(lengths, num_tokens) == [taken.count(index) for index in range(len(lengths))]


def test_equal_token_count_stops_the_longer_side_from_looking_repetitive():
    random = np.random.default_rng(0)
    long = random.integers(0, 20, (8, 200)).tolist()
    short = [ids[:25] for ids in long]
    assert distinct_2(long, 1600) < 0.7 * distinct_2(short, 200)
    before, after, num_tokens = distinct_at_equal_tokens(short, long)
    assert before == after and num_tokens == 200


def test_the_interval_of_a_share_is_wilsons_where_every_item_is_a_cluster():
    hits = [1.0] * 60 + [0.0] * 40
    low, high = proportion_interval(hits, [str(i) for i in range(100)])
    # Wilson's interval of 60 of 100 from the tables; the sample variance makes the effective size 99.
    assert (low, high) == (pytest.approx(0.502, abs=2e-3), pytest.approx(0.691, abs=2e-3))


def test_items_that_go_together_count_as_one():
    hits = [1.0] * 60 + [0.0] * 40
    apart = proportion_interval(hits, [str(i) for i in range(100)])
    together = proportion_interval(hits, [str(i // 10) for i in range(100)])
    ten = proportion_interval([1.0] * 6 + [0.0] * 4, [str(i) for i in range(10)])
    assert together == pytest.approx(ten, abs=1e-9)
    # Ten draws whose variance is estimated from themselves are worth nine: Wilson's interval by its formula.
    z, n, p = 1.959964, 9, 0.6
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert ten == pytest.approx([(p + z**2 / (2 * n) + sign * half) / (1 + z**2 / n) for sign in (-1, 1)], abs=1e-6)
    assert together[1] - together[0] > 2 * (apart[1] - apart[0])


def test_a_share_without_misses_has_an_interval_that_narrows_with_the_clusters():
    few, many = (proportion_interval([1.0] * 40, [str(i % n) for i in range(40)]) for n in (4, 40))
    assert few[0] < many[0] < 1.0
    assert few[1] == pytest.approx(1.0)
    assert many[1] == pytest.approx(1.0)


def test_the_interval_covers_the_true_share_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        share_C = random.beta(6, 4, size=80)  # pairs of one prompt are alike
        clusters = [str(c) for c in range(80) for _ in range(3)]
        hits = [float(random.random() < share_C[int(c)]) for c in clusters]
        low, high = proportion_interval(hits, clusters)
        covered += low <= 0.6 <= high
    assert 0.91 < covered / 400 < 0.985


def test_a_curve_that_rises_and_stays_has_its_plateau_where_it_stops_rising() -> None:
    found = plateau([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, *[10] * 15], window=3)
    assert (found.first, found.level, found.is_flat) == (1.0, 10.0, True)
    assert found.step == 10  # 9, 10, 10: 0.33 below the level, within a tenth of 9


def test_a_curve_that_still_rises_at_its_end_is_not_flat() -> None:
    found = plateau(list(range(20)), window=4)
    assert not found.is_flat
    assert found.step > 14


def test_a_dip_late_in_the_curve_moves_the_plateau_behind_it() -> None:
    values = [0.0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5]
    assert plateau(values, window=2).step > 9


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_step_is_one_of_the_curve_and_a_constant_is_flat_from_the_start(values: list[float], window: int) -> None:
    assert 1 <= plateau(values, window=window).step <= len(values)
    assert plateau([2.0] * len(values), window=window).step == 1
