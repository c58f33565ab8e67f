"""Linear maps on a CPU: the bits of a row depend neither on the other rows nor on the threads.

In float32 `torch.nn.functional.linear` calls the BLAS that torch was built with, MKL as a rule, whose order of sums
depends on the number of rows and which has no AVX-512 path on AMD processors. oneDNN is also in every build of torch
for x86-64; its float32 products sum each row in one order, and read transposed matrices as they lie.

In bfloat16 `torch.nn.functional.linear` calls oneDNN, which sums each row in one order with AVX512-BF16. With AMX its
order depends on the number of rows, so a kernel of our own takes its place (cpu.cpp).

Shape legend: R rows, I inputs, O outputs.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tunesmith.engine.kernels.arguments import INTEGER, POINTER, address, records_gradient, with_dense_rows
from tunesmith.engine.kernels.native import shared
from tunesmith.engine.kernels.recording import call

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

_PROBES, _MOST_ROWS, _PROBE_FLOP = (1, 2, 3, 4, 7, 33, 64, 129), 2048, 5 * 10**9
"""Numbers of rows whose products are compared with those of many rows, at most so many, in at most so much work."""

_TILE_INPUTS = 32
"""Inputs that the kernel for AMX takes at a time."""


class Arguments(ctypes.Structure):
    """`LinearArguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "bias", "y")),
        *((name, INTEGER) for name in ("num_rows", "num_inputs", "num_outputs", "block", "x_stride")),
        *((name, INTEGER) for name in ("num_threads", "is_bfloat16")),
    )


def is_exact(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """True if `linear` computes this product itself, with bits that depend on no other row."""
    return is_by_onednn(x_RI, weight_OI) or is_by_tiles(x_RI, weight_OI)


def is_by_tiles(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """True if `linear` computes this product by AMX: two bfloat16 matrices on a CPU that has it, not under autocast."""
    return x_RI.dtype == weight_OI.dtype == torch.bfloat16 and _are_plain(x_RI, weight_OI) and _tiles() is not None


@functools.cache
def _tiles() -> ctypes.CDLL | None:
    """The kernel, if the processor has AMX and the system allows it."""
    if not torch.cpu._is_amx_tile_supported():
        return None
    library = shared("auto").library("linear", torch.device("cpu"))
    return library if library is not None and library.linear_has_tiles() else None


def is_by_onednn(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """True if `linear` computes this product by oneDNN: two float32 matrices on a CPU, not under autocast."""
    return _HAS_ONEDNN and x_RI.dtype == weight_OI.dtype == torch.float32 and _are_plain(x_RI, weight_OI)


def _are_plain(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    return (
        x_RI.dim() == weight_OI.dim() == 2
        and x_RI.device.type == "cpu"
        and x_RI.numel() > 0
        and weight_OI.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias `[R, O]` with gradients; `torch.nn.functional.linear` unless `is_exact`."""
    if not is_exact(x_RI, weight_OI):
        return torch.nn.functional.linear(x_RI, weight_OI, bias_O)
    if records_gradient(x_RI, weight_OI, bias_O):
        return _Linear.apply(x_RI, weight_OI, bias_O)  # type: ignore[return-value]
    return _forward(x_RI, weight_OI, bias_O)


def linear_into(
    out_RO: torch.Tensor, x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """`out_RO`, dense, overwritten with x weight^T + bias, without a gradient; not for what `is_by_onednn`."""
    if is_by_tiles(x_RI, weight_OI):
        return _by_tiles(x_RI, weight_OI, bias_O, out_RO)
    if bias_O is None:
        return torch.mm(x_RI, weight_OI.t(), out=out_RO)
    return torch.addmm(bias_O, x_RI, weight_OI.t(), out=out_RO)


def product(a_RI: torch.Tensor, b_IO: torch.Tensor) -> torch.Tensor:
    """a @ b `[R, O]` without a gradient, by oneDNN if `is_by_onednn`."""
    return _onednn(a_RI, b_IO.t()) if is_by_onednn(a_RI, b_IO) else a_RI @ b_IO


@torch.no_grad()
def rows_are_independent(weight_OI: torch.Tensor) -> bool:
    """True if products with this weight have the same bits for a few rows as for many, with any number of threads up to
    torch's: in float32 by trial, in bfloat16 by what computes them.
    """
    if weight_OI.dtype == torch.bfloat16:
        # Emulated bfloat16 may agree in a trial: which order it sums in was never seen to be fixed.
        return _tiles() is not None if torch.cpu._is_amx_tile_supported() else torch.cpu._is_avx512_bf16_supported()
    num_outputs, num_inputs = weight_OI.shape
    most = max(_PROBES[-1] + 1, min(_MOST_ROWS, _PROBE_FLOP // (2 * num_outputs * num_inputs)))
    x_RI = torch.randn(most, num_inputs, generator=torch.Generator().manual_seed(0))
    if not is_by_onednn(x_RI, weight_OI):
        return False
    y_RO, num_threads = linear(x_RI, weight_OI), torch.get_num_threads()
    try:
        for count in range(1, num_threads + 1):
            torch.set_num_threads(count)
            if not all(torch.equal(linear(x_RI[:rows], weight_OI), y_RO[:rows]) for rows in _PROBES):
                return False
    finally:
        torch.set_num_threads(num_threads)
    return True


def _forward(x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return (_onednn if x_RI.dtype == torch.float32 else _by_tiles)(x_RI, weight_OI, bias_O)


def _by_tiles(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_RO: torch.Tensor | None = None
) -> torch.Tensor:
    missing = -x_RI.shape[1] % _TILE_INPUTS
    if missing:
        x_RI, weight_OI = pad(x_RI, (0, missing)), pad(weight_OI, (0, missing))
    x_RI, weight_OI = with_dense_rows(x_RI), weight_OI.contiguous()
    bias_O = None if bias_O is None else bias_O.contiguous()
    y_RO = x_RI.new_empty(len(x_RI), len(weight_OI)) if out_RO is None else out_RO
    arguments = Arguments(
        *(x_RI.data_ptr(), weight_OI.data_ptr(), address(bias_O), y_RO.data_ptr()),
        *(*x_RI.shape, len(weight_OI), 0, x_RI.stride(0), torch.get_num_threads(), True),
    )
    library = _tiles()
    assert library is not None
    call(library, "linear_by_tiles", arguments, (x_RI, weight_OI, bias_O, y_RO))
    return y_RO


def _onednn(x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    num_rows, num_outputs = len(x_RI), len(weight_OI)
    if num_rows == 1:  # the product with a vector is another function, with other bits
        x_RI = x_RI.repeat(2, 1)
    if num_outputs == 1:
        weight_OI, bias_O = weight_OI.repeat(2, 1), None if bias_O is None else bias_O.repeat(2)
    if not weight_OI.is_contiguous() and not weight_OI.t().is_contiguous():
        weight_OI = weight_OI.contiguous()  # with gaps between its rows, oneDNN sums in another order
    y_RO = torch.ops.mkldnn._linear_pointwise.default(x_RI, weight_OI, bias_O, "none", [], "")
    return y_RO[:num_rows, :num_outputs]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        return _forward(x_RI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RO: torch.Tensor) -> Any:
        x_RI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        d_x_RI = product(d_y_RO, weight_OI) if needs_x else None
        # Not by oneDNN: torch would copy the transposed left side for it.
        d_weight_OI = d_y_RO.t() @ x_RI if needs_weight else None
        return d_x_RI, d_weight_OI, d_y_RO.sum(0) if needs_bias else None
