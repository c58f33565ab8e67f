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

    The host reads nothing and does not wait, so a CUDA graph can contain it. Numbers are not checked: rows and tokens
    must be in range, and `drawn_SK4` large enough.

    Raises:
        InputError: a tensor has another shape or dtype, or gaps.
        TritonUnavailableError: Triton was chosen and cannot run.
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
