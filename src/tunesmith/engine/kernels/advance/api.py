"""The end of a decoding step on a device, in Triton or in torch.

Shape legend: S slots.
"""

from tunesmith.engine.kernels.advance import torch_impl
from tunesmith.engine.kernels.advance.torch_impl import DrawnTokens, SlotState
from tunesmith.engine.kernels.native import Kernels


def advance(state: SlotState, drawn: DrawnTokens, *, kernels: Kernels) -> None:
    """Take one token for each slot that has some left, in place, as `torch_impl.advance` defines it.

    The host reads nothing and does not wait, so a CUDA graph can contain it. Nothing is checked: rows and tokens must
    be in range, and `drawn_SK4` large enough.

    Raises:
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    if kernels.picked("advance", state.drawn_SK4) == "triton":
        from tunesmith.engine.kernels.advance import triton_impl

        triton_impl.advance(state, drawn)
    else:
        torch_impl.advance(state, drawn)
