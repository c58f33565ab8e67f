"""Group-relative policy optimisation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from pydantic import model_validator

from tunesmith.config.policy_sections import Estimator, KLSection, PolicyLossSection
from tunesmith.config.recipe import PolicyRecipe
from tunesmith.config.rules import ACCURACY, NO_HEAD, Rule, is_, is_updated_once, no_kl_alarm, policy_rules
from tunesmith.config.sections import EvaluationSection, GRPORolloutSection, NonNegative, NonNegativeInt
from tunesmith.config.spec import Passes, Spec

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "advantages", "mean", "none"]


class GRPOKLSection(KLSection):
    """KL divergence to the reference policy, with GRPO's defaults: k3, in the loss."""

    coef: NonNegative = 0.04
    estimator: Estimator = "k3"
    place: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward of a completion, or add it to the loss."""


class GRPOSection(PolicyLossSection):
    """Group-relative policy optimisation (Shao et al. 2024) and RLOO: the group is the baseline, without a critic."""

    baseline: Baseline = "mean"
    """Mean reward of the group (GRPO), or of its other completions (RLOO)."""
    scale: Scale = "group"
    """Divide advantages by the standard deviation of the group's rewards, of all rewards, of all advantages
    (REINFORCE++-baseline), by the mean of the group's rewards, which are 0 or more (MaxRL), or not at all."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the rewards, then normalize; or normalize each within its group, sum, and scale to variance 1 over the step
    (GDPO), ignoring baseline and scale."""
    dynamic_sampling: NonNegativeInt = 0
    """Rounds of further prompts in a step, in place of groups with equal rewards (DAPO); 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions cut off by the length limit out of the loss, but not out of the baseline."""
    kl: GRPOKLSection = GRPOKLSection()

    @model_validator(mode="after")
    def _check_place_of_kl(self) -> "GRPOSection":
        if self.multi_objective_aggregation == "normalize_then_sum" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "multi_objective_aggregation is normalize_then_sum, which has no sum to take the KL from; set "
                "kl.place: loss"
            )
        if self.scale == "mean" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "scale is mean, which divides by rewards of 0 or more, but kl.place is reward, which lowers them; set "
                "kl.place: loss"
            )
        return self


class GRPORecipe(PolicyRecipe):
    """Train a policy by GRPO against a reward: each completion is compared with its group, no critic."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["grpo"] = "grpo"
    rollout: GRPORolloutSection = GRPORolloutSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()


OWN_LOGPS = (
    "grpo.num_epochs and grpo.num_minibatches are 1, so that the old policy is the one that is updated, and its "
    "log-probs are those of the update's own pass; leave this out"
)

GRPO_RULES: tuple[Rule, ...] = (
    *policy_rules("grpo"),
    Rule(
        "grpo.baseline grpo.scale",
        is_("grpo.multi_objective_aggregation", "normalize_then_sum"),
        "grpo.multi_objective_aggregation is normalize_then_sum, which normalizes each reward within its group by "
        "itself; set sum_then_normalize, or leave this out",
    ),
)


def _passes(cfg: GRPORecipe) -> Passes:
    # With a single update the old policy is the one that is updated.
    return Passes.of_drawing(cfg, old_policy=cfg.grpo.num_epochs * cfg.grpo.num_minibatches > 1)


SPEC = Spec(
    recipe=GRPORecipe,
    title="GRPO",
    code="tunesmith.trainers.grpo:GRPO",
    headline=("reward", "frac_reward_zero_std", "completions/mean_length"),
    best="reward",
    passes=_passes,
    rules=(
        *GRPO_RULES,
        Rule("rollout.recompute_logps", is_updated_once("grpo"), OWN_LOGPS),
        no_kl_alarm("grpo"),
        ACCURACY,
        NO_HEAD,
    ),
)
