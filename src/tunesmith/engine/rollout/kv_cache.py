"""Block tables of the paged key/value cache: shared prefixes, reference counts, copy on write.

The cache is allocated once and divided into blocks of 16 tokens. A sequence has a table, the list of its blocks in
order: token t is in block `table.blocks[t // 16]` at offset `t % 16`. The completions of a prompt share its blocks by
reference, and so do prompts with a common prefix (as in PagedAttention, Kwon et al. 2023). Keys and values themselves
are read, written and copied by the model runner.

Shape legend: L layers, N blocks.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tunesmith.base.core.errors import InputError

BLOCK_TOKENS = 16
"""Tokens in a block. Only full blocks of a prompt are shared between prompts."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Layers, heads and dtype of the cache. Example: 30 layers of 3 heads of 64 in bf16 take 23,040 bytes a token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of 16 tokens in all layers."""
        return 2 * self.num_layers * BLOCK_TOKENS * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block `source` to block `target` in all layers, before anything of the step is written.

    The copies of one step may be done in any order: no target is the source of another.
    """

    source: int
    target: int


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence.

    `row` is its row in `KVCache.block_tables`. The first `num_found` tokens of the prompt were cached, so prefill
    starts after them; `num_written` are computed. `num_tokens` tokens have a slot. `keys` are the hashes of the
    prompt's full blocks.

    Example: a prompt of 20 tokens of which 16 are cached: `blocks=[3, 8]`, `num_found=16`, `num_tokens=20`.
    """

    row: int
    prompt_ids: Sequence[int]
    keys: Sequence[bytes]
    blocks: list[int]
    num_found: int
    num_written: int
    num_tokens: int


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def num_blocks_for(budget_bytes: int, shape: CacheShape, *, max_tokens: int) -> int:
    """Blocks that fit into `budget_bytes`.

    Raises:
        InputError: if one sequence of `max_tokens` tokens, and a copy of its prompt's last block, do not fit.
    """
    num_blocks = budget_bytes // shape.bytes_per_block
    needed = blocks_for(max_tokens) + 1
    if num_blocks < needed:
        raise InputError(
            f"the budget of the key/value cache is {budget_bytes / 2**20:.1f} MiB, but one sequence of {max_tokens} "
            f"tokens takes {needed * shape.bytes_per_block / 2**20:.1f} MiB; raise the budget to at least that, or "
            "lower max_new_tokens or the length of the prompts"
        )
    return num_blocks


def allocate_storage(shape: CacheShape, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Storage of keys (0) and values (1), `[L, 2, N, 16 * num_kv_heads * head_dim]`.

    The layout within a block is the attention kernel's. It is zeroed, because masked entries are multiplied by zero and
    must be finite.
    """
    width = BLOCK_TOKENS * shape.num_kv_heads * shape.head_dim
    return torch.zeros((shape.num_layers, 2, num_blocks, width), dtype=shape.dtype, device=device)


def copy_blocks(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Do `copies` in `storage`, of `allocate_storage`."""
    if copies:
        storage[:, :, [copy.target for copy in copies]] = storage[:, :, [copy.source for copy in copies]]


def prompt_keys(prompt_ids: Sequence[int]) -> list[bytes]:
    """A key for each full block: a hash of its ids and of the previous key, so equal keys mean equal prefixes."""
    keys: list[bytes] = []
    key = b""
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ids = array("q", prompt_ids[start : start + BLOCK_TOKENS])
        key = hashlib.blake2b(key + ids.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class BlockPool:
    """Reference counts of blocks, and the index of blocks by their contents.

    A block is held by tables, cached (held by none, but its contents can be found again), or blank. Blank blocks are
    taken first, then cached ones, the least recently used first. To be read, and changed by the methods only:
    `num_holders` and `key_of` (the key of its contents, or None) by block, and `block_of` by key. `is_written` by block
    is 1 if the contents are computed; whoever computes them sets it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_holders = [0] * num_blocks
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.is_written = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._cached)

    def take(self) -> int:
        """Take a free block; its count is 1."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise RuntimeError("the key/value cache has no free block; check num_free first")
        self.num_holders[block] = 1
        self.is_written[block] = False
        return block

    def hold(self, block: int) -> None:
        """Increment the count of `block`."""
        self._cached.pop(block, None)
        self.num_holders[block] += 1

    def release(self, block: int) -> None:
        """Decrement the count of `block`. At 0 it is free, and its contents stay findable if they were written."""
        self.num_holders[block] -= 1
        if self.num_holders[block]:
            return
        if self.key_of[block] is not None and self.is_written[block]:
            self._cached[block] = None
        else:
            self._forget(block)
            self._blank.append(block)

    def name(self, block: int, key: bytes) -> None:
        """Index `block` by `key`, unless another block is."""
        if key not in self.block_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def forget_contents(self) -> None:
        """Clear the index; cached blocks become blank."""
        self._blank += self._cached
        self._cached.clear()
        self.block_of.clear()
        self.key_of = [None] * len(self.key_of)

    def _forget(self, block: int) -> None:
        key = self.key_of[block]
        if key is not None:
            del self.block_of[key]
            self.key_of[block] = None


class KVCache:
    """Block tables over one pool.

    `block_tables`, `[max_tables, blocks_for(max_tokens)]` int32 on the CPU, is read by the attention kernel and changed
    in place. Row `table.row` lists the blocks of `table`; entries after `blocks_for(table.num_tokens)` are undefined.

    Example: `prompt = cache.allocate(range(20))` takes two blocks. After `mark_written(prompt, 20)`, `first =
    cache.fork(prompt)` shares both. `cache.append(first)` returns `BlockCopy(source=prompt.blocks[1],
    target=first.blocks[1])`: the partly full block is copied, the full one is not.
    """

    def __init__(self, num_blocks: int, *, max_tokens: int, max_tables: int) -> None:
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_tables = max_tables
        self.block_tables = torch.zeros((max_tables, blocks_for(max_tokens)), dtype=torch.int32)
        self._rows = self.block_tables.numpy()  # same memory; setting one element is ten times faster
        self._pool = BlockPool(num_blocks)
        self._free_rows = list(range(max_tables - 1, -1, -1))
        self._tables: dict[int, Table] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return self._pool.num_free

    def num_needed(self, prompt_ids: Sequence[int]) -> int:
        """Free blocks that `allocate(prompt_ids)` would take now."""
        return self._num_needed(prompt_ids, self._find(prompt_ids, prompt_keys(prompt_ids)))

    def allocate(self, prompt_ids: Sequence[int]) -> Table:
        """A table for a prompt of one token or more; cached blocks of its prefix are shared.

        At least the last token is left to compute, because its logits are needed. Shared blocks may belong to a prompt
        whose prefill has not run yet: compute tokens in the order in which tables were allocated, and within a step
        write all keys of a layer before reading any.

        Raises:
            RuntimeError: the prompt is empty or too long, or there are too few free blocks or tables.
        """
        if not 0 < len(prompt_ids) <= self.max_tokens:
            raise RuntimeError(f"a prompt of {len(prompt_ids)} tokens; the cache takes 1 to {self.max_tokens}")
        keys = prompt_keys(prompt_ids)
        found = self._find(prompt_ids, keys)
        if self._num_needed(prompt_ids, found) > self.num_free:
            raise RuntimeError("the key/value cache has too few free blocks; check num_needed first")
        for block in found:
            self._pool.hold(block)
        num_found = len(found) * BLOCK_TOKENS
        blocks = found + [self._pool.take() for _ in range(blocks_for(len(prompt_ids)) - len(found))]
        for block, key in zip(blocks, keys, strict=False):
            self._pool.name(block, key)
        table = Table(-1, prompt_ids, keys, blocks, num_found, num_found, len(prompt_ids))
        return self._enter(table)

    def mark_written(self, table: Table, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens of the prompt are computed; their full blocks can be reused."""
        for index in range(table.num_written // BLOCK_TOKENS, min(num_tokens // BLOCK_TOKENS, len(table.keys))):
            self._pool.is_written[table.blocks[index]] = True
        table.num_written = num_tokens

    def fork(self, table: Table) -> Table:
        """A table with the same tokens that shares all blocks.

        Raises:
            RuntimeError: the prompt is not computed yet, or there are too few tables.
        """
        if table.num_written < len(table.prompt_ids):
            raise RuntimeError("a table is forked before its prompt is computed")
        for block in table.blocks:
            self._pool.hold(block)
        found, written, length = table.num_found, table.num_written, table.num_tokens
        return self._enter(Table(-1, table.prompt_ids, table.keys, list(table.blocks), found, written, length))

    def append(self, table: Table, num_tokens: int = 1) -> BlockCopy | None:
        """Add slots for `num_tokens` tokens; returns a copy to do if the last block was shared and partly full.

        Raises:
            RuntimeError: the sequence gets too long, or there are too few free blocks.
        """
        if table.num_tokens + num_tokens > self.max_tokens:
            raise RuntimeError(f"a sequence grows beyond the cache's maximum of {self.max_tokens} tokens")
        copy = None
        if table.num_tokens % BLOCK_TOKENS and self._pool.num_holders[table.blocks[-1]] > 1:
            copy = BlockCopy(table.blocks[-1], self._pool.take())
            self._pool.release(copy.source)
            table.blocks[-1] = copy.target
            self._rows[table.row, len(table.blocks) - 1] = copy.target
        table.num_tokens += num_tokens
        while len(table.blocks) < blocks_for(table.num_tokens):
            table.blocks.append(self._pool.take())
            self._rows[table.row, len(table.blocks) - 1] = table.blocks[-1]
        return copy

    def extend(self, table: Table, prompt_ids: Sequence[int]) -> None:
        """Make `table` that of the longer prompt `prompt_ids`, whose first `table.num_tokens` tokens it has computed.

        The further tokens are left to compute, at least one; computed full blocks can be found from now on, also after
        the table is freed. No other table may share the block that is partly full.

        Raises:
            RuntimeError: nothing is left to compute, the sequence gets too long, or there are too few free blocks.
        """
        num_computed = table.num_tokens
        if len(prompt_ids) <= num_computed:
            raise RuntimeError(f"a table of {num_computed} computed tokens is extended to {len(prompt_ids)}")
        copy = self.append(table, len(prompt_ids) - num_computed)
        assert copy is None, "the block that is partly full belongs to this table alone"
        table.prompt_ids, table.keys = prompt_ids, prompt_keys(prompt_ids)
        for block, key in zip(table.blocks, table.keys, strict=False):
            self._pool.name(block, key)
        table.num_found = num_computed
        table.num_written = 0  # so that the blocks of earlier turns are marked too
        self.mark_written(table, num_computed)

    def remember(self, table: Table, token_ids: Sequence[int]) -> None:
        """Index the full blocks of `token_ids`, which `table` has computed, so that a longer prompt can find them also
        after the table is freed.
        """
        table.keys = prompt_keys(token_ids)
        for block, key in zip(table.blocks, table.keys, strict=False):
            self._pool.name(block, key)
            self._pool.is_written[block] = True

    def free(self, table: Table) -> None:
        """Release the table's blocks. Computed full blocks of its prompt can be found until they are taken.

        Free in reverse order of allocation: a table whose prompt is not computed goes after those that share it.

        Raises:
            RuntimeError: another table shares a block that would now never be computed.
        """
        own = table.blocks[table.num_found // BLOCK_TOKENS : len(table.keys)]
        if any(not self._pool.is_written[block] and self._pool.num_holders[block] > 1 for block in own):
            raise RuntimeError("a table is freed whose shared blocks would now never be computed")
        del self._tables[table.row]
        self._free_rows.append(table.row)
        for block in reversed(table.blocks):  # the end of a prefix is the least likely to be shared, so reuse it first
            self._pool.release(block)
        table.blocks = []

    def invalidate(self) -> None:
        """Forget all contents, because the weights changed. Tables keep their blocks, which are no longer shared."""
        self._pool.forget_contents()

    def _find(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, without the last token."""
        found: list[int] = []
        for key in keys[: (len(prompt_ids) - 1) // BLOCK_TOKENS]:
            if (block := self._pool.block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def _num_needed(self, prompt_ids: Sequence[int], found: list[int]) -> int:
        return blocks_for(len(prompt_ids)) - sum(self._pool.num_holders[block] > 0 for block in found)

    def _enter(self, table: Table) -> Table:
        if not self._free_rows:
            raise RuntimeError(f"more than the {self.max_tables} tables of the cache")
        table.row = self._free_rows.pop()
        self._tables[table.row] = table
        self._rows[table.row, : len(table.blocks)] = table.blocks
        return table
