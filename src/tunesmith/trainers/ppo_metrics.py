"""The figures of a PPO step, under TRL's names.

Shape legend: B sequences, T completion tokens.
"""

from collections.abc import Sequence

from tunesmith.batch.pack import PPOBatch
from tunesmith.batch.rollout import Group
from tunesmith.rewards.scorer import Scores
from tunesmith.trainers import policy_metrics
from tunesmith.trainers.policy_metrics import Metrics


def step_metrics(
    groups: Sequence[Group],
    scores: Scores,
    batch: PPOBatch,
    kl_coef: float,
    stats: policy_metrics.UpdateStats,
) -> Metrics:
    """All figures of a step: rewards, KL of the rollout, lengths, updates."""
    mask_BT = batch.sequences.mask_BT
    kl = policy_metrics.kl_per_sequence(batch.old_logp_BT, batch.reference_logp_BT, mask_BT)
    rewards = scores.metrics()
    score = rewards["reward"]
    num_tokens = batch.sequences.num_tokens
    return {
        **rewards,
        "objective/kl": kl,
        "objective/entropy": stats.first.entropy_per_sequence,
        "objective/scores": score,
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": score - kl_coef * kl,
        "kl": kl * len(mask_BT) / num_tokens,
        **policy_metrics.completion_metrics(groups),
        **stats.metrics(),
        "num_tokens": float(num_tokens),
    }
