"""The cache against a naive model: whatever is done to it, every sequence reads back its own tokens."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_cache

from tunesmith.base.core.errors import InputError
from tunesmith.engine.rollout.kv_cache import (
    BLOCK_TOKENS,
    BlockCopy,
    CacheShape,
    KVCache,
    Table,
    allocate_storage,
    blocks_for,
    copy_blocks,
    num_blocks_for,
    prompt_keys,
)

SHAPE = CacheShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
MAX_TOKENS = 80
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 50)).map(
    # Few beginnings, many lengths: prompts often share one, two or three full blocks.
    lambda drawn: tuple([drawn[0]] * 16 + [drawn[1]] * 16 + [7] * 18)[: drawn[2]]
)


def test_a_token_of_smollm2_takes_23040_bytes_and_blocks_fill_the_budget():
    assert SHAPE.bytes_per_block == 23040 * 16
    assert num_blocks_for(23040 * 16 * 9 + 1, SHAPE, max_tokens=128) == 9
    with pytest.raises(InputError, match=r"one sequence of 129 tokens takes 3\.5 MiB; raise the budget"):
        num_blocks_for(23040 * 16 * 9 + 1, SHAPE, max_tokens=129)


def test_storage_copies_whole_blocks_in_all_layers():
    shape = CacheShape(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    storage = allocate_storage(shape, 5)
    assert storage.numel() * storage.element_size() == 5 * shape.bytes_per_block
    assert not storage.any()
    storage.copy_(torch.arange(storage.numel()).view_as(storage))
    before = storage.clone()
    copy_blocks(storage, [BlockCopy(0, 3), BlockCopy(0, 4)])
    copy_blocks(storage, [])
    assert torch.equal(storage[:, :, :3], before[:, :, :3])
    assert torch.equal(storage[:, :, 3], before[:, :, 0]) and torch.equal(storage[:, :, 4], before[:, :, 0])


def test_keys_name_beginnings_not_single_blocks():
    same, other = prompt_keys([1] * 32), prompt_keys([2] * 16 + [1] * 16)
    assert len(same) == 2 and len(set(same + other)) == 4
    assert prompt_keys([1] * 31) == same[:1]
    assert prompt_keys([1] * 15) == []


def _cache(num_blocks: int = 20) -> KVCache:
    return KVCache(num_blocks, max_tokens=MAX_TOKENS, max_tables=16)


def _computed(cache: KVCache, prompt_ids: tuple[int, ...]) -> Table:
    table = cache.allocate(prompt_ids)
    cache.mark_written(table, len(prompt_ids))
    return table


def test_completions_share_full_blocks_and_copy_the_last_one_when_they_write():
    cache = _cache()
    prompt = _computed(cache, tuple(range(20)))
    first, second = cache.fork(prompt), cache.fork(prompt)
    assert cache.num_free == 18
    copy = cache.append(first)
    assert copy == BlockCopy(prompt.blocks[1], first.blocks[1])
    assert first.blocks[0] == prompt.blocks[0] and first.blocks[1] != prompt.blocks[1]
    cache.free(prompt)
    assert cache.append(second) is None, "the last holder writes in place"
    assert cache.append(first) is None
    check_cache(cache)


def test_a_prompt_of_full_blocks_is_never_copied():
    cache = _cache()
    prompt = _computed(cache, tuple(range(32)))
    fork = cache.fork(prompt)
    assert cache.append(fork) is None and fork.blocks[:2] == prompt.blocks and len(fork.blocks) == 3


def test_the_last_token_of_a_known_prompt_is_computed_anyway():
    cache = _cache()
    cache.free(_computed(cache, tuple(range(32))))
    assert cache.allocate(tuple(range(32))).num_found == 16
    assert cache.allocate(tuple(range(33))).num_found == 32
    check_cache(cache)


def test_equal_beginnings_are_shared_also_before_they_are_computed():
    cache = _cache()
    first = cache.allocate((1,) * 40)
    second = cache.allocate((1,) * 32 + (2,) * 8)
    assert second.num_found == 32 and second.blocks[:2] == first.blocks[:2]
    with pytest.raises(RuntimeError, match="would now never be computed"):
        cache.free(first)
    cache.free(second)
    cache.free(first)
    assert cache.allocate((1,) * 40).num_found == 0, "what was never computed is not found"
    check_cache(cache)


def test_freed_prompts_are_found_until_their_blocks_are_taken_the_end_first():
    cache = _cache(num_blocks=4)
    cache.free(_computed(cache, (1,) * 49))
    assert cache.num_needed((1,) * 49) == 4, "found blocks that nobody holds are taken too"
    cache.free(_computed(cache, (2,) * 32))
    assert cache.allocate((1,) * 49).num_found == 32
    check_cache(cache)


def test_invalidate_forgets_prefixes_but_not_what_runs():
    cache = _cache()
    cache.free(_computed(cache, (1,) * 40))
    held = _computed(cache, (2,) * 40)
    blocks = list(held.blocks)
    cache.invalidate()
    assert cache.allocate((1,) * 40).num_found == 0
    assert cache.allocate((2,) * 40).num_found == 0
    assert held.blocks == blocks
    check_cache(cache)
    cache.free(held)
    check_cache(cache)


def test_misuse_is_a_defect_that_is_named():
    cache = KVCache(2, max_tokens=32, max_tables=1)
    with pytest.raises(RuntimeError, match="prompt of 33 tokens"):
        cache.allocate((1,) * 33)
    table = cache.allocate((1,) * 32)
    with pytest.raises(RuntimeError, match="before its prompt is computed"):
        cache.fork(table)
    with pytest.raises(RuntimeError, match="maximum of 32 tokens"):
        cache.append(table)
    with pytest.raises(RuntimeError, match="too few free blocks"):
        cache.allocate((2,))
    cache.free(table)
    _computed(cache, (3,))
    with pytest.raises(RuntimeError, match="more than the 1 tables"):
        cache.allocate((4,))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda cache, table: table.blocks.append(19), "3 blocks for 20 tokens"),
        (lambda cache, table: cache._pool.hold(table.blocks[0]), "its count says 2"),
        (lambda cache, table: cache.block_tables.fill_(19), "differs from the table"),
        (lambda cache, table: setattr(table, "prompt_ids", (9,) * 20), "not those of its prompt"),
        (lambda cache, table: table.blocks.reverse(), "a key of other contents"),
        (lambda cache, table: setattr(table, "num_written", 21), "counts its tokens wrongly"),
        (lambda cache, table: cache._free_rows.pop(), "a row of block_tables is lost"),
        (lambda cache, table: cache._pool.is_written.__setitem__(table.blocks[0], 0), "is not marked"),
        (lambda cache, table: cache._pool.block_of.clear(), "not found by its key"),
        (lambda cache, table: setattr(cache.fork(table), "num_tokens", 21), "not equally full"),
        (lambda cache, table: cache.fork(table).blocks.reverse(), "different indices"),
    ],
)
def test_the_integrity_check_sees_damage(damage, complaint: str):
    cache = _cache()
    table = _computed(cache, (1,) * 20)
    check_cache(cache)
    damage(cache, table)
    with pytest.raises(AssertionError, match=complaint):
        check_cache(cache)


class CacheMachine(RuleBasedStateMachine):
    """Prompts come, are computed in chunks, fork, grow and go. The store holds (token, position) of what was written.

    `expected` is the naive model: the tokens of each table as a plain list. `unwritten` are the prompts that are not
    computed yet, in the order of allocation, in which they are computed.
    """

    @initialize(num_blocks=st.integers(6, 24))
    def start(self, num_blocks: int) -> None:
        self.cache = KVCache(num_blocks, max_tokens=MAX_TOKENS, max_tables=8)
        self.store = np.full((num_blocks, BLOCK_TOKENS, 2), -1)
        self.expected: dict[Table, list[int]] = {}
        self.unwritten: list[Table] = []
        self.next_token = 1000

    def _write(self, table: Table, position: int, token: int) -> None:
        block = int(self.cache.block_tables[table.row, position // BLOCK_TOKENS])
        self.store[block, position % BLOCK_TOKENS] = token, position

    def _has_room(self, num_blocks: int) -> bool:
        return self.cache.num_free >= num_blocks and len(self.expected) < self.cache.max_tables

    @rule(prompt_ids=PROMPTS)
    def allocate(self, prompt_ids: tuple[int, ...]) -> None:
        num_free, needed = self.cache.num_free, self.cache.num_needed(prompt_ids)
        if not self._has_room(needed):
            return
        table = self.cache.allocate(prompt_ids)
        assert num_free - self.cache.num_free == needed
        self.expected[table] = list(prompt_ids)
        self.unwritten.append(table)

    @precondition(lambda self: self.unwritten)
    @rule(num_tokens=st.integers(1, 60))
    def compute(self, num_tokens: int) -> None:
        table = self.unwritten[0]
        stop = min(table.num_written + num_tokens, len(table.prompt_ids))
        for position in range(table.num_written, stop):
            self._write(table, position, table.prompt_ids[position])
        self.cache.mark_written(table, stop)
        if stop == len(table.prompt_ids):
            self.unwritten.pop(0)

    def _pick(self, data: st.DataObject) -> Table | None:
        written = [table for table in self.expected if table not in self.unwritten]
        return data.draw(st.sampled_from(written), label="table") if written else None

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = self._pick(data)
        if table is not None and self._has_room(0):
            self.expected[self.cache.fork(table)] = list(self.expected[table])

    @rule(data=st.data(), count=st.integers(1, 20))
    def append(self, data: st.DataObject, count: int) -> None:
        table = self._pick(data)
        for _ in range(count):
            if table is None or table.num_tokens == MAX_TOKENS or not self.cache.num_free:
                return
            copy = self.cache.append(table)
            if copy is not None:
                self.store[copy.target] = self.store[copy.source]
            self._write(table, table.num_tokens - 1, self.next_token)
            self.expected[table].append(self.next_token)
            self.next_token += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self._pick(data)
        if table is not None:
            del self.expected[table]
            self.cache.free(table)

    @precondition(lambda self: self.unwritten)
    @rule()
    def cancel(self) -> None:
        table = self.unwritten.pop()
        del self.expected[table]
        self.cache.free(table)

    @precondition(lambda self: not self.unwritten)
    @rule()
    def invalidate(self) -> None:
        self.cache.invalidate()
        self.store[:] = np.where(self._held()[:, None, None], self.store, -1)

    def _held(self) -> np.ndarray:
        held = np.zeros(self.cache.num_blocks, dtype=bool)
        for table in self.expected:
            held[table.blocks] = True
        return held

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        check_cache(self.cache)
        assert self.cache.num_free == self.cache.num_blocks - self._held().sum()
        computed = {table for table in self.expected if table not in self.unwritten}
        for table, tokens in self.expected.items():
            read = len(tokens) if table in computed else table.num_written
            rows = self.cache.block_tables[table.row, : blocks_for(len(tokens))].numpy()
            if table in computed or table is self.unwritten[0]:
                cells = self.store[rows].reshape(-1, 2)[:read]
                assert cells[:, 0].tolist() == tokens[:read]
                assert cells[:, 1].tolist() == list(range(read))

    def teardown(self) -> None:
        for table in reversed(list(self.expected)):
            self.cache.free(table)
        check_cache(self.cache)
        assert self.cache.num_free == self.cache.num_blocks


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
