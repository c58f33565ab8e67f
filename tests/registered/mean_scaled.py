"""An algorithm of another package, in one file: GRPO with MaxRL's advantage, (reward - mean of the group) / mean."""

from typing import Literal

import torch

from tunesmith.base.config.algorithms.grpo import GRPOSection
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.config.sections import GRPORolloutSection
from tunesmith.base.config.spec import Passes, Spec
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers.grpo import GRPO


class MeanScaledSection(GRPOSection):
    """Its settings."""

    floor: float = 1e-6
    """Added to the mean that the advantage is divided by."""


class MeanScaledRecipe(PolicyRecipe):
    """Train a policy by advantages that are scaled by the group's mean reward."""

    algorithm: Literal["mean_scaled"] = "mean_scaled"
    rollout: GRPORolloutSection = GRPORolloutSection()
    mean_scaled: MeanScaledSection = MeanScaledSection()


class MeanScaled(GRPO):
    """GRPO with another comparison."""

    def compare(self, scores: Scores, length_PG: torch.Tensor) -> torch.Tensor:
        """Advantage of each completion, `[P, G]`."""
        section: MeanScaledSection = self.cfg  # pyright: ignore[reportAssignmentType]
        mean_P1 = scores.total_PG.mean(1, keepdim=True)
        return (scores.total_PG - mean_P1) / (mean_P1 + section.floor)


SPEC = Spec(
    recipe=MeanScaledRecipe,
    title="mean-scaled GRPO",
    code="mean_scaled:MeanScaled",
    headline=("reward", "completions/mean_length"),
    best="reward",
    passes=Passes.of_drawing,
)
