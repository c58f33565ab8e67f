"""Gradient norms and the step of AdamW over all parameters at once, in C++ or in torch."""

import ctypes
import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch.optim.adamw import adamw as adamw_of_torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.adamw import torch_impl
from tunesmith.engine.kernels.adamw.torch_impl import AdamWSettings, CodedMoments, FloatMoments, ParameterUpdate
from tunesmith.engine.kernels.arguments import (
    DOUBLE,
    INTEGER,
    POINTER,
    SINGLE,
    address,
    function_of,
    library_for,
    picked_library,
)
from tunesmith.engine.kernels.native import Kernels

_MASTERS = (torch.float32, torch.float64)
_LISTS = (POINTER, INTEGER, POINTER, INTEGER)


class _Gradient(ctypes.Structure):
    _fields_ = (("values", POINTER), ("size", INTEGER), ("is_bfloat16", INTEGER))


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("gradient", _Gradient),
        *((name, POINTER) for name in ("master", "weight", "exp_avg", "exp_avg_sq")),
        *((name, POINTER) for name in ("exp_avg_scale", "exp_avg_sq_scale")),
        ("seed", ctypes.c_uint32),
        *((name, SINGLE) for name in ("step_size", "keep", "root_factor")),
    )


class _Settings(ctypes.Structure):
    _fields_ = (
        *((name, SINGLE) for name in ("gradient_factor", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")),
        *((name, POINTER) for name in ("signed_levels", "unsigned_levels")),
    )


def sums_of_squares(gradients: Sequence[torch.Tensor], *, kernels: Kernels) -> list[float]:
    """The sum of the squares of each gradient: finite exactly where all elements are finite.

    One pass over memory. Natively it is added up in float64 and no bit depends on the number of threads; in torch it is
    added up in float32.

    Raises:
        NativeUnavailableError: native kernels were chosen and cannot run.
    """
    is_native = [g.is_contiguous() and library_for(kernels, "adamw", g) is not None for g in gradients]
    native = iter(_sums_natively(list(compress(gradients, is_native)), kernels))
    other = iter(_sums_by_torch([g for g, here in zip(gradients, is_native, strict=True) if not here]))
    return [next(native if here else other) for here in is_native]


def _sums_natively(gradients: Sequence[torch.Tensor], kernels: Kernels) -> list[float]:
    sums = (DOUBLE * len(gradients))()
    if gradients:
        items = (_Gradient * len(gradients))(*map(_gradient, gradients))
        function_of(picked_library(kernels, "adamw", gradients[0]), "sums_of_squares", _LISTS)(
            ctypes.addressof(items), len(gradients), ctypes.addressof(sums), torch.get_num_threads()
        )
    return list(sums)


def _sums_by_torch(gradients: Sequence[torch.Tensor]) -> list[float]:
    """The sums from norms in float32, without a wider copy; stacked, so that a GPU is waited for once."""
    if not gradients:
        return []
    wide = [torch.float64 if gradient.dtype == torch.float64 else torch.float32 for gradient in gradients]
    norms = [torch.linalg.vector_norm(g, dtype=dtype).double() for g, dtype in zip(gradients, wide, strict=True)]
    # In float32 the squares of numbers above 1e19 are infinite, and those below 1e-19 are nothing.
    return [
        norm**2 if math.isfinite(norm) and norm > 1e-15 else float(gradient.double().square().sum())
        for norm, gradient in zip(torch.stack(norms).tolist(), gradients, strict=True)
    ]


@torch.no_grad()
def add_gradient(held: torch.Tensor, gradient: torch.Tensor, *, kernels: Kernels) -> torch.Tensor:
    """held + gradient in float32: into `held` itself where that is float32, else into a new tensor.

    One pass over memory; torch's own addition of bfloat16 to float32 takes an order of magnitude longer.

    Raises:
        NativeUnavailableError: native kernels were chosen and cannot run.
    """
    dense = held.is_contiguous() and gradient.is_contiguous() and held.dtype in (torch.float32, torch.bfloat16)
    library = library_for(kernels, "adamw", gradient) if dense else None
    if library is None:
        return held.add_(gradient) if held.dtype == torch.float32 else held.float().add_(gradient)
    total = held if held.dtype == torch.float32 else torch.empty_like(held, dtype=torch.float32)
    items = _gradient(held), _gradient(gradient)
    function_of(library, "add_gradients", (POINTER, POINTER, POINTER, INTEGER))(
        *(ctypes.addressof(item) for item in items), total.data_ptr(), torch.get_num_threads()
    )
    return total


@torch.no_grad()
def adamw(
    updates: Sequence[ParameterUpdate], settings: AdamWSettings, gradient_factor: float = 1.0, *, kernels: Kernels
) -> None:
    """Change moments, master and weight of each parameter in place by one step of AdamW (Loshchilov and Hutter 2019).

    The gradient counts `gradient_factor` times, which is where clipping and loss scaling go in. Natively all is one
    pass over memory, and the bits do not depend on the number of threads; in torch, float32 moments go through torch's
    own AdamW, whose fused form is on GPUs one pass too. The two differ by rounding.

    Raises:
        InputError: shapes or dtypes do not fit.
        NativeUnavailableError: native kernels were chosen and cannot run.
    """
    native: list[ParameterUpdate] = []
    by_torch: list[ParameterUpdate] = []
    for update in updates:
        _check(update)
        if not _is_dense(update):
            torch_impl.adamw(update, settings, gradient_factor)
        elif _wants_native(update, settings) and library_for(kernels, "adamw", update.gradient) is not None:
            native.append(update)
        elif isinstance(update.moments, FloatMoments):
            by_torch.append(update)
        else:
            torch_impl.adamw(update, settings, gradient_factor)
    if native:
        _run_natively(native, settings, gradient_factor, picked_library(kernels, "adamw", native[0].gradient))
    if by_torch:
        _run_by_torch(by_torch, settings, gradient_factor)


def _check(update: ParameterUpdate) -> None:
    master, shape = update.master, update.master.shape
    if master.dtype not in _MASTERS:
        raise InputError(f"the master is {master.dtype}; give float32")
    tensors = {"gradient": update.gradient, "weight": update.weight, "exp_avg": update.moments.exp_avg}
    for name, tensor in (tensors | {"exp_avg_sq": update.moments.exp_avg_sq}).items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; give that of the master, {tuple(shape)}")


def _is_dense(update: ParameterUpdate) -> bool:
    """True if all tensors are contiguous, which neither C++ nor torch's fused code checks."""
    tensors = (update.gradient, update.master, update.weight, update.moments.exp_avg, update.moments.exp_avg_sq)
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _wants_native(update: ParameterUpdate, settings: AdamWSettings) -> bool:
    """True unless torch's AdamW was asked for, or C++ lacks the dtype of master or weight; `library_for` checks that of
    the gradient.
    """
    if not settings.fused and isinstance(update.moments, FloatMoments):
        return False
    weight = update.weight
    return update.master.dtype == torch.float32 and (weight is None or weight.dtype == torch.bfloat16)


def _run_natively(
    updates: Sequence[ParameterUpdate], settings: AdamWSettings, gradient_factor: float, library: ctypes.CDLL
) -> None:
    levels = torch_impl.levels(7), torch_impl.levels(8)  # the name holds them until the call is over
    numbers = _Settings(
        *(gradient_factor, 1 - settings.beta1, settings.beta2, 1 - settings.beta2, settings.eps), *map(address, levels)
    )
    items = (_Parameter * len(updates))(*(_parameter(update, settings) for update in updates))
    function_of(library, "adamw", _LISTS)(
        ctypes.addressof(items), len(updates), ctypes.addressof(numbers), torch.get_num_threads()
    )


def _gradient(gradient: torch.Tensor) -> _Gradient:
    return _Gradient(gradient.data_ptr(), gradient.numel(), gradient.dtype == torch.bfloat16)


def _parameter(update: ParameterUpdate, settings: AdamWSettings) -> _Parameter:
    moments, count = update.moments, update.num_updates
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if isinstance(moments, CodedMoments):
        scales = moments.exp_avg_scale_K, moments.exp_avg_sq_scale_K
    return _Parameter(
        _gradient(update.gradient),
        *map(address, (update.master, update.weight, moments.exp_avg, moments.exp_avg_sq, *scales)),
        update.seed,
        update.learning_rate / (1 - settings.beta1**count),
        1 - update.learning_rate * update.weight_decay,
        1 / math.sqrt(1 - settings.beta2**count),
    )


def _run_by_torch(updates: Sequence[ParameterUpdate], settings: AdamWSettings, gradient_factor: float) -> None:
    """Those that share a rate and a decay in one call."""
    together: dict[tuple[float, float, torch.device], list[ParameterUpdate]] = {}
    for update in updates:
        key = (update.learning_rate, update.weight_decay, update.master.device)
        together.setdefault(key, []).append(update)
    for (learning_rate, weight_decay, device), group in together.items():
        gradients = [update.gradient.to(update.master.dtype) for update in group]
        if gradient_factor != 1.0:
            gradients = [gradient * gradient_factor for gradient in gradients]
        moments = [update.moments for update in group if isinstance(update.moments, FloatMoments)]
        counts = torch.tensor([float(update.num_updates - 1) for update in group], device=device)
        adamw_of_torch(
            [update.master for update in group],
            gradients,
            [moment.exp_avg for moment in moments],
            [moment.exp_avg_sq for moment in moments],
            [],
            list(counts.unbind()),
            fused=settings.fused,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=settings.eps,
            maximize=False,
        )
        for update in group:
            if update.weight is not None:
                update.weight.copy_(update.master)
