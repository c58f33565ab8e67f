"""Arguments and definition of a step of AdamW, in torch alone: one parameter at a time, float32 (float64 for float64).

Shape legend: N elements of a parameter in the order of memory, K = ceil(N / CODED) groups that share a scale, L levels.
"""

import math
from dataclasses import dataclass

import torch

CODED = 256
"""Elements of 8-bit moments that share a scale."""

_SPREAD = 0x9E3779B9
"""Distance of the numbers from which neighbouring elements draw."""

_CHANCES = 2**16
"""Numbers that the rounding of a moment is drawn from."""


@dataclass(frozen=True, slots=True)
class FloatMoments:
    """Running means of the gradient and of its square, float32 of the parameter's shape, changed in place."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True, slots=True)
class CodedMoments:
    """The same in 8 bits an element, after Dettmers et al. 2022 (arXiv 2110.02861), changed in place.

    `exp_avg` and `exp_avg_sq`: codes, uint8 of the parameter's shape; those of `exp_avg_sq` encode its root, whose
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
    All hold the elements of a parameter from `start` on, a multiple of `CODED`.
    """

    gradient: torch.Tensor
    master: torch.Tensor
    weight: torch.Tensor | None
    moments: Moments
    num_updates: int
    learning_rate: float
    weight_decay: float
    start: int = 0

    @property
    def seed(self) -> int:
        """The seed of the rounding to codes, below 2^32: no two updates draw the same, and an element is rounded alike
        wherever its parameter is cut.
        """
        return (self.num_updates * 0x632BE5AB + self.start * _SPREAD) % 2**32


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Settings shared by all parameters. Without `fused`, float32 moments go through torch's AdamW, operation by
    operation.
    """

    beta1: float
    beta2: float
    eps: float
    fused: bool = True


def adamw(update: ParameterUpdate, settings: AdamWSettings, gradient_factor: float) -> None:
    """Change moments, master and weight in place by one step with the gradient times `gradient_factor`.

    Loshchilov and Hutter 2019, algorithm 2: the decay acts on the weight, outside of the moments.
    """
    moments = update.moments
    decoded = _decoded(moments) if isinstance(moments, CodedMoments) else moments
    gradient = update.gradient.to(update.master.dtype) * gradient_factor
    decoded.exp_avg.lerp_(gradient, 1 - settings.beta1)
    decoded.exp_avg_sq.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    root = decoded.exp_avg_sq.sqrt().div_(math.sqrt(1 - settings.beta2**update.num_updates))
    update.master.mul_(1 - update.learning_rate * update.weight_decay)
    step_size = update.learning_rate / (1 - settings.beta1**update.num_updates)
    update.master.addcdiv_(decoded.exp_avg, root.add_(settings.eps), value=-step_size)
    if update.weight is not None:
        update.weight.copy_(update.master)
    if isinstance(moments, CodedMoments):
        _encode(decoded, moments, update.seed)


def levels(num_bits: int) -> torch.Tensor:
    """The 2^num_bits magnitudes of a code, ascending from 0 to 1, float32: the dynamic type of Dettmers (2016).

    Each decade below 1 has half as many levels as the one above it, evenly spread: the means of neighbouring marks.
    """
    parts = [torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    for decade in range(num_bits - 1):
        marks = torch.linspace(0.1, 1, 2 ** (num_bits - 1 - decade) + 1, dtype=torch.float64)
        parts.append((marks[1:] + marks[:-1]) / 2 * 10.0**-decade)
    return torch.cat(parts).sort().values.float()


def _decoded(moments: CodedMoments) -> FloatMoments:
    code_N, sign_N = moments.exp_avg.flatten().int() & 127, 1 - 2 * (moments.exp_avg.flatten() >= 128).int()
    device, shape = moments.exp_avg.device, moments.exp_avg.shape
    mean_N = levels(7).to(device)[code_N] * sign_N * _spread(moments.exp_avg_scale_K, code_N.numel())
    root_N = levels(8).to(device)[moments.exp_avg_sq.flatten().int()]
    root_N = root_N * _spread(moments.exp_avg_sq_scale_K, code_N.numel())
    return FloatMoments(mean_N.view(shape), root_N.square().view(shape))


def _encode(decoded: FloatMoments, moments: CodedMoments, seed: int) -> None:
    mean_N, root_N = decoded.exp_avg.flatten(), decoded.exp_avg_sq.flatten().sqrt()
    moments.exp_avg_scale_K.copy_(_largest(mean_N))
    moments.exp_avg_sq_scale_K.copy_(_largest(root_N))
    random_N = _drawn(seed, mean_N.numel(), mean_N.device)
    mean_code_N = _rounded(mean_N.abs(), moments.exp_avg_scale_K, levels(7), random_N // _CHANCES)
    moments.exp_avg.copy_((mean_code_N + 128 * (mean_N < 0)).view_as(moments.exp_avg))
    root_code_N = _rounded(root_N, moments.exp_avg_sq_scale_K, levels(8), random_N % _CHANCES)
    # A root of 0 under a mean that is not 0 would be a step without bound.
    moments.exp_avg_sq.copy_(torch.maximum(root_code_N, (root_N > 0).long()).view_as(moments.exp_avg_sq))


def _rounded(
    magnitude_N: torch.Tensor, scale_K: torch.Tensor, levels_L: torch.Tensor, random_N: torch.Tensor
) -> torch.Tensor:
    """Codes of the level below or above, above with the probability that makes the mean exact."""
    levels_L, scale_N = levels_L.to(scale_K.device), _spread(scale_K, len(magnitude_N))
    share_N = torch.where(scale_N > 0, magnitude_N / scale_N, 0.0)
    below_N = torch.bucketize(share_N, levels_L, right=True) - 1
    low_N, high_N = levels_L[below_N], levels_L[(below_N + 1).clamp(max=len(levels_L) - 1)]
    return below_N + (share_N - low_N > random_N.float() / _CHANCES * (high_N - low_N)).long()


def _drawn(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` numbers below 2^32, each a function of seed and position: the mixer of MurmurHash3."""
    x_N = (seed + torch.arange(count, device=device) * _SPREAD) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x_N = _times(x_N ^ (x_N >> shift), factor)
    return x_N ^ (x_N >> 16)


def _times(x_N: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor modulo 2^32, in halves: the whole product would not fit into 64 bits with a sign."""
    return ((x_N >> 16) * factor % 2**16 * 2**16 + (x_N % 2**16) * factor) % 2**32


def _spread(scale_K: torch.Tensor, count: int) -> torch.Tensor:
    """The scale of each element."""
    return scale_K.repeat_interleave(CODED)[:count]


def _largest(value_N: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group."""
    padded_N = torch.nn.functional.pad(value_N.abs(), (0, -len(value_N) % CODED))
    return padded_N.view(-1, CODED).amax(dim=1)
