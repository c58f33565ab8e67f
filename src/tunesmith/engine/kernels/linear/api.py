"""Linear maps over packed weights in bfloat16 or float32, with oneDNN's bits, for the few rows of a decoding step.

Shape legend: R rows, I inputs, O outputs, P panels of 16 or 48 outputs, W numbers of a panel.
"""

import ctypes
from dataclasses import dataclass

import torch

from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.arguments import INTEGER, POINTER, address, require, with_dense_rows
from tunesmith.engine.kernels.linear import exact
from tunesmith.engine.kernels.native import NATIVE_DTYPES, Kernels
from tunesmith.engine.kernels.recording import call

_BLOCKS = (512, 1024)
"""Inputs that oneDNN sums at a time. Seen: in bfloat16 512 up to 1024 inputs and 1024 beyond, in float32 1024."""

_PROBE_ROWS, _PROBE_OUTPUTS = 64, 64


def cpu_has_bfloat16() -> bool:
    """True if the processor has instructions for bfloat16 products; without them they are emulated in float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[O, I]` in panels, and how many inputs are summed at a time. Only `pack` makes one."""

    panels_PW: torch.Tensor
    num_outputs: int
    num_inputs: int
    block: int
    library: ctypes.CDLL


def block_like_torch(weight_OI: torch.Tensor, *, kernels: Kernels) -> int | None:
    """The block with which `linear` has the bits of torch for a weight of this shape and dtype.

    The bits of `torch.nn.functional.linear` in bfloat16, those of `exact.linear` in float32. Found by trial: the
    trial's sums cancel, so that what is left is rounding, which tells one order from another. None where no block has
    these bits, or where there is no native kernel: it needs a compiler and an even number of inputs, and for bfloat16
    AVX512-BF16 without AMX (with it `exact.linear` needs no packed weight).
    """
    dtype, (num_outputs, num_inputs) = weight_OI.dtype, weight_OI.shape
    if dtype not in NATIVE_DTYPES or num_inputs % 2 or _library(weight_OI, kernels) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    half = num_inputs // 2
    x_RH, part_OH = (torch.randn(rows, half, generator=generator) for rows in (_PROBE_ROWS, _PROBE_OUTPUTS))
    x_RI = torch.cat([x_RH, x_RH], 1).to(dtype)
    probe_OI = torch.cat([part_OH, -part_OH], 1).to(dtype).repeat(-(-num_outputs // _PROBE_OUTPUTS), 1)[:num_outputs]
    expected_RO = exact.linear(x_RI, probe_OI)  # torch's own for bfloat16
    for block in _BLOCKS:
        if torch.equal(linear(x_RI, pack(probe_OI, block, kernels=kernels), None), expected_RO):
            return block
    return None


class BlocksLikeTorch:
    """`block_like_torch` of many weights, tried once for each shape and dtype."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._blocks: dict[tuple[torch.Size, torch.dtype], int | None] = {}

    def of(self, weight_OI: torch.Tensor) -> int | None:
        """The block for this weight."""
        key = (weight_OI.shape, weight_OI.dtype)
        if key not in self._blocks:
            self._blocks[key] = block_like_torch(weight_OI, kernels=self._kernels)
        return self._blocks[key]


def pack(weight_OI: torch.Tensor, block: int, *, kernels: Kernels) -> PackedWeight:
    """A copy of a weight as `linear` reads it; `block` comes from `block_like_torch`.

    Raises:
        InputError: the weight is no bfloat16 or float32 matrix with an even number of inputs, or the block is no even
            number.
        NativeUnavailableError: there is no native kernel here.
    """
    if weight_OI.dtype not in NATIVE_DTYPES or weight_OI.dim() != 2 or weight_OI.shape[1] % 2:
        raise InputError(
            f"the weight is {weight_OI.dtype} of shape {tuple(weight_OI.shape)}; give bfloat16 or float32 "
            "[outputs, inputs] with an even number of inputs"
        )
    if block < 2 or block % 2:
        raise InputError(f"block is {block}; give a positive even number of inputs")
    library = _library(weight_OI, kernels)
    if library is None:
        raise NativeUnavailableError("there is no native kernel for linear maps here; ask block_like_torch first")
    weight_OI, is_bfloat16 = weight_OI.contiguous(), weight_OI.dtype == torch.bfloat16
    num_outputs, num_inputs = weight_OI.shape
    panel_outputs = library.linear_panel_outputs(INTEGER(is_bfloat16))
    panels_PW = weight_OI.new_empty(-(-num_outputs // panel_outputs), panel_outputs * num_inputs)
    library.linear_pack(
        *(POINTER(tensor.data_ptr()) for tensor in (weight_OI, panels_PW)),
        *(INTEGER(number) for number in (num_outputs, num_inputs, torch.get_num_threads(), is_bfloat16)),
    )
    return PackedWeight(panels_PW, num_outputs, num_inputs, block, library)


def _library(weight_OI: torch.Tensor, kernels: Kernels) -> ctypes.CDLL | None:
    """The compiled kernel, if it has products of the weight's dtype on this processor."""
    library = kernels.library("linear", weight_OI.device)
    is_bfloat16 = INTEGER(weight_OI.dtype == torch.bfloat16)
    return None if library is None or not library.linear_panel_outputs(is_bfloat16) else library


def linear(x_RI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias `[R, O]` in the weight's dtype, rounded once; no gradient.

    The products of a block of inputs are summed in float32, then the blocks from first to last, then the bias. The bits
    of a row depend on that row alone: not on other rows, nor on threads. Rows of x may be any distance apart.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    dtype = weight.panels_PW.dtype
    require("x", x_RI, (*x_RI.shape[:1], weight.num_inputs), weight.panels_PW)
    require("the bias", bias_O, (weight.num_outputs,), weight.panels_PW)
    x_RI, bias_O = with_dense_rows(x_RI), None if bias_O is None else bias_O.contiguous()
    num_rows, threads = x_RI.shape[0], torch.get_num_threads()
    y_RO = torch.empty(num_rows, weight.num_outputs, dtype=dtype)
    arguments = exact.Arguments(
        *(x_RI.data_ptr(), weight.panels_PW.data_ptr(), address(bias_O), y_RO.data_ptr()),
        *(num_rows, weight.num_inputs, weight.num_outputs, weight.block, x_RI.stride(0)),
        *(threads, dtype == torch.bfloat16),
    )
    call(weight.library, "linear", arguments, (x_RI, weight.panels_PW, bias_O, y_RO))
    return y_RO
