"""Online direct preference optimisation (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own
completions, of which a reward says which is better.

Several completions are drawn for each prompt; the best and the worst of a group are a pair, and a group whose rewards
are all equal is left out. Shape legend: P prompts, G completions per prompt, S sides (0 chosen, 1 rejected), N pairs.
The step is `PolicyStep.step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tunesmith.base.config.algorithms.online_dpo import OnlineDPOSection
from tunesmith.engine.batch.pack import PolicyBatch
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.logprob import TokenScores
from tunesmith.learn.algorithms import advantages, direct_loss
from tunesmith.learn.algorithms.policy_loss import UpdateSize
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers.policy_step import Credit, Loss, PolicyStep


@dataclass(slots=True)
class OnlineDPO(PolicyStep):
    """The learner: `step` changes the policy and the optimizer."""

    ROWS_TOGETHER: ClassVar[int] = 2
    """Both completions of a pair are in one micro-batch."""

    cfg: OnlineDPOSection

    @property
    def needs_old_pass(self) -> bool:
        """False: the loss has no ratio to an old policy."""
        return False

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """The best of each group with advantage 1, the worst with -1; of equal ones the first."""
        differs_P = advantages.rewards_differ(scores.total_PG, scores.valid_PG)
        comparable_PG = scores.valid_PG & differs_P[:, None]
        best_PG, worst_PG = (advantages.highest(sign * scores.total_PG, comparable_PG, 1) for sign in (1, -1))
        figures = {"frac_reward_zero_std": (~differs_P).float().mean().item()}
        return Credit(best_PG | worst_PG, best_PG.float() - worst_PG.float(), figures, best_PG | worst_PG)

    def loss(self, micro: PolicyBatch, new: TokenScores, size: UpdateSize) -> Loss:
        """The direct loss of the pairs, a mean over those of the update; rows 2 n and 2 n + 1 are pair n."""
        mask_BT = micro.sequences.mask_BT
        is_first_N1 = micro.advantage_BT[::2, :1] > 0  # every completion has a token

        def sides(x_B: torch.Tensor) -> torch.Tensor:
            x_N2 = x_B.reshape(-1, 2)
            return torch.where(is_first_N1, x_N2, x_N2.flip(1)).T

        reference_BT = micro.reference_logp_BT
        pairs = direct_loss.PairLogps(
            sides((new.logp_BT * mask_BT).sum(dim=1)),
            sides(mask_BT.sum(dim=1)),
            None if reference_BT is None else sides((reference_BT * mask_BT).sum(dim=1)),
        )
        return Loss(*direct_loss.paired(pairs, self.cfg, num_pairs=size.num_sequences / 2))
