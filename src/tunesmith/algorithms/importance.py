"""Importance weights for completions that were drawn from another distribution than the policy that is trained.

The gradient wants tokens of the policy pi; they were drawn from mu, which differs where the engine rounds otherwise
than the trainer, and wherever top-p, top-k, min-p, a repetition penalty or a bias shape the draw. Weights pi / mu
correct both; cut to a range they trade a little bias for variance: truncated importance sampling, Yao et al. 2025
("Your efficient RL framework secretly brings you off-policy RL training"), after Ionides 2008.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.algorithms.sums import check_shapes, kept
from tunesmith.config.rollout_sections import ImportanceSection


@dataclass(frozen=True, slots=True)
class Correction:
    """`weight_BT` multiplies the advantage of each token: float32, detached, 0 outside the mask.

    `is_cut_BT` is true for tokens whose weight lay outside of [floor, cap]. `ratio_N` are the weights of the N tokens,
    or completions, as they count; `logp_difference_N` is |log pi - log mu| of each token, in nats.
    """

    weight_BT: Tensor
    is_cut_BT: Tensor
    ratio_N: Tensor
    logp_difference_N: Tensor
    cut_share: Tensor

    def metrics(self) -> dict[str, float]:
        """Figures under TRL's names, and the share of weights that were cut; empty without tokens."""
        if not self.logp_difference_N.numel():
            return {}
        return {
            "sampling/sampling_logp_difference/mean": self.logp_difference_N.mean().item(),
            "sampling/sampling_logp_difference/max": self.logp_difference_N.max().item(),
            "sampling/importance_sampling_ratio/min": self.ratio_N.min().item(),
            "sampling/importance_sampling_ratio/mean": self.ratio_N.mean().item(),
            "sampling/importance_sampling_ratio/max": self.ratio_N.max().item(),
            "sampling/importance_sampling_ratio/cut_share": self.cut_share.item(),
        }


def correction(
    train_logp_BT: Tensor, sampled_logp_BT: Tensor, mask_BT: Tensor, settings: ImportanceSection
) -> Correction:
    """Weights pi / mu of the tokens, cut as `settings` say.

    `train_logp_BT` is log pi, of the trainer's own forward before the update and at the sampling temperature.
    `sampled_logp_BT` is log mu of what was really drawn from, after filters and penalty (`Completion.logps`): then the
    mean over mu of weight x f is, before the cut, the sum of pi f over what mu can draw. Where a filter keeps a mass Z
    of the vocabulary, a weight is Z; the unfiltered log-probs (`Completion.raw_logps`) would leave that out, and
    correct rounding alone.

    Per token, or with `level: sequence` one weight for a completion, the product of its tokens' (unbiased, of greater
    variance: a filter makes it vanish with length). `truncate` moves a weight into [floor, cap], `mask` sets one
    outside of it to 0, `off` makes each weight 1 and only measures.

    Raises:
        InputError: if shapes differ.
    """
    check_shapes(train_logp_BT=train_logp_BT, sampled_logp_BT=sampled_logp_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    log_ratio_BT = kept(train_logp_BT.detach(), mask_BT) - kept(sampled_logp_BT.detach(), mask_BT)
    if settings.level == "sequence":
        log_ratio_BL = log_ratio_BT.sum(dim=1, keepdim=True, dtype=torch.float64)
        counts_BL = mask_BT.any(dim=1, keepdim=True)
    else:
        log_ratio_BL, counts_BL = log_ratio_BT, mask_BT
    ratio_BL = log_ratio_BL.exp()
    is_cut_BL = counts_BL & ((ratio_BL > settings.cap) | (ratio_BL < settings.floor))
    if settings.mode == "truncate":
        ratio_BL = ratio_BL.clamp(settings.floor, settings.cap)
    elif settings.mode == "mask":
        ratio_BL = ratio_BL.masked_fill(is_cut_BL, 0.0)
    else:
        is_cut_BL = torch.zeros_like(is_cut_BL)
    weight_BL = torch.ones_like(ratio_BL) if settings.mode == "off" else ratio_BL
    return Correction(
        weight_BT=weight_BL.expand_as(mask_BT).masked_fill(~mask_BT, 0.0).float(),
        is_cut_BT=is_cut_BL & mask_BT,
        ratio_N=ratio_BL[counts_BL].float(),
        logp_difference_N=log_ratio_BT[mask_BT].abs(),
        cut_share=is_cut_BL.sum() / counts_BL.sum(),
    )
