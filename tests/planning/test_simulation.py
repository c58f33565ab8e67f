"""The simulated queue: its makespan is between the ideal and the bound of list scheduling, and it is deterministic."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.observe.planning.simulation import InOrder, draw_s, run_queue, sample_lengths

SECONDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=60)


@given(SECONDS, st.integers(1, 8))
def test_a_makespan_is_between_the_ideal_and_grahams_bound(seconds: list[float], num_workers: int):
    answers = run_queue(InOrder(len(seconds)), seconds, [1.0] * num_workers)
    assert sorted(answer.lease for answer in answers) == list(range(len(seconds)))
    mean_s, longest_s = sum(seconds) / num_workers, max(seconds)
    assert answers[-1].at_s >= max(mean_s, longest_s) * (1 - 1e-9)
    assert answers[-1].at_s <= (mean_s + (1 - 1 / num_workers) * longest_s) * (1 + 1e-9)


@given(SECONDS, st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_the_same_leases_are_answered_in_the_same_order(seconds: list[float], speeds: list[float]):
    assert run_queue(InOrder(len(seconds)), seconds, speeds) == run_queue(InOrder(len(seconds)), seconds, speeds)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 50))
def test_an_engine_needs_between_the_longest_and_all_of_its_completions(lengths: list[int], slots: int):
    steps = draw_s(lengths, slots, lambda _: 1.0)
    assert max(lengths) <= steps <= sum(lengths)
    assert steps >= sum(lengths) / slots
    tokens = draw_s(lengths, slots, float)  # a step that takes as long as it has rows
    assert tokens == sum(lengths)


def test_one_slot_draws_one_after_the_other_and_enough_slots_all_at_once():
    assert draw_s([3, 5, 2], 1, lambda _: 2.0) == 20
    assert draw_s([3, 5, 2], 3, {3: 1.0, 2: 10.0, 1: 100.0}.__getitem__) == 2 * 1 + 1 * 10 + 2 * 100


def test_lengths_are_drawn_by_the_seed_around_their_mean():
    lengths = sample_lengths(4000, 100, 10_000, seed=1)
    assert lengths == sample_lengths(4000, 100, 10_000, seed=1) != sample_lengths(4000, 100, 10_000, seed=2)
    assert 90 < statistics.fmean(lengths) < 110
    assert max(sample_lengths(1000, 100, 120, seed=0)) == 120
