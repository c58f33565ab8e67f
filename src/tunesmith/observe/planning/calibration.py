"""Differences between predictions and measurements: a published table, and the runs of a user.

A calibration is a factor for each stage, the measured seconds divided by the predicted ones. Everything else in the
model is a maker's figure or stated in `Hardware` and `Workload`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tunesmith.observe.planning.hardware import HARDWARE
from tunesmith.observe.planning.memory import Layout
from tunesmith.observe.planning.shape import read_shape
from tunesmith.observe.planning.step_time import Cluster, StepModel, StepTime
from tunesmith.observe.planning.workload import Workload

STAGES: tuple[str, ...] = ("weights", "rollout", "scoring", "critic", "update")

PUBLISHED: Mapping[int, float] = {8: 253.8, 16: 143.4, 32: 81.2}
"""Seconds of a PPO step of NeMo-Aligner, by nodes of 8 GPUs for the actor; as many again hold the critic. Llama 2 70B,
1,024 rollouts, global batch 128 (its Accelerated-RLHF.md; arXiv 2405.01481)."""

PUBLISHED_WORK = Workload(
    draws=True,
    prompts=1024,
    completions=1,
    prompt_tokens=256,
    new_tokens=2048,
    mean_new_tokens=512,
    num_minibatches=8,
    micro_batch_size=1,
    has_reference=True,
    recomputes_old_policy=True,
    critic="separate",
    slots=8,
    lease=8,
    checkpointed=True,
)
"""Its workload. The table does not give lengths, micro-batches and GPUs: the limit and the micro-batches are the
defaults of its `gpt_ppo_actor.yaml`; H100, the lengths of prompts and the mean length of completions are assumed."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors by stage, the source, and the largest relative error on measurements that it was not made from; None:
    there is no such measurement.
    """

    factors: Mapping[str, float]
    source: str
    error: float | None

    def __str__(self) -> str:
        error = "its error on other hardware is not known" if self.error is None else f"error up to {self.error:.0%}"
        return f"{self.source}; {error}"


def published_model(nodes: int, factor: float = 1.0) -> StepModel:
    """The model of the published run on `nodes` + `nodes` nodes."""
    layout = Layout(data=nodes // 2, tensor=8, pipeline=2, engine_tensor=8)
    cluster = Cluster(HARDWARE["h100"], nodes, 8, critic_nodes=nodes)
    return StepModel(read_shape("llama-2-70b"), PUBLISHED_WORK, cluster, layout, dict.fromkeys(STAGES, factor))


def published_step(nodes: int, factor: float = 1.0) -> StepTime:
    """The predicted step of the published run."""
    return published_model(nodes, factor).step()


def published_factor(*rows: int) -> float:
    """Measured divided by predicted seconds of the published `rows`, their geometric mean."""
    return math.exp(sum(math.log(PUBLISHED[n] / published_step(n).total_s) for n in rows) / len(rows))


def published_error() -> float:
    """The largest relative error of a published row that is predicted from one other row."""
    return max(
        abs(published_step(row, published_factor(other)).total_s / PUBLISHED[row] - 1)
        for row in PUBLISHED
        for other in PUBLISHED
        if row != other
    )


def calibration_for(hardware: str) -> Calibration:
    """The calibration of a built-in hardware: the published table for h100; for others its factor, without an error."""
    factor = published_factor(*PUBLISHED)
    source = f"calibrated on NeMo-Aligner's Llama 2 70B on 128 to 512 GPUs (factor {factor:.2f})"
    if hardware == "cpu":
        return Calibration({}, "not calibrated; --from RUN calibrates on a run of yours", None)
    return Calibration(dict.fromkeys(STAGES, factor), source, published_error() if hardware == "h100" else None)
