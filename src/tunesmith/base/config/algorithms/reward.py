"""Reward models: settings, recipe, and what the rest of the program knows of them."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.sections import (
    NonNegative,
    PairsSection,
    PositiveInt,
    Section,
)
from tunesmith.base.config.spec import Passes, Spec


class RewardTrainerSection(Section):
    """The Bradley-Terry reward model."""

    num_layers: PositiveInt | None = None
    """Keep only the lowest n layers, for a smaller reward model; null keeps all."""
    num_epochs: PositiveInt = 1
    """Passes over the pairs."""
    pairs_per_step: PositiveInt = 16
    """Pairs in one optimizer step."""
    micro_batch_size: PositiveInt = 16
    """Pairs in one forward and backward pass; gradients are accumulated."""
    margin: Literal["none", "column"] = "none"
    """`column`: subtract the row's `margin` from the difference of rewards (Llama 2)."""
    center_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which keeps rewards near zero."""


class RewardEvaluationSection(Section):
    """Evaluation of a reward model once it is trained."""

    judge: bool = False
    """Evaluate it on the held-out pairs as `tunesmith eval reward` does, beside a TF-IDF baseline fitted on the
    training pairs; written to reward_quality.json."""


class RewardRecipe(Recipe):
    """Train a reward model on preference pairs."""

    ALLOWS_PIPELINE = False
    OWN = "reward_model"

    algorithm: Literal["reward"] = "reward"
    pairs: PairsSection = PairsSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()
    evaluation: RewardEvaluationSection = RewardEvaluationSection()


def _passes(cfg: RewardRecipe) -> Passes:
    section = cfg.reward_model
    return Passes.of_rows(2 * section.pairs_per_step, 2 * section.micro_batch_size)  # a pair is two rows


SPEC = Spec(
    recipe=RewardRecipe,
    title="Bradley-Terry reward model",
    code="tunesmith.learn.trainers.reward:RewardTask",
    headline=("loss", "accuracy", "margin"),
    best="accuracy",
    passes=_passes,
    trains="reward model",
)
