"""Gated activations and soft-capping, with gradients, in C++, in Triton or in torch.

Shape legend: R rows, I intermediate size, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, get_args

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import (
    INTEGER,
    POINTER,
    SINGLE,
    address,
    empty_as,
    function_of,
    picked_library,
    records_gradient,
    require,
    require_rows,
    with_dense_rows,
)
from tunesmith.engine.kernels.gated import torch_impl
from tunesmith.engine.kernels.gated.torch_impl import Activation
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.recording import call

_FUNCTIONS = (*get_args(Activation), "softcap")
"""In the order of their numbers in cpu.cpp."""

_BACKWARD = (*[POINTER] * 5, *[INTEGER] * 7, SINGLE)


class _Arguments(ctypes.Structure):
    """`GatedArguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "up", "out")),
        *((name, INTEGER) for name in ("num_rows", "num_columns", "x_stride", "up_stride", "function")),
        *((name, INTEGER) for name in ("is_bfloat16", "num_threads")),
        ("cap", SINGLE),
    )


def gated(gate_RI: torch.Tensor, up_RI: torch.Tensor, activation: Activation, *, kernels: Kernels) -> torch.Tensor:
    """activation(gate) * up [R, I], in the dtype given and contiguous, with gradients to both.

    Computed in float32 and rounded once. Transformers rounds the activation before the product, so in bfloat16 the
    result may differ from it by a unit in the last place; in float32 the two are the same function. Gate and up may be
    halves of one fused [R, 2 I]. In C++ and in Triton an element's bits depend on its own two inputs alone.

    Raises:
        InputError: shapes or dtypes do not fit, or the activation is unknown.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check("gate", gate_RI, activation)
    require("up", up_RI, gate_RI.shape, gate_RI)
    function = _picked(kernels, gate_RI, activation)
    return torch_impl.gated(gate_RI, up_RI, activation) if function is None else _applied(function, gate_RI, up_RI)


def activate(x_RI: torch.Tensor, activation: Activation, *, kernels: Kernels) -> torch.Tensor:
    """activation(x) [R, I], in the dtype given and contiguous, with gradients; computed in float32, rounded once.

    Raises:
        InputError: x is no matrix of floats, or the activation is unknown.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check("x", x_RI, activation)
    function = _picked(kernels, x_RI, activation)
    return torch_impl.activate(x_RI, activation) if function is None else _applied(function, x_RI, None)


def softcap(x_RV: torch.Tensor, cap: float, *, kernels: Kernels) -> torch.Tensor:
    """cap * tanh(x / cap) [R, V], in the dtype given and contiguous, with gradients; in float32, rounded once.

    Transformers' Gemma 2 rounds after each of the three operations, so in bfloat16 the result may differ from it by
    some units in the last place.

    Raises:
        InputError: x is no matrix of floats, or the cap is not positive.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    require_rows("x", x_RV, may_be_none=True)
    if not 0 < cap < float("inf"):
        raise InputError(f"cap is {cap}; give a positive number, or leave soft-capping out")
    function = _picked(kernels, x_RV, "softcap", cap)
    return torch_impl.softcap(x_RV, cap) if function is None else _applied(function, x_RV, None)


def _check(name: str, x_RI: torch.Tensor, activation: Activation) -> None:
    require_rows(name, x_RI)
    if activation not in get_args(Activation):
        raise InputError(f"activation is {activation!r}; allowed: {', '.join(get_args(Activation))}")


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of each element and its gradient, in C++, or in Triton if there is no library. Rows are dense."""

    name: str
    cap: float
    library: ctypes.CDLL | None

    def forward(self, x_RI: torch.Tensor, up_RI: torch.Tensor | None) -> torch.Tensor:
        """function(x) * up."""
        if self.library is None:
            return _triton_forward(x_RI, up_RI, self.name, self.cap)
        out_RI = empty_as(x_RI)
        tensors = (x_RI, up_RI, out_RI)
        call(self.library, "gated", _Arguments(*map(address, tensors), *self._numbers(x_RI, up_RI)), tensors)
        return out_RI

    def backward(
        self, x_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gradient of x, gradient of up)."""
        d_out_RI = d_out_RI.contiguous()
        if self.library is None:
            d_x_RI, d_up_RI = _triton_backward(x_RI, up_RI, d_out_RI, self.name, self.cap)
            return d_x_RI, None if up_RI is None else d_up_RI
        d_x_RI, d_up_RI = empty_as(x_RI), None if up_RI is None else empty_as(x_RI)
        function_of(self.library, "gated_backward", _BACKWARD)(
            *(address(tensor) for tensor in (x_RI, up_RI, d_out_RI, d_x_RI, d_up_RI)), *self._numbers(x_RI, up_RI)
        )
        return d_x_RI, d_up_RI

    def _numbers(self, x_RI: torch.Tensor, up_RI: torch.Tensor | None) -> tuple[int | float, ...]:
        strides = x_RI.stride(0), 0 if up_RI is None else up_RI.stride(0)
        is_bfloat16 = x_RI.dtype == torch.bfloat16
        return *x_RI.shape, *strides, _FUNCTIONS.index(self.name), is_bfloat16, torch.get_num_threads(), self.cap


def _picked(kernels: Kernels, x_RI: torch.Tensor, name: str, cap: float = 0.0) -> _Function | None:
    """None if torch is to do the work."""
    backend = kernels.picked("gated", x_RI)
    if backend == "torch":
        return None
    return _Function(name, cap, picked_library(kernels, "gated", x_RI) if backend == "native" else None)


def _applied(function: _Function, x_RI: torch.Tensor, up_RI: torch.Tensor | None) -> torch.Tensor:
    x_RI, up_RI = with_dense_rows(x_RI), None if up_RI is None else with_dense_rows(up_RI)
    if records_gradient(x_RI, up_RI):
        return _Gated.apply(x_RI, up_RI, function)  # type: ignore[return-value]
    return function.forward(x_RI, up_RI)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, up_RI: torch.Tensor | None, function: _Function) -> torch.Tensor:
        ctx.save_for_backward(x_RI, up_RI)
        ctx.function = function
        return function.forward(x_RI, up_RI)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return *ctx.function.backward(*ctx.saved_tensors, grads[0]), None


# The Triton kernels as operators: torch.compile sees them, a CUDA graph may contain them. _Gated records gradients.
@torch.library.custom_op("tunesmith::gated", mutates_args=())
def _triton_forward(x_RI: torch.Tensor, up_RI: torch.Tensor | None, function: str, cap: float) -> torch.Tensor:
    from tunesmith.engine.kernels.gated.triton_impl import forward

    return forward(x_RI, up_RI, function, cap)


@torch.library.custom_op("tunesmith::gated_gradient", mutates_args=())
def _triton_backward(
    x_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor, function: str, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, gradient of up); the latter is empty if `up_RI` is None."""
    from tunesmith.engine.kernels.gated.triton_impl import backward

    d_x_RI, d_up_RI = backward(x_RI, up_RI, d_out_RI, function, cap)
    return d_x_RI, x_RI.new_empty(0) if d_up_RI is None else d_up_RI


@_triton_forward.register_fake
def _(x_RI: torch.Tensor, *_: object) -> torch.Tensor:
    return empty_as(x_RI)


@_triton_backward.register_fake
def _(x_RI: torch.Tensor, up_RI: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_as(x_RI), x_RI.new_empty(0) if up_RI is None else empty_as(x_RI)
