"""Who holds a block of the key/value cache, and which block has known contents."""

from collections import OrderedDict


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
