"""The Bradley-Terry loss of reward models, with margins and ties.

Shapes: B pairs. `num_pairs` is the number of pairs in the whole optimizer step, so that the losses and gradients of its
micro-batches add up to those of one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tunesmith.algorithms.sums import Denominator, Sums, check_denominator, check_shapes, kept, total
from tunesmith.core.errors import InputError


@dataclass(frozen=True, slots=True)
class PreferenceStats(Sums):
    """Sums over pairs; records of micro-batches add up. Decided pairs are those that are no tie."""

    num_pairs: Tensor
    num_decided: Tensor
    loss: Tensor
    """Loss of each pair, centering included, before the division by the global denominator."""
    correct: Tensor
    """Decided pairs whose chosen completion has the strictly higher reward."""
    margin: Tensor
    """Chosen minus rejected reward of the decided pairs."""
    reward: Tensor
    """Rewards of both completions, so of twice `num_pairs` completions."""
    reward_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means under the names of TRL's RewardTrainer; without pairs they are left out. Waits for the device once."""
        sums = self.floats()
        num_pairs, num_decided = sums["num_pairs"], sums["num_decided"]
        if num_pairs == 0:
            return {}
        mean_reward = sums["reward"] / (2 * num_pairs)
        variance = max(0.0, sums["reward_square"] / (2 * num_pairs) - mean_reward**2)
        metrics = {
            "loss": sums["loss"] / num_pairs,
            "mean_reward": mean_reward,
            "std_reward": variance**0.5,
            "tie_fraction": 1 - num_decided / num_pairs,
        }
        if num_decided > 0:
            metrics["accuracy"] = sums["correct"] / num_decided
            metrics["margin"] = sums["margin"] / num_decided
        return metrics


def bradley_terry(
    chosen_B: Tensor,
    rejected_B: Tensor,
    margin_B: Tensor | None = None,
    tie_B: Tensor | None = None,
    *,
    num_pairs: Denominator,
    center_coef: float = 0.0,
) -> tuple[Tensor, PreferenceStats]:
    """Scalar loss, differentiable through both rewards, and detached statistics.

    With d = chosen - rejected, a decided pair costs -log sigmoid(d - margin); the margin is 0 where unknown (Llama 2,
    arXiv 2307.09288, equation 2). A tie is half a vote for each side: -(log sigmoid(d) + log sigmoid(-d)) / 2, least at
    d = 0; its margin is not used. `center_coef` weighs (chosen + rejected)^2 of every pair, which holds rewards near 0
    (Eisenstein et al. 2023, arXiv 2312.09244; TRL's `center_rewards_coefficient`). The sum over all pairs, ties
    included, is divided by `num_pairs`.
    Raises `InputError` if shapes differ, `center_coef` is negative or `num_pairs` is not positive.
    """
    check_shapes(chosen_B=chosen_B, rejected_B=rejected_B, margin_B=margin_B, tie_B=tie_B)
    check_denominator("num_pairs", num_pairs)
    if not center_coef >= 0:
        raise InputError(f"center_coef is {center_coef}; it must be 0 (off) or positive.")
    every_B = torch.ones_like(chosen_B, dtype=torch.bool)
    decided_B = every_B if tie_B is None else ~tie_B.bool()
    chosen_B, rejected_B = kept(chosen_B, every_B), kept(rejected_B, every_B)
    difference_B = chosen_B - rejected_B
    wanted_B = difference_B if margin_B is None else difference_B - kept(margin_B.detach(), decided_B)
    # Half of the vote goes to the other side where the pair is a tie, none where it is decided.
    tied_B = 0.5 * (logsigmoid(difference_B) + logsigmoid(-difference_B))
    loss_B = -torch.where(decided_B, logsigmoid(wanted_B), tied_B)
    if center_coef > 0:
        loss_B = loss_B + center_coef * (chosen_B + rejected_B).square()
    reward_B = torch.cat([chosen_B, rejected_B]).detach().double()
    return loss_B.sum() / num_pairs, PreferenceStats(
        num_pairs=total(every_B),
        num_decided=total(decided_B),
        loss=total(loss_B),
        correct=total((difference_B > 0) & decided_B),
        margin=total(kept(difference_B, decided_B)),
        reward=total(reward_B),
        reward_square=total(reward_B.square()),
    )
