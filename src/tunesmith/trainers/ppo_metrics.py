"""The figures of a PPO step, under TRL's names where TRL has one.

Shape legend: P prompts, G completions per prompt, B = P * G sequences, T completion tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tunesmith.algorithms.policy_loss import PolicyStats
from tunesmith.algorithms.sums import merged
from tunesmith.algorithms.value_loss import ValueStats
from tunesmith.batch.pack import PolicyScores, PPOBatch
from tunesmith.batch.rollout import Group
from tunesmith.core.trace import Trace
from tunesmith.models.optimizer import StepReport
from tunesmith.rewards.scorer import Scores
from tunesmith.schema.records import plain_text

Metrics = dict[str, float]


@dataclass(slots=True)
class UpdateStats:
    """Statistics of a step's updates, summed over micro-batches; the last minibatch is kept apart for the early
    stop.
    """

    stopped_early: bool = False
    reports: list[StepReport] = field(default_factory=list[StepReport])
    _policy: list[PolicyStats] = field(default_factory=list[PolicyStats])
    _value: list[ValueStats] = field(default_factory=list[ValueStats])
    _minibatch: list[PolicyStats] = field(default_factory=list[PolicyStats])
    _num_closed: int = 0

    def add(self, policy: PolicyStats, value: ValueStats) -> None:
        """Take in one micro-batch."""
        if len(self.reports) > self._num_closed:
            self._minibatch, self._num_closed = [], len(self.reports)
        self._policy.append(policy)
        self._minibatch.append(policy)
        self._value.append(value)

    def add_report(self, report: StepReport) -> None:
        """Take in the optimizer's report, which closes a minibatch."""
        self.reports.append(report)

    def last_minibatch_kl(self) -> float:
        """KL of the last minibatch to the policy that drew its tokens, in nats per token."""
        return merged(self._minibatch).metrics()["policy/approxkl_avg"]

    def last_report(self) -> StepReport:
        """The report of the last optimizer step."""
        return self.reports[-1]

    def metrics(self) -> Metrics:
        """Means over all tokens of all updates, and the optimizer's figures."""
        return {
            **merged(self._policy).metrics(),
            **merged(self._value).metrics(),
            "grad_norm": mean([report.grad_norm for report in self.reports]),
            "lr": self.reports[-1].learning_rate,
            "updates": float(len(self.reports)),
            "refused_steps": float(sum(report.refused for report in self.reports)),
            "policy/stopped_early": float(self.stopped_early),
        }


def step_metrics(
    groups: Sequence[Group], scores: Scores, old: PolicyScores, batch: PPOBatch, kl_coef: float, stats: UpdateStats
) -> Metrics:
    """All figures of a step: rewards, KL and entropy of the rollout, lengths, log-prob agreement, updates."""
    mask_BT = batch.sequences.mask_BT
    kl = kl_per_sequence(old.logp_BT, batch.reference_logp_BT, mask_BT)
    entropy = (old.entropy_BT * mask_BT).sum(dim=1).mean().item()
    score = scores.total_PG.mean().item()
    num_tokens = batch.sequences.num_tokens
    return {
        **reward_metrics(scores),
        "objective/kl": kl,
        "objective/entropy": entropy,
        "objective/scores": score,
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": score - kl_coef * kl,
        "kl": kl * len(mask_BT) / num_tokens,
        "entropy": entropy * len(mask_BT) / num_tokens,
        **completion_metrics(groups),
        **logp_agreement(groups, old.logp_BT, mask_BT),
        **stats.metrics(),
        "num_tokens": float(num_tokens),
    }


def reward_metrics(scores: Scores) -> Metrics:
    """Mean and spread of the summed reward and of each of its parts."""
    metrics = {"reward": scores.total_PG.mean().item(), "reward_std": spread(scores.total_PG)}
    for name, part_PG in scores.parts.items():
        known = part_PG[~part_PG.isnan()]
        metrics[f"rewards/{name}/mean"] = known.mean().item() if len(known) else math.nan
        metrics[f"rewards/{name}/std"] = spread(known)
    return metrics


def completion_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths in tokens, and the share that the length limit cut off."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "completions/mean_length": mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": mean([completion.finish_reason == "length" for completion in completions]),
    }


def logp_agreement(groups: Sequence[Group], logp_BT: torch.Tensor, mask_BT: torch.Tensor) -> Metrics:
    """How far the engine's log-probs lie from the trainer's, in nats: the largest and the mean difference.

    With top-p or top-k the engine's are those of the cut distribution, and the difference is real.
    """
    rows = [completion.logps for group in groups for completion in group.completions]
    engine_BT = torch.zeros(logp_BT.shape)
    for row, logps in enumerate(rows):
        engine_BT[row, : len(logps)] = torch.tensor(logps)
    difference_BT = (engine_BT.to(logp_BT) - logp_BT).abs() * mask_BT
    return {
        "rollout/logp_diff_max": difference_BT.max().item(),
        "rollout/logp_diff_mean": (difference_BT.sum() / mask_BT.sum()).item(),
    }


def kl_per_sequence(logp_BT: torch.Tensor, reference_logp_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Mean over the sequences of log policy - log reference, summed over the tokens, in nats."""
    return ((logp_BT - reference_logp_BT) * mask_BT).sum(dim=1).mean().item()


def join(parts_BT: Sequence[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Micro-batches as one tensor, each padded with zeros to the width of `mask_BT`."""
    width = mask_BT.shape[1]
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts_BT])


def with_times(metrics: Metrics, times: Trace) -> Metrics:
    """`metrics` with the seconds of each stage, and completion tokens per second of the step."""
    tokens_per_s = {"tokens_per_s": metrics["num_tokens"] / times.wall_s} if "num_tokens" in metrics else {}
    return {**metrics, **times.metrics(), **tokens_per_s}


def sample_rows(step: int, groups: Sequence[Group], scores: Scores, limit: int = 8) -> list[dict[str, object]]:
    """Rows of `samples.jsonl`: the first completion of the first `limit` groups, with its reward and the parts of
    it.
    """
    rows: list[dict[str, object]] = []
    for p, group in enumerate(groups[:limit]):
        completion = group.completions[0]
        rows.append(
            {
                "step": step,
                "prompt_id": group.prompt.id,
                "prompt": plain_text(group.prompt.content),
                "completion": completion.text,
                "num_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "weight_version": group.weight_version,
                "reward": scores.total_PG[p, 0].item(),
                "rewards": {name: part_PG[p, 0].item() for name, part_PG in scores.parts.items()},
            }
        )
    return rows


def summary(metrics: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """What a run came to: reward and KL at the first and at the last step."""
    if not metrics:
        return {"steps": 0}
    first, last = metrics[0], metrics[-1]
    names = ("reward", "objective/kl", "entropy", "completions/mean_length", "eval/reward")
    return {
        "steps": len(metrics),
        "refused_steps": int(sum(row["refused_steps"] for row in metrics)),
        **{f"{name}_first": first[name] for name in names if name in first and len(metrics) > 1},
        **{name: last[name] for name in names if name in last},
    }


def mean(values: Sequence[float]) -> float:
    """The mean of `values`."""
    return sum(values) / len(values)


def spread(values: torch.Tensor) -> float:
    """Standard deviation; 0 for a single value."""
    return values.std().item() if values.numel() > 1 else 0.0
