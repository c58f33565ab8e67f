"""Best-of-n distillation: draw n completions of each prompt, keep the best by the reward, learn them as SFT does.

RAFT (Dong et al. 2023, arXiv 2304.06767), also known as rejection-sampling fine-tuning; the baseline that PPO and GRPO
are compared with. Shape legend: P prompts, G completions per prompt, T completion tokens. The step is
`PolicyStep.step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tunesmith.base.config.algorithms.best_of_n import BestOfNSection
from tunesmith.engine.batch.pack import PolicyBatch
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.engine.models.logprob import TokenScores
from tunesmith.learn.algorithms.advantages import highest
from tunesmith.learn.algorithms.policy_loss import UpdateSize, policy_loss
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers import metrics
from tunesmith.learn.trainers.api import Metrics
from tunesmith.learn.trainers.policy_step import Credit, Loss, PolicyStep


@dataclass(slots=True)
class BestOfN(PolicyStep):
    """The learner: `step` changes the policy, the optimizer and the KL controller."""

    cfg: BestOfNSection

    @property
    def needs_old_pass(self) -> bool:
        """False: a likelihood has no ratio to an old policy."""
        return False

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """The best of each group by the reward, less the KL if that is part of it; each with advantage 1."""
        reward_PG = scores.total_PG if kl_PG is None else scores.total_PG - self.kl.value * kl_PG.to(scores.total_PG)
        best_PG = highest(reward_PG, scores.valid_PG, self.cfg.keep)
        kept = {"reward/kept": scores.total_PG[best_PG].mean().item()} if best_PG.any() else {}
        return Credit(best_PG, torch.ones_like(reward_PG), kept)

    def loss(self, micro: PolicyBatch, new: TokenScores, size: UpdateSize) -> Loss:
        """The negative log-likelihood of all completion tokens, at the temperature of the rollout, a mean over the
        tokens of the update; and the KL to the reference if its place is the loss.
        """
        kl = self.cfg.kl
        terms = PolicyTerms("log_prob", kl=kl.estimator, kl_coef=self.kl.value if kl.place == "loss" else 0.0)
        tokens = PolicyTokens(
            new.logp_BT,
            micro.old_logp_BT,
            micro.advantage_BT,
            micro.sequences.mask_BT,
            micro.reference_logp_BT if terms.kl_coef > 0 else None,
        )
        return Loss(*policy_loss(tokens, terms, size.num_tokens, size.num_tokens))

    def figures(self, scores: Scores, batch: PolicyBatch, stats: metrics.UpdateStats) -> Metrics:
        """As of every step, and the mean -log p of a token over all updates."""
        return {**PolicyStep.figures(self, scores, batch, stats), "loss": stats.metrics()["loss/policy_avg"]}
