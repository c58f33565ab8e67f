"""Blocks are taken blank first, then the longest unused; what was never written is never found again."""

import pytest
from integrity import pool_errors

from tunesmith.engine.rollout.kv_cache import BlockPool


def _kept(pool: BlockPool, key: bytes) -> int:
    block = pool.take()
    pool.name(block, key)
    pool.is_written[block] = True
    pool.release(block)
    return block


def test_blank_blocks_are_taken_before_known_ones_and_of_those_the_longest_unused():
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    for block, key in ((first, b"first"), (second, b"second")):
        pool.name(block, key)
        pool.is_written[block] = True
    pool.release(second)
    pool.release(first)
    assert pool.num_free == 3
    assert pool.take() not in (first, second)
    assert pool.take() == second, "freed before the other, so unused for longer"
    assert pool.block_of.get(b"second") is None and pool.block_of.get(b"first") == first


def test_a_block_used_again_counts_as_used_last():
    pool = BlockPool(2)
    first = pool.take()
    second = pool.take()
    for block, key in ((first, b"first"), (second, b"second")):
        pool.name(block, key)
        pool.is_written[block] = True
        pool.release(block)
    pool.hold(first)
    pool.release(first)
    assert pool.take() == second


def test_contents_that_were_never_written_are_forgotten_with_the_last_holder():
    pool = BlockPool(1)
    block = pool.take()
    pool.name(block, b"promised")
    assert pool.block_of.get(b"promised") == block
    pool.release(block)
    assert pool.block_of.get(b"promised") is None
    assert pool_errors(pool) == []


def test_a_block_that_is_taken_again_is_unwritten_again():
    pool = BlockPool(1)
    _kept(pool, b"old")
    block = pool.take()
    pool.name(block, b"promised")
    pool.release(block)
    assert pool.block_of.get(b"promised") is None


def test_the_first_block_of_some_contents_is_the_one_that_is_found():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.name(first, b"same")
    pool.name(second, b"same")
    assert pool.block_of.get(b"same") == first and pool.key_of[second] is None
    pool.release(second)
    assert pool.block_of.get(b"same") == first
    assert pool_errors(pool) == []


def test_forgotten_contents_are_found_no_more_and_no_block_is_lost():
    pool = BlockPool(4)
    kept = _kept(pool, b"kept")
    held = pool.take()
    pool.name(held, b"held")
    pool.forget_contents()
    assert pool.block_of.get(b"kept") is None and pool.block_of.get(b"held") is None
    pool.release(held)
    assert pool.num_free == 4
    assert sorted(pool.take() for _ in range(4)) == [0, 1, 2, 3] and kept in range(4)
    assert pool_errors(pool) == []


def test_an_exhausted_pool_says_so():
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(RuntimeError, match="no free block"):
        pool.take()


def test_damage_is_reported():
    pool = BlockPool(2)
    block = _kept(pool, b"kept")
    pool.hold(block)
    pool.num_holders[block] = 0
    assert any("held, cached or blank" in line for line in pool_errors(pool))
