"""Arguments of a step of AdamW: one record for each parameter, and moments in float32 or in 8 bits.

Shape legend: N elements of a parameter, in the order of memory; K = ceil(N / CODED) groups that share a scale.
"""

from dataclasses import dataclass

import torch

CODED = 256
"""Elements of 8-bit moments that share a scale."""


@dataclass(frozen=True, slots=True)
class FloatMoments:
    """Running means of the gradient and of its square, float32 of the parameter's shape, changed in place."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True, slots=True)
class CodedMoments:
    """The same in 8 bits an element, after Dettmers et al. 2022 (arXiv 2110.02861), changed in place.

    `exp_avg` and `exp_avg_sq`: codes, uint8 of the parameter's shape; those of `exp_avg_sq` stand for its root, whose
    range is that of `exp_avg`. `exp_avg_scale_K`, `exp_avg_sq_scale_K`: float32, the largest magnitude of each group.
    """

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_scale_K: torch.Tensor
    exp_avg_sq_scale_K: torch.Tensor


Moments = FloatMoments | CodedMoments


def zero_moments(master: torch.Tensor, *, coded: bool) -> Moments:
    """The moments of a parameter before its first update."""
    if not coded:
        return FloatMoments(torch.zeros_like(master), torch.zeros_like(master))
    codes = [torch.zeros_like(master, dtype=torch.uint8) for _ in range(2)]
    scales = [master.new_zeros(-(-master.numel() // CODED), dtype=torch.float32) for _ in range(2)]
    return CodedMoments(*codes, *scales)


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """One parameter's part in a step.

    `gradient` and `master` have one shape; `weight` is the 16-bit copy that takes the new master, None where the master
    itself is the weight. `num_updates` counts this one. `learning_rate` and `weight_decay` are those of the step.
    """

    gradient: torch.Tensor
    master: torch.Tensor
    weight: torch.Tensor | None
    moments: Moments
    num_updates: int
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Settings shared by all parameters."""

    beta1: float
    beta2: float
    eps: float
