"""Online direct preference optimisation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.base.config.algorithms.dpo import DirectLossSection, direct_loss_rules
from tunesmith.base.config.policy_sections import KLSection, UpdateSection
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.config.rules import ACCURACY, NO_HEAD, Rule, always
from tunesmith.base.config.sections import EvaluationSection, RolloutSection
from tunesmith.base.config.spec import Passes, Spec


class OnlineDPOSection(DirectLossSection, UpdateSection):
    """DPO on the best and the worst of the policy's own completions (Guo et al. 2024, arXiv 2402.04792)."""

    @model_validator(mode="after")
    def _check_pairs(self) -> "OnlineDPOSection":
        if self.loss == "kto":
            raise ValueError("loss is kto, which takes single labels, but a group gives a pair; set another loss")
        if self.micro_batch_size % 2:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, but a pair is two sequences; set an even number"
            )
        return self

    @property
    def kl(self) -> KLSection:
        """The reference that the loss compares with: `beta` is the coefficient of the KL to it (Rafailov et al. 2023,
        equation 3).
        """
        return KLSection(coef=self.beta if self.needs_reference else 0.0, place="loss")


class PairRolloutSection(RolloutSection):
    """Sampling of the completions that are compared."""

    completions_per_prompt: Annotated[int, Field(ge=2)] = 2
    """Completions of each prompt; the best and the worst are learnt."""


class OnlineDPORecipe(PolicyRecipe):
    """Train a policy by DPO on pairs of its own completions, judged by a reward."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["online_dpo"] = "online_dpo"
    rollout: PairRolloutSection = PairRolloutSection()
    online_dpo: OnlineDPOSection = OnlineDPOSection()
    evaluation: EvaluationSection = EvaluationSection()


def _passes(cfg: OnlineDPORecipe) -> Passes:
    return Passes.of_drawing(cfg, num_learnt=2 * cfg.rollout.prompts_per_step)


SPEC = Spec(
    recipe=OnlineDPORecipe,
    title="online DPO ({loss})",
    code="tunesmith.learn.trainers.online_dpo:OnlineDPO",
    headline=("reward", "rewards/accuracies", "completions/mean_length"),
    best="reward",
    passes=_passes,
    rules=(
        *direct_loss_rules("online_dpo"),
        Rule(
            "rollout.importance.* rollout.recompute_logps alarms.max_cut_share alarms.max_logp_difference",
            always,
            "a direct loss has no ratio to the policy that drew; leave this out",
        ),
        Rule(
            "alarms.max_kl",
            lambda v: v["online_dpo.loss"] in ("simpo", "orpo") and v["alarms.max_kl"] is not None,
            "online_dpo.loss is one without a reference model, so its KL is not measured; leave this out",
        ),
        ACCURACY,
        NO_HEAD,
    ),
)
