"""The figures of a GRPO step, under TRL's names.

Shape legend: P prompts, G completions per prompt, B sequences, T completion tokens.
"""

from collections.abc import Sequence

import torch

from tunesmith.algorithms.importance import Correction
from tunesmith.algorithms.policy_loss import PolicyStats
from tunesmith.batch.pack import Sequences
from tunesmith.batch.rollout import Group
from tunesmith.models.logprob import TokenScores
from tunesmith.models.optimizer import StepReport
from tunesmith.rewards.scorer import Scores
from tunesmith.trainers import policy_metrics
from tunesmith.trainers.policy_metrics import Metrics


class StepStats:
    """Statistics of one step. Those of a pass over the completions are kept of the first update alone: there the
    policy is the one that drew them.
    """

    def __init__(self, groups: Sequence[Group], scores: Scores) -> None:
        self._groups = groups
        self._scores = scores
        self._updates = policy_metrics.UpdateStats()
        self._kl_sum = 0.0
        self._has_reference = False

    def add(
        self,
        policy: PolicyStats,
        sequences: Sequences,
        new: TokenScores,
        reference_logp_BT: torch.Tensor | None,
        drawn: Correction,
    ) -> None:
        """Take in one micro-batch."""
        self._updates.add(policy)
        if self._updates.reports:
            return
        self._updates.add_pass(sequences, new.logp_BT, new.entropy_BT, drawn)
        if reference_logp_BT is not None:
            self._has_reference = True
            self._kl_sum += ((new.logp_BT.detach() - reference_logp_BT) * sequences.mask_BT).sum().item()

    def add_report(self, report: StepReport) -> None:
        """Take in the optimizer's report, which closes a minibatch."""
        self._updates.add_report(report)

    def worst_report(self) -> StepReport | None:
        """The report of the last update that was refused, else of the last one."""
        return self._updates.worst_report()

    def mean_kl(self) -> float:
        """Mean KL of a completion to the reference, in nats; 0 without a reference."""
        return self._kl_sum / max(1, self._updates.first.num_sequences)

    def _kl_metrics(self) -> Metrics:
        if not self._has_reference:
            return {}
        return {"objective/kl": self.mean_kl(), "kl": self._kl_sum / self._updates.first.num_tokens}

    def metrics(self, varies_P: torch.Tensor) -> Metrics:
        """All figures of the step. `varies_P`: whether the rewards of a group differ."""
        num_drawn = sum(len(completion.token_ids) for group in self._groups for completion in group.completions)
        shared = {
            **self._scores.metrics(),
            "frac_reward_zero_std": (~varies_P).float().mean().item(),
            "groups/num_drawn": float(len(self._groups)),
            "groups/num_dropped": float((~varies_P).sum().item()),
            **policy_metrics.completion_metrics(self._groups),
            "num_tokens": float(num_drawn),
        }
        if not self._updates.reports:
            return {**shared, "updates": 0.0, "refused_steps": 0.0}
        return {
            **shared,
            **self._kl_metrics(),
            **self._updates.metrics(),
        }
