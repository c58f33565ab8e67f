"""`torch.ops.tunesmith.logprob`: the Triton kernels as operators that autograd and torch.compile know.

Triton is imported by the first call, not here.

Shape legend: N rows, V vocabulary.
"""

from typing import Any

import torch

from tunesmith.kernels.arguments import empty_as, with_dense_rows


@torch.library.custom_op("tunesmith::logprob", mutates_args=())
def logprob(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, sums_N3), float32: what `torch_impl.chosen_logp_entropy` defines, and what `logprob_gradient`
    needs of each row. A `softcap` of 0 is none. Gradients flow from the first two to the logits.
    """
    from tunesmith.kernels.logprob.triton_impl import forward

    return forward(with_dense_rows(logits_NV), ids_N, temperature, softcap)


@torch.library.custom_op("tunesmith::logprob_gradient", mutates_args=())
def logprob_gradient(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_N3: torch.Tensor,
    d_logp_N: torch.Tensor,
    d_entropy_N: torch.Tensor,
    temperature: float,
    softcap: float,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype."""
    from tunesmith.kernels.logprob.triton_impl import backward

    dense_NV = with_dense_rows(logits_NV)
    gradient_NV = empty_as(dense_NV)
    backward(dense_NV, ids_N, sums_N3, d_logp_N, d_entropy_N, temperature, softcap, gradient_NV)
    return gradient_NV


@torch.library.custom_op("tunesmith::logprob_gradient_", mutates_args=("logits_NV",))
def logprob_gradient_(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_N3: torch.Tensor,
    d_logp_N: torch.Tensor,
    d_entropy_N: torch.Tensor,
    temperature: float,
    softcap: float,
) -> None:
    """Write the gradient of the logits over them."""
    from tunesmith.kernels.logprob.triton_impl import backward

    dense_NV = with_dense_rows(logits_NV)
    backward(dense_NV, ids_N, sums_N3, d_logp_N, d_entropy_N, temperature, softcap, dense_NV)
    if dense_NV is not logits_NV:
        logits_NV.copy_(dense_NV)


@logprob.register_fake
def _(logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float) -> tuple[torch.Tensor, ...]:
    num_rows = logits_NV.shape[0]
    shapes = ((num_rows,), (num_rows,), (num_rows, 3))
    return tuple(logits_NV.new_empty(shape, dtype=torch.float32) for shape in shapes)


@logprob_gradient.register_fake
def _(logits_NV: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty_as(with_dense_rows(logits_NV))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits_NV, ids_N, ctx.temperature, ctx.softcap = inputs
    ctx.save_for_backward(logits_NV, ids_N, output[2])
    ctx.mark_non_differentiable(output[2])


def _gradient(
    ctx: Any, d_logp_N: torch.Tensor, d_entropy_N: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    given = (*ctx.saved_tensors, d_logp_N, d_entropy_N, ctx.temperature, ctx.softcap)
    return logprob_gradient(*given), None, None, None


logprob.register_autograd(_gradient, setup_context=_keep)


class ReusingLogits(torch.autograd.Function):
    """`logprob` whose backward pass writes the gradient over the logits; for eager code."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logp_N, entropy_N)."""
        logp_N, entropy_N, sums_N3 = logprob(logits_NV.detach(), ids_N, temperature, softcap)
        ctx.save_for_backward(logits_NV, ids_N, sums_N3)
        ctx.numbers = temperature, softcap
        # Rows that share memory cannot hold a gradient each, and rows with gaps would need a copy anyway.
        ctx.in_place = logits_NV.stride(0) >= logits_NV.shape[1] and logits_NV.stride(1) == 1
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the logits, in their memory; reading them in another backward pass raises."""
        logits_NV, ids_N, sums_N3 = ctx.saved_tensors
        given = (logits_NV.detach(), ids_N, sums_N3, *grads, *ctx.numbers)
        if not ctx.in_place:
            return logprob_gradient(*given), None, None, None
        logprob_gradient_(*given)  # this raises the version of the logits, which detach() shares
        return given[0], None, None, None
