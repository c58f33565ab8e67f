"""Scores from hidden states and the gradients of a loss of them in one visit: logits are made once, however many.

Shape legend: N rows, H hidden, V vocabulary, R rows of a block, U rows of a block with a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tunesmith.kernels.logprob.api import ScoreGradient, logits_gradient, score
from tunesmith.kernels.logprob.head_blocks import (
    FEWEST_COLUMNS,
    FEWEST_ROWS,
    HeadCall,
    LogitsRoom,
    OutputLayer,
    blocks,
    check,
    chunk_bytes_on,
    in_autocast,
    is_top,
    product,
    wide,
)
from tunesmith.kernels.native import Kernels

_WEIGHT_PARTS = 4
"""Products for the weight's gradient are made in blocks of this part of what logits may take."""

ScoreLoss = Callable[[slice, torch.Tensor, torch.Tensor], ScoreGradient]
"""From some rows and their log-probs and entropies: the gradient that a loss gives to these."""


@dataclass(frozen=True, slots=True)
class HeadGradients:
    """Scores of all rows, and the gradients of a loss of them; those of weight and bias in float32 for 16 bits.

    `d_weight_VH` is None where it was not asked for, `d_bias_V` where there is no bias.
    """

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    d_hidden_NH: torch.Tensor
    d_weight_VH: torch.Tensor | None
    d_bias_V: torch.Tensor | None


def head_gradients(
    hidden_NH: torch.Tensor,
    layer: OutputLayer,
    ids_N: torch.Tensor,
    loss: ScoreLoss,
    temperature: float = 1.0,
    *,
    kernels: Kernels,
    chunk_bytes: int | None = None,
    needs_weight: bool = True,
) -> HeadGradients:
    """Scores as by `head_logp_entropy`, and gradients of a loss whose derivative by a row's scores is known once these
    are: as for a log-likelihood, or a clipped policy loss with its advantages and old log-probs.

    Blocks of `chunk_bytes` of logits (by default `chunk_bytes_on` the device) are each made once, scored, written over
    by their gradient and multiplied: three matrix products, where a backward pass that comes later takes four if not
    all logits fit. `loss` is called for some rows at a time, in their order, and can sum up its value and statistics.
    Rows to whose scores it gives no gradient are left out of the last two products. Gradients of weight and bias are
    summed over the blocks in float32. Under autocast logits come in its dtype, as by `head_logp_entropy`.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError, TritonUnavailableError: that kernel was chosen and cannot be had.
    """
    check(hidden_NH, layer, ids_N)
    dtype = hidden_NH.dtype
    hidden_NH, layer = in_autocast(hidden_NH.detach(), layer)
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    call = HeadCall(ids_N, layer.softcap, temperature, chunk_bytes, kernels)
    found = _in_one_visit(hidden_NH, layer, call, loss, needs_weight=needs_weight)[0]
    return replace(found, d_hidden_NH=found.d_hidden_NH.to(dtype))


@torch.no_grad()
def _in_one_visit(
    hidden_NH: torch.Tensor, layer: OutputLayer, call: HeadCall, loss: ScoreLoss, *, needs_weight: bool
) -> tuple[HeadGradients, torch.Tensor]:
    """The gradients, and is_top_N, which is empty unless it was asked for."""
    row_bytes = layer.weight_VH.shape[0] * hidden_NH.element_size()
    scores_2N = wide(hidden_NH.new_empty(2, len(hidden_NH)))
    tops = [torch.zeros(0, dtype=torch.bool, device=hidden_NH.device)]
    sums = _Sums(hidden_NH, layer, call, needs_weight=needs_weight)
    room = LogitsRoom()
    for rows in blocks(len(hidden_NH), row_bytes, call.chunk_bytes, FEWEST_ROWS):
        ids_R = call.ids_N[rows]
        logits_RV = room.logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
        scored = score(logits_RV, ids_R, call.temperature, softcap=layer.softcap, kernels=call.kernels)
        scores_2N[0, rows], scores_2N[1, rows] = scored.logp_N, scored.entropy_N
        if call.marks_top:
            tops.append(is_top(logits_RV, ids_R))
        gradient = loss(rows, scored.logp_N, scored.entropy_N)
        used_U = rows_with_gradient(gradient, ids_R.device)
        sums_RK = scored.sums_NK
        if used_U is not None:
            logits_RV, ids_R, sums_RK = logits_RV[used_U], ids_R[used_U], sums_RK[used_U]
            gradient = picked(gradient, used_U)
        if len(ids_R):
            d_logits_RV = logits_gradient(
                logits_RV, ids_R, sums_RK, gradient, call.temperature, softcap=layer.softcap, kernels=call.kernels
            )
            sums.add(rows, used_U, d_logits_RV)
    found = HeadGradients(scores_2N[0], scores_2N[1], sums.d_hidden_NH, sums.d_weight_VH, sums.d_bias_V)
    return found, torch.cat(tops)


def rows_with_gradient(gradient: ScoreGradient, device: torch.device) -> torch.Tensor | None:
    """Indices of the rows to whose scores a loss gives a gradient; None if these are all."""
    given = [grad for grad in (gradient.d_logp_N, gradient.d_entropy_N) if grad is not None]
    if not given:
        return torch.zeros(0, dtype=torch.int64, device=device)
    used_N = given[0] != 0
    for grad in given[1:]:
        used_N |= grad != 0
    return None if bool(used_N.all()) else used_N.nonzero()[:, 0]


def picked(gradient: ScoreGradient, rows_M: torch.Tensor) -> ScoreGradient:
    """The gradient of the scores of these rows."""
    grads = (gradient.d_logp_N, gradient.d_entropy_N)
    return ScoreGradient(*(None if grad is None else grad[rows_M] for grad in grads))


class _Sums:
    """The gradients, added up over blocks of rows."""

    def __init__(self, hidden_NH: torch.Tensor, layer: OutputLayer, call: HeadCall, *, needs_weight: bool) -> None:
        self._hidden_NH, self._layer = hidden_NH, layer
        self._block_bytes = call.chunk_bytes // _WEIGHT_PARTS
        self.d_hidden_NH = torch.zeros_like(hidden_NH)
        sums = torch.float32 if hidden_NH.element_size() == 2 else hidden_NH.dtype
        self.d_weight_VH = torch.zeros_like(layer.weight_VH, dtype=sums) if needs_weight else None
        needs_bias = needs_weight and layer.bias_V is not None
        self.d_bias_V = layer.weight_VH.new_zeros(len(layer.weight_VH), dtype=sums) if needs_bias else None

    def add(self, rows: slice, used_U: torch.Tensor | None, d_logits_UV: torch.Tensor) -> None:
        """Take in the gradient of the logits of a block, or of the rows `used_U` of it."""
        hidden_UH = self._hidden_NH[rows] if used_U is None else self._hidden_NH[rows][used_U]
        d_hidden_UH = d_logits_UV.mm(self._layer.weight_VH)
        if used_U is None:
            self.d_hidden_NH[rows] = d_hidden_UH
        else:
            self.d_hidden_NH[rows].index_copy_(0, used_U, d_hidden_UH)
        if self.d_weight_VH is not None:
            column_bytes = self._hidden_NH.shape[1] * self.d_weight_VH.element_size()
            for columns in blocks(len(self.d_weight_VH), column_bytes, self._block_bytes, FEWEST_COLUMNS):
                self.d_weight_VH[columns] += product(d_logits_UV[:, columns].t(), hidden_UH)
        if self.d_bias_V is not None:
            self.d_bias_V += d_logits_UV.sum(0, dtype=self.d_bias_V.dtype)


def scores_with_known_gradient(
    hidden_NH: torch.Tensor, layer: OutputLayer, call: HeadCall, known: ScoreLoss
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, is_top_N), differentiable; their gradients are computed along with them, from what `known`
    says of the loss.

    The backward pass hands these out if the loss gave what was said, up to rounding, and else computes them anew: so a
    wrong word costs time, and no gradient.
    """
    return _KnownGradient.apply(hidden_NH, layer.weight_VH, layer.bias_V, call, known)  # type: ignore[return-value]


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        call: HeadCall,
        known: ScoreLoss,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        said: list[ScoreGradient] = []

        def loss(rows: slice, logp_R: torch.Tensor, entropy_R: torch.Tensor) -> ScoreGradient:
            said.append(known(rows, logp_R, entropy_R))
            return said[-1]

        layer = OutputLayer(weight_VH, bias_V, call.softcap)
        found, is_top_N = _in_one_visit(hidden_NH, layer, call, loss, needs_weight=any(ctx.needs_input_grad[1:3]))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        # In the dtype of the weight from here on: there is one rounding, and half as much to hold.
        ctx.call, ctx.found, ctx.said = call, _narrowed(found, layer), said
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(is_top_N)
        return found.logp_N, found.entropy_N, is_top_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        found, ctx.found = ctx.found, None  # whoever takes them may change them; a second pass makes them again
        gradient = ScoreGradient(*grads[:2])
        if found is None or not _agrees(gradient, ctx.said):
            layer = OutputLayer(weight_VH, bias_V, ctx.call.softcap)

            def loss(rows: slice, *_: torch.Tensor) -> ScoreGradient:
                return ScoreGradient(*(None if grad is None else grad[rows] for grad in grads[:2]))

            needs_weight = any(ctx.needs_input_grad[1:3])
            found = _narrowed(_in_one_visit(hidden_NH, layer, ctx.call, loss, needs_weight=needs_weight)[0], layer)
        return found.d_hidden_NH, found.d_weight_VH, found.d_bias_V, None, None


def _narrowed(found: HeadGradients, layer: OutputLayer) -> HeadGradients:
    d_weight_VH, d_bias_V = (
        None if grad is None else grad.to(layer.weight_VH.dtype) for grad in (found.d_weight_VH, found.d_bias_V)
    )
    return HeadGradients(found.logp_N, found.entropy_N, found.d_hidden_NH, d_weight_VH, d_bias_V)


def _agrees(given: ScoreGradient, said: list[ScoreGradient]) -> bool:
    """Whether a loss gave the gradient that was said, but for rounding; a part that is None is 0."""
    pairs = ((given.d_logp_N, [one.d_logp_N for one in said]), (given.d_entropy_N, [one.d_entropy_N for one in said]))
    for grad_N, parts in pairs:
        there = [part for part in parts if part is not None]
        if len(there) not in (0, len(parts)):
            return False
        if grad_N is None or not there:
            if any(one is not None and bool(one.any()) for one in (grad_N, *there)):
                return False
            continue
        said_N = torch.cat(there)
        size_N = said_N.abs()
        if not bool(((grad_N - said_N).abs() <= _RELATIVE * size_N + _ABSOLUTE * size_N.max()).all()):
            return False
    return True


_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
"""How far two ways to the same float32 number may be apart: of itself, and of the largest one."""
