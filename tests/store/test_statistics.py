"""Agreement and bias against published examples, an oracle and the edges where they are undefined."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.collect.store.vote_stats import bias_test, cohen_kappa, krippendorff_alpha

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section C: 4 observers, 12 units, missing data.
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
)


def test_alpha_is_that_of_the_published_example():
    units = [[value for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]
    found = krippendorff_alpha(units)
    assert found.value == pytest.approx(0.743, abs=0.0005)
    assert found.num == 11


def test_kappa_is_that_of_the_published_example():
    # Two readers, 50 proposals: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no.
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert cohen_kappa(pairs).value == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("units", "reason"),
    [([], "two raters"), ([["a"], ["b"]], "two raters"), ([["a", "a"], ["a", "a"]], "all judgements are the same")],
)
def test_alpha_says_why_it_is_undefined(units: list[list[str]], reason: str):
    found = krippendorff_alpha(units)
    assert found.value is None
    assert reason in found.reason


def test_kappa_says_why_it_is_undefined():
    assert cohen_kappa([]).reason == "no item was judged by both"
    assert "one and the same" in cohen_kappa([("a", "a")]).reason


def test_full_agreement_is_one_and_steady_disagreement_is_below_chance():
    assert krippendorff_alpha([["a", "a"], ["b", "b"]]).value == pytest.approx(1.0)
    assert (krippendorff_alpha([["a", "b"], ["b", "a"], ["a", "b"]]).value or 1.0) < 0


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=8))
def test_alpha_is_at_most_one_and_never_nan(units: list[list[str]]):
    found = krippendorff_alpha(units)
    assert (found.value is None) == bool(found.reason)
    if found.value is not None:
        assert math.isfinite(found.value)
        assert found.value <= 1.0


@settings(deadline=None)  # the first example imports scipy
@given(st.integers(1, 300).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num))))
def test_the_binomial_test_is_that_of_scipy(counts: tuple[int, int]):
    stats = pytest.importorskip("scipy.stats")
    hits, num = counts
    assert bias_test(hits, num).p_value == pytest.approx(stats.binomtest(hits, num).pvalue, rel=1e-9, abs=1e-300)


def test_a_rater_who_always_goes_left_is_found_and_no_votes_prove_nothing():
    p_value = bias_test(10_000, 10_000).p_value
    assert p_value is not None
    assert p_value < 1e-100
    assert bias_test(0, 0).share is None
