"""Reward models: settings, recipe, and what the rest of the program knows of them."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.rules import NO_REFERENCE, Rule
from tunesmith.base.config.sections import (
    MixedPairsSection,
    NonNegative,
    OptimizerSection,
    Pessimism,
    Positive,
    PositiveInt,
    Section,
)
from tunesmith.base.config.spec import Passes, Spec

Length = Literal["none", "balanced", "expert", "post_hoc"]


class HeadsSection(Section):
    """Several score heads on one trunk, each trained on a bootstrap sample of the votes: where they differ, the votes
    do not say what is better (Osband et al. 2016, arXiv 1602.04621)."""

    SHORTHAND = "count"

    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of heads; the reward is their mean."""
    bootstrap: Literal["prompts", "pairs", "none"] = "prompts"
    """What each head draws with replacement, as weights from a Poisson distribution with mean 1: prompts with all their
    pairs, or pairs; `none`: heads differ by their random beginning alone."""
    prior_scale: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Size of the random part that each head begins with, whose mean over the heads is 0: the standard deviation of its
    weights times the root of their number. It stays where no vote says otherwise (Osband et al. 2018, arXiv
    1806.03335)."""


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
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = 0.0
    """Share of the votes that are taken to be wrong: so much of the loss is that of the other answer."""
    heads: HeadsSection = HeadsSection()


class CommitteeSection(Section):
    """Leaves out votes that all heads contradict: in the first epoch none of them has learnt from the pair yet."""

    SHORTHAND = "confidence"

    confidence: Annotated[float, Field(gt=0.5, lt=1)] | None = None
    """A pair is left out of a step if each head gives the other answer at least this probability; null leaves out
    none."""
    after: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the steps that are made before pairs are left out."""


class RewardModelSection(RewardTrainerSection):
    """The Bradley-Terry reward model that is trained by itself."""

    length: Length = "none"
    """Keeps a reward model from learning that longer answers are better. `balanced`: weights, by which of equally
    different lengths the longer answer wins as often as it loses, in each source; `expert`: what length alone says of
    the votes of a source is added to the difference of the rewards that are trained, which then learn the rest (a
    product of experts: Clark et al. 2019, arXiv 1909.03683; Shen et al. 2023, arXiv 2310.05199); `post_hoc`: the trend
    of the trained model's rewards over the length of answers to train on is subtracted from what it gives (Huang et al.
    2024, arXiv 2409.17407)."""
    committee: CommitteeSection = CommitteeSection()
    average_from: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the steps from which on the weights are averaged: the model that is evaluated and saved has their mean;
    null takes the last ones."""


class PolicyRewardSection(RewardTrainerSection):
    """The Bradley-Terry reward model, and how a policy is rewarded by it."""

    pessimism: Pessimism = 0.0
    """With several heads: the reward is their mean minus this times their standard deviation; `worst` is the lowest."""


class RewardOptimizerSection(OptimizerSection):
    """AdamW with a rate for the head, which starts at nothing where the trunk does not."""

    head_learning_rate: Positive | None = 1e-3
    """Learning rate of the reward heads; null takes learning_rate."""


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
    pairs: MixedPairsSection = MixedPairsSection()
    reward_model: RewardModelSection = RewardModelSection()
    optimizer: RewardOptimizerSection = RewardOptimizerSection()
    evaluation: RewardEvaluationSection = RewardEvaluationSection()


def _passes(cfg: RewardRecipe) -> Passes:
    section = cfg.reward_model
    return Passes.of_rows(2 * section.pairs_per_step, 2 * section.micro_batch_size)  # a pair is two rows


ONE_HEAD = Rule(
    "reward_model.heads.bootstrap reward_model.heads.prior_scale reward_model.pessimism "
    "reward_model.committee.confidence",
    lambda v: v["reward_model.heads.count"] == 1,
    "reward_model.heads.count is 1; set it to the number of heads, or leave this out",
)

NO_COMMITTEE = Rule(
    "reward_model.committee.after",
    lambda v: v["reward_model.committee.confidence"] is None,
    "reward_model.committee.confidence is null, so no pair is left out; set it, or leave this out",
)

SPEC = Spec(
    recipe=RewardRecipe,
    title="Bradley-Terry reward model",
    code="tunesmith.learn.trainers.reward:RewardTask",
    headline=("loss", "accuracy", "margin"),
    best="accuracy",
    passes=_passes,
    rules=(ONE_HEAD, NO_COMMITTEE, NO_REFERENCE),
    trains="reward model",
)
