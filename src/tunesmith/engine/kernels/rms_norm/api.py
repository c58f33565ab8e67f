"""Add and RMSNorm, with gradients, in C++, in Triton or in torch.

Shape legend: R rows, H hidden; an x with heads is [R, heads, H].
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.base.core.errors import InputError, TritonUnavailableError
from tunesmith.engine.kernels.arguments import (
    FLOATS,
    INTEGER,
    POINTER,
    SINGLE,
    address,
    empty_as,
    function_of,
    picked_library,
    records_gradient,
    require,
    with_dense_rows,
)
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.recording import call
from tunesmith.engine.kernels.rms_norm import torch_impl
from tunesmith.engine.kernels.rms_norm.torch_impl import LONGEST, Normed, layout_of

_ROWS_OF_SUM = 64
"""`kRowsOfSum` of cpu.cpp."""

_BACKWARD = (*[POINTER] * 8, *[INTEGER] * 5, SINGLE, INTEGER, INTEGER)


class _Arguments(ctypes.Structure):
    """`NormArguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "residual", "weight", "normed", "sum", "scale")),
        *((name, INTEGER) for name in ("num_rows", "num_columns", "inner", "outer_stride", "inner_stride")),
        *((name, INTEGER) for name in ("is_bfloat16", "num_threads")),
        *((name, SINGLE) for name in ("epsilon", "offset")),
    )


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
    shape decides. Triton has rows of up to `LONGEST` numbers; with `auto` longer ones run in torch.

    Raises:
        InputError: shapes or dtypes do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(x_RH, residual_RH, weight_H)
    norm = _picked(kernels, x_RH, epsilon, offset)
    if norm is None:
        return torch_impl.add_rms_norm(x_RH, residual_RH, weight_H, epsilon, offset)
    if records_gradient(x_RH, residual_RH, weight_H):
        normed_RH, sum_RH = _AddRmsNorm.apply(x_RH, residual_RH, weight_H, norm)  # type: ignore[misc]
    else:
        normed_RH, sum_RH, _ = norm.forward(x_RH, residual_RH, weight_H, keeps_scale=False)
    return Normed(normed_RH, x_RH if sum_RH is None else sum_RH)


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(sum, weight, 1 / root mean square of each row): what the backward pass needs."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm with its gradient, in C++, or in Triton if there is no library."""

    library: ctypes.CDLL | None
    epsilon: float
    offset: float

    def forward(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, *, keeps_scale: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(normed, sum if there is a residual, 1 / root mean square of each row); C++ computes the last if asked."""
        if self.library is None:
            normed_RH, sum_RH, scale_R = _triton_forward(x_RH, residual_RH, weight_H, self.epsilon, self.offset)
            return normed_RH, None if residual_RH is None else sum_RH, scale_R
        x_RH, weight_H = with_dense_rows(x_RH), weight_H.contiguous()
        normed_RH = empty_as(x_RH)
        sum_RH = None
        if residual_RH is not None:
            residual_RH, sum_RH = residual_RH.contiguous(), empty_as(x_RH)
        scale_R = torch.empty(x_RH.shape[:-1].numel(), dtype=torch.float32) if keeps_scale else None
        tensors = (x_RH, residual_RH, weight_H, normed_RH, sum_RH, scale_R)
        arguments = _Arguments(
            *map(address, tensors),
            *layout_of(x_RH),
            *(x_RH.dtype == torch.bfloat16, torch.get_num_threads(), self.epsilon, self.offset),
        )
        call(self.library, "add_rms_norm", arguments, tensors)
        return normed_RH, sum_RH, scale_R

    def backward(
        self, saved: Saved, d_normed_RH: torch.Tensor, d_sum_RH: torch.Tensor | None, *, for_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gradient of x and of the residual, gradient of the weight)."""
        if self.library is None:
            d_x_RH, d_weight_H = _triton_backward(*saved, d_normed_RH, d_sum_RH, self.offset, for_weight)
            return d_x_RH, d_weight_H if for_weight else None
        sum_RH, weight_H, scale_R = saved
        sum_RH, weight_H, d_normed_RH = with_dense_rows(sum_RH), weight_H.contiguous(), d_normed_RH.contiguous()
        d_sum_RH = None if d_sum_RH is None else d_sum_RH.contiguous()
        d_x_RH, d_weight_H, partial = empty_as(sum_RH), None, None
        if for_weight:
            d_weight_H = torch.empty_like(weight_H)
            partial = torch.empty(-(-len(scale_R) // _ROWS_OF_SUM), len(weight_H), dtype=torch.float32)
        tensors = (sum_RH, scale_R, weight_H, d_normed_RH, d_sum_RH, d_x_RH, d_weight_H, partial)
        function_of(self.library, "add_rms_norm_backward", _BACKWARD)(
            *(address(tensor) for tensor in tensors),
            *layout_of(sum_RH),
            self.offset,
            sum_RH.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return d_x_RH, d_weight_H


def _picked(kernels: Kernels, x_RH: torch.Tensor, epsilon: float, offset: float) -> _Norm | None:
    """None if torch is to do the work."""
    backend, width = kernels.picked("rms_norm", x_RH), x_RH.shape[-1]
    if backend == "native":
        return _Norm(picked_library(kernels, "rms_norm", x_RH), epsilon, offset)
    if backend == "torch" or (width > LONGEST and kernels.choice != "triton"):
        return None
    if width > LONGEST:
        raise TritonUnavailableError(
            f"the Triton kernel rms_norm takes rows of up to {LONGEST} numbers and was given {width}; choose auto "
            "or torch"
        )
    return _Norm(None, epsilon, offset)


class _AddRmsNorm(torch.autograd.Function):
    """(normed, sum), the latter None without a residual."""

    @staticmethod
    def forward(
        ctx: Any, x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, norm: _Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed_RH, sum_RH, scale_R = norm.forward(x_RH, residual_RH, weight_H, keeps_scale=True)
        ctx.save_for_backward(x_RH if sum_RH is None else sum_RH, weight_H, scale_R)
        ctx.norm, ctx.has_residual = norm, sum_RH is not None
        ctx.set_materialize_grads(False)
        return normed_RH, sum_RH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        d_normed_RH, d_sum_RH = grads
        if d_normed_RH is None:
            return d_sum_RH, d_sum_RH, None, None
        for_weight = ctx.needs_input_grad[2]
        d_x_RH, d_weight_H = ctx.norm.backward(ctx.saved_tensors, d_normed_RH, d_sum_RH, for_weight=for_weight)
        return d_x_RH, d_x_RH if ctx.has_residual else None, d_weight_H, None


# The Triton kernels as operators: torch.compile sees them, a CUDA graph may contain them. _AddRmsNorm has gradients.
@torch.library.custom_op("tunesmith::add_rms_norm", mutates_args=())
def _triton_forward(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed_RH, sum_RH, scale_R float32); `sum_RH` is empty without a residual."""
    from tunesmith.engine.kernels.rms_norm.triton_impl import forward

    normed_RH, sum_RH, scale_R = forward(x_RH, residual_RH, weight_H, epsilon, offset)
    return normed_RH, x_RH.new_empty(0) if sum_RH is None else sum_RH, scale_R


@torch.library.custom_op("tunesmith::add_rms_norm_gradient", mutates_args=())
def _triton_backward(
    sum_RH: torch.Tensor,
    weight_H: torch.Tensor,
    scale_R: torch.Tensor,
    d_normed_RH: torch.Tensor,
    d_sum_RH: torch.Tensor | None,
    offset: float,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x and of the residual, gradient of the weight); the latter is empty unless `for_weight`."""
    from tunesmith.engine.kernels.rms_norm.triton_impl import backward

    saved = sum_RH, weight_H, scale_R
    d_x_RH, d_weight_H = backward(saved, d_normed_RH, d_sum_RH, offset, for_weight=for_weight)
    return d_x_RH, weight_H.new_empty(0) if d_weight_H is None else d_weight_H


@_triton_forward.register_fake
def _(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sum_RH = x_RH.new_empty(0) if residual_RH is None else empty_as(x_RH)
    return empty_as(x_RH), sum_RH, x_RH.new_empty(x_RH.shape[:-1].numel(), dtype=torch.float32)


@_triton_backward.register_fake
def _(sum_RH: torch.Tensor, weight_H: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_as(sum_RH), empty_as(weight_H) if rest[-1] else weight_H.new_empty(0)


def _check(x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor) -> None:
    if x_RH.dim() not in (2, 3) or x_RH.dtype not in FLOATS or not x_RH.numel():
        raise InputError(
            f"x is {x_RH.dtype} of shape {tuple(x_RH.shape)}; "
            "give floating-point [rows, hidden] or [rows, heads, hidden], not empty"
        )
    require("residual", residual_RH, x_RH.shape, x_RH)
    require("weight", weight_H, x_RH.shape[-1:], x_RH)
