"""Best-of-n distillation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from pydantic import model_validator

from tunesmith.base.config.policy_sections import KLSection, UpdateSection
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.config.rules import (
    ACCURACY,
    NO_HEAD,
    NO_KL_YET,
    Rule,
    always,
    is_updated_once,
    kl_rules,
    no_kl_alarm,
)
from tunesmith.base.config.sections import EvaluationSection, GRPORolloutSection, NonNegative, Positive, PositiveInt
from tunesmith.base.config.spec import Passes, Spec


class BestOfNKLSection(KLSection):
    """KL divergence to the reference policy, off by default."""

    coef: NonNegative = 0.0


class BestOfNSection(UpdateSection):
    """Best-of-n: learn the best of n completions as SFT does (RAFT, Dong et al. 2023)."""

    keep: PositiveInt = 1
    """Completions to keep of each prompt, those with the highest reward."""
    target_kl: Positive | None = None
    """Stop the updates of a rollout once the KL per token to its own policy exceeds this; null is off."""
    kl: BestOfNKLSection = BestOfNKLSection()


class BestOfNRecipe(PolicyRecipe):
    """Train a policy on the best of n completions by a reward: the baseline of PPO and GRPO."""

    algorithm: Literal["best_of_n"] = "best_of_n"
    rollout: GRPORolloutSection = GRPORolloutSection()
    best_of_n: BestOfNSection = BestOfNSection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def _check_keep(self) -> "BestOfNRecipe":
        num_drawn = self.rollout.completions_per_prompt
        if self.best_of_n.keep >= num_drawn:
            raise ValueError(
                f"best_of_n.keep is {self.best_of_n.keep}, but {num_drawn} completions are drawn for each prompt; "
                "keep fewer, or raise rollout.completions_per_prompt"
            )
        return self


def _passes(cfg: BestOfNRecipe) -> Passes:
    return Passes.of_drawing(cfg, num_learnt=cfg.rollout.prompts_per_step * cfg.best_of_n.keep)


SPEC = Spec(
    recipe=BestOfNRecipe,
    title="best-of-n (RAFT)",
    code="tunesmith.learn.trainers.best_of_n:BestOfN",
    headline=("reward", "reward/kept", "loss"),
    best="reward",
    passes=_passes,
    rules=(
        *kl_rules("best_of_n"),
        Rule("best_of_n.kl.bias_correction", always, "best-of-n has no ratio to weigh the KL with; leave this out"),
        Rule(
            "rollout.importance.* rollout.recompute_logps alarms.max_cut_share alarms.max_logp_difference",
            always,
            "best-of-n learns the kept completions as SFT does, without the log-probs that they were drawn with; leave "
            "this out",
        ),
        Rule("best_of_n.target_kl", is_updated_once("best_of_n"), NO_KL_YET),
        no_kl_alarm("best_of_n"),
        ACCURACY,
        NO_HEAD,
    ),
)
