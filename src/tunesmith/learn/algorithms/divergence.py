"""Distillation loss: divergence between the next-token distributions of a student and of its teachers.

Distributions are over the whole vocabulary, at the completion tokens (generalized knowledge distillation, Agarwal et
al. 2024, arXiv 2306.13649). Logits are computed from hidden states in blocks of rows, never all at once.

Shape legend: N completion tokens, H hidden, V vocabulary, R rows of a block, K statistics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import records_gradient
from tunesmith.engine.kernels.logprob.head import (
    FEWEST_COLUMNS,
    FEWEST_ROWS,
    LogitsBuffer,
    OutputLayer,
    blocks,
    chunk_bytes_on,
    in_autocast,
    wide_product,
)
from tunesmith.engine.kernels.masking import Denominator, check_denominator, total, widened
from tunesmith.learn.algorithms.sums import Sums

_WORK_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Size of a float32 temporary of the element-wise part: on a CPU the half dozen of them stay in its cache."""
_WEIGHT_BYTES = 16 * 2**20
"""Size of a product that is added to the gradient of the weight."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Generalized Jensen-Shannon divergence of softmax(logits / temperature), in the convention of TRL.

    With the student's p, a teacher's q and their mixture m = beta q + (1 - beta) p it is

        beta KL(q || m) + (1 - beta) KL(p || m)   for 0 < beta < 1; 1/2 is the Jensen-Shannon divergence,
        KL(q || p), the forward KL                for beta = 0: covers all modes of the teacher,
        KL(p || q), the reverse KL                for beta = 1: seeks the teacher's main modes.

    The first formula vanishes as beta approaches 0 or 1, so the two ends are not its limits. Gradients are not scaled
    by temperature^2.

    `is_sampled` estimates the reverse KL by the sampled token y alone: log p(y) - log q(y), with the gradient
    (log p(y) - log q(y)) grad log p(y). Over samples of p both have the mean of the reverse KL's.
    """

    beta: float = 1.0
    temperature: float = 1.0
    is_sampled: bool = False


@dataclass(frozen=True, slots=True)
class Predictions:
    """Next-token distributions of one model: its hidden states `[N, H]` at the tokens, and its output layer.

    With `layer` None, `hidden_NH` are the logits. `weight` is that of a teacher, relative to the other teachers.
    """

    hidden_NH: Tensor
    layer: OutputLayer | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DivergenceStats(Sums):
    """Sums over tokens; with several teachers, weighted means of their divergence and agreement."""

    tokens: Tensor
    divergence: Tensor
    """In nats, before the division by the global denominator."""
    entropy: Tensor
    """Of the student at the temperature of the divergence, in nats."""
    agreement: Tensor
    """Tokens at which student and teacher have the same most likely token."""

    def metrics(self) -> dict[str, float]:
        """Means over tokens, empty if there are none. Synchronizes with the device once."""
        sums = self.floats()
        tokens = sums["tokens"]
        if not tokens:
            return {}
        return {
            "loss": sums["divergence"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "teacher_agreement": sums["agreement"] / tokens,
        }


def divergence_loss(
    student: Predictions,
    teachers: Sequence[Predictions],
    divergence: Divergence,
    *,
    num_tokens: Denominator,
    vocabulary: int | None = None,
    chunk_bytes: int | None = None,
    sampled_N: Tensor | None = None,
    weight_N: Tensor | None = None,
) -> tuple[Tensor, DivergenceStats]:
    """Scalar loss, differentiable through the student's hidden states and output layer, and detached statistics.

    The loss is the sum of the divergence over the tokens, each times its weight in `weight_N` if that is given, divided
    by `num_tokens`, the number of tokens (or the sum of weights) of the whole optimizer step; statistics have no
    weights. `sampled_N` are the ids of the tokens, for a divergence that `is_sampled`. Logits have the dtype of the
    weights, or of autocast; the softmax is in float32 (float64 for float64). No gradient flows to the teachers.

    Several teachers: the weighted mean of their divergences, not the divergence from one mixture, so that teachers are
    independent of each other and their sums add up. Its optimum is the weighted arithmetic mean of the teachers for the
    forward KL (with the gradient of the mixture), and their normalized weighted geometric mean for the reverse KL.

    Output layers padded to different sizes are cut to the smallest one if it holds `vocabulary`, the number of ids of
    the tokenizer that all models share.

    Memory: blocks of rows whose logits, of all models together, fit in `chunk_bytes` (default: `chunk_bytes_on` the
    device), at least 2 rows. The forward pass computes the gradients of a block along with its divergence, so that
    logits are made once. Gradients of hidden states, weight and bias are kept until the backward pass, in float32 for
    16-bit inputs; a second backward pass raises RuntimeError.

    Raises:
        InputError: shapes do not fit, vocabularies differ, or the sampled ids are missing.
    """
    check_denominator("num_tokens", num_tokens)
    if divergence.is_sampled and sampled_N is None:
        raise InputError("a divergence that is sampled needs the ids of the tokens; give sampled_N")
    models = [
        _cast(student),
        *(_cast(replace(one, hidden_NH=one.hidden_NH.detach())) for one in teachers),
    ]
    size = _common_size(models, vocabulary)
    hidden_NH, layer = models[0].hidden_NH, models[0].layer
    chunk_bytes = chunk_bytes_on(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    tokens = _Tokens(sampled_N if divergence.is_sampled else None, weight_N)
    call = _Call(models[1:], divergence, size, chunk_bytes, _softcap(models[0]), tokens)
    tensors = (hidden_NH, None, None) if layer is None else (hidden_NH, layer.weight_VH, layer.bias_V)
    if not records_gradient(*tensors):
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
    summed, sums_K = _InBlocks.apply(*tensors, call)  # type: ignore[reportGeneralTypeIssues]
    return summed / num_tokens, DivergenceStats(sums_K.new_tensor(len(hidden_NH)), *sums_K[:3].unbind())


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The id of each token, if the divergence is sampled, and its weight, if they have any."""

    sampled_N: Tensor | None
    weight_N: Tensor | None

    def part(self, rows: slice) -> "_Tokens":
        """Those of `rows`."""
        return _Tokens(*(None if one is None else one[rows] for one in (self.sampled_N, self.weight_N)))


@dataclass(frozen=True, slots=True)
class _Call:
    """Everything but the student's tensors; `size` is V, `softcap` the student's."""

    teachers: Sequence[Predictions]
    divergence: Divergence
    size: int
    chunk_bytes: int
    softcap: float | None
    tokens: _Tokens


class _InBlocks(torch.autograd.Function):
    """(Weighted sum of the divergences, sums_K), with gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        inputs = (hidden_NH, weight_VH, bias_V)
        sums_dtype = widened(hidden_NH[:0]).dtype
        ctx.dtypes = [one if one is None else one.dtype for one in inputs]
        ctx.gradients = gradients = [
            torch.zeros_like(one, dtype=sums_dtype) if one is not None and is_needed else None
            for one, is_needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        layer = None if weight_VH is None else OutputLayer(weight_VH, bias_V)
        models = [(one, LogitsBuffer()) for one in (Predictions(hidden_NH, layer), *call.teachers)]
        sums_K = torch.zeros(4, dtype=torch.float64, device=hidden_NH.device)
        row_bytes = call.size * sum(model.hidden_NH.element_size() for model, _ in models)
        work_bytes = _WORK_BYTES.get(hidden_NH.device.type, _WORK_BYTES["cuda"])
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in blocks(len(hidden_NH), row_bytes, call.chunk_bytes, FEWEST_ROWS):
                student_RV, *teachers_RV = [_logits(model, rows, call.size, buffer) for model, buffer in models]
                tokens = call.tokens.part(rows)
                for part in blocks(len(student_RV), 4 * call.size, work_bytes, 1):
                    of_part = [logits_RV[part] for logits_RV in teachers_RV]
                    sums_K += _score(student_RV[part], of_part, tokens.part(part), call)
                _add_gradients(gradients, rows, student_RV, hidden_NH, weight_VH)
        ctx.mark_non_differentiable(sums_K)
        return sums_K[0 if call.tokens.weight_N is None else 3].to(sums_dtype), sums_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "the gradients of this loss are used up; compute the loss again for another backward pass"
            )
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if one is None else one.mul_(grads[0]).to(dtype) for one, dtype in pairs), None


def _logits(model: Predictions, rows: slice, size: int, buffer: LogitsBuffer) -> Tensor:
    """The first `size` logits of these rows, before the softcap; overwrites the previous block in `buffer`."""
    hidden_RH, layer = model.hidden_NH[rows], model.layer
    if layer is None:
        return hidden_RH[:, :size].clone()
    bias_V = None if layer.bias_V is None else layer.bias_V[:size]
    return buffer.logits(hidden_RH, layer.weight_VH[:size], bias_V)


def _add_gradients(
    gradients: Sequence[Tensor | None], rows: slice, d_logits_RV: Tensor, hidden_NH: Tensor, weight_VH: Tensor | None
) -> None:
    """Accumulate the gradients of hidden states, weight and bias from those of the logits of these rows."""
    d_hidden_NH, d_weight_VH, d_bias_V = gradients
    size = d_logits_RV.shape[1]
    if d_hidden_NH is not None:
        d_hidden_RH = d_logits_RV if weight_VH is None else wide_product(d_logits_RV, weight_VH[:size])
        d_hidden_NH[rows, : d_hidden_RH.shape[1]] = d_hidden_RH.to(d_hidden_NH.dtype)
    if d_weight_VH is not None:
        hidden_RH = hidden_NH[rows]
        for tokens in blocks(size, 4 * hidden_RH.shape[1], _WEIGHT_BYTES, FEWEST_COLUMNS):
            d_weight_VH[tokens] += wide_product(d_logits_RV[:, tokens].t(), hidden_RH)
    if d_bias_V is not None:
        d_bias_V[:size] += d_logits_RV.sum(0, dtype=d_bias_V.dtype)


def _score(student_RV: Tensor, teachers_RV: Sequence[Tensor], tokens: _Tokens, call: _Call) -> Tensor:
    """sums_K: divergence, student's entropy, agreement, and the divergence times the tokens' weights. The gradient is
    written over the student's logits.
    """
    temperature, weights = call.divergence.temperature, sum(teacher.weight for teacher in call.teachers)
    logp_RV = _log_probs(student_RV, call.softcap, temperature)
    p_RV, slope_RV, top_R = logp_RV.exp(), torch.zeros_like(logp_RV), logp_RV.argmax(-1)
    sums_K = student_RV.new_zeros(4, dtype=torch.float64)
    sums_K[1] = -total(torch.linalg.vecdot(p_RV, logp_RV))
    for teacher, logits_RV in zip(call.teachers, teachers_RV, strict=True):
        share = teacher.weight / weights
        logq_RV = _log_probs(logits_RV, _softcap(teacher), temperature)
        if tokens.sampled_N is None:
            divergence_R, d_logits_RV = _divergence(logp_RV, p_RV, logq_RV, call.divergence.beta)
        else:
            divergence_R, d_logits_RV = _sampled(logp_RV, p_RV, logq_RV, tokens.sampled_N)
        slope_RV.add_(d_logits_RV, alpha=share)
        sums_K[0] += share * total(divergence_R)
        sums_K[2] += share * total(logq_RV.argmax(-1) == top_R)
        if tokens.weight_N is not None:
            sums_K[3] += share * total(divergence_R * tokens.weight_N)
    if tokens.weight_N is not None:
        slope_RV.mul_(tokens.weight_N[:, None])
    if call.softcap is not None:
        slope_RV.mul_(1 - torch.tanh(widened(student_RV) / call.softcap).square())
    student_RV.copy_(slope_RV.div_(temperature))
    return sums_K


def _divergence(logp_RV: Tensor, p_RV: Tensor, logq_RV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence of each row, and its derivative with respect to the student's scaled logits.

    The derivative is p - q for the forward KL, p (log p/q - KL(p || q)) for the reverse KL, and
    (1 - beta) p (log p/m - KL(p || m)) in between.
    """
    if beta == 0:
        q_RV = logq_RV.exp()
        return torch.linalg.vecdot(q_RV, logq_RV - logp_RV), p_RV - q_RV
    mixture_RV = logq_RV
    if beta < 1:
        mixture_RV = torch.logaddexp(logq_RV + math.log(beta), logp_RV + math.log1p(-beta))
    slope_RV = logp_RV - mixture_RV
    from_student_R = torch.linalg.vecdot(p_RV, slope_RV)
    slope_RV.sub_(from_student_R[:, None]).mul_(p_RV)
    if beta == 1:
        return from_student_R, slope_RV
    from_teacher_R = torch.linalg.vecdot(logq_RV.exp(), logq_RV - mixture_RV)
    return beta * from_teacher_R + (1 - beta) * from_student_R, slope_RV.mul_(1 - beta)


def _sampled(logp_RV: Tensor, p_RV: Tensor, logq_RV: Tensor, sampled_R: Tensor) -> tuple[Tensor, Tensor]:
    """log p - log q of the sampled token of each row, and that times the derivative of log p, `1[v = y] - p_v`."""
    place_R1 = sampled_R[:, None]
    ratio_R1 = logp_RV.gather(1, place_R1) - logq_RV.gather(1, place_R1)
    slope_RV = (-ratio_R1 * p_RV).scatter_add_(1, place_R1, ratio_R1)
    return ratio_R1[:, 0], slope_RV


def _log_probs(logits_RV: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float32 for 16 bits."""
    logits_RV = widened(logits_RV)
    if softcap is not None:
        logits_RV = softcap * torch.tanh(logits_RV / softcap)
    return (logits_RV if temperature == 1 else logits_RV / temperature).log_softmax(-1)


def _softcap(model: Predictions) -> float | None:
    return None if model.layer is None else model.layer.softcap


def _cast(model: Predictions) -> Predictions:
    if model.layer is None:
        return model
    hidden_NH, layer = in_autocast(model.hidden_NH, model.layer)
    return Predictions(hidden_NH, layer, model.weight)


def _common_size(models: Sequence[Predictions], vocabulary: int | None) -> int:
    """V, after checking shapes and vocabularies; the first model is the student."""
    num_rows = len(models[0].hidden_NH)
    for model in models:
        shape = tuple(model.hidden_NH.shape)
        if len(shape) != 2 or shape[0] != num_rows:
            raise InputError(f"hidden states are {shape}; give [{num_rows}, hidden], as many rows as of the student")
        if model.layer is not None and model.layer.weight_VH.shape[1:] != shape[1:]:
            weight = tuple(model.layer.weight_VH.shape)
            raise InputError(f"hidden states are {shape} and their output layer {weight}; give [vocabulary, hidden]")
    sizes = [model.hidden_NH.shape[1] if model.layer is None else len(model.layer.weight_VH) for model in models]
    if len(set(sizes)) > 1 and (vocabulary is None or vocabulary > min(sizes)):
        raise InputError(
            f"student and teachers have {sizes} logits, and their tokenizer {vocabulary or 'unknown'} ids; take "
            "teachers with the student's tokenizer, and output layers that hold all its ids"
        )
    return min(sizes)
