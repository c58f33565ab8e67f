"""What a step of PPO or GRPO hands to `run`, and what of it goes into the run folder."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.batch.rollout import Group
from tunesmith.core.trace import Trace
from tunesmith.models.optimizer import StepReport
from tunesmith.rewards.scorer import Scores
from tunesmith.trainers import policy_metrics
from tunesmith.trainers.policy_metrics import Metrics
from tunesmith.trainers.session import Session, StepRecord


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics, the groups that the step drew and their scores, and the optimizer's report if there was an update."""

    metrics: Metrics
    groups: Sequence[Group]
    scores: Scores
    report: StepReport | None


def step_record(session: Session, index: int, result: StepResult, evaluation: Metrics, times: Trace) -> StepRecord:
    """What step `index` (from 0) leaves in the run folder."""
    groups, scores = result.groups, result.scores
    return StepRecord(
        metrics=policy_metrics.with_times({**result.metrics, **evaluation}, times),
        report=result.report,
        batch=lambda: policy_metrics.batch_rows(groups, scores),
        samples=policy_metrics.sample_rows(index + 1, groups, scores) if session.samples_due(index) else (),
    )
