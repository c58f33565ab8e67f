"""The end of a decoding step on a device, in Triton or in torch.

Shape legend: S slots.
"""

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.advance import torch_impl
from tunesmith.kernels.advance.torch_impl import DrawnTokens, SlotState
from tunesmith.kernels.native import Kernels


def advance(state: SlotState, drawn: DrawnTokens, *, kernels: Kernels) -> None:
    """Take one token for each slot that has some left, in place, as `torch_impl.advance` defines it.

    Nothing waits for the device, and nothing of the numbers is read by the host, so it can stand in a CUDA graph.
    Numbers are not checked: rows and tokens must lie inside, and `drawn_SK4` must have room.

    Raises:
        InputError: what was drawn is not of as many slots, or of another dtype.
        TritonUnavailableError: Triton was chosen and cannot be had.
    """
    num_slots = len(state.token_S)
    for name, tensor, dtype, shape in (
        ("token_S", drawn.token_S, torch.int64, (num_slots,)),
        ("scores_S2", drawn.scores_S2, torch.float32, (num_slots, 2)),
        ("status_S", drawn.status_S, torch.int32, (num_slots,)),
        ("value_S", drawn.value_S, torch.float32, (num_slots,)),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous()):
            raise InputError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give contiguous {dtype} {list(shape)}"
            )
    if kernels.picked("advance", state.drawn_SK4) == "triton":
        from tunesmith.kernels.advance import triton_impl

        triton_impl.advance(state, drawn)
    else:
        torch_impl.advance(state, drawn)
