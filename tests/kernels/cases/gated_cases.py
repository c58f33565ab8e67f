"""What the tests of gated activations share with their twins in Triton."""

from collections.abc import Callable
from functools import partial

import torch

import drawn

normal = partial(drawn.normal, scale=4.0)


def with_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], d_out: torch.Tensor
) -> list[torch.Tensor]:
    """[output, gradient of each input]."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_as_in_float64(
    function: Callable[..., torch.Tensor],
    definition: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    d_out: torch.Tensor,
    *,
    rtol: float,
) -> None:
    """One rounding to the dtype, after arithmetic in float32 whose errors are relative to the largest term."""
    found = with_gradients(function, inputs, d_out)
    exact = with_gradients(definition, [tensor.double() for tensor in inputs], d_out.double())
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == d_out.dtype
        torch.testing.assert_close(ours.double(), expected, atol=2e-6, rtol=rtol)
