"""Invariants of the cache and the scheduler, checked from outside: O(blocks and tokens).

Each block is held, cached or blank. Its count of holders is the number of tables that list it. A table has just the
blocks that its tokens need. A block in several tables has the same index in all, and is full in all or the last of all.
A key finds one block, whose ids give that key. `block_tables` repeats the tables.
"""

from collections.abc import Iterable

from tunesmith.base.core.trace import Trace
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS, BlockPool, KVCache, Table, blocks_for, prompt_keys
from tunesmith.engine.rollout.scheduler import Scheduler


def prefilled(record: Trace) -> float:
    """Prompt tokens that engines computed, and did not find in their caches, while the trace was recorded."""
    return sum(value for name, value in record.metrics().items() if name.endswith("prefill_tokens"))


def pool_errors(pool: BlockPool) -> list[str]:
    """One line for each violated invariant inside the pool."""
    found: list[str] = []
    blank = set(pool._blank)
    if len(blank) != len(pool._blank):
        found.append("a block is twice among the blank ones")
    for block, holders in enumerate(pool.num_holders):
        states = (holders > 0) + (block in blank) + (block in pool._cached)
        key = pool.key_of[block]
        if holders < 0 or states != 1:
            found.append(f"block {block}, held {holders} times, must be held, cached or blank, one of the three")
        if block in pool._cached and (key is None or not pool.is_written[block]):
            found.append(f"block {block} is cached, but its contents are not known or not written")
        if block in blank and key is not None:
            found.append(f"block {block} is blank and has a key")
        if key is not None and pool.block_of.get(key) != block:
            found.append(f"block {block} is not found by its key")
    if len(pool.block_of) != sum(key is not None for key in pool.key_of):
        found.append("a key finds a block that does not have it")
    return found


def check_cache(cache: KVCache) -> None:
    """AssertionError with one line for each violated invariant."""
    errors = pool_errors(cache._pool)
    holders: dict[int, list[tuple[Table, int]]] = {}
    for table in cache._tables.values():
        errors += _table_errors(cache, table)
        for index, block in enumerate(table.blocks):
            holders.setdefault(block, []).append((table, index))
    for block in range(cache.num_blocks):
        errors += _sharing_errors(cache, block, holders.get(block, []))
    if sorted([*cache._free_rows, *cache._tables]) != list(range(cache.max_tables)):
        errors.append("a row of block_tables is lost, or used twice")
    assert not errors, "\n".join(errors)


def _table_errors(cache: KVCache, table: Table) -> Iterable[str]:
    if cache._tables.get(table.row) is not table:
        yield f"table {table.row} is listed under another row"
    if len(table.blocks) != blocks_for(table.num_tokens):
        yield f"table {table.row} has {len(table.blocks)} blocks for {table.num_tokens} tokens"
    if not table.num_found <= table.num_written <= len(table.prompt_ids) <= table.num_tokens <= cache.max_tokens:
        yield f"table {table.row} counts its tokens wrongly"
    if cache._rows[table.row, : len(table.blocks)].tolist() != table.blocks:
        yield f"block_tables[{table.row}] differs from the table"
    if list(table.keys) != prompt_keys(table.prompt_ids):
        yield f"the keys of table {table.row} are not those of its prompt"
    for index, block in enumerate(table.blocks):
        key = cache._pool.key_of[block]
        if key is not None and (index >= len(table.keys) or key != table.keys[index]):
            yield f"block {block} of table {table.row} has a key of other contents"
        is_own = table.num_found // BLOCK_TOKENS <= index < len(table.keys)
        if is_own and (index + 1) * BLOCK_TOKENS <= table.num_written and not cache._pool.is_written[block]:
            yield f"block {block} of table {table.row} was computed and is not marked"


def _sharing_errors(cache: KVCache, block: int, holders: list[tuple[Table, int]]) -> Iterable[str]:
    if cache._pool.num_holders[block] != len(holders):
        yield f"block {block} is in {len(holders)} tables, its count says {cache._pool.num_holders[block]}"
    if len({index for _, index in holders}) > 1:
        yield f"block {block} has different indices in the tables that share it"
    ends = {min(table.num_tokens, (index + 1) * BLOCK_TOKENS) for table, index in holders}
    if len(ends) > 1:
        yield f"block {block} is shared and is not equally full in all tables"


def check_scheduler(scheduler: Scheduler) -> None:
    """AssertionError naming the first violated invariant of slots, tables and reserved blocks."""
    check_cache(scheduler._cache)
    groups = [*scheduler._ready, *scheduler._prefilling]
    reserved = [item.reserved for item in (*scheduler._running, *groups)]
    assert sum(reserved) == scheduler._reserved and min(reserved, default=0) >= 0, reserved
    assert scheduler._reserved <= scheduler._cache.num_free
    assert max(len(scheduler._running), len(groups)) <= scheduler._num_slots
    assert scheduler._num_claimed == sum(group.request.n for group in scheduler._prefilling)
    assert all(group.waiting for group in groups), "a prompt is kept for no completion"
