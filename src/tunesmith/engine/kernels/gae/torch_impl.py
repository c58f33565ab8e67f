"""Generalised advantage estimation in torch: a scan over columns.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. Positions outside it are skipped as if
they were not there, and come out as 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tunesmith.engine.kernels.masking import kept


class Advantages(NamedTuple):
    """Advantages and returns (the targets of the value function); 0 outside the mask."""

    advantage_BT: Tensor
    return_BT: Tensor


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """Advantages and returns (advantage + value) of each token, in fp32 or wider, without gradient.

    Equation 16 of Schulman et al. 2016 (arXiv 1506.02438), with the value behind a row's last token 0,

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},

    scanned from the last column to the first, all rows at once. The scan only ever multiplies by gamma lam <= 1, so it
    is stable for any length.
    """
    mask_BT = mask_BT.bool()
    reward_BT, value_BT = kept(reward_BT.detach(), mask_BT), kept(value_BT.detach(), mask_BT)
    advantage_BT = torch.zeros_like(value_BT + reward_BT)
    next_value_B = next_advantage_B = advantage_BT.new_zeros(advantage_BT.shape[0])
    for t in reversed(range(value_BT.shape[1])):
        mask_B, value_B = mask_BT[:, t], value_BT[:, t]
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_B
        next_advantage_B = torch.where(mask_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B, value_B, next_value_B)
        advantage_BT[:, t] = next_advantage_B
    advantage_BT = kept(advantage_BT, mask_BT)
    return Advantages(advantage_BT, advantage_BT + value_BT)
