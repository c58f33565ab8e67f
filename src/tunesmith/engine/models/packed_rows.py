"""Right-padded rows as packed tokens, with common prefixes of neighbouring rows once.

Shape legend: B rows, S positions, T packed tokens, N states at (row, position), H hidden, F further dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.engine.kernels.attention.records import ALONE, Segments


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The tokens of some rows. Those of row b before position `shared_B[b]` begin at `shared_start_B[b]`, the others at
    `own_start_B[b]`. `parts` are row, first position and end of each segment.

    Example: rows [5, 6, 7, 8] and [5, 6, 9] are the tokens [5, 6, 7, 8, 9] in segments of 2, 2 and 1, the last two of
    which continue the first.
    """

    ids_T: torch.Tensor
    segments: Segments
    shared_B: torch.Tensor
    shared_start_B: torch.Tensor
    own_start_B: torch.Tensor
    parts: Sequence[tuple[int, int, int]]

    def tokens_of(self, x_BSF: torch.Tensor) -> torch.Tensor:
        """The rows of a right-padded tensor that belong to the packed tokens, `[T, F]`."""
        return _packed(x_BSF, self.parts)

    def index(self, row_N: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        """index_N: index of the token at (row, position) among the packed tokens."""
        shared_N = self.shared_B[row_N]
        own_N = self.own_start_B[row_N] + position_N - shared_N
        return torch.where(position_N < shared_N, self.shared_start_B[row_N] + position_N, own_N)


def pack_rows(ids_BS: torch.Tensor, lengths_B: torch.Tensor, *, shares_prefixes: bool = True) -> PackedRows:
    """The first `lengths_B[b]` (at least 1) tokens of each row, prefixes shared where that saves the most tokens."""
    lengths = lengths_B.tolist()
    groups = _groups(ids_BS, lengths) if shares_prefixes else ((range(b, b + 1), 0) for b in range(len(lengths)))
    parts: list[tuple[int, int, int]] = []
    parents: list[int] = []  # the segment that each continues
    starts: list[tuple[int, int, int]] = []  # of each row: shared tokens, where they begin, where its own do
    num_tokens = 0
    for rows, num_shared in groups:
        parent, start = ALONE, num_tokens
        if num_shared:
            parent = len(parts)
            parts.append((rows.start, 0, num_shared))
            parents.append(ALONE)
            num_tokens += num_shared
        for row in rows:
            starts.append((num_shared, start, num_tokens))
            if lengths[row] > num_shared:  # a row may have no tokens beyond its shared prefix
                parts.append((row, num_shared, lengths[row]))
                parents.append(parent)
                num_tokens += lengths[row] - num_shared
    shared_B, shared_start_B, own_start_B = torch.tensor(starts, device=ids_BS.device).unbind(1)
    segments = Segments(tuple(end - first for _, first, end in parts), tuple(parents))
    return PackedRows(_packed(ids_BS, parts), segments, shared_B, shared_start_B, own_start_B, parts)


def _packed(x_BS: torch.Tensor, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return torch.cat([x_BS[row, first:end] for row, first, end in parts])


def _groups(ids_BS: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Groups of neighbouring rows, and the length of their common prefix; 0 for a single row.

    A row joins the group before it if that saves more tokens overall, even with a shorter prefix.
    """
    first, shared = 0, lengths[0] if lengths else 0
    for row in range(1, len(lengths) + 1):
        num_saving = row - first  # rows that share what the first one brings
        common = 0 if row == len(lengths) else _common(ids_BS[first], ids_BS[row], min(shared, lengths[row]))
        if num_saving * common > (num_saving - 1) * shared:
            shared = common
        else:
            yield range(first, row), shared if num_saving > 1 else 0
            first, shared = row, 0 if row == len(lengths) else lengths[row]


def _common(first_S: torch.Tensor, second_S: torch.Tensor, limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    different = (first_S[:limit] != second_S[:limit]).nonzero()
    return int(different[0]) if len(different) else limit


def states_at(hidden_TH: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """hidden_NH: the states at `index_N`, with repetitions; gradients are summed in float32 or float64."""
    return _States.apply(hidden_TH, index_N)  # type: ignore[return-value]


class _States(torch.autograd.Function):
    """Unlike torch's indexing, sums gradients of repeated rows in float32 and in a fixed order."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_states, ctx.dtype = len(hidden_TH), hidden_TH.dtype
        return hidden_TH.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_N,) = ctx.saved_tensors
        wide_NH = grads[0] if ctx.dtype == torch.float64 else grads[0].float()
        sums_TH = wide_NH.new_zeros((ctx.num_states, wide_NH.shape[1]))
        return sums_TH.index_add_(0, index_N, wide_NH).to(ctx.dtype), None
