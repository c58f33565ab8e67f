"""Which block of the key/value cache holds which tokens: block tables, shared prefixes, copies on write.

The cache is allocated once and cut into blocks of 16 tokens. A sequence has a table, the list of its blocks in order;
token t stands in block `table.blocks[t // 16]` at offset `t % 16`. The completions of a prompt share its blocks by
reference, and so do prompts that begin alike. Nothing here reads keys or values: the model runner does, by the tables,
and does the copies that it is told to do.

Shape legend: L layers, N blocks.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tunesmith.core.errors import InputError

BLOCK_TOKENS = 16
"""Tokens in a block. Only full blocks of a prompt are shared between prompts."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides how many bytes a token takes. Example: 30 layers of 3 heads of 64 in bf16 take 23,040 a token."""

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
    """Keys and values of block `source` are to be copied to block `target`, in all layers, before anything is written.

    Copies of one step may be done in any order: no target is the source of another.
    """

    source: int
    target: int


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence.

    `row` is its row in `KVCache.block_tables`. The first `num_found` tokens were found in the cache, so prefill begins
    there; `num_written` of the prompt's tokens have been written. `num_tokens` have a place. `keys` name the full
    blocks of the prompt.

    Example: a prompt of 20 tokens whose first 16 are known: `blocks=[3, 8]`, `num_found=16`, `num_tokens=20`.
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
    """Room for keys (0) and values (1), `[L, 2, N, 16 * num_kv_heads * head_dim]`, zeros.

    How the numbers of a block are laid out is the attention kernel's affair. Zeros, because what a mask multiplies by
    zero must be finite.
    """
    width = BLOCK_TOKENS * shape.num_kv_heads * shape.head_dim
    return torch.zeros((shape.num_layers, 2, num_blocks, width), dtype=shape.dtype, device=device)


def copy_blocks(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Do `copies` in `storage`, made by `allocate_storage`."""
    if copies:
        storage[:, :, [copy.target for copy in copies]] = storage[:, :, [copy.source for copy in copies]]


def prompt_keys(prompt_ids: Sequence[int]) -> list[bytes]:
    """A key for each full block: a hash of its ids and of the key before, so equal keys mean equal beginnings."""
    keys: list[bytes] = []
    key = b""
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ids = array("q", prompt_ids[start : start + BLOCK_TOKENS])
        key = hashlib.blake2b(key + ids.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class KVCache:
    """Block tables over one pool.

    `block_tables` is `[max_tables, blocks_for(max_tokens)]` int32, on the CPU: row `table.row` lists the table's
    blocks, what stands behind `blocks_for(table.num_tokens)` has no meaning. A kernel reads it; it is changed in place.

    Example, blocks of 16: `prompt = cache.allocate(range(20))` takes two blocks. When their keys are written
    (`mark_written(prompt, 20)`), `first = cache.fork(prompt)` holds the same two. `cache.append(first)` returns
    `BlockCopy(source=prompt.blocks[1], target=first.blocks[1])`: the half-full block is copied, the full one is not.
    """

    def __init__(self, num_blocks: int, *, max_tokens: int, max_tables: int) -> None:
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_tables = max_tables
        self.block_tables = torch.zeros((max_tables, blocks_for(max_tokens)), dtype=torch.int32)
        self._rows = self.block_tables.numpy()  # the same memory: setting one element costs a tenth
        self._pool = BlockPool(num_blocks)
        self._free_rows = list(range(max_tables - 1, -1, -1))
        self._tables: dict[int, Table] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, those with reusable contents included."""
        return self._pool.num_free

    def num_needed(self, prompt_ids: Sequence[int]) -> int:
        """By how much `allocate(prompt_ids)` would lower `num_free` now."""
        return self._num_needed(prompt_ids, self._find(prompt_ids, prompt_keys(prompt_ids)))

    def allocate(self, prompt_ids: Sequence[int]) -> Table:
        """A table for a prompt of one token or more; what is known of its beginning is shared, not taken anew.

        At least the last token is left to be computed, because its logits are wanted. Found blocks may belong to a
        prompt whose prefill has not run yet: tokens must be computed in the order in which tables were allocated, and
        of tokens in one step all keys of a layer must be written before any is read.
        """
        if not 0 < len(prompt_ids) <= self.max_tokens:
            raise RuntimeError(f"a prompt of {len(prompt_ids)} tokens; the cache was made for 1 to {self.max_tokens}")
        keys = prompt_keys(prompt_ids)
        found = self._find(prompt_ids, keys)
        if self._num_needed(prompt_ids, found) > self.num_free:
            raise RuntimeError("the key/value cache has too few free blocks; its user must ask num_needed first")
        for block in found:
            self._pool.hold(block)
        num_found = len(found) * BLOCK_TOKENS
        blocks = found + [self._pool.take() for _ in range(blocks_for(len(prompt_ids)) - len(found))]
        for block, key in zip(blocks, keys, strict=False):
            self._pool.name(block, key)
        table = Table(-1, prompt_ids, keys, blocks, num_found, num_found, len(prompt_ids))
        return self._enter(table)

    def mark_written(self, table: Table, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the prompt are computed, so that their full blocks may outlive the table."""
        for index in range(table.num_written // BLOCK_TOKENS, min(num_tokens // BLOCK_TOKENS, len(table.keys))):
            self._pool.mark_written(table.blocks[index])
        table.num_written = num_tokens

    def fork(self, table: Table) -> Table:
        """A table with the same tokens that shares all blocks; the prompt must have been written."""
        if table.num_written < len(table.prompt_ids):
            raise RuntimeError("a table is forked before its prompt is computed")
        for block in table.blocks:
            self._pool.hold(block)
        found, written, length = table.num_found, table.num_written, table.num_tokens
        return self._enter(Table(-1, table.prompt_ids, table.keys, list(table.blocks), found, written, length))

    def append(self, table: Table, num_tokens: int = 1) -> BlockCopy | None:
        """Make place for more tokens; a copy is returned if the last block was shared and is only partly full."""
        if table.num_tokens + num_tokens > self.max_tokens:
            raise RuntimeError(f"a sequence grows over the {self.max_tokens} tokens that the cache was made for")
        copy = None
        if table.num_tokens % BLOCK_TOKENS and self._pool.num_holders(table.blocks[-1]) > 1:
            copy = BlockCopy(table.blocks[-1], self._pool.take())
            self._pool.release(copy.source)
            table.blocks[-1] = copy.target
            self._rows[table.row, len(table.blocks) - 1] = copy.target
        table.num_tokens += num_tokens
        while len(table.blocks) < blocks_for(table.num_tokens):
            table.blocks.append(self._pool.take())
            self._rows[table.row, len(table.blocks) - 1] = table.blocks[-1]
        return copy

    def free(self, table: Table) -> None:
        """Give the table's blocks back. Full blocks of its prompt that were written can be found until they are taken.

        A table whose prompt is not computed is freed after those that share it: free in reverse order of allocation.
        """
        own = table.blocks[table.num_found // BLOCK_TOKENS : len(table.keys)]
        if any(not self._pool.is_written(block) and self._pool.num_holders(block) > 1 for block in own):
            raise RuntimeError("a table is freed whose blocks another one shares and nobody would now compute")
        del self._tables[table.row]
        self._free_rows.append(table.row)
        for block in reversed(table.blocks):  # the end of a prefix is of use to fewest, so it is the first to be taken
            self._pool.release(block)
        table.blocks = []

    def invalidate(self) -> None:
        """Forget all contents, because the weights changed. Tables stay; nothing that they hold is found any more."""
        self._pool.forget_contents()

    def check_integrity(self) -> None:
        """Check all invariants; for tests and debugging, O(blocks and tokens).

        Each block is held, kept or blank. Its count of holders is the number of tables that list it. A table has just
        the blocks that its tokens need. A block in several tables has the same place in all, and is full in all or the
        last of all. A key finds one block, whose ids give that key. `block_tables` says what the tables say.

        Raises:
            AssertionError: with one line for each violation.
        """
        complaints = self._pool.complaints()
        holders: dict[int, list[tuple[Table, int]]] = {}
        for table in self._tables.values():
            complaints += self._table_complaints(table)
            for index, block in enumerate(table.blocks):
                holders.setdefault(block, []).append((table, index))
        for block in range(self.num_blocks):
            complaints += self._sharing_complaints(block, holders.get(block, []))
        if sorted([*self._free_rows, *self._tables]) != list(range(self.max_tables)):
            complaints.append("a row of block_tables is lost, or used twice")
        if complaints:
            raise AssertionError("\n".join(complaints))

    def _table_complaints(self, table: Table) -> Iterable[str]:
        if self._tables.get(table.row) is not table:
            yield f"table {table.row} stands under another row"
        if len(table.blocks) != blocks_for(table.num_tokens):
            yield f"table {table.row} has {len(table.blocks)} blocks for {table.num_tokens} tokens"
        if not table.num_found <= table.num_written <= len(table.prompt_ids) <= table.num_tokens <= self.max_tokens:
            yield f"table {table.row} counts its tokens wrongly"
        if self._rows[table.row, : len(table.blocks)].tolist() != table.blocks:
            yield f"block_tables[{table.row}] differs from the table"
        if list(table.keys) != prompt_keys(table.prompt_ids):
            yield f"the keys of table {table.row} are not those of its prompt"
        for index, block in enumerate(table.blocks):
            key = self._pool.key(block)
            if key is not None and (index >= len(table.keys) or key != table.keys[index]):
                yield f"block {block} of table {table.row} has a key of other contents"
            is_own = table.num_found // BLOCK_TOKENS <= index < len(table.keys)
            if is_own and (index + 1) * BLOCK_TOKENS <= table.num_written and not self._pool.is_written(block):
                yield f"block {block} of table {table.row} was computed and is not marked"

    def _sharing_complaints(self, block: int, holders: list[tuple[Table, int]]) -> Iterable[str]:
        if self._pool.num_holders(block) != len(holders):
            yield f"block {block} is in {len(holders)} tables, its count says {self._pool.num_holders(block)}"
        if len({index for _, index in holders}) > 1:
            yield f"block {block} has different places in the tables that share it"
        ends = {min(table.num_tokens, (index + 1) * BLOCK_TOKENS) for table, index in holders}
        if len(ends) > 1:
            yield f"block {block} is shared and is not equally full in all tables"

    def _find(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for key in keys[: (len(prompt_ids) - 1) // BLOCK_TOKENS]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def _num_needed(self, prompt_ids: Sequence[int], found: list[int]) -> int:
        return blocks_for(len(prompt_ids)) - sum(self._pool.num_holders(block) > 0 for block in found)

    def _enter(self, table: Table) -> Table:
        if not self._free_rows:
            raise RuntimeError(f"more than the {self.max_tables} tables that the cache was made for")
        table.row = self._free_rows.pop()
        self._tables[table.row] = table
        self._rows[table.row, : len(table.blocks)] = table.blocks
        return table


class BlockPool:
    """Reference counts of blocks, and the blocks that can be found by their contents.

    A block is held by tables, or kept (nobody holds it, its contents are known and can be found again), or blank. Blank
    blocks are taken first, then kept ones, the longest unused first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._is_written = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._kept)

    def num_holders(self, block: int) -> int:
        """Tables that hold `block`."""
        return self._num_holders[block]

    def key(self, block: int) -> bytes | None:
        """The key by which `block` can be found, or None."""
        return self._key_of[block]

    def is_written(self, block: int) -> bool:
        """True if the contents that the block's key promises are there."""
        return bool(self._is_written[block])

    def take(self) -> int:
        """A block that nobody held, now held once."""
        if self._blank:
            block = self._blank.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        else:
            raise RuntimeError("the key/value cache has no free block; its user must ask num_free first")
        self._num_holders[block] = 1
        self._is_written[block] = False
        return block

    def hold(self, block: int) -> None:
        """One more table holds `block`."""
        self._kept.pop(block, None)
        self._num_holders[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds `block`; the last one frees it, and its contents stay if they were written."""
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if self._key_of[block] is not None and self._is_written[block]:
            self._kept[block] = None
        else:
            self._forget(block)
            self._blank.append(block)

    def find(self, key: bytes) -> int | None:
        """The block with these contents, or None."""
        return self._block_of.get(key)

    def name(self, block: int, key: bytes) -> None:
        """Let `block` be found by `key`, unless another block is."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def mark_written(self, block: int) -> None:
        """The contents of `block` are there."""
        self._is_written[block] = True

    def forget_contents(self) -> None:
        """No block can be found any more; kept ones become blank."""
        self._blank += self._kept
        self._kept.clear()
        self._block_of.clear()
        self._key_of = [None] * len(self._key_of)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    def complaints(self) -> list[str]:
        """What is wrong inside the pool; see `KVCache.check_integrity`."""
        found: list[str] = []
        blank = set(self._blank)
        if len(blank) != len(self._blank):
            found.append("a block is twice among the blank ones")
        for block, holders in enumerate(self._num_holders):
            places = (holders > 0) + (block in blank) + (block in self._kept)
            key = self._key_of[block]
            if holders < 0 or places != 1:
                found.append(f"block {block}, held {holders} times, must be held, kept or blank, one of the three")
            if block in self._kept and (key is None or not self._is_written[block]):
                found.append(f"block {block} is kept, but its contents are not known or not written")
            if block in blank and key is not None:
                found.append(f"block {block} is blank and has a key")
            if key is not None and self._block_of.get(key) != block:
                found.append(f"block {block} is not found by its key")
        if len(self._block_of) != sum(key is not None for key in self._key_of):
            found.append("a key finds a block that does not have it")
        return found
