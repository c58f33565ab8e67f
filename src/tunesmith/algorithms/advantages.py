"""Generalised advantage estimation and whitening.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. Positions outside it are skipped as
if they were not there, and come out as 0. Advantages are targets: no gradient flows through anything in this file.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tunesmith.algorithms.sums import Sums, check_shapes, kept, total
from tunesmith.core.errors import InputError


class Advantages(NamedTuple):
    """Advantages, and the returns that the value function is fitted to; 0 outside the mask."""

    advantage_BT: Tensor
    return_BT: Tensor


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """Advantages and returns (advantage + value) of each token, in fp32 or wider, without gradient.

    `value_BT` is the value of the state before the token is drawn. The value after a row's last token is 0: a
    completion is an episode, whether it ended by itself or at the length limit. Equation 16 of Schulman et al. 2016
    (arXiv 1506.02438),

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},

    scanned from the last column to the first, all rows at once. The scan only ever multiplies by gamma lam <= 1, so it
    is stable for any length. Raises `InputError` if shapes differ or gamma or lam lies outside 0 to 1.
    """
    _check(reward_BT, value_BT, mask_BT, gamma, lam)
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


def gae_loop(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """What `gae` returns, token by token in plain fp64 numbers: the definition that `gae` is tested against."""
    _check(reward_BT, value_BT, mask_BT, gamma, lam)
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


@dataclass(frozen=True, slots=True)
class Moments(Sums):
    """What whitening must know about a rollout; add the records of all ranks to whiten over the whole of it."""

    num: Tensor
    value: Tensor
    square: Tensor


def moments(x_BT: Tensor, mask_BT: Tensor) -> Moments:
    """Count, sum and sum of squares of the elements inside the mask."""
    check_shapes(x_BT=x_BT, mask_BT=mask_BT)
    x_BT = kept(x_BT, mask_BT.bool()).double()
    return Moments(num=total(mask_BT.bool()), value=total(x_BT), square=total(x_BT.square()))


def whiten(
    x_BT: Tensor, mask_BT: Tensor, shift_mean: bool = True, *, eps: float = 1e-8, over: Moments | None = None
) -> Tensor:
    """`x_BT` scaled to variance 1 and, with `shift_mean`, moved to mean 0.

    The result is 0 outside the mask, in fp32 or wider, and carries no gradient. The variance is the unbiased one
    (n - 1) and `eps` is added to it, as TRL's PPO did; a lone element has variance 0. Mean and variance are those of
    `over`, by default of the elements inside the mask. Raises `InputError` if shapes differ.
    """
    check_shapes(x_BT=x_BT, mask_BT=mask_BT)
    known = moments(x_BT, mask_BT) if over is None else over
    mean = known.value / known.num.clamp(min=1)
    variance = ((known.square - known.value * mean) / (known.num - 1).clamp(min=1)).clamp(min=0)
    mask_BT = mask_BT.bool()
    x_BT = kept(x_BT.detach(), mask_BT)
    centred_BT = x_BT.double() - mean
    whitened_BT = centred_BT * torch.rsqrt(variance + eps) + (0.0 if shift_mean else mean)
    return kept(whitened_BT, mask_BT).to(x_BT.dtype)


def _check(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> None:
    check_shapes(reward_BT=reward_BT, value_BT=value_BT, mask_BT=mask_BT)
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise InputError(f"{name} is {value}; it must lie between 0 and 1.")
