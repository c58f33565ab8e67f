"""Group-relative policy optimisation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.base.config.policy_sections import Estimator, KLSection, PolicyLossSection
from tunesmith.base.config.recipe import PtxRecipe
from tunesmith.base.config.rules import ACCURACY, NO_HEAD, Rule, is_, is_not, is_updated_once, no_kl_alarm, policy_rules
from tunesmith.base.config.sections import (
    EvaluationSection,
    GRPORolloutSection,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
)
from tunesmith.base.config.spec import Passes, Spec

Baseline = Literal["mean", "leave_one_out", "length_weighted", "greedy"]
Keep = Literal["shortest", "best_per_token"]
Scale = Literal["group", "batch", "advantages", "mean", "none"]
TurnAdvantages = Literal["none", "place", "anchor"]


class GRPOKLSection(KLSection):
    """KL divergence to the reference policy, with GRPO's defaults: k3, in the loss."""

    coef: NonNegative = 0.04
    estimator: Estimator = "k3"
    place: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward of a completion, or add it to the loss."""


class GRPOSection(PolicyLossSection):
    """Group-relative policy optimisation (Shao et al. 2024) and RLOO: the group is the baseline, without a critic."""

    baseline: Baseline = "mean"
    """Mean reward of the group (GRPO), of its other completions (RLOO), or weighted by their lengths (OPO); or the
    reward of one more completion of the prompt, of the likeliest tokens (ReMax)."""
    scale: Scale = "group"
    """Divide advantages by the standard deviation of the group's rewards, of all rewards, of all advantages
    (REINFORCE++-baseline), by the mean of the group's rewards, which are 0 or more (MaxRL), or not at all."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the rewards, then normalize; or normalize each within its group, sum, and scale to variance 1 over the step
    (GDPO), ignoring baseline and scale."""
    pass_at: PositiveInt = 1
    """Learn the chance that one of this many completions is right, from rewards of 0 and 1, ignoring baseline and
    scale; 1 is off."""
    keep: PositiveInt | None = None
    """Completions of each group to compare and learn (GFPO); null is all."""
    keep_by: Keep = "shortest"
    """Keep the shortest ones, or those with the highest reward per token, for rewards of 0 or more."""
    length_penalty: NonNegative = 0.0
    """Weight of a reward for short completions, relative to the others of the group (Kimi k1.5); 0 is off."""
    turn_advantages: TurnAdvantages | bool = "none"
    """Compare the turns of trajectories too: each by what was given from it on, with those of the same `place` in the
    group (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821), or with those of the group that were answered the same (GiGPO's
    `anchor` states, Feng et al. 2025, arXiv 2505.10978). true is `place`."""
    anchor_coef: NonNegative = 1.0
    """Weight of the advantage among turns of the same state, beside that of the trajectory."""
    anchor_discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn of what is given later, for the comparison of turns of the same state."""
    dynamic_sampling: NonNegativeInt = 0
    """Rounds of further prompts in a step, in place of groups with equal rewards (DAPO); 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions cut off by the length limit out of the loss, but not out of the baseline."""
    kl: GRPOKLSection = GRPOKLSection()

    @field_validator("turn_advantages")
    @classmethod
    def _from_switch(cls, given: TurnAdvantages | bool) -> TurnAdvantages:
        """The setting that true or false is, as recipes had it before there were several."""
        return given if isinstance(given, str) else "place" if given else "none"

    @model_validator(mode="after")
    def _check_place_of_kl(self) -> "GRPOSection":
        if self.multi_objective_aggregation == "normalize_then_sum" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "multi_objective_aggregation is normalize_then_sum, which has no sum to take the KL from; set "
                "kl.place: loss"
            )
        if self.baseline == "greedy" and self.scale != "none":
            raise ValueError(
                f"scale is {self.scale}, but baseline is greedy, which may differ from a group whose rewards are all "
                "equal, so nothing to divide by; set scale: none"
            )
        if self.turn_advantages == "anchor" and self.baseline == "length_weighted":
            raise ValueError(
                "turn_advantages is anchor, which compares single turns, but baseline is length_weighted, which is for "
                "whole completions; set another baseline"
            )
        if self.turn_advantages != "none" and (
            self.baseline == "greedy" or self.pass_at > 1 or self.multi_objective_aggregation == "normalize_then_sum"
        ):
            raise ValueError(
                "turn_advantages compares turns by one sum of rewards with the group's mean, but baseline is "
                f"{self.baseline}, pass_at is {self.pass_at} and multi_objective_aggregation is "
                f"{self.multi_objective_aggregation}; set them back"
            )
        if self.scale == "mean" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "scale is mean, which divides by rewards of 0 or more, but kl.place is reward, which lowers them; set "
                "kl.place: loss"
            )
        if self.length_penalty and (self.pass_at > 1 or self.multi_objective_aggregation == "normalize_then_sum"):
            raise ValueError(
                f"length_penalty is {self.length_penalty:g}, which is added to the sum of rewards, but pass_at is "
                f"{self.pass_at} and multi_objective_aggregation is {self.multi_objective_aggregation}; set one back"
            )
        if self.length_penalty and self.baseline == "greedy":
            raise ValueError(
                f"length_penalty is {self.length_penalty:g}, which compares the completions of a group, but baseline "
                "is greedy, a completion that is none of them; set one back"
            )
        if self.length_penalty and self.scale == "mean":
            raise ValueError(
                f"length_penalty is {self.length_penalty:g}, which lowers rewards, but scale is mean, which needs "
                "them to be 0 or more; set one back"
            )
        if self.pass_at > 1 and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                f"pass_at is {self.pass_at}, which needs one reward of 0 or 1, but multi_objective_aggregation is "
                "normalize_then_sum; set sum_then_normalize"
            )
        if self.pass_at > 1 and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                f"pass_at is {self.pass_at}, which needs rewards of 0 and 1, but kl.place is reward, which lowers "
                "them; set kl.place: loss"
            )
        return self


class GRPORecipe(PtxRecipe):
    """Train a policy by GRPO against a reward: each completion is compared with its group, no critic."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["grpo"] = "grpo"
    rollout: GRPORolloutSection = GRPORolloutSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def _check_group(self) -> "GRPORecipe":
        num_drawn = self.rollout.completions_per_prompt
        num_learnt = self.grpo.keep or num_drawn
        if not 2 <= num_learnt <= num_drawn:
            raise ValueError(
                f"grpo.keep is {num_learnt}, but {num_drawn} completions are drawn for each prompt; keep 2 or more, "
                "and no more than are drawn"
            )
        if self.grpo.pass_at >= num_learnt:
            raise ValueError(
                f"grpo.pass_at is {self.grpo.pass_at}, but a group has {num_learnt} completions, and only several sets "
                "of completions can be compared; lower it, or raise rollout.completions_per_prompt"
            )
        return self


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
    Rule(
        "grpo.baseline grpo.scale",
        lambda v: v["grpo.pass_at"] > 1,
        "grpo.pass_at has a baseline and a scale of its own; set it to 1, or leave this out",
    ),
    Rule(
        "grpo.anchor_coef grpo.anchor_discount",
        is_not("grpo.turn_advantages", "anchor"),
        "they belong to grpo.turn_advantages anchor; set that, or leave this out",
    ),
    Rule("grpo.keep_by", is_("grpo.keep", None), "grpo.keep is null, which learns all; set it, or leave this out"),
)


def _passes(cfg: GRPORecipe) -> Passes:
    # With a single update the old policy is the one that is updated.
    is_off_policy = cfg.grpo.num_epochs * cfg.grpo.num_minibatches > 1 and not cfg.grpo.is_divergence_bound
    num_learnt = cfg.rollout.prompts_per_step * (cfg.grpo.keep or cfg.rollout.completions_per_prompt)
    num_greedy = cfg.rollout.prompts_per_step * (cfg.grpo.baseline == "greedy")
    return Passes.of_drawing(cfg, old_policy=is_off_policy, num_learnt=num_learnt, num_beside=num_greedy)


SPEC = Spec(
    recipe=GRPORecipe,
    title="GRPO",
    code="tunesmith.learn.trainers.grpo:GRPO",
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
