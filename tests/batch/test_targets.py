"""Learnt tokens are packed without padding and dealt out to micro-batches and steps by rules that need no state."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.batch.targets import LearntSequence, by_token_budget, items_of_step, pack_targets

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def test_each_learnt_token_stands_behind_its_state_and_nothing_behind_the_last_is_packed() -> None:
    first = LearntSequence("a", (10, 11, 12, 13, 14), (range(1, 2), range(3, 4)))
    second = LearntSequence("b", (20, 21, 22), (range(1, 3),))
    targets = pack_targets([first, second])
    assert targets.ids_T.tolist() == [10, 11, 12, 20, 21]
    assert targets.lengths == (3, 2)
    assert targets.state_N.tolist() == [0, 2, 3, 4]
    assert targets.chosen_N.tolist() == [11, 13, 21, 22]
    assert (first.num_learnt, first.num_used, second.num_used) == (2, 3, 2)


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=5))
def test_packing_agrees_with_a_loop_over_tokens(flags: list[list[bool]]) -> None:
    sequences: list[LearntSequence] = []
    expected: list[tuple[tuple[int, ...], int]] = []
    for number, learnt in enumerate(flags):
        learnt[1] = True
        ids = tuple(100 * number + place for place in range(len(learnt)))
        spans = tuple(range(place, place + 1) for place in range(1, len(learnt)) if learnt[place])
        sequences.append(LearntSequence(str(number), ids, spans))
        expected += [(ids[:place], ids[place]) for place in range(1, len(learnt)) if learnt[place]]
    targets = pack_targets(sequences)
    starts = torch.tensor(targets.lengths).cumsum(0) - torch.tensor(targets.lengths)
    seen: list[tuple[tuple[int, ...], int]] = []
    for state, chosen in zip(targets.state_N.tolist(), targets.chosen_N.tolist(), strict=True):
        start = max(begin for begin in starts.tolist() if begin <= state)
        seen.append((tuple(targets.ids_T[start : state + 1].tolist()), chosen))
    assert seen == expected


def test_a_cut_keeps_what_is_learnt_before_it() -> None:
    whole = LearntSequence("a", tuple(range(9)), (range(2, 4), range(6, 9)))
    assert whole.cut(7) == LearntSequence("a", tuple(range(7)), (range(2, 4), range(6, 7)), is_cut=True)
    assert whole.cut(6).spans == (range(2, 4),)
    assert whole.cut(2).spans == ()


@given(LENGTHS, st.integers(1, 80), st.booleans())
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, padded: bool
) -> None:
    groups = by_token_budget(lengths, budget, padded=padded)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        cost = len(sizes) * max(sizes) if padded else sum(sizes)
        assert len(group) == 1 or cost <= budget
    assert lengths[groups[0][0]] == max(lengths)  # what may not fit into memory comes first


@given(LENGTHS, st.integers(60, 120))
def test_packed_groups_are_no_more_than_the_known_bound(lengths: list[int], budget: int) -> None:
    fewest = -(-sum(lengths) // budget)
    # Two groups that are both at most half full would have been one.
    assert len(by_token_budget(lengths, budget, padded=False)) <= 2 * fewest


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
def test_an_epoch_of_steps_takes_every_sequence_once_in_any_window(
    seed: int, count: int, size: int, window: int
) -> None:
    lengths = [(7 * index) % 13 + 1 for index in range(count * size)]
    steps = [items_of_step(seed, step, size, lengths, window=window) for step in range(count)]
    assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
    assert steps[count // 2] == items_of_step(seed, count // 2, size, lengths, window=window)
    assert {len(step) for step in steps} == {size}


def test_a_window_gathers_equal_lengths_and_shuffles_the_steps() -> None:
    lengths = [index % 16 + 1 for index in range(64)]

    def spread(window: int) -> tuple[float, list[int]]:
        steps = [[lengths[i] for i in items_of_step(3, step, 4, lengths, window=window)] for step in range(16)]
        return sum(max(step) - min(step) for step in steps) / 16, [max(step) for step in steps]

    assert spread(16)[0] == 0.0
    assert spread(1)[0] > 5
    assert spread(16)[1] != sorted(spread(16)[1])


def test_without_a_window_the_order_is_that_of_the_seed() -> None:
    from tunesmith.base.core.seeds import items_at

    assert items_of_step(5, 3, 4, [1] * 11) == items_at(5, 12, 4, 11)


def test_a_window_does_not_reach_into_the_next_pass() -> None:
    """Ten sequences, two a step: five steps a pass, so a window of three is followed by one of two."""
    lengths = list(range(1, 11))
    steps = [items_of_step(1, step, 2, lengths, window=3) for step in range(10)]
    for first, last in ((0, 5), (5, 10)):
        assert sorted(index for step in steps[first:last] for index in step) == list(range(10))
    spans = [max(step) - min(step) for step in steps]
    drawn = [items_of_step(1, step, 2, lengths) for step in range(10)]
    assert {i for step in drawn[:3] for i in step} == {i for step in steps[:3] for i in step}
    assert {i for step in drawn[3:5] for i in step} == {i for step in steps[3:5] for i in step}
    assert sum(spans) < sum(max(step) - min(step) for step in drawn)
