"""Add and RMSNorm, with gradients, in C++, in Triton or in torch.

Shape legend: R rows, H hidden; an x with heads is [R, heads, H].
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tunesmith.core.errors import InputError, TritonUnavailableError
from tunesmith.kernels.arguments import (
    FLOATS,
    INTEGER,
    POINTER,
    SINGLE,
    address,
    empty_as,
    function_of,
    picked_library,
    records_gradient,
    with_dense_rows,
)
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm import ops, torch_impl
from tunesmith.kernels.rms_norm.torch_impl import LONGEST, Normed, layout_of

_ROWS_OF_SUM = 64
"""`kRowsOfSum` of cpu.cpp."""

_FORWARD = (*[POINTER] * 6, *[INTEGER] * 5, SINGLE, SINGLE, INTEGER, INTEGER)
_BACKWARD = (*[POINTER] * 8, *[INTEGER] * 5, SINGLE, INTEGER, INTEGER)


def add_rms_norm(
    x_RH: torch.Tensor,
    residual_RH: torch.Tensor | None,
    weight_H: torch.Tensor,
    epsilon: float,
    *,
    offset: float = 0.0,
    kernels: Kernels,
) -> Normed:
    """The residual stream x + residual and its RMSNorm, as `torch_impl.add_rms_norm` defines them; gradients to all.

    `offset` 1 is Gemma's norm, whose weight is stored less 1. x is [R, H], or [R, heads, H] for a norm of each head;
    it may be a slice of a wider tensor, so the heads within a fused projection need no copy. Without a residual,
    `sum_RH` is x itself. In C++ and in Triton a row's result depends on that row alone, to the bit, with gradients or
    without, and sums run in another order than torch's, so a result may be rounded to its neighbour. The gradient of a
    bfloat16 weight is summed in float32: in C++ in the same order for any number of threads, in Triton in one that the
    shape decides. Triton has rows of up to `layout.LONGEST` numbers; with `auto` longer ones run in torch.

    Raises:
        InputError: shapes or dtypes do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(x_RH, residual_RH, weight_H)
    form = _form(kernels, x_RH, epsilon, offset)
    if form is None:
        return torch_impl.add_rms_norm(x_RH, residual_RH, weight_H, epsilon, offset)
    if not records_gradient(x_RH, residual_RH, weight_H):
        return Normed(*form.forward(x_RH, residual_RH, weight_H, keeps_scale=False)[:2])
    if residual_RH is None:
        return Normed(_RmsNorm.apply(x_RH, weight_H, form), x_RH)  # type: ignore[arg-type]
    return Normed(*_AddRmsNorm.apply(x_RH, residual_RH, weight_H, form))  # type: ignore[misc]


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(sum, weight, 1 / root mean square of each row): what the backward pass needs."""


class _Form(Protocol):
    """A norm with its two numbers, in one of the kernels."""

    def forward(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, *, keeps_scale: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(normed, sum, 1 / root mean square of each row); the last may be None unless it `keeps_scale`."""
        ...

    def backward(
        self, saved: Saved, d_normed_RH: torch.Tensor, d_sum_RH: torch.Tensor | None, *, for_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gradient of x and of the residual, gradient of the weight)."""
        ...


def _form(kernels: Kernels, x_RH: torch.Tensor, epsilon: float, offset: float) -> _Form | None:
    """None where the definition is to do the work."""
    backend, width = kernels.picked("rms_norm", x_RH), x_RH.shape[-1]
    if backend == "native":
        return _Native(picked_library(kernels, "rms_norm", x_RH), epsilon, offset)
    if backend == "torch" or (width > LONGEST and kernels.choice != "triton"):
        return None
    if width > LONGEST:
        raise TritonUnavailableError(
            f"the Triton kernel rms_norm takes rows of up to {LONGEST} numbers and was given {width}; choose auto "
            "or torch"
        )
    return _Triton(epsilon, offset)


@dataclass(frozen=True, slots=True)
class _Triton:
    epsilon: float
    offset: float

    def forward(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, *, keeps_scale: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        normed_RH, sum_RH, scale_R = ops.add_rms_norm(x_RH, residual_RH, weight_H, self.epsilon, self.offset)
        return normed_RH, x_RH if residual_RH is None else sum_RH, scale_R

    def backward(
        self, saved: Saved, d_normed_RH: torch.Tensor, d_sum_RH: torch.Tensor | None, *, for_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        d_x_RH, d_weight_H = ops.add_rms_norm_gradient(*saved, d_normed_RH, d_sum_RH, self.offset, for_weight)
        return d_x_RH, d_weight_H if for_weight else None


@dataclass(frozen=True, slots=True)
class _Native:
    library: ctypes.CDLL
    epsilon: float
    offset: float

    def forward(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, *, keeps_scale: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x_RH, weight_H = with_dense_rows(x_RH), weight_H.contiguous()
        normed_RH = empty_as(x_RH)
        sum_RH = None
        if residual_RH is not None:
            residual_RH, sum_RH = residual_RH.contiguous(), empty_as(x_RH)
        scale_R = torch.empty(x_RH.shape[:-1].numel(), dtype=torch.float32) if keeps_scale else None
        function_of(self.library, "add_rms_norm", _FORWARD)(
            x_RH.data_ptr(),
            address(residual_RH),
            weight_H.data_ptr(),
            normed_RH.data_ptr(),
            address(sum_RH),
            address(scale_R),
            *layout_of(x_RH),
            self.epsilon,
            self.offset,
            x_RH.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return normed_RH, x_RH if sum_RH is None else sum_RH, scale_R

    def backward(
        self, saved: Saved, d_normed_RH: torch.Tensor, d_sum_RH: torch.Tensor | None, *, for_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sum_RH, weight_H, scale_R = saved
        sum_RH, weight_H, d_normed_RH = with_dense_rows(sum_RH), weight_H.contiguous(), d_normed_RH.contiguous()
        d_sum_RH = None if d_sum_RH is None else d_sum_RH.contiguous()
        d_x_RH = empty_as(sum_RH)
        d_weight_H = torch.empty_like(weight_H) if for_weight else None
        partial = (
            torch.empty(-(-len(scale_R) // _ROWS_OF_SUM), len(weight_H), dtype=torch.float32) if for_weight else None
        )
        function_of(self.library, "add_rms_norm_backward", _BACKWARD)(
            *(address(tensor) for tensor in (sum_RH, scale_R, weight_H, d_normed_RH, d_sum_RH)),
            *(address(tensor) for tensor in (d_x_RH, d_weight_H, partial)),
            *layout_of(sum_RH),
            self.offset,
            sum_RH.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return d_x_RH, d_weight_H


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: torch.Tensor, weight_H: torch.Tensor, form: _Form) -> torch.Tensor:
        normed_RH, _, scale_R = form.forward(x_RH, None, weight_H, keeps_scale=True)
        ctx.save_for_backward(x_RH, weight_H, scale_R)
        ctx.form = form
        return normed_RH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return *ctx.form.backward(ctx.saved_tensors, grads[0], None, for_weight=ctx.needs_input_grad[1]), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, form: _Form
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_RH, sum_RH, scale_R = form.forward(x_RH, residual_RH, weight_H, keeps_scale=True)
        ctx.save_for_backward(sum_RH, weight_H, scale_R)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return normed_RH, sum_RH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        d_normed_RH, d_sum_RH = grads
        if d_normed_RH is None:
            return d_sum_RH, d_sum_RH, None, None
        d_x_RH, d_weight_H = ctx.form.backward(
            ctx.saved_tensors, d_normed_RH, d_sum_RH, for_weight=ctx.needs_input_grad[2]
        )
        return d_x_RH, d_x_RH, d_weight_H, None


def _check(x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor) -> None:
    if x_RH.dim() not in (2, 3) or x_RH.dtype not in FLOATS or not x_RH.numel():
        raise InputError(
            f"x is {x_RH.dtype} of shape {tuple(x_RH.shape)}; "
            "give floating-point [rows, hidden] or [rows, heads, hidden], not empty"
        )
    for name, tensor, shape in (("residual", residual_RH, x_RH.shape), ("weight", weight_H, x_RH.shape[-1:])):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x_RH.dtype):
            raise InputError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give {x_RH.dtype} of shape {tuple(shape)}"
            )
