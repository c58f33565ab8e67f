"""What all passes over the output layer share: the layer itself, how many of its logits exist at a time, its products.

Shape legend: N rows, H hidden, V vocabulary, R rows of a block, C columns of a block (neighbouring tokens).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tunesmith.core.errors import InputError
from tunesmith.kernels.native import Kernels

CPU_CHUNK_BYTES = 64 * 2**20
GPU_SHARE = 32

ONE_VISIT_ON = frozenset({"cuda"})
"""Devices on which gradients that are known in time are computed along with the scores. On a CPU the sum of the
weight's gradient over blocks, in float32, takes what the fourth product would: a whole update of 1,100 and of 2,000
tokens took 1.02 and 0.98 times as long with it, and more memory."""

FEWEST_ROWS, FEWEST_COLUMNS = 2, 64
"""A block has so many whatever it takes: a matrix of one row may be multiplied by other code, with other bits."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits are `hidden @ weight_VH.T + bias_V`, then `softcap * tanh(logit / softcap)` if there is a `softcap`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadCall:
    """What a pass is asked for, without the tensors that take gradients. `chunk_bytes`: see `chunk_bytes_on`.

    With `marks_top` it also says which tokens are the most likely ones.
    """

    ids_N: torch.Tensor
    softcap: float | None
    temperature: float
    chunk_bytes: int
    kernels: Kernels
    marks_top: bool = False

    def visits_once(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
        """Whether gradients that are known are to be computed along with the scores; kept logits need no second
        visit anyway.
        """
        return hidden_NH.device.type in ONE_VISIT_ON and not self.fits(hidden_NH, weight_VH)

    def fits(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
        """Whether the logits of all rows may be there at once."""
        return len(hidden_NH) * weight_VH.shape[0] * hidden_NH.element_size() <= self.chunk_bytes


def chunk_bytes_on(device: torch.device) -> int:
    """Bytes that the logits of all rows may take to be kept, by default, in the dtype of the weights.

    64 MiB on a CPU, and on a GPU a part of its whole memory: time is dear there, and logits of all rows that fit need
    not be made again.
    """
    if device.type != "cuda":
        return CPU_CHUNK_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_SHARE


def check(hidden_NH: torch.Tensor, layer: OutputLayer, ids_N: torch.Tensor) -> None:
    """Raise InputError unless there is a hidden state of the layer's width and an id for each row."""
    weight_VH = layer.weight_VH
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise InputError(
            f"hidden states are {tuple(hidden_NH.shape)} and the output layer {tuple(weight_VH.shape)}; "
            "give [rows, hidden] and [vocabulary, hidden]"
        )
    if ids_N.shape != hidden_NH.shape[:1]:
        raise InputError(f"{tuple(ids_N.shape)} ids for {len(hidden_NH)} rows; give one for each row")


def in_autocast(hidden_NH: torch.Tensor, layer: OutputLayer) -> tuple[torch.Tensor, OutputLayer]:
    """Hidden states and layer as autocast hands them to a linear map, if it is on; gradients come back in their own
    dtypes. float64 stays what it is, there too.
    """
    device = hidden_NH.device.type
    if not torch.is_autocast_enabled(device) or hidden_NH.dtype == torch.float64:
        return hidden_NH, layer
    dtype = torch.get_autocast_dtype(device)
    bias_V = None if layer.bias_V is None else layer.bias_V.to(dtype)
    return hidden_NH.to(dtype), OutputLayer(layer.weight_VH.to(dtype), bias_V, layer.softcap)


def blocks(length: int, bytes_of_one: int, block_bytes: int, fewest: int) -> Iterator[slice]:
    """`length` things as neighbouring ones of at most `block_bytes` or `fewest`, as even as can be, the most first."""
    count = -(-length // max(fewest, block_bytes // bytes_of_one))
    for index in range(count):
        yield slice(-(-length * index // count), -(-length * (index + 1) // count))


def logits(hidden_RH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    """Logits `[R, C]` before any cap; those of one row have the bits that it has among others."""
    if len(hidden_RH) == 1:  # see FEWEST_ROWS
        return linear(hidden_RH.expand(2, -1), weight_CH, bias_C)[:1]
    return linear(hidden_RH, weight_CH, bias_C)


class LogitsRoom:
    """Where the logits of one block after the other stand, the largest block first. Blocks that are taken and freed one
    by one come to lie apart in the system's heap, and then several times the memory of one is resident.
    """

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def logits(self, hidden_RH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
        """`logits`, over those that were made here before."""
        if self._room is None:
            logits_RC = logits(hidden_RH, weight_CH, bias_C)
            self._room = logits_RC.view(-1)
            return logits_RC
        if len(hidden_RH) == 1:  # see FEWEST_ROWS
            return logits(hidden_RH, weight_CH, bias_C)
        shape = len(hidden_RH), len(weight_CH)
        out_RC = self._room[: shape[0] * shape[1]].view(shape)
        if bias_C is None:
            return torch.mm(hidden_RH, weight_CH.t(), out=out_RC)
        return torch.addmm(bias_C, hidden_RH, weight_CH.t(), out=out_RC)


def is_top(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
    """True where no logit of the row is larger than that of its token; a cap changes no order."""
    return logits_RV.gather(1, ids_R[:, None])[:, 0] >= logits_RV.amax(1)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; on a GPU products of 16 bits come in float32, as they were summed, without a rounding of each part."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.mm(b)


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32 if it has 16 bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
