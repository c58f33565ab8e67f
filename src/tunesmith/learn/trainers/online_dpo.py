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
from tunesmith.engine.batch.pack import PolicyBatch, units_of
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.logprob import TokenScores
from tunesmith.learn.algorithms import advantages, direct_loss
from tunesmith.learn.algorithms.policy_loss import UpdateSize
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers import metrics
from tunesmith.learn.trainers.policy_step import Credit, Loss, PolicyStep


@dataclass(slots=True)
class OnlineDPO(PolicyStep):
    """The learner: `step` changes the policy and the optimizer."""

    TOGETHER: ClassVar[int] = 2
    """Both completions of a pair are in one micro-batch."""

    cfg: OnlineDPOSection

    @property
    def needs_old_pass(self) -> bool:
        """False: the loss has no ratio to an old policy."""
        return False

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """The best of each group with advantage 1, the worst with -1; of equal ones the first. A completion without a
        token, as of an environment whose first words left no room, is in no pair.
        """
        valid_PG = scores.valid_PG & metrics.has_tokens(groups)
        differs_P = advantages.rewards_differ(scores.total_PG, valid_PG)
        comparable_PG = valid_PG & differs_P[:, None]
        best_PG, worst_PG = (advantages.highest(sign * scores.total_PG, comparable_PG, 1) for sign in (1, -1))
        figures = {"frac_reward_zero_std": (~differs_P).float().mean().item()}
        return Credit(best_PG | worst_PG, best_PG.float() - worst_PG.float(), figures, best_PG | worst_PG)

    def loss(self, micro: PolicyBatch, new: TokenScores, size: UpdateSize) -> Loss:
        """The direct loss of the pairs, a mean over those of the update. The log-prob of a trajectory of several
        samples is the sum of theirs: each turn is drawn behind what the model read there.
        """
        mask_BT = micro.sequences.mask_BT
        units = units_of(micro.sequences, self.TOGETHER)
        pair_B = torch.tensor([pair for pair, rows in enumerate(units) for _ in rows], device=mask_BT.device)
        side_B = (micro.advantage_BT[:, 0] < 0).long()  # every sample begins with a token that was drawn

        def sides(x_B: torch.Tensor) -> torch.Tensor:
            return x_B.new_zeros(2, len(units)).index_put((side_B, pair_B), x_B, accumulate=True)

        reference_BT = micro.reference_logp_BT
        pairs = direct_loss.PairLogps(
            sides((new.logp_BT * mask_BT).sum(dim=1)),
            sides(mask_BT.sum(dim=1)),
            None if reference_BT is None else sides((reference_BT * mask_BT).sum(dim=1)),
        )
        return Loss(*direct_loss.paired(pairs, self.cfg, num_pairs=size.num_sequences / 2))
