"""Linear maps in bfloat16 over packed weights, with the bits of torch's own, for the few rows of a decoding step.

Shape legend: R rows, I inputs, O outputs, P panels of 48 outputs, W numbers of a panel.
"""

import ctypes
from dataclasses import dataclass

import torch

from tunesmith.core.errors import InputError, NativeUnavailableError
from tunesmith.kernels.arguments import INTEGER, POINTER, address, with_dense_rows
from tunesmith.kernels.native import Kernels

_PANEL_OUTPUTS = 48

_BLOCKS = (512, 1024)
"""Inputs that oneDNN sums at a time: 512 up to 1024 inputs, 1024 beyond; so it was on the processors that were seen."""

_PROBE_ROWS, _PROBE_OUTPUTS = 64, 64


class _Arguments(ctypes.Structure):
    """`LinearArguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "bias", "y")),
        *((name, INTEGER) for name in ("num_rows", "num_inputs", "num_outputs", "block", "x_stride", "num_threads")),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[O, I]` in panels, and how many inputs are summed at a time. Only `pack` makes one."""

    panels_PW: torch.Tensor
    num_outputs: int
    num_inputs: int
    block: int
    library: ctypes.CDLL


def block_like_torch(num_outputs: int, num_inputs: int, *, kernels: Kernels) -> int | None:
    """The block with which `linear` has the bits of `torch.nn.functional.linear` for a bfloat16 weight `[O, I]`.

    Found by trial: the trial's sums cancel, so that what is left is rounding, which tells one order from another. None
    where no block has these bits, or where there is no native kernel: it needs AVX512-BF16 (where there is AMX too,
    torch is faster), an even number of inputs, and a compiler.
    """
    library = kernels.library("linear", torch.device("cpu"))
    if library is None or not library.linear_is_compiled() or num_inputs % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    half = num_inputs // 2
    x_RH, weight_OH = (torch.randn(rows, half, generator=generator) for rows in (_PROBE_ROWS, _PROBE_OUTPUTS))
    x_RI = torch.cat([x_RH, x_RH], 1).bfloat16()
    weight_OI = torch.cat([weight_OH, -weight_OH], 1).bfloat16().repeat(-(-num_outputs // _PROBE_OUTPUTS), 1)
    weight_OI = weight_OI[:num_outputs]
    expected_RO = torch.nn.functional.linear(x_RI, weight_OI)
    for block in _BLOCKS:
        if torch.equal(linear(x_RI, pack(weight_OI, block, kernels=kernels), None), expected_RO):
            return block
    return None


class BlocksLikeTorch:
    """`block_like_torch` of many weights, tried once for each shape."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._blocks: dict[torch.Size, int | None] = {}

    def of(self, weight_OI: torch.Tensor) -> int | None:
        """The block for this weight; None for other dtypes than bfloat16, too."""
        if weight_OI.dtype != torch.bfloat16:
            return None
        if weight_OI.shape not in self._blocks:
            self._blocks[weight_OI.shape] = block_like_torch(*weight_OI.shape, kernels=self._kernels)
        return self._blocks[weight_OI.shape]


def pack(weight_OI: torch.Tensor, block: int, *, kernels: Kernels) -> PackedWeight:
    """A copy of a bfloat16 weight as `linear` reads it; `block` comes from `block_like_torch`.

    Raises:
        InputError: the weight is no bfloat16 matrix with an even number of inputs, or the block is no even number.
        NativeUnavailableError: there is no native kernel here.
    """
    if weight_OI.dtype != torch.bfloat16 or weight_OI.dim() != 2 or weight_OI.shape[1] % 2:
        raise InputError(
            f"the weight is {weight_OI.dtype} of shape {tuple(weight_OI.shape)}; give bfloat16 [outputs, inputs] with "
            "an even number of inputs"
        )
    if block < 2 or block % 2:
        raise InputError(f"block is {block}; give a positive even number of inputs")
    library = kernels.library("linear", weight_OI.device)
    if library is None or not library.linear_is_compiled():
        raise NativeUnavailableError("there is no native kernel for linear maps here; ask block_like_torch first")
    weight_OI = weight_OI.contiguous()
    num_outputs, num_inputs = weight_OI.shape
    num_panels = -(-num_outputs // _PANEL_OUTPUTS)
    panels_PW = torch.empty(num_panels, _PANEL_OUTPUTS * num_inputs, dtype=torch.bfloat16)
    library.linear_pack(
        *(POINTER(tensor.data_ptr()) for tensor in (weight_OI, panels_PW)),
        *(INTEGER(number) for number in (num_outputs, num_inputs, torch.get_num_threads())),
    )
    return PackedWeight(panels_PW, num_outputs, num_inputs, block, library)


def linear(x_RI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias `[R, O]` in bfloat16, as `torch_impl.linear` defines it; no gradient.

    The bits of a row depend on that row alone: not on other rows, nor on threads. Rows of x may be any distance apart.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    if x_RI.dtype != torch.bfloat16 or x_RI.dim() != 2 or x_RI.shape[1] != weight.num_inputs:
        raise InputError(f"x is {x_RI.dtype} of shape {tuple(x_RI.shape)}; give bfloat16 [rows, {weight.num_inputs}]")
    if bias_O is not None and (bias_O.dtype != torch.bfloat16 or bias_O.shape != (weight.num_outputs,)):
        raise InputError(
            f"the bias is {bias_O.dtype} of shape {tuple(bias_O.shape)}; give bfloat16 [{weight.num_outputs}]"
        )
    x_RI, bias_O = with_dense_rows(x_RI), None if bias_O is None else bias_O.contiguous()
    num_rows, threads = x_RI.shape[0], torch.get_num_threads()
    y_RO = torch.empty(num_rows, weight.num_outputs, dtype=torch.bfloat16)
    arguments = _Arguments(
        x_RI.data_ptr(),
        weight.panels_PW.data_ptr(),
        address(bias_O),
        y_RO.data_ptr(),
        *(num_rows, weight.num_inputs, weight.num_outputs, weight.block, x_RI.stride(0), threads),
    )
    weight.library.linear(ctypes.byref(arguments))
    return y_RO
