"""Generalised advantage estimation, in C++, in Triton or in torch.

Shapes: B sequences, T completion tokens.
"""

from typing import cast

import torch
from torch import Tensor

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import INTEGER, POINTER, SINGLE, address, function_of, picked_library
from tunesmith.engine.kernels.gae import torch_impl
from tunesmith.engine.kernels.gae.torch_impl import Advantages
from tunesmith.engine.kernels.masking import check_shapes, widened
from tunesmith.engine.kernels.native import Choice, Kernels, shared

_NATIVE = (*[POINTER] * 5, INTEGER, INTEGER, SINGLE, SINGLE, INTEGER)


def gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, *, kernels: Kernels
) -> Advantages:
    """Advantages and returns (advantage + value) of each token, in fp32 or wider, without gradient; `torch_impl.gae` is
    the definition.

    `value_BT` is the value of the state before the token is drawn. The value after a row's last token is 0: a
    completion is an episode, whether it ended by itself or at the length limit. Positions outside the mask are skipped
    and come out as 0, whatever they hold. Natively the bits are those of the definition in float32; in Triton sums
    are formed in another order.

    Raises:
        InputError: shapes differ, they are not [B, T], or gamma or lam lies outside 0 to 1.
        NativeUnavailableError, TritonUnavailableError: the chosen kernels cannot run.
    """
    check_shapes(reward_BT=reward_BT, value_BT=value_BT, mask_BT=mask_BT)
    if reward_BT.dim() != 2:
        raise InputError(f"reward_BT has shape {tuple(reward_BT.shape)}; give [sequences, tokens]")
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise InputError(f"{name} is {value}; it must lie between 0 and 1.")
    return Advantages(*_gae(reward_BT.detach(), value_BT.detach(), mask_BT, gamma, lam, kernels.choice))


@torch.library.custom_op("tunesmith::gae", mutates_args=())
def _gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, choice: str
) -> tuple[Tensor, Tensor]:
    kernels = shared(cast(Choice, choice))
    wide = torch.promote_types(widened(reward_BT).dtype, widened(value_BT).dtype)
    reward_BT, value_BT = reward_BT.to(wide), value_BT.to(wide)
    match kernels.picked("gae", reward_BT):
        case "native":
            return _native(kernels, reward_BT, value_BT, mask_BT, gamma, lam)
        case "triton":
            from tunesmith.engine.kernels.gae import triton_impl

            return triton_impl.gae(reward_BT, value_BT, mask_BT.bool(), gamma, lam)
        case "torch":
            found = torch_impl.gae(reward_BT, value_BT, mask_BT, gamma, lam)
            return found.advantage_BT.contiguous(), found.return_BT.contiguous()


@_gae.register_fake
def _(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, choice: str
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(widened(reward_BT).dtype, widened(value_BT).dtype)
    return reward_BT.new_empty(reward_BT.shape, dtype=wide), reward_BT.new_empty(reward_BT.shape, dtype=wide)


def _native(
    kernels: Kernels, reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    # The names hold contiguous copies alive until the call is over.
    reward_BT, value_BT, mask_BT = reward_BT.contiguous(), value_BT.contiguous(), mask_BT.bool().contiguous()
    advantage_BT, return_BT = torch.empty_like(reward_BT), torch.empty_like(reward_BT)
    function_of(picked_library(kernels, "gae", reward_BT), "gae", _NATIVE)(
        *map(address, (reward_BT, value_BT, mask_BT, advantage_BT, return_BT)),
        *(*reward_BT.shape, gamma, gamma * lam, torch.get_num_threads()),
    )
    return advantage_BT, return_BT
