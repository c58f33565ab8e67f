"""ODIN: a second head that learns length, so that the first one need not.

Chen et al. 2024, "ODIN: Disentangled Reward Mitigates Hacking in RLHF", arXiv 2402.07319. Shapes: B answers, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.engine.kernels.masking import check_shapes
from tunesmith.learn.algorithms.sums import Sums

_FLOOR = 1e-2
"""Added to the variance of rewards: heads begin at zero, where a correlation has no gradient, and next to it a steep
one."""


@dataclass(frozen=True, slots=True)
class LengthSums(Sums):
    """Sums over micro-batches, each weighed by its pairs; records add up."""

    num_pairs: Tensor
    quality: Tensor
    """Correlation of the quality head with length."""
    length: Tensor
    """That of the length head."""
    product: Tensor
    """Product of the heads' weights."""

    def metrics(self) -> dict[str, float]:
        """The means over the pairs."""
        sums = self.floats()
        names = {"quality": "length/quality", "length": "length/head", "product": "length/product"}
        return {name: sums[key] / sums["num_pairs"] for key, name in names.items()}


def correlation(reward_B: Tensor, length_B: Tensor) -> Tensor:
    """Pearson's correlation, differentiable through the rewards, whose variance counts 0.01 more than it is. 0 where
    all lengths are equal.
    """
    reward_B = reward_B - reward_B.mean()
    length_B = length_B - length_B.mean()
    spread = length_B.square().mean().sqrt()
    unit_B = length_B / spread.clamp(min=1e-9)
    return (reward_B * unit_B).mean() / (reward_B.square().mean() + _FLOOR).sqrt()


def odin(
    quality_B: Tensor,
    head_B: Tensor,
    tokens_B: Tensor,
    quality_weight_H: Tensor,
    head_weight_H: Tensor,
    *,
    num_pairs: int,
    coef: float,
    orthogonal_coef: float,
) -> tuple[Tensor, LengthSums]:
    """Scalar terms of the loss beside that of the preferences, differentiable through all but `tokens_B`, and detached
    statistics.

    The preferences are learnt from the sum of both rewards, q + l. With the correlation r of `correlation` the terms
    are coef (|r(q, tokens)| - r(l, tokens)) + orthogonal_coef |w_q . w_l|: the length head takes all that length
    explains, and the quality head, which alone is kept, nothing of it. In the authors' code heads have unit length;
    here they begin at zero. As in the paper, correlations are over the answers of a batch, here of one micro-batch, so
    that the terms of several have to be weighed by their `num_pairs`,
    as the statistics are. Raises `InputError` if shapes differ.
    """
    check_shapes(quality_B=quality_B, head_B=head_B, tokens_B=tokens_B)
    check_shapes(quality_weight_H=quality_weight_H, head_weight_H=head_weight_H)
    of_quality, of_head = correlation(quality_B, tokens_B), correlation(head_B, tokens_B)
    product = (quality_weight_H * head_weight_H).sum()
    terms = coef * (of_quality.abs() - of_head) + orthogonal_coef * product.abs()
    sums = [one.detach().double() * num_pairs for one in (torch.ones_like(product), of_quality, of_head, product)]
    return terms, LengthSums(*sums)
