"""Layout of packed tokens: consecutive sequences, some of which continue a shared one.

Shape legend: T tokens, R sequences, E places of copies, N blocks, W numbers of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.attention.records import BLOCK_TOKENS, Places

ALONE = -1
"""Stands in `Segments.parents` for a sequence that goes on from no other."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Sequence r has `lengths[r]` tokens of its own, which follow those of sequence `parents[r]`.

    So a prompt that several completions share stands there once. A parent goes on from no other sequence and stands
    before its children.

    Example: a prompt of 5 tokens with completions of 3 and 4, and a row of 6 for itself, are
    `Segments((5, 3, 4, 6), (-1, 0, 0, -1))`: 18 tokens, with positions 0-4, 5-7, 5-8 and 0-5.

    Raises:
        InputError: a length is not positive, or a parent is no earlier sequence that stands alone.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.parents) or any(length < 1 for length in self.lengths):
            raise InputError(
                f"sequences have lengths {list(self.lengths)[:8]} and {len(self.parents)} parents; lengths must be "
                "positive, and there must be a parent (or -1) for each"
            )
        for child, parent in enumerate(self.parents):
            if parent != ALONE and not (0 <= parent < child and self.parents[parent] == ALONE):
                raise InputError(
                    f"sequence {child} goes on from {parent}; give {ALONE}, or an earlier sequence that goes on from "
                    "no other"
                )

    @classmethod
    def alone(cls, lengths: Sequence[int]) -> "Segments":
        """Sequences that share nothing."""
        return cls(tuple(lengths), (ALONE,) * len(lengths))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences; shared ones count once."""
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Index of each sequence's first own token, and of the end."""
        return [0, *accumulate(self.lengths)]

    @property
    def prefixes(self) -> list[int]:
        """Tokens of the parent of each sequence."""
        return [0 if parent == ALONE else self.lengths[parent] for parent in self.parents]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, those of its parent included."""
        return max((a + b for a, b in zip(self.prefixes, self.lengths, strict=True)), default=0)

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Position of each token in its sequence, `[T]`, int64."""
        if not self.lengths:
            return torch.zeros(0, dtype=torch.int64, device=device)
        pairs = zip(self.prefixes, self.lengths, strict=True)
        return torch.cat([torch.arange(prefix, prefix + length, device=device) for prefix, length in pairs])

    def token_indices(self) -> list[torch.Tensor]:
        """For each sequence the index of every token that it consists of, those of its parent first."""
        starts = self.starts
        own = [torch.arange(start, end) for start, end in pairwise(starts)]
        return [
            tokens if parent == ALONE else torch.cat((own[parent], tokens))
            for tokens, parent in zip(own, self.parents, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class CopiedPlaces:
    """Places of T tokens, and behind them of E copies: `copied_E` are the tokens whose keys and values stand there too.

    Where a prompt ends inside of a block, each of its completions has a block of its own that begins with the same
    tokens. int32.
    """

    places: Places
    copied_E: torch.Tensor
    num_blocks: int


class Packing:
    """State shared by all layers of one pass over packed tokens; made once for a pass.

    It keeps room for the keys and values of one layer, which the next layer writes over: do not use it in two passes at
    a time.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._places: CopiedPlaces | None = None
        self._rooms: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @property
    def places(self) -> CopiedPlaces:
        """Indices of keys and values in the buffer."""
        if self._places is None:
            self._places = copied_places(self.segments)
        return self._places

    def room(self, key_width: int, dtype: torch.dtype) -> torch.Tensor:
        """Blocks for keys and values, `[2, N, W]`; what is behind a sequence in its last block is zero."""
        key = (key_width, dtype)
        if key not in self._rooms:
            self._rooms[key] = torch.zeros((2, self.places.num_blocks, BLOCK_TOKENS * key_width), dtype=dtype)
        return self._rooms[key]


def copied_places(segments: Segments) -> CopiedPlaces:
    """Blocks for all sequences: full ones of a parent are shared, all others are a sequence's own."""
    lengths_R = torch.tensor(segments.lengths, dtype=torch.int64)
    starts = segments.starts
    rows_T = torch.repeat_interleave(torch.arange(len(lengths_R)), lengths_R)
    tables: list[list[int]] = []
    copied: list[torch.Tensor] = []
    copy_positions: list[torch.Tensor] = []
    copy_rows: list[torch.Tensor] = []
    num_blocks = 0
    for row, (length, prefix, parent) in enumerate(
        zip(segments.lengths, segments.prefixes, segments.parents, strict=True)
    ):
        num_shared = prefix // BLOCK_TOKENS
        num_own = -(-(prefix + length) // BLOCK_TOKENS) - num_shared
        shared = tables[parent][:num_shared] if num_shared else []
        tables.append([*shared, *range(num_blocks, num_blocks + num_own)])
        num_blocks += num_own
        tail = torch.arange(num_shared * BLOCK_TOKENS, prefix)
        copied.append(starts[parent] + tail if len(tail) else tail)
        copy_positions.append(tail)
        copy_rows.append(torch.full_like(tail, row))
    width = max(map(len, tables), default=0)
    tables_RN = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    positions = torch.cat((segments.positions(), *copy_positions))
    places = Places(positions.int(), torch.cat((rows_T, *copy_rows)).int(), tables_RN.reshape(len(tables), width))
    return CopiedPlaces(places, torch.cat((torch.zeros(0), *copied)).int(), num_blocks)
