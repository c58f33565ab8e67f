"""Log-prob and entropy from hidden states, through the output layer, without ever holding all logits.

Shape legend: N rows, H hidden, V vocabulary, R rows of a block, M rows with a gradient, C columns of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tunesmith.kernels.arguments import records_gradient
from tunesmith.kernels.logprob.api import Scored, ScoreGradient, logits_gradient, score
from tunesmith.kernels.logprob.head_blocks import (
    FEWEST_COLUMNS,
    FEWEST_ROWS,
    HeadCall,
    LogitsRoom,
    blocks,
    check,
    in_autocast,
    is_top,
    product,
    wide,
)
from tunesmith.kernels.logprob.head_blocks import OutputLayer as OutputLayer
from tunesmith.kernels.logprob.head_blocks import chunk_bytes_on as chunk_bytes_on
from tunesmith.kernels.logprob.head_gradients import HeadGradients as HeadGradients
from tunesmith.kernels.logprob.head_gradients import ScoreLoss as ScoreLoss
from tunesmith.kernels.logprob.head_gradients import head_gradients as head_gradients
from tunesmith.kernels.logprob.head_gradients import picked, rows_with_gradient, scores_with_known_gradient
from tunesmith.kernels.native import Kernels

_FORWARD_PARTS, _BACKWARD_PARTS = 4, 8
"""Logits that do not all fit are made in blocks of this part of what may be kept. On a CPU smaller blocks of rows take
longer, as each packs the weight anew; the blocks of columns of the backward pass do so below an eighth."""


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Of each row: log-prob of its token and entropy in nats, and whether no token is more likely than its own."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    is_top_N: torch.Tensor


def head_logp_entropy(
    hidden_NH: torch.Tensor,
    layer: OutputLayer,
    ids_N: torch.Tensor,
    temperature: float = 1.0,
    *,
    kernels: Kernels,
    chunk_bytes: int | None = None,
    known: ScoreLoss | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) in nats of softmax(logits / temperature), float32 (float64 for float64), with gradients.

    `ids_N` is int64. The values have the bits of `chosen_logp_entropy` on the logits of all rows, where the matrix
    product of a row does not depend on the rows beside it (bfloat16 on a CPU). Gradients flow to the hidden states, the
    weight and the bias; the weight's has one rounding, as if all logits had been there. Under autocast logits come in
    its dtype, as those of `torch.nn.functional.linear` do.

    Memory: if the logits of all rows fit in `chunk_bytes` (by default `chunk_bytes_on` the device) they are kept for
    the backward pass, which writes their gradient over them. Else the forward pass makes those of some rows at a time,
    and the backward pass makes them again for some columns: a quarter of `chunk_bytes` exists at a time, in the
    backward pass an eighth, or 2 rows and 64 columns if that is more. With a softcap in C++ or in torch it is three
    times as much. Kept besides are the hidden states, which the caller has, and a few numbers per row. The backward
    pass adds a float32 [N, H], and the gradients themselves. Rows to whose scores the loss gives no gradient are left
    out of it.

    `known` says what gradient the loss will give to the scores of some rows. On a GPU, where not all logits fit, the
    forward pass then computes all gradients in the same visit, by `head_gradients`: three matrix products instead of
    four, blocks of `chunk_bytes`, and a weight's gradient that is summed in float32. If the loss gives another gradient
    after all, the backward pass computes them anew. On a CPU nobody asks `known`: it would gain nothing there.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError: native kernels were chosen and cannot be had.
    """
    check(hidden_NH, layer, ids_N)
    hidden_NH, layer = in_autocast(hidden_NH, layer)
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    return _scored(hidden_NH, layer, HeadCall(ids_N, layer.softcap, temperature, chunk_bytes, kernels), known)[:2]


def head_scores(
    hidden_NH: torch.Tensor,
    layer: OutputLayer,
    ids_N: torch.Tensor,
    *,
    kernels: Kernels,
    known: ScoreLoss | None = None,
) -> HeadScores:
    """What `head_logp_entropy` gives at temperature 1, and which tokens are the most likely ones, from one pass."""
    check(hidden_NH, layer, ids_N)
    hidden_NH, layer = in_autocast(hidden_NH, layer)
    call = HeadCall(ids_N, layer.softcap, 1.0, chunk_bytes_on(hidden_NH.device), kernels, marks_top=True)
    return HeadScores(*_scored(hidden_NH, layer, call, known))


def _scored(
    hidden_NH: torch.Tensor, layer: OutputLayer, call: HeadCall, known: ScoreLoss | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, is_top_N); the last is empty unless the call asks for it."""
    if len(call.ids_N) == 0:  # still a function of its inputs: a loss over nothing has a gradient of zero
        nothing_N = 0.0 * hidden_NH.sum(-1).to(torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32)
        return nothing_N, nothing_N.clone(), torch.zeros_like(call.ids_N, dtype=torch.bool)
    tensors = (hidden_NH, layer.weight_VH, layer.bias_V)
    if records_gradient(*tensors):
        if known is not None and call.visits_once(hidden_NH, layer.weight_VH):
            return scores_with_known_gradient(hidden_NH, layer, call, known)
        return _FromHidden.apply(*tensors, call)  # type: ignore[return-value]
    done = _forward(call, hidden_NH, layer, keeps=False)
    return done.scored.logp_N, done.scored.entropy_N, done.is_top_N


@dataclass(frozen=True, slots=True)
class _Forward:
    """The scores of all rows, which tokens are the most likely ones if that was asked, and the logits before any cap
    if they were few enough to keep.
    """

    scored: Scored
    is_top_N: torch.Tensor
    logits_NV: torch.Tensor | None


def _forward(call: HeadCall, hidden_NH: torch.Tensor, layer: OutputLayer, *, keeps: bool) -> _Forward:
    row_bytes = layer.weight_VH.shape[0] * hidden_NH.element_size()
    block_bytes = call.chunk_bytes // (1 if call.fits(hidden_NH, layer.weight_VH) else _FORWARD_PARTS)
    chunks: list[Scored] = []
    tops = [torch.zeros(0, dtype=torch.bool, device=hidden_NH.device)]
    logits_RV, room = None, LogitsRoom()
    for rows in blocks(len(hidden_NH), row_bytes, block_bytes, FEWEST_ROWS):
        logits_RV = room.logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
        ids_R = call.ids_N[rows]
        chunks.append(score(logits_RV, ids_R, call.temperature, softcap=call.softcap, kernels=call.kernels))
        if call.marks_top:
            tops.append(is_top(logits_RV, ids_R))
    is_top_N = torch.cat(tops)
    if len(chunks) == 1:
        return _Forward(chunks[0], is_top_N, logits_RV if keeps else None)
    parts = ([getattr(chunk, field.name) for chunk in chunks] for field in fields(Scored))
    return _Forward(Scored(*map(torch.cat, parts)), is_top_N, None)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, call: HeadCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = _forward(call, hidden_NH, OutputLayer(weight_VH, bias_V), keeps=True)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, done.scored.sums_NK)
        ctx.call, ctx.logits_NV = call, done.logits_NV
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(done.is_top_N)
        return done.scored.logp_N, done.scored.entropy_N, done.is_top_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, sums_NK = ctx.saved_tensors
        logits_NV, ctx.logits_NV = ctx.logits_NV, None  # they are written over; a second pass makes them again
        call: HeadCall = ctx.call
        gradient = ScoreGradient(*grads[:2])  # of log-probs and entropies
        rows_M = rows_with_gradient(gradient, hidden_NH.device)
        hidden_MH = hidden_NH
        if rows_M is not None:
            logits_NV = None if logits_NV is None else logits_NV[rows_M]
            call = replace(call, ids_N=call.ids_N[rows_M])
            gradient, hidden_MH, sums_NK = picked(gradient, rows_M), hidden_NH[rows_M], sums_NK[rows_M]
        layer = OutputLayer(weight_VH, bias_V)
        sums = _Gradients(hidden_MH, layer, ctx.needs_input_grad)
        for columns, logits_MC in _columns(hidden_MH, layer, call, logits_NV):
            d_logits_MC = logits_gradient(
                logits_MC,
                call.ids_N - columns.start,
                sums_NK,
                gradient,
                call.temperature,
                softcap=call.softcap,
                kernels=call.kernels,
            )
            sums.add(columns, d_logits_MC)
        d_hidden_MH = sums.d_hidden()
        if rows_M is not None and d_hidden_MH is not None:
            d_hidden_MH = torch.zeros_like(hidden_NH).index_copy_(0, rows_M, d_hidden_MH)
        return d_hidden_MH, sums.d_weight_VH, sums.d_bias_V, None


class _Gradients:
    """What the backward pass gives, added up over blocks of columns."""

    def __init__(self, hidden_MH: torch.Tensor, layer: OutputLayer, needs: tuple[bool, ...]) -> None:
        self._hidden_MH = hidden_MH
        self._weight_VH = layer.weight_VH
        self._d_hidden_MH = torch.zeros_like(hidden_MH) if needs[0] else None
        self._num_blocks = 0
        self.d_weight_VH = torch.zeros_like(layer.weight_VH) if needs[1] else None
        self.d_bias_V = torch.zeros_like(layer.bias_V) if needs[2] and layer.bias_V is not None else None

    def add(self, columns: slice, d_logits_MC: torch.Tensor) -> None:
        """Take in the gradient of the logits of some columns."""
        if self.d_weight_VH is not None:
            torch.mm(d_logits_MC.t(), self._hidden_MH, out=self.d_weight_VH[columns])
        if self.d_bias_V is not None:
            self.d_bias_V[columns] = d_logits_MC.sum(0)
        if self._d_hidden_MH is not None:
            part_MH = product(d_logits_MC, self._weight_VH[columns])
            # One block needs no sum, and several are summed in more than 16 bits.
            self._d_hidden_MH = self._d_hidden_MH + part_MH if self._num_blocks else wide(part_MH)
        self._num_blocks += 1

    def d_hidden(self) -> torch.Tensor | None:
        """The gradient of the hidden states, in their dtype."""
        return None if self._d_hidden_MH is None else self._d_hidden_MH.to(self._hidden_MH.dtype)


def _columns(
    hidden_MH: torch.Tensor, layer: OutputLayer, call: HeadCall, logits_MV: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of columns and their logits, made anew unless `logits_MV` are all of them."""
    num_tokens = layer.weight_VH.shape[0]
    if len(hidden_MH) == 0:
        return
    if logits_MV is not None:
        yield slice(0, num_tokens), logits_MV
        return
    column_bytes = len(hidden_MH) * hidden_MH.element_size()
    block_bytes = call.chunk_bytes // (1 if call.fits(hidden_MH, layer.weight_VH) else _BACKWARD_PARTS)
    room = LogitsRoom()
    for columns in blocks(num_tokens, column_bytes, block_bytes, FEWEST_COLUMNS):
        bias_C = None if layer.bias_V is None else layer.bias_V[columns]
        yield columns, room.logits(hidden_MH, layer.weight_VH[columns], bias_C)
