"""Arguments of attention besides queries, keys and values.

Shape legend: T tokens, P positions or prefixes, H query heads, F half of the rotated width, R tables or sequences,
N blocks, G members of a prefix, E places of copies, W numbers of a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from tunesmith.base.core.errors import InputError

BLOCK_TOKENS = 16
"""Tokens in a block of the cache."""

ALONE = -1
"""In `Segments.parents`: the sequence continues no other."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The shape of an attention layer and how its scores are made.

    Scores are `scale * q k`, then `softcap * tanh(score / softcap)` if there is a `softcap` (Gemma 2). With a `window`
    the token at position p sees p - window + 1 to p, else 0 to p. Query head h reads the key/value head
    `h // (num_heads / num_kv_heads)`. `sinks_H` are scores of one key more for each query head, which has no value
    (gpt-oss).

    Example: SmolLM2-135M is `AttentionSettings(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)`.

    Raises:
        InputError: a number is out of range.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} query heads and {self.num_kv_heads} key/value heads; give positive numbers, the "
                "first a multiple of the second"
            )
        if self.head_dim < 1:
            raise InputError(f"head_dim is {self.head_dim}; it must be at least 1")
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise InputError(f"scale is {self.scale}; it must be positive and finite")
        if self.window is not None and self.window < 1:
            raise InputError(f"window is {self.window}; it must be at least 1, or None for no window")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise InputError(f"softcap is {self.softcap}; it must be positive and finite, or None for no cap")

    @property
    def group_size(self) -> int:
        """Query heads of a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Numbers of a token's queries, and of its output."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines of rotary positions, float32: entry f of a position turns the pair of dimensions (f, F + f).

    The rotated width 2F is the first part of a head, the rest stays. A scaling of attention is already in the tables.
    Su et al., RoFormer (2021), in the half-split order of transformers' Llama.

    Raises:
        InputError: shapes or dtypes do not fit.
    """

    cos_PF: torch.Tensor
    sin_PF: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("cos", self.cos_PF), ("sin", self.sin_PF)):
            if tensor.dim() != 2 or tensor.shape != self.cos_PF.shape or not tensor.dtype.is_floating_point:
                raise InputError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give two tables [positions, width / 2]"
                )


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of tokens: int32, on one device. In C++ that is the CPU; in Triton it is the device of the tokens.

    Token t is number `positions_T[t]` of the sequence whose blocks row `table_rows_T[t]` of `block_tables_RN` lists;
    a block has 16 tokens.

    Example: tokens 17 and 18 of the sequence in row 2 whose blocks are 5 and 9 are `positions_T=[17, 18]`,
    `table_rows_T=[2, 2]`, and are at 1 and 2 of block 9.

    Raises:
        InputError: shapes or dtypes do not fit.
    """

    positions_T: torch.Tensor
    table_rows_T: torch.Tensor
    block_tables_RN: torch.Tensor

    def __post_init__(self) -> None:
        device = self.positions_T.device
        for name, tensor, dims in (
            ("positions", self.positions_T, 1),
            ("table_rows", self.table_rows_T, 1),
            ("block_tables", self.block_tables_RN, 2),
        ):
            _require_int32(name, tensor, dims, device)
        if self.positions_T.shape != self.table_rows_T.shape:
            raise InputError(
                f"{len(self.positions_T)} positions and {len(self.table_rows_T)} table rows; give one for each token"
            )


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of tokens whose sequences begin with the same blocks: int32, on the device of the tokens.

    `members_PG[p]` are the indices of such tokens in the batch, -1 for none; `length_P[p]` is how many tokens of their
    sequences are in the same blocks, a multiple of 16, and 0 where prefix p is not used. `start_T[t]` is where the
    part of token t's sequence begins that is its own: the length of the prefix that it is a member of, else 0. A token
    is a member of one prefix at most. Only shapes are checked: the numbers may change between replays of a CUDA graph.

    Example: tokens 0 and 1 of three share two blocks: `members_PG=[[0, 1]]`, `length_P=[32]`, `start_T=[32, 32, 0]`.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """

    members_PG: torch.Tensor
    length_P: torch.Tensor
    start_T: torch.Tensor

    def __post_init__(self) -> None:
        device = self.members_PG.device
        for name, tensor, dims in (
            ("members", self.members_PG, 2),
            ("length", self.length_P, 1),
            ("start", self.start_T, 1),
        ):
            _require_int32(name, tensor, dims, device)
        if len(self.members_PG) != len(self.length_P):
            raise InputError(
                f"members are of {len(self.members_PG)} prefixes and length of {len(self.length_P)}; give one length "
                "for each row of members"
            )


def _require_int32(name: str, tensor: torch.Tensor, dims: int, device: torch.device) -> None:
    if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.device != device:
        raise InputError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; "
            f"give int32 with {dims} dimensions on {device}"
        )


@dataclass(frozen=True, slots=True)
class Segments:
    """Sequence r has `lengths[r]` tokens of its own, which follow those of sequence `parents[r]`.

    So a prompt that several completions share is stored once. A parent continues no other sequence and comes before
    its children.

    Example: a prompt of 5 tokens with completions of 3 and 4, and a row of 6 for itself, are
    `Segments((5, 3, 4, 6), (-1, 0, 0, -1))`: 18 tokens, with positions 0-4, 5-7, 5-8 and 0-5.

    Raises:
        InputError: a length is not positive, or a parent is no earlier sequence without a parent.
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
                    f"sequence {child} continues {parent}; give {ALONE}, or an earlier sequence that continues no other"
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
    """Places of T tokens, followed by those of E copies of the keys and values of the tokens `copied_E`. int32.

    Where a prompt ends inside of a block, each of its completions has a block of its own that begins with the same
    tokens.
    """

    places: Places
    copied_E: torch.Tensor
    num_blocks: int


class Packing:
    """State shared by all layers of one pass over packed tokens; made once for a pass.

    It has a buffer for the keys and values of one layer, which the next layer overwrites: do not use it in two passes
    at a time.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @cached_property
    def places(self) -> CopiedPlaces:
        """Places of keys and values in the buffer."""
        return copied_places(self.segments)

    def buffer(self, key_width: int, dtype: torch.dtype) -> torch.Tensor:
        """Blocks for keys and values, `[2, N, W]`; zero behind the end of a sequence in its last block."""
        key = (key_width, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros((2, self.places.num_blocks, BLOCK_TOKENS * key_width), dtype=dtype)
        return self._buffers[key]


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
