"""Seeds and orders: pure functions, the same on every machine."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.seeds import Groups, derive, items_at, permutation


def test_a_derived_seed_is_pinned():
    assert derive(0, "rollout", 1) == 1151401845474615813


def test_keys_of_another_type_or_grouping_give_another_seed():
    assert len({derive(0, "1"), derive(0, 1), derive(0, "a", "b"), derive(0, "ab"), derive(1, "a"), derive(0)}) == 6


def test_a_seed_does_not_depend_on_the_hash_seed_of_the_process():
    code = "from tunesmith.base.core.seeds import derive, permutation; print(derive(3, 'a'), permutation(3, 1, 5))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {f"{derive(3, 'a')} {permutation(3, 1, 5)}\n"}


@given(st.integers(0, 2**40), st.text(max_size=8))
def test_a_seed_fits_in_63_bits(seed: int, key: str):
    assert 0 <= derive(seed, key) < 2**63


@given(st.integers(0, 5), st.integers(0, 3), st.integers(1, 40))
def test_an_epoch_visits_every_item_once(seed: int, epoch: int, length: int):
    assert sorted(permutation(seed, epoch, length)) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own():
    assert len({tuple(permutation(seed, epoch, 20)) for seed in range(3) for epoch in range(3)}) == 9


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 20), st.integers(1, 12))
def test_drawing_in_two_parts_gives_the_items_of_one_draw(position: int, first: int, second: int, length: int):
    whole = items_at(7, position, first + second, length)
    assert whole == items_at(7, position, first, length) + items_at(7, position + first, second, length)


def test_a_draw_crosses_epochs():
    assert items_at(0, 0, 6, 3) == permutation(0, 0, 3) + permutation(0, 1, 3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(0, 3))
def test_items_of_a_group_follow_each_other(keys: list[int], epoch: int):
    order = items_at(3, epoch * len(keys), len(keys), len(keys), Groups(keys))
    assert sorted(order) == list(range(len(keys)))
    assert len([key for key, _ in itertools.groupby(keys[index] for index in order)]) == len(set(keys))


def test_items_of_one_group_are_shuffled():
    orders = {tuple(items_at(0, epoch * 20, 20, 20, Groups([""] * 20))) for epoch in range(3)}
    assert len(orders) == 3 and tuple(range(20)) not in orders


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_item_is_drawn_again_and_again(count: int):
    assert items_at(0, 5, count, 1) == [0] * count
