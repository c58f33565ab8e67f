"""Shared by the interfaces of native kernels: checks of tensors, and their pointers for C++."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.native import Kernels

Rest = ParamSpec("Rest")
Result = TypeVar("Result")

POINTER, INTEGER, SINGLE, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double
"""Types of the arguments of a native function."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that kernels accept; the first and the third natively."""


def library_for(kernels: Kernels, op: str, tensor: torch.Tensor) -> ctypes.CDLL | None:
    """The library of `op` for this tensor's device and dtype; None where torch computes it.

    Native kernels are for bfloat16 and float32. Other dtypes are for tests and for other devices, and run in torch.

    Raises:
        NativeUnavailableError: `native` was chosen and cannot run.
        TritonUnavailableError: `triton` was chosen; an operation that has it asks `Kernels.picked` before.
    """
    return None if kernels.picked(op, tensor) == "torch" else kernels.library(op, tensor.device)


def picked_library(kernels: Kernels, op: str, tensor: torch.Tensor) -> ctypes.CDLL:
    """The library of `op`, once `kernels.picked(op, tensor)` was `native`, which loads it."""
    library = kernels.library(op, tensor.device)
    assert library is not None
    return library


def function_of(library: ctypes.CDLL, name: str, types: Sequence[type]) -> Any:
    """The function `name` of the library, with its argument types declared: numbers are then passed as they are."""
    function = getattr(library, name)
    if function.argtypes is None:
        function.argtypes, function.restype = tuple(types), None
    return function


def address(tensor: torch.Tensor | None) -> int | None:
    """Pointer to the tensor's first element; None, a null pointer, for None. Keep the tensor until the call ends."""
    return None if tensor is None else tensor.data_ptr()


def with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if each row (its last dimension) is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def step_of(tensor: torch.Tensor, dim: int) -> int:
    """Elements between two of this dimension; 0 where there is one alone, which all share."""
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of the same shape and dtype, without gaps whatever the strides of the one given."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def records_gradient(*tensors: torch.Tensor | None) -> bool:
    """True if autograd must record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def require_rows(name: str, tensor: torch.Tensor, *, may_be_none: bool = False) -> None:
    """Refuse what is no matrix of floats with columns and, unless there `may_be_none`, rows.

    Raises:
        InputError: naming the argument, its dtype and shape.
    """
    is_empty = tensor.dim() == 2 and not (tensor.shape[1] if may_be_none else tensor.numel())
    if tensor.dim() != 2 or tensor.dtype not in FLOATS or is_empty:
        raise InputError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give floating-point [rows, columns], not empty"
        )


def require(name: str, tensor: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise InputError unless `tensor` is None, or has this shape, and the dtype and device of `like`."""
    if tensor is None or (tensor.shape == tuple(shape) and tensor.dtype == like.dtype and tensor.device == like.device):
        return
    raise InputError(
        f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; "
        f"give {like.dtype} {list(shape)} on {like.device}"
    )


def without_autocast(
    work: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """`work` with autocast off on the device of its first argument."""

    @functools.wraps(work)
    def exact(first: torch.Tensor, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        with torch.autocast(first.device.type, enabled=False):
            return work(first, *rest, **named)

    return exact
