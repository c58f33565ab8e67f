"""Log-prob and entropy from hidden states, through the output layer, without ever holding all logits.

Shape legend: N rows, H hidden, V vocabulary, R rows of a block, M rows with a gradient, C columns of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import records_gradient
from tunesmith.engine.kernels.linear.exact import is_by_onednn, linear, linear_into, product
from tunesmith.engine.kernels.logprob.api import Scored, ScoreGradient, logits_gradient, score
from tunesmith.engine.kernels.masking import widened
from tunesmith.engine.kernels.native import Kernels

CPU_CHUNK_BYTES = 128 * 2**20
GPU_SHARE = 32

FEWEST_ROWS, FEWEST_COLUMNS = 2, 64
"""Smallest block, whatever its size in bytes: a matrix of one row may take another code path, with other bits."""

_FORWARD_PARTS, _BACKWARD_PARTS = 8, 16
"""If not all logits fit, a block takes this part of `chunk_bytes`. On a CPU smaller blocks of rows are slower, because
each packs the weight again; so are blocks of columns below a sixteenth in the backward pass."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits are `hidden @ weight_VH.T + bias_V`, then `softcap * tanh(logit / softcap)` if there is a `softcap`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Per row: log-prob of its token and entropy in nats, and whether no token is more likely than its own."""

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
    product of a row does not depend on the other rows (bfloat16 and float32 on a CPU). Gradients flow to the hidden
    states, the weight and the bias; the weight's is rounded once, as if all logits had been there. Under autocast
    logits have its dtype, as those of `torch.nn.functional.linear` do.

    Memory: if the logits of all rows fit in `chunk_bytes` (by default `chunk_bytes_on` the device) they are kept for
    the backward pass, which overwrites them with their gradient. Else the forward pass computes some rows at a time,
    and the backward pass recomputes some columns at a time: blocks of an eighth of `chunk_bytes`, a sixteenth in the
    backward pass, or 2 rows and 64 columns if that is more. A softcap in C++ or in torch takes three times as much.
    Also kept are the hidden states, which the caller has, and a few numbers per row. The backward pass allocates a
    float32 [N, H] and the gradients themselves; rows whose scores get no gradient are left out of it.

    Raises:
        InputError: shapes or dtypes, ids or the temperature do not fit.
        NativeUnavailableError: native kernels were chosen and cannot run.
    """
    _check(hidden_NH, layer, ids_N)
    hidden_NH, layer = in_autocast(hidden_NH, layer)
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    return _scored(hidden_NH, layer, _HeadCall(ids_N, layer.softcap, temperature, chunk_bytes, kernels))[:2]


def head_scores(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor, *, kernels: Kernels) -> HeadScores:
    """`head_logp_entropy` at temperature 1, and which tokens are the most likely ones, from one pass."""
    _check(hidden_NH, layer, ids_N)
    hidden_NH, layer = in_autocast(hidden_NH, layer)
    call = _HeadCall(ids_N, layer.softcap, 1.0, chunk_bytes_on(hidden_NH.device), kernels, marks_top=True)
    return HeadScores(*_scored(hidden_NH, layer, call))


def chunk_bytes_on(device: torch.device) -> int:
    """Default limit in bytes, in the dtype of the weights, up to which the logits of all rows are kept.

    128 MiB on a CPU, and on a GPU a share of its memory: logits that fit need not be computed again.
    """
    if device.type != "cuda":
        return CPU_CHUNK_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_SHARE


@dataclass(frozen=True, slots=True)
class _HeadCall:
    """Arguments of a pass that take no gradient. With `marks_top` it also finds the most likely tokens."""

    ids_N: torch.Tensor
    softcap: float | None
    temperature: float
    chunk_bytes: int
    kernels: Kernels
    marks_top: bool = False

    def fits(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
        """True if the logits of all rows fit in `chunk_bytes`."""
        return len(hidden_NH) * weight_VH.shape[0] * hidden_NH.element_size() <= self.chunk_bytes


class LogitsBuffer:
    """One buffer for the logits of all blocks, allocated with the first and largest one.

    Allocating per block fragments glibc's heap, and resident memory grows several-fold.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def logits(self, hidden_RH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
        """Logits `[R, C]` before any cap, over those of the block before; a row's bits do not depend on its block."""
        if len(hidden_RH) == 1:  # see FEWEST_ROWS
            return linear(hidden_RH.expand(2, -1), weight_CH, bias_C)[:1]
        if is_by_onednn(hidden_RH, weight_CH):  # it has no out=
            return linear(hidden_RH, weight_CH, bias_C)
        if self._buffer is None:
            logits_RC = linear(hidden_RH, weight_CH, bias_C)
            self._buffer = logits_RC.view(-1)
            return logits_RC
        shape = len(hidden_RH), len(weight_CH)
        out_RC = self._buffer[: shape[0] * shape[1]].view(shape)
        return linear_into(out_RC, hidden_RH, weight_CH, bias_C)


def blocks(length: int, bytes_of_one: int, block_bytes: int, fewest: int) -> Iterator[slice]:
    """Slices that cover `length` rows, each at most `block_bytes` or `fewest` rows, of even size, the largest first."""
    count = -(-length // max(fewest, block_bytes // bytes_of_one))
    for index in range(count):
        yield slice(-(-length * index // count), -(-length * (index + 1) // count))


def _scored(
    hidden_NH: torch.Tensor, layer: OutputLayer, call: _HeadCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, is_top_N); the last is empty unless the call asks for it."""
    if len(call.ids_N) == 0:  # still a function of its inputs: a loss over nothing has a gradient of zero
        nothing_N = 0.0 * hidden_NH.sum(-1).to(torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32)
        return nothing_N, nothing_N.clone(), torch.zeros_like(call.ids_N, dtype=torch.bool)
    tensors = (hidden_NH, layer.weight_VH, layer.bias_V)
    if records_gradient(*tensors):
        return _FromHidden.apply(*tensors, call)  # type: ignore[return-value]
    done = _forward(call, hidden_NH, layer, keeps=False)
    return done.scored.logp_N, done.scored.entropy_N, done.is_top_N


@dataclass(frozen=True, slots=True)
class _Forward:
    """Scores of all rows, the marks of the most likely tokens, and the logits before any cap if they are kept."""

    scored: Scored
    is_top_N: torch.Tensor
    logits_NV: torch.Tensor | None


def _forward(call: _HeadCall, hidden_NH: torch.Tensor, layer: OutputLayer, *, keeps: bool) -> _Forward:
    row_bytes = layer.weight_VH.shape[0] * hidden_NH.element_size()
    block_bytes = call.chunk_bytes // (1 if call.fits(hidden_NH, layer.weight_VH) else _FORWARD_PARTS)
    chunks: list[Scored] = []
    tops = [torch.zeros(0, dtype=torch.bool, device=hidden_NH.device)]
    logits_RV, buffer = None, LogitsBuffer()
    for rows in blocks(len(hidden_NH), row_bytes, block_bytes, FEWEST_ROWS):
        logits_RV = buffer.logits(hidden_NH[rows], layer.weight_VH, layer.bias_V)
        ids_R = call.ids_N[rows]
        chunks.append(score(logits_RV, ids_R, call.temperature, softcap=call.softcap, kernels=call.kernels))
        if call.marks_top:  # a cap changes no order
            tops.append(logits_RV.gather(1, ids_R[:, None])[:, 0] >= logits_RV.amax(1))
    is_top_N = torch.cat(tops)
    if len(chunks) == 1:
        return _Forward(chunks[0], is_top_N, logits_RV if keeps else None)
    parts = ([getattr(chunk, field.name) for chunk in chunks] for field in fields(Scored))
    return _Forward(Scored(*map(torch.cat, parts)), is_top_N, None)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, call: _HeadCall
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
        call: _HeadCall = ctx.call
        gradient = ScoreGradient(*grads[:2])  # of log-probs and entropies
        rows_M = _rows_with_gradient(gradient, hidden_NH.device)
        hidden_MH = hidden_NH
        if rows_M is not None:
            logits_NV = None if logits_NV is None else logits_NV[rows_M]
            call = replace(call, ids_N=call.ids_N[rows_M])
            gradient = ScoreGradient(*(None if grad is None else grad[rows_M] for grad in grads[:2]))
            hidden_MH, sums_NK = hidden_NH[rows_M], sums_NK[rows_M]
        layer = OutputLayer(weight_VH, bias_V)
        sums = _Gradients(hidden_MH, layer, ctx.needs_input_grad)
        # By columns, though the forward pass goes by rows: a block then has the whole gradient of its rows of the
        # weight, which is the largest result and is rounded once, as it would be with all logits. By rows it would be a
        # sum over blocks. Columns can be taken alone because the sums of each row are known from the forward pass.
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
    """Gradients of hidden states, weight and bias, accumulated over blocks of columns."""

    def __init__(self, hidden_MH: torch.Tensor, layer: OutputLayer, needs: tuple[bool, ...]) -> None:
        self._hidden_MH = hidden_MH
        self._weight_VH = layer.weight_VH
        self._d_hidden_MH = torch.zeros_like(hidden_MH) if needs[0] else None
        self._num_blocks = 0
        empty_or_zeros = torch.empty_like if len(hidden_MH) else torch.zeros_like  # without rows, nothing is added
        self.d_weight_VH = empty_or_zeros(layer.weight_VH) if needs[1] else None
        self.d_bias_V = torch.zeros_like(layer.bias_V) if needs[2] and layer.bias_V is not None else None

    def add(self, columns: slice, d_logits_MC: torch.Tensor) -> None:
        """Accumulate the gradient of the logits of some columns."""
        if self.d_weight_VH is not None:
            torch.mm(d_logits_MC.t(), self._hidden_MH, out=self.d_weight_VH[columns])
        if self.d_bias_V is not None:
            self.d_bias_V[columns] = d_logits_MC.sum(0)
        if self._d_hidden_MH is not None:
            part_MH = wide_product(d_logits_MC, self._weight_VH[columns])
            # One block needs no sum; several are summed in float32 where the parts have 16 bits.
            self._d_hidden_MH = self._d_hidden_MH + part_MH if self._num_blocks else widened(part_MH)
        self._num_blocks += 1

    def d_hidden(self) -> torch.Tensor | None:
        """The gradient of the hidden states, in their dtype."""
        return None if self._d_hidden_MH is None else self._d_hidden_MH.to(self._hidden_MH.dtype)


def _columns(
    hidden_MH: torch.Tensor, layer: OutputLayer, call: _HeadCall, logits_MV: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of columns with their logits, recomputed unless `logits_MV` holds all of them."""
    num_tokens = layer.weight_VH.shape[0]
    if len(hidden_MH) == 0:
        return
    if logits_MV is not None:
        yield slice(0, num_tokens), logits_MV
        return
    column_bytes = len(hidden_MH) * hidden_MH.element_size()
    block_bytes = call.chunk_bytes // (1 if call.fits(hidden_MH, layer.weight_VH) else _BACKWARD_PARTS)
    buffer = LogitsBuffer()
    for columns in blocks(num_tokens, column_bytes, block_bytes, FEWEST_COLUMNS):
        bias_C = None if layer.bias_V is None else layer.bias_V[columns]
        yield columns, buffer.logits(hidden_MH, layer.weight_VH[columns], bias_C)


def _rows_with_gradient(gradient: ScoreGradient, device: torch.device) -> torch.Tensor | None:
    """Indices of the rows whose scores get a gradient; None if these are all."""
    given = [grad for grad in (gradient.d_logp_N, gradient.d_entropy_N) if grad is not None]
    if not given:
        return torch.zeros(0, dtype=torch.int64, device=device)
    used_N = given[0] != 0
    for grad in given[1:]:
        used_N |= grad != 0
    return None if bool(used_N.all()) else used_N.nonzero()[:, 0]


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; on a GPU 16-bit products are returned in float32, so that a sum of several is rounded once."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return product(a, b)


def in_autocast(hidden_NH: torch.Tensor, layer: OutputLayer) -> tuple[torch.Tensor, OutputLayer]:
    """Hidden states and layer in the dtype of autocast if it is on, as for a linear map; float64 is left alone."""
    device = hidden_NH.device.type
    if not torch.is_autocast_enabled(device) or hidden_NH.dtype == torch.float64:
        return hidden_NH, layer
    dtype = torch.get_autocast_dtype(device)
    bias_V = None if layer.bias_V is None else layer.bias_V.to(dtype)
    return hidden_NH.to(dtype), OutputLayer(layer.weight_VH.to(dtype), bias_V, layer.softcap)


def _check(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor) -> None:
    """Raise InputError unless there is a hidden state of the layer's width and an id for each row."""
    weight_VH = layer.weight_VH
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise InputError(
            f"hidden states are {tuple(hidden_NH.shape)} and the output layer {tuple(weight_VH.shape)}; "
            "give [rows, hidden] and [vocabulary, hidden]"
        )
    if ids_N.shape != hidden_NH.shape[:1]:
        raise InputError(f"{tuple(ids_N.shape)} ids for {len(hidden_NH)} rows; give one for each row")
