"""The float64 oracle of generalised advantage estimation.

Shapes: B sequences, T completion tokens.
"""

import torch
from torch import Tensor

from tunesmith.engine.kernels.gae.torch_impl import Advantages


def gae_loop(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """Advantages and returns, token by token in plain float64 numbers."""
    advantages = torch.zeros(value_BT.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for b, (rewards, values, mask) in enumerate(
        zip(reward_BT.tolist(), value_BT.tolist(), mask_BT.tolist(), strict=True)
    ):
        next_value, next_advantage = 0.0, 0.0
        for t in reversed([t for t, counts in enumerate(mask) if counts]):
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[b, t], returns[b, t] = next_advantage, next_advantage + next_value
    return Advantages(advantages, returns)
