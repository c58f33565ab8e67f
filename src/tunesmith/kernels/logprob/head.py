"""Log-prob and entropy from hidden states, through the output layer, without ever holding all logits.

Shape legend: N rows, H hidden, V vocabulary, R rows of a chunk, C columns of a chunk (neighbouring tokens).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import linear

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import records_gradient
from tunesmith.kernels.gated.api import softcap
from tunesmith.kernels.logprob.api import Scored, ScoreGradient, logits_gradient, score
from tunesmith.kernels.native import Kernels

CHUNK_BYTES = 64 * 2**20
"""Logits that exist at a time take no more than this, in the dtype of the weights."""

_FEWEST_ROWS, _FEWEST_COLUMNS = 2, 64
"""A chunk has so many whatever it takes: a matrix of one row may be multiplied by other code, with other bits."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits are `hidden @ weight_VH.T + bias_V`, then `softcap * tanh(logit / softcap)` if there is a `softcap`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None


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
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) in nats of softmax(logits / temperature), float32 (float64 for float64), with gradients.

    `ids_N` is int64. The values have the bits of `chosen_logp_entropy` on the logits of all rows, where the matrix
    product of a row does not depend on the rows beside it (bfloat16 on a CPU). Gradients flow to the hidden states, the
    weight and the bias; the weight's has one rounding, as if all logits had been there.

    Memory: the forward pass makes logits for some rows at a time, the backward pass makes them again for some columns
    and writes their gradient over them. So at any time there are at most `chunk_bytes` of them (with a softcap three
    times as much), or 2 rows in the forward and 64 columns in the backward pass if that is more. Kept for the backward
    pass are the hidden states, which the caller has, and a few numbers per row; the logits too if those of all rows fit
    in `chunk_bytes`. The backward pass adds a float32 [N, H], and the gradients themselves. Rows to whose scores the
    loss gives no gradient are left out of it.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError: native kernels were chosen and cannot be had.
    """
    _check(hidden_NH, layer, ids_N)
    return _scored(hidden_NH, layer, _Call(ids_N, layer.softcap, temperature, chunk_bytes, kernels))[:2]


def head_scores(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor, *, kernels: Kernels) -> HeadScores:
    """What `head_logp_entropy` gives at temperature 1, and which tokens are the most likely ones, from one pass."""
    _check(hidden_NH, layer, ids_N)
    call = _Call(ids_N, layer.softcap, 1.0, CHUNK_BYTES, kernels, marks_top=True)
    return HeadScores(*_scored(hidden_NH, layer, call))


def _check(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor) -> None:
    weight_VH = layer.weight_VH
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise InputError(
            f"hidden states are {tuple(hidden_NH.shape)} and the output layer {tuple(weight_VH.shape)}; "
            "give [rows, hidden] and [vocabulary, hidden]"
        )
    if ids_N.shape != hidden_NH.shape[:1]:
        raise InputError(f"{tuple(ids_N.shape)} ids for {len(hidden_NH)} rows; give one for each row")


def _scored(
    hidden_NH: torch.Tensor, layer: OutputLayer, call: "_Call"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, is_top_N); the last is empty unless the call asks for it."""
    if len(call.ids_N) == 0:  # still a function of its inputs: a loss over nothing has a gradient of zero
        nothing_N = 0.0 * hidden_NH.sum(-1).to(torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32)
        return nothing_N, nothing_N.clone(), torch.zeros_like(call.ids_N, dtype=torch.bool)
    if records_gradient(hidden_NH, layer.weight_VH, layer.bias_V):
        return _FromHidden.apply(hidden_NH, layer.weight_VH, layer.bias_V, call)  # type: ignore[return-value]
    done = call.forward(hidden_NH, layer, keeps=False)
    return done.scored.logp_N, done.scored.entropy_N, done.is_top_N


@dataclass(frozen=True, slots=True)
class _Forward:
    """The scores of all rows, which tokens are the most likely ones if that was asked, and the logits before any cap
    if they were few enough to keep.
    """

    scored: Scored
    is_top_N: torch.Tensor
    logits_NV: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `head_logp_entropy`, without the tensors that take gradients."""

    ids_N: torch.Tensor
    softcap: float | None
    temperature: float
    chunk_bytes: int
    kernels: Kernels
    marks_top: bool = False

    def forward(self, hidden_NH: torch.Tensor, layer: OutputLayer, *, keeps: bool) -> _Forward:
        row_bytes = layer.weight_VH.shape[0] * hidden_NH.element_size()
        chunks: list[Scored] = []
        tops = [torch.zeros(0, dtype=torch.bool, device=hidden_NH.device)]
        logits_RV = None
        for rows in _chunks(len(hidden_NH), max(_FEWEST_ROWS, self.chunk_bytes // row_bytes)):
            logits_RV = _logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
            chunks.append(score(self._capped(logits_RV), self.ids_N[rows], self.temperature, kernels=self.kernels))
            if self.marks_top:  # a cap changes no order
                tops.append(logits_RV.gather(1, self.ids_N[rows, None])[:, 0] >= logits_RV.amax(1))
        is_top_N = torch.cat(tops)
        if len(chunks) == 1:
            return _Forward(chunks[0], is_top_N, logits_RV if keeps else None)
        parts = ([getattr(chunk, field.name) for chunk in chunks] for field in fields(Scored))
        return _Forward(Scored(*map(torch.cat, parts)), is_top_N, None)

    def d_logits(
        self, logits_NC: torch.Tensor, start: int, sums_NK: torch.Tensor, gradient: ScoreGradient
    ) -> torch.Tensor:
        """The gradient of the columns from `start` on of the logits before the cap, written over them."""
        ids_N = self.ids_N - start
        if self.softcap is None:
            return logits_gradient(logits_NC, ids_N, sums_NK, gradient, self.temperature, kernels=self.kernels)
        with torch.enable_grad():
            capped_NC = self._capped(logits_NC.requires_grad_())
        d_capped_NC = capped_NC.detach().clone()  # the cap may want its own output
        logits_gradient(d_capped_NC, ids_N, sums_NK, gradient, self.temperature, kernels=self.kernels)
        return torch.autograd.grad(capped_NC, logits_NC, d_capped_NC)[0]

    def _capped(self, logits_NC: torch.Tensor) -> torch.Tensor:
        return logits_NC if self.softcap is None else softcap(logits_NC, self.softcap, kernels=self.kernels)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = call.forward(hidden_NH, OutputLayer(weight_VH, bias_V), keeps=True)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, done.scored.sums_NK)
        ctx.call, ctx.logits_NV = call, done.logits_NV
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(done.is_top_N)
        return done.scored.logp_N, done.scored.entropy_N, done.is_top_N

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        grads = given[:2]  # of log-probs and entropies
        hidden_NH, weight_VH, bias_V, sums_NK = ctx.saved_tensors
        logits_NV, ctx.logits_NV = ctx.logits_NV, None  # they are written over; a second pass makes them again
        call: _Call = ctx.call
        used_N = torch.zeros(len(hidden_NH), dtype=torch.bool, device=hidden_NH.device)
        for grad in grads:
            used_N |= False if grad is None else grad != 0
        gradient = ScoreGradient(*grads)
        rows_M = None if bool(used_N.all()) else used_N.nonzero()[:, 0]
        if rows_M is not None:
            logits_NV = None if logits_NV is None else logits_NV[rows_M]
            call = replace(call, ids_N=call.ids_N[rows_M])
            gradient = ScoreGradient(*(None if grad is None else grad[rows_M] for grad in grads))
        picked = (hidden_NH, sums_NK) if rows_M is None else (hidden_NH[rows_M], sums_NK[rows_M])
        layer = OutputLayer(weight_VH, bias_V)
        sums = _Gradients(picked[0], layer, ctx.needs_input_grad)
        for columns, logits_MC in _columns(picked[0], layer, call.chunk_bytes, logits_NV):
            sums.add(columns, call.d_logits(logits_MC, columns.start, picked[1], gradient))
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
            part_MH = d_logits_MC.mm(self._weight_VH[columns])
            # One block needs no sum, and several are summed in more than 16 bits.
            self._d_hidden_MH = self._d_hidden_MH + part_MH if self._num_blocks else _wide(part_MH)
        self._num_blocks += 1

    def d_hidden(self) -> torch.Tensor | None:
        """The gradient of the hidden states, in their dtype."""
        return None if self._d_hidden_MH is None else self._d_hidden_MH.to(self._hidden_MH.dtype)


def _columns(
    hidden_MH: torch.Tensor, layer: OutputLayer, chunk_bytes: int, logits_MV: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of columns and their logits, made anew unless `logits_MV` are all of them."""
    num_tokens = layer.weight_VH.shape[0]
    if len(hidden_MH) == 0:
        return
    if logits_MV is not None:
        yield slice(0, num_tokens), logits_MV
        return
    column_bytes = len(hidden_MH) * hidden_MH.element_size()
    for columns in _chunks(num_tokens, max(_FEWEST_COLUMNS, chunk_bytes // column_bytes)):
        bias_C = None if layer.bias_V is None else layer.bias_V[columns]
        yield columns, _logits(hidden_MH, layer.weight_VH[columns], bias_C)


def _logits(hidden_RH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    if len(hidden_RH) == 1:  # see _FEWEST_ROWS
        return linear(hidden_RH.expand(2, -1), weight_CH, bias_C)[:1]
    return linear(hidden_RH, weight_CH, bias_C)


def _chunks(length: int, most: int) -> Iterator[slice]:
    """Neighbouring parts of `length` things, as even as can be, none of more than `most`."""
    count = -(-length // most)
    for index in range(count):
        yield slice(length * index // count, length * (index + 1) // count)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
