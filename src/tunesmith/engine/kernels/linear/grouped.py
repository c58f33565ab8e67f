"""Linear maps of several groups of rows, each with a weight of its own, such as the experts of a mixture.

The bits of a row depend neither on the other rows nor on the groups, where `exact.linear` has that property.

Shape legend: R rows, G groups, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tunesmith.engine.kernels.arguments import records_gradient
from tunesmith.engine.kernels.linear.exact import linear, product


def grouped_linear(
    x_RI: torch.Tensor, weight_GOI: torch.Tensor, bias_GO: torch.Tensor | None, counts: Sequence[int]
) -> torch.Tensor:
    """`[R, O]`: the first `counts[0]` rows by the first weight, the next `counts[1]` by the second, and so on, with
    gradients. The counts add up to R, which is at least 1; the weights may be transposed views.
    """
    weight_GOI, bias_GO = weight_GOI.to(x_RI.dtype), None if bias_GO is None else bias_GO.to(x_RI.dtype)  # autocast
    if records_gradient(x_RI, weight_GOI, bias_GO):
        return _Grouped.apply(x_RI, weight_GOI, bias_GO, counts)  # type: ignore[return-value]
    return _forward(x_RI, weight_GOI, bias_GO, counts)


def each_group(
    x_RI: torch.Tensor, counts: Sequence[int], compute: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`[R, O]`: the outputs of `compute(group, rows)` for the groups that have rows, one after the other.

    A single row is given twice: torch may compute its product with another kernel, with other bits.
    """
    return torch.cat([compute(g, _two(x_RI[rows]))[: rows.stop - rows.start] for g, rows in _used(counts)])


def _two(x_RI: torch.Tensor) -> torch.Tensor:
    return x_RI if len(x_RI) > 1 else x_RI.repeat(2, 1)


def _used(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and these."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count


def _forward(
    x_RI: torch.Tensor, weight_GOI: torch.Tensor, bias_GO: torch.Tensor | None, counts: Sequence[int]
) -> torch.Tensor:
    biases = [None] * len(counts) if bias_GO is None else bias_GO
    return each_group(x_RI, counts, lambda g, rows_RI: linear(rows_RI, weight_GOI[g], biases[g]))


class _Grouped(torch.autograd.Function):
    """Autograd of one product for each group would make a gradient of the size of all weights for each."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: torch.Tensor, weight_GOI: torch.Tensor, bias_GO: torch.Tensor | None, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x_RI, weight_GOI)
        ctx.counts = counts
        return _forward(x_RI, weight_GOI, bias_GO, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RO: torch.Tensor) -> Any:
        x_RI, weight_GOI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_weight_GOI = torch.zeros_like(weight_GOI) if needs_weight else None
        d_bias_GO = d_y_RO.new_zeros(weight_GOI.shape[:2]) if needs_bias else None
        for group, rows in _used(ctx.counts):
            if d_weight_GOI is not None:
                d_weight_GOI[group] = product(d_y_RO[rows].t(), x_RI[rows])
            if d_bias_GO is not None:
                d_bias_GO[group] = d_y_RO[rows].sum(0)
        d_x_RI = each_group(d_y_RO, ctx.counts, lambda g, rows_RO: product(rows_RO, weight_GOI[g])) if needs_x else None
        return d_x_RI, d_weight_GOI, d_bias_GO, None
