"""Grid sizes of attention on a GPU, computed from shapes and settings alone, never from positions.

So one plan, and one CUDA graph, stays right while sequences grow.
"""

from dataclasses import dataclass

import torch

from tunesmith.kernels.attention.records import BLOCK_TOKENS, AttentionSettings
from tunesmith.kernels.launching import ceil_div, power_of_two

SPLIT_TOKENS = 512
"""Tokens of a sequence that one program goes over. Where a split begins depends on nothing else, and so do the bits."""

_SMALLEST_DOT = 16
_MOST_ROWS = 32
_TILE_BYTES = 16 * 1024
_NUMBERS_OF_A_PRODUCT = 4096
_NUMBERS_OF_A_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Grid and splits of the attention of one layer.

    A program has `rows` query heads of one token, `head_tiles` programs make up those of a key/value head, and programs
    over a shared prefix have `prefix_rows` of several tokens. They go over `split_tokens` keys, `tile_tokens` at a
    time; `num_splits` of them make up the width of the tables. `block_d` is a head's width, filled up to a power of
    two, and `block_h` the number of heads in a program that turns and writes. `uses_dot`: by matrix units. The
    stages of a loop are entries of the block table, keys and values that these lead to, and products.
    """

    rows: int
    head_tiles: int
    prefix_rows: int
    tile_tokens: int
    split_tokens: int
    num_splits: int
    block_d: int
    block_h: int
    uses_dot: bool
    num_warps: int
    num_stages: int = 5

    def prefix_tiles(self, num_members: int, group_size: int) -> int:
        """Programs that make up the query heads of a key/value head, of all members of a prefix."""
        return ceil_div(num_members * group_size, self.prefix_rows)


def launch(
    settings: AttentionSettings,
    dtype: torch.dtype,
    table_width: int,
    *,
    uses_dot: bool,
    split_tokens: int = SPLIT_TOKENS,
) -> AttentionPlan:
    """The plan for tables of `table_width` blocks. Matrix units take the query heads of a key/value head as 16 rows or
    more; without them a product of rows, keys and a head's width has to fit the registers.
    """
    group, block_d = settings.group_size, max(_SMALLEST_DOT, power_of_two(settings.head_dim))
    if uses_dot:
        rows = min(_MOST_ROWS, max(_SMALLEST_DOT, power_of_two(group)))
        prefix_rows = _MOST_ROWS
        tile_tokens = max(_SMALLEST_DOT, min(64, _TILE_BYTES // (block_d * dtype.itemsize)))
    else:
        prefix_rows = max(1, min(4, 512 // block_d))
        rows = min(power_of_two(group), prefix_rows)
        tile_tokens = max(BLOCK_TOKENS, min(64, _NUMBERS_OF_A_PRODUCT // (prefix_rows * block_d)))
    return AttentionPlan(
        rows=rows,
        head_tiles=ceil_div(group, rows),
        prefix_rows=prefix_rows,
        tile_tokens=tile_tokens,
        split_tokens=split_tokens,
        num_splits=max(1, ceil_div(table_width * BLOCK_TOKENS, split_tokens)),
        block_d=block_d,
        block_h=max(1, min(power_of_two(settings.num_heads), _NUMBERS_OF_A_PROGRAM // block_d)),
        uses_dot=uses_dot,
        num_warps=4 if uses_dot else 8,
    )
