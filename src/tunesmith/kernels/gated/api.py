"""Gated activations and soft-capping, with gradients, in C++, in Triton or in torch.

Shape legend: R rows, I intermediate size, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import (
    INTEGER,
    POINTER,
    SINGLE,
    address,
    empty_as,
    function_of,
    picked_library,
    records_gradient,
    require_rows,
    with_dense_rows,
)
from tunesmith.kernels.gated import ops, torch_impl
from tunesmith.kernels.gated.torch_impl import Activation
from tunesmith.kernels.native import Kernels

_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""In the order of their numbers in cpu.cpp."""

_GATED = (*[POINTER] * 3, *[INTEGER] * 7)
_GATED_BACKWARD = (*[POINTER] * 5, *[INTEGER] * 7)
_SOFTCAP = (*[POINTER] * 2, *[INTEGER] * 3, SINGLE, *[INTEGER] * 2)
_SOFTCAP_BACKWARD = (*[POINTER] * 3, *[INTEGER] * 3, SINGLE, *[INTEGER] * 2)


def gated(gate_RI: torch.Tensor, up_RI: torch.Tensor, activation: Activation, *, kernels: Kernels) -> torch.Tensor:
    """activation(gate) * up [R, I], in the dtype given and without gaps, with gradients to both.

    Computed in float32 and rounded once. Transformers rounds the activation before the product, so in bfloat16 the
    result may differ from it by a unit in the last place; in float32 the two are the same function. Gate and up may be
    halves of one fused [R, 2 I]. In C++ and in Triton an element's bits depend on its own two inputs alone.

    Raises:
        InputError: shapes or dtypes do not fit, or the activation is unknown.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    require_rows("gate", gate_RI)
    if up_RI.shape != gate_RI.shape or up_RI.dtype != gate_RI.dtype:
        raise InputError(
            f"up is {up_RI.dtype} of shape {tuple(up_RI.shape)}; give {gate_RI.dtype} of shape {tuple(gate_RI.shape)}"
        )
    return _gated(gate_RI, up_RI, activation, kernels)


def activate(x_RI: torch.Tensor, activation: Activation, *, kernels: Kernels) -> torch.Tensor:
    """activation(x) [R, I], in the dtype given and without gaps, with gradients; computed in float32, rounded once.

    Raises:
        InputError: x is no matrix of floats, or the activation is unknown.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    require_rows("x", x_RI)
    return _gated(x_RI, None, activation, kernels)


def softcap(x_RV: torch.Tensor, cap: float, *, kernels: Kernels) -> torch.Tensor:
    """cap * tanh(x / cap) [R, V], in the dtype given and without gaps, with gradients; in float32, rounded once.

    Transformers' Gemma 2 rounds after each of the three operations, so in bfloat16 the result may differ from it by
    some units in the last place.

    Raises:
        InputError: x is no matrix of floats, or the cap is not positive.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    require_rows("x", x_RV)
    if not 0 < cap < float("inf"):
        raise InputError(f"cap is {cap}; give a positive number, or leave soft-capping out")
    form = _cap_form(kernels, x_RV, cap)
    if form is None:
        return torch_impl.softcap(x_RV, cap)
    if records_gradient(x_RV):
        return _Softcap.apply(x_RV, form)  # type: ignore[return-value]
    return form.forward(x_RV)


def _gated(gate_RI: torch.Tensor, up_RI: torch.Tensor | None, activation: Activation, kernels: Kernels) -> torch.Tensor:
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; allowed: {', '.join(_ACTIVATIONS)}")
    form = _form(kernels, gate_RI, activation)
    if form is None:
        return (
            torch_impl.activate(gate_RI, activation) if up_RI is None else torch_impl.gated(gate_RI, up_RI, activation)
        )
    if records_gradient(gate_RI, up_RI):
        return _Gated.apply(gate_RI, up_RI, form)  # type: ignore[return-value]
    return form.forward(gate_RI, up_RI)


class _Form(Protocol):
    """An activation in one of the kernels."""

    def forward(self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None) -> torch.Tensor: ...

    def backward(
        self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gradient of gate, gradient of up)."""
        ...


def _form(kernels: Kernels, gate_RI: torch.Tensor, activation: Activation) -> _Form | None:
    """None where the definition is to do the work."""
    backend = kernels.picked("gated", gate_RI)
    if backend == "native":
        return _Native(picked_library(kernels, "gated", gate_RI), _ACTIVATIONS.index(activation))
    return _Triton(activation) if backend == "triton" else None


@dataclass(frozen=True, slots=True)
class _Triton:
    activation: Activation

    def forward(self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None) -> torch.Tensor:
        return ops.gated(gate_RI, up_RI, self.activation)

    def backward(
        self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        d_gate_RI, d_up_RI = ops.gated_gradient(gate_RI, up_RI, d_out_RI, self.activation)
        return d_gate_RI, None if up_RI is None else d_up_RI


@dataclass(frozen=True, slots=True)
class _Native:
    """In C++, where an activation is a number."""

    library: ctypes.CDLL
    activation: int

    def forward(self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None) -> torch.Tensor:
        gate_RI, up_RI = with_dense_rows(gate_RI), None if up_RI is None else with_dense_rows(up_RI)
        out_RI = empty_as(gate_RI)
        function_of(self.library, "gated", _GATED)(
            gate_RI.data_ptr(), address(up_RI), out_RI.data_ptr(), *self._numbers(gate_RI, up_RI)
        )
        return out_RI

    def backward(
        self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_RI, up_RI = with_dense_rows(gate_RI), None if up_RI is None else with_dense_rows(up_RI)
        d_out_RI, d_gate_RI = d_out_RI.contiguous(), empty_as(gate_RI)
        d_up_RI = None if up_RI is None else empty_as(gate_RI)
        function_of(self.library, "gated_backward", _GATED_BACKWARD)(
            *(address(tensor) for tensor in (gate_RI, up_RI, d_out_RI, d_gate_RI, d_up_RI)),
            *self._numbers(gate_RI, up_RI),
        )
        return d_gate_RI, d_up_RI

    def _numbers(self, gate_RI: torch.Tensor, up_RI: torch.Tensor | None) -> tuple[int, ...]:
        num_rows, width = gate_RI.shape
        up_stride = 0 if up_RI is None else up_RI.stride(0)
        is_bfloat16 = gate_RI.dtype == torch.bfloat16
        return num_rows, width, gate_RI.stride(0), up_stride, self.activation, is_bfloat16, torch.get_num_threads()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RI: torch.Tensor, up_RI: torch.Tensor | None, form: _Form) -> torch.Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        ctx.form = form
        return form.forward(gate_RI, up_RI)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        gate_RI, up_RI = ctx.saved_tensors
        return *ctx.form.backward(gate_RI, up_RI, grads[0]), None


class _CapForm(Protocol):
    """Soft-capping in one of the kernels."""

    def forward(self, x_RV: torch.Tensor) -> torch.Tensor: ...

    def backward(self, x_RV: torch.Tensor, d_out_RV: torch.Tensor) -> torch.Tensor: ...


def _cap_form(kernels: Kernels, x_RV: torch.Tensor, cap: float) -> _CapForm | None:
    """None where the definition is to do the work."""
    backend = kernels.picked("gated", x_RV)
    if backend == "native":
        return _NativeCap(picked_library(kernels, "gated", x_RV), cap)
    return _TritonCap(cap) if backend == "triton" else None


@dataclass(frozen=True, slots=True)
class _TritonCap:
    cap: float

    def forward(self, x_RV: torch.Tensor) -> torch.Tensor:
        return ops.softcap(x_RV, self.cap)

    def backward(self, x_RV: torch.Tensor, d_out_RV: torch.Tensor) -> torch.Tensor:
        return ops.softcap_gradient(x_RV, d_out_RV, self.cap)


@dataclass(frozen=True, slots=True)
class _NativeCap:
    library: ctypes.CDLL
    cap: float

    def forward(self, x_RV: torch.Tensor) -> torch.Tensor:
        x_RV = with_dense_rows(x_RV)
        out_RV = empty_as(x_RV)
        function_of(self.library, "softcap", _SOFTCAP)(x_RV.data_ptr(), out_RV.data_ptr(), *self._numbers(x_RV))
        return out_RV

    def backward(self, x_RV: torch.Tensor, d_out_RV: torch.Tensor) -> torch.Tensor:
        x_RV, d_out_RV = with_dense_rows(x_RV), d_out_RV.contiguous()
        d_x_RV = empty_as(x_RV)
        function_of(self.library, "softcap_backward", _SOFTCAP_BACKWARD)(
            x_RV.data_ptr(), d_out_RV.data_ptr(), d_x_RV.data_ptr(), *self._numbers(x_RV)
        )
        return d_x_RV

    def _numbers(self, x_RV: torch.Tensor) -> tuple[int | float, ...]:
        return (*x_RV.shape, x_RV.stride(0), self.cap, x_RV.dtype == torch.bfloat16, torch.get_num_threads())


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RV: torch.Tensor, form: _CapForm) -> torch.Tensor:
        ctx.save_for_backward(x_RV)
        ctx.form = form
        return form.forward(x_RV)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.form.backward(ctx.saved_tensors[0], grads[0]), None
