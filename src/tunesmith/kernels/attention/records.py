"""Arguments of attention besides queries, keys and values.

Shape legend: T tokens, P positions or prefixes, F half of the rotated width, R tables, N blocks of a table, G members
of a prefix.
"""

import math
from dataclasses import dataclass

import torch

from tunesmith.core.errors import InputError

BLOCK_TOKENS = 16
"""Tokens in a block of the cache."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The shape of an attention layer and how its scores are made.

    Scores are `scale * q k`, then `softcap * tanh(score / softcap)` if there is a `softcap` (Gemma 2). With a `window`
    the token at position p sees p - window + 1 to p, else 0 to p. Query head h reads the key/value head
    `h // (num_heads / num_kv_heads)`.

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
    16 tokens stand in a block.

    Example: tokens 17 and 18 of the sequence in row 2 whose blocks are 5 and 9 are `positions_T=[17, 18]`,
    `table_rows_T=[2, 2]`, and stand in block 9 at 1 and 2.

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
    sequences stand in the same blocks, a multiple of 16, and 0 where prefix p is not used. `start_T[t]` is where the
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
