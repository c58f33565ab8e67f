"""Log-prob of chosen tokens and entropy, with gradients, in C++, in Triton or in torch.

Shape legend: N rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import (
    DOUBLE,
    INTEGER,
    POINTER,
    address,
    empty_as,
    function_of,
    picked_library,
    records_gradient,
    require_rows,
    with_dense_rows,
)
from tunesmith.engine.kernels.gated.api import softcap as capped
from tunesmith.engine.kernels.logprob import torch_impl
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample.torch_impl import SMALLEST_TEMPERATURE

_FORWARD = (*[POINTER] * 5, *[INTEGER] * 3, DOUBLE, INTEGER, INTEGER)
_BACKWARD = (*[POINTER] * 6, *[INTEGER] * 4, DOUBLE, INTEGER, INTEGER)


def chosen_logp_entropy(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) in nats of softmax(logits / temperature), float32 (float64 for float64), with gradients.

    `ids_N` is int64. In C++ and in Triton, from equal logits the log-probs have the bits of the sampler's `raw_logp_B`,
    and a row's result depends on that row alone. Both are NaN where a logit of the row is not finite. What is kept for
    the backward pass are the logits and a few numbers per row; it gives a gradient in the dtype of the logits.

    With a `softcap` c the logits are c * tanh(logits / c): in Triton within the same pass, else in one before it, which
    rounds to the dtype of the logits and keeps one more tensor of their size.

    Raises:
        InputError: shapes, dtypes, ids, the temperature or the cap do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(logits_NV, ids_N, temperature, softcap)
    if not records_gradient(logits_NV):
        scored = score(logits_NV, ids_N, temperature, softcap=softcap, kernels=kernels)
        return scored.logp_N, scored.entropy_N
    if softcap is not None and kernels.picked("logprob", logits_NV) != "triton":
        logits_NV, softcap = capped(logits_NV, softcap, kernels=kernels), None
    return _Chosen.apply(logits_NV, ids_N, temperature, softcap or 0.0, kernels)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs and entropies of rows, and what `logits_gradient` needs of each besides its logits."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    sums_NK: torch.Tensor


def score(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    kernels: Kernels,
) -> Scored:
    """The results of `chosen_logp_entropy`, with the same bits, and a few sums per row; without autograd.

    Raises:
        InputError, NativeUnavailableError, TritonUnavailableError: as `chosen_logp_entropy`.
    """
    _check(logits_NV, ids_N, temperature, softcap)
    logits_NV = logits_NV.detach()
    if softcap is not None and kernels.picked("logprob", logits_NV) != "triton":
        logits_NV, softcap = capped(logits_NV, softcap, kernels=kernels), None
    return _scored(logits_NV, ids_N, temperature, softcap or 0.0, kernels)


@dataclass(frozen=True, slots=True)
class ScoreGradient:
    """Gradients of some loss with respect to the log-probs and entropies of rows; None where it uses none of them."""

    d_logp_N: torch.Tensor | None
    d_entropy_N: torch.Tensor | None


def logits_gradient(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_NK: torch.Tensor,
    gradient: ScoreGradient,
    temperature: float,
    *,
    softcap: float | None = None,
    kernels: Kernels,
) -> torch.Tensor:
    """The gradient of the logits, written over them: rows of `score`, or some neighbouring columns of those.

    `sums_NK` are from `score` of the whole rows, with the same kernels. For columns from c on, give `ids_N - c`; ids
    outside are no error. With a `softcap` it is the gradient of the logits before the cap; in C++ and in torch it then
    has memory of its own, and the pass takes three times that of the logits.
    """
    logits_NV = logits_NV.detach()
    if softcap is not None and kernels.picked("logprob", logits_NV) != "triton":
        with torch.enable_grad():
            capped_NV = capped(logits_NV.requires_grad_(), softcap, kernels=kernels)
        d_capped_NV = capped_NV.detach().clone()  # the cap may want its own output
        logits_gradient(d_capped_NV, ids_N, sums_NK, gradient, temperature, kernels=kernels)
        return torch.autograd.grad(capped_NV, logits_NV, d_capped_NV)[0]
    dense_NV = with_dense_rows(logits_NV)
    _write_gradient(None, ids_N, sums_NK, gradient, temperature, softcap or 0.0, dense_NV, kernels)
    return logits_NV if dense_NV is logits_NV else logits_NV.copy_(dense_NV)


class _Chosen(torch.autograd.Function):
    """`chosen_logp_entropy`; a `softcap` of 0 is none, and Triton alone has one."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scored = _scored(logits_NV, ids_N, temperature, softcap, kernels)
        ctx.save_for_backward(logits_NV, ids_N, scored.sums_NK)
        ctx.call = temperature, softcap, kernels
        ctx.set_materialize_grads(False)
        return scored.logp_N, scored.entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grads[0] is None and grads[1] is None:
            return None, None, None, None, None
        logits_NV, ids_N, sums_NK = ctx.saved_tensors
        temperature, softcap, kernels = ctx.call
        dense_NV = with_dense_rows(logits_NV.detach())
        out_NV = empty_as(dense_NV)
        _write_gradient(dense_NV, ids_N, sums_NK, ScoreGradient(*grads), temperature, softcap, out_NV, kernels)
        return out_NV, None, None, None, None


def _scored(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float, kernels: Kernels
) -> Scored:
    backend = kernels.picked("logprob", logits_NV)
    if backend == "torch":
        return Scored(*torch_impl.sums_in_blocks(logits_NV, ids_N, temperature))
    logits_NV, ids_N = with_dense_rows(logits_NV), ids_N.contiguous()
    if backend == "triton":
        return Scored(*_triton_forward(logits_NV, ids_N, temperature, softcap))
    num_rows, num_tokens = logits_NV.shape
    logp_N, entropy_N = torch.empty(2, num_rows, dtype=torch.float32).unbind()
    sums_N3 = torch.empty(num_rows, 3, dtype=torch.float64)
    function_of(picked_library(kernels, "logprob", logits_NV), "chosen_logp_entropy", _FORWARD)(
        *(tensor.data_ptr() for tensor in (logits_NV, ids_N, logp_N, entropy_N, sums_N3)),
        num_rows,
        num_tokens,
        logits_NV.stride(0),
        temperature,
        logits_NV.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return Scored(logp_N, entropy_N, sums_N3)


def _write_gradient(
    logits_NV: torch.Tensor | None,
    ids_N: torch.Tensor,
    sums_NK: torch.Tensor,
    gradient: ScoreGradient,
    temperature: float,
    softcap: float,
    out_NV: torch.Tensor,
    kernels: Kernels,
) -> None:
    """Write the gradient of the logits to `out_NV`, which holds them if `logits_NV` is None; rows are dense."""
    backend = kernels.picked("logprob", out_NV)
    given_NV = out_NV if logits_NV is None else logits_NV
    # The names hold contiguous copies alive until the call is over.
    ids_N, sums_NK = ids_N.contiguous(), sums_NK.contiguous()
    d_logp_N, d_entropy_N = (
        None if grad is None else grad.contiguous() for grad in (gradient.d_logp_N, gradient.d_entropy_N)
    )
    if backend == "torch":
        torch_impl.gradient_in_blocks(given_NV, ids_N, sums_NK, d_logp_N, d_entropy_N, temperature, out_NV)
    elif backend == "triton":
        zero_N = torch.zeros_like(sums_NK[:, 0])
        grads = (zero_N if grad is None else grad for grad in (d_logp_N, d_entropy_N))
        _triton_backward(logits_NV, ids_N, sums_NK, *grads, temperature, softcap, out_NV)
    else:
        function_of(picked_library(kernels, "logprob", out_NV), "chosen_logp_entropy_backward", _BACKWARD)(
            *(address(tensor) for tensor in (given_NV, ids_N, sums_NK, d_logp_N, d_entropy_N, out_NV)),
            *out_NV.shape,
            given_NV.stride(0),
            out_NV.stride(0),
            temperature,
            out_NV.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )


# The Triton kernels as operators: torch.compile sees them, a CUDA graph may contain them. _Chosen records gradients.
@torch.library.custom_op("tunesmith::logprob", mutates_args=())
def _triton_forward(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, sums_N3), float32."""
    from tunesmith.engine.kernels.logprob.triton_impl import forward

    return forward(logits_NV, ids_N, temperature, softcap)


@torch.library.custom_op("tunesmith::logprob_gradient", mutates_args=("out_NV",))
def _triton_backward(
    logits_NV: torch.Tensor | None,
    ids_N: torch.Tensor,
    sums_N3: torch.Tensor,
    d_logp_N: torch.Tensor,
    d_entropy_N: torch.Tensor,
    temperature: float,
    softcap: float,
    out_NV: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out_NV`, which holds them if `logits_NV` is None."""
    from tunesmith.engine.kernels.logprob.triton_impl import backward

    given_NV = out_NV if logits_NV is None else logits_NV
    backward(given_NV, ids_N, sums_N3, d_logp_N, d_entropy_N, temperature, softcap, out_NV)


@_triton_forward.register_fake
def _(logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float) -> tuple[torch.Tensor, ...]:
    num_rows = logits_NV.shape[0]
    shapes = ((num_rows,), (num_rows,), (num_rows, 3))
    return tuple(logits_NV.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _check(logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float | None) -> None:
    require_rows("logits", logits_NV, may_be_none=True)
    num_rows, num_tokens = logits_NV.shape
    if ids_N.dtype != torch.int64 or ids_N.shape != (num_rows,):
        raise InputError(f"ids are {ids_N.dtype} of shape {tuple(ids_N.shape)}; give torch.int64 [{num_rows}]")
    # On a GPU this would wait for it; there indexing checks the ids, and Triton gives NaN for one outside.
    if num_rows and ids_N.device.type == "cpu" and not 0 <= int(ids_N.min()) <= int(ids_N.max()) < num_tokens:
        raise InputError(f"ids lie in [{int(ids_N.min())}, {int(ids_N.max())}]; give ids in [0, {num_tokens})")
    if not SMALLEST_TEMPERATURE <= temperature < float("inf"):
        raise InputError(
            f"temperature is {temperature}; log-probs need one of at least {SMALLEST_TEMPERATURE}, and finite"
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise InputError(f"softcap is {softcap}; give a positive finite number, or None for no cap")
