"""Log-prob and entropy from hidden states, through the output layer, without ever holding all logits.

Shape legend: N rows, H hidden, V vocabulary, R rows of a chunk, C columns of a chunk (neighbouring tokens).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import linear

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import records_gradient
from tunesmith.kernels.logprob.api import Scored, ScoreGradient, logits_gradient, score
from tunesmith.kernels.native import Kernels

_CPU_CHUNK_BYTES = 64 * 2**20
_GPU_SHARE = 32

_PARTS = 4
"""Logits that do not fit are made in blocks of this part of what may be kept: on a CPU smaller blocks cost no time."""

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
    chunk_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) in nats of softmax(logits / temperature), float32 (float64 for float64), with gradients.

    `ids_N` is int64. The values have the bits of `chosen_logp_entropy` on the logits of all rows, where the matrix
    product of a row does not depend on the rows beside it (bfloat16 on a CPU). Gradients flow to the hidden states, the
    weight and the bias; the weight's has one rounding, as if all logits had been there.

    Memory: if the logits of all rows fit in `chunk_bytes` (by default `chunk_bytes_on` the device) they are kept for
    the backward pass, which writes their gradient over them. Else the forward pass makes those of some rows at a time,
    and the backward pass makes them again for some columns: a quarter of `chunk_bytes` exist at a time, or 2 rows in
    the forward and 64 columns in the backward pass if that is more. With a softcap in C++ or in torch it is three times
    as much. Kept besides are the hidden states, which the caller has, and a few numbers per row. The backward pass adds
    a float32 [N, H], and the gradients themselves. Rows to whose scores the loss gives no gradient are left out of it.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError: native kernels were chosen and cannot be had.
    """
    _check(hidden_NH, layer, ids_N)
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    return _scored(hidden_NH, layer, _Call(ids_N, layer.softcap, temperature, chunk_bytes, kernels))[:2]


def chunk_bytes_on(device: torch.device) -> int:
    """Bytes that the logits of all rows may take to be kept, by default, in the dtype of the weights.

    64 MiB on a CPU, and on a GPU a part of its whole memory: time is dear there, and logits of all rows that fit need
    not be made again.
    """
    if device.type != "cuda":
        return _CPU_CHUNK_BYTES
    return torch.cuda.get_device_properties(device).total_memory // _GPU_SHARE


def head_scores(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor, *, kernels: Kernels) -> HeadScores:
    """What `head_logp_entropy` gives at temperature 1, and which tokens are the most likely ones, from one pass."""
    _check(hidden_NH, layer, ids_N)
    call = _Call(ids_N, layer.softcap, 1.0, chunk_bytes_on(hidden_NH.device), kernels, marks_top=True)
    return HeadScores(*_scored(hidden_NH, layer, call))


ScoreLoss = Callable[[slice, torch.Tensor, torch.Tensor], ScoreGradient]
"""From some rows and their log-probs and entropies: the gradient that a loss gives to these."""


@dataclass(frozen=True, slots=True)
class HeadGradients:
    """Scores of all rows, and the gradients of a loss of them; those of weight and bias in float32 for 16 bits."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    d_hidden_NH: torch.Tensor
    d_weight_VH: torch.Tensor
    d_bias_V: torch.Tensor | None


@torch.no_grad()
def head_gradients(
    hidden_NH: torch.Tensor,
    layer: OutputLayer,
    ids_N: torch.Tensor,
    loss: ScoreLoss,
    temperature: float = 1.0,
    *,
    kernels: Kernels,
    chunk_bytes: int | None = None,
) -> HeadGradients:
    """Scores as by `head_logp_entropy`, and gradients of a loss whose derivative by a row's scores is known once these
    are: as for a log-likelihood, or a clipped policy loss with its advantages and old log-probs.

    Each block of logits is made once, scored, written over by its gradient and multiplied: three matrix products, where
    a backward pass that comes later takes four if not all logits fit in `chunk_bytes`. `loss` is called for some rows
    at a time, in their order, and can sum up its value and statistics. Gradients of weight and bias are summed over the
    blocks in float32.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError, TritonUnavailableError: that kernel was chosen and cannot be had.
    """
    _check(hidden_NH, layer, ids_N)
    row_bytes = layer.weight_VH.shape[0] * hidden_NH.element_size()
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    scores_2N = _wide(hidden_NH.new_empty(2, len(ids_N)))
    d_hidden_NH = torch.zeros_like(hidden_NH)
    d_weight_VH = _wide(torch.zeros_like(layer.weight_VH))
    d_bias_V = None if layer.bias_V is None else _wide(torch.zeros_like(layer.bias_V))
    for rows in _chunks(len(ids_N), row_bytes, chunk_bytes, _FEWEST_ROWS):
        logits_RV = _logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
        scored = score(logits_RV, ids_N[rows], temperature, softcap=layer.softcap, kernels=kernels)
        scores_2N[0, rows], scores_2N[1, rows] = scored.logp_N, scored.entropy_N
        gradient = loss(rows, scored.logp_N, scored.entropy_N)
        d_logits_RV = logits_gradient(
            logits_RV,
            ids_N[rows],
            scored.sums_NK,
            gradient,
            temperature,
            softcap=layer.softcap,
            kernels=kernels,
        )
        d_hidden_NH[rows] = d_logits_RV.mm(layer.weight_VH)
        d_weight_VH += _product(d_logits_RV.t(), hidden_NH[rows])
        if d_bias_V is not None:
            d_bias_V += d_logits_RV.sum(0, dtype=d_bias_V.dtype)
    return HeadGradients(scores_2N[0], scores_2N[1], d_hidden_NH, d_weight_VH, d_bias_V)


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
        for rows in _chunks(len(hidden_NH), row_bytes, self.chunk_bytes, _FEWEST_ROWS):
            logits_RV = _logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
            ids_R = self.ids_N[rows]
            chunks.append(score(logits_RV, ids_R, self.temperature, softcap=self.softcap, kernels=self.kernels))
            if self.marks_top:  # a cap changes no order
                tops.append(logits_RV.gather(1, ids_R[:, None])[:, 0] >= logits_RV.amax(1))
        is_top_N = torch.cat(tops)
        if len(chunks) == 1:
            return _Forward(chunks[0], is_top_N, logits_RV if keeps else None)
        parts = ([getattr(chunk, field.name) for chunk in chunks] for field in fields(Scored))
        return _Forward(Scored(*map(torch.cat, parts)), is_top_N, None)

    def d_logits(
        self, logits_NC: torch.Tensor, start: int, sums_NK: torch.Tensor, gradient: ScoreGradient
    ) -> torch.Tensor:
        """The gradient of the columns from `start` on of the logits before the cap, written over them."""
        return logits_gradient(
            logits_NC,
            self.ids_N - start,
            sums_NK,
            gradient,
            self.temperature,
            softcap=self.softcap,
            kernels=self.kernels,
        )


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
            part_MH = _product(d_logits_MC, self._weight_VH[columns])
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
    for columns in _chunks(num_tokens, column_bytes, chunk_bytes, _FEWEST_COLUMNS):
        bias_C = None if layer.bias_V is None else layer.bias_V[columns]
        yield columns, _logits(hidden_MH, layer.weight_VH[columns], bias_C)


def _logits(hidden_RH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    if len(hidden_RH) == 1:  # see _FEWEST_ROWS
        return linear(hidden_RH.expand(2, -1), weight_CH, bias_C)[:1]
    return linear(hidden_RH, weight_CH, bias_C)


def _chunks(length: int, bytes_of_one: int, chunk_bytes: int, fewest: int) -> Iterator[slice]:
    """All of `length` things at once if they fit in `chunk_bytes`, else neighbouring ones, as even as can be."""
    most = max(fewest, chunk_bytes // _PARTS // bytes_of_one)
    count = 1 if length * bytes_of_one <= chunk_bytes else -(-length // most)
    for index in range(count if length else 0):
        yield slice(length * index // count, length * (index + 1) // count)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; on a GPU products of 16 bits come in float32, as they were summed, without a rounding of each part."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.mm(b)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
