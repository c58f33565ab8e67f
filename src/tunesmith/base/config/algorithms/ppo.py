"""Proximal policy optimisation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from pydantic import model_validator

from tunesmith.base.config.policy_sections import KLSection, PolicyLossSection
from tunesmith.base.config.recipe import PtxRecipe
from tunesmith.base.config.rules import NO_RATIO, ONE_UPDATE, Rule, is_, is_updated_once, no_kl_alarm, policy_rules
from tunesmith.base.config.sections import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from tunesmith.base.config.spec import Passes, Spec


class PPOSection(PolicyLossSection):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    num_epochs: PositiveInt = 2
    value_clip: Positive | None = 0.2
    """Clip range of values around those of the rollout; null is off."""
    value_coef: NonNegative = 0.1
    """Weight of the value loss."""
    gamma: Fraction = 1.0
    """Discount of later rewards."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    lam_per_length: Positive | None = None
    """Lambda of the advantages of a completion of l tokens: 1 - 1 / (lam_per_length l), at least 0, as VAPO has it
    with 0.05; null is lam for all."""
    value_lam: Fraction | None = None
    """Lambda of the returns that the values are fitted to: VC-PPO and VAPO have 1; null is lam."""
    value_steps: NonNegativeInt = 0
    """First steps, which train the separate critic alone (VC-PPO's value pre-training)."""
    gae: Literal["auto", "loop"] = "auto"
    """Generalised advantage estimation of all completions at once, or token by token in Python, with equal results."""
    whiten_advantages: bool = True
    """Normalize advantages to mean 0 and variance 1 over the rollout."""
    whiten_rewards: bool = False
    """Scale rewards to variance 1 over the rollout, keeping their mean."""
    critic: Literal["shared", "separate", "none"] = "shared"
    """Value head on the policy's trunk, a separate model, or none: advantages are then the returns (REINFORCE++)."""
    critic_process: bool = False
    """Compute a separate critic in a process of its own, beside the policy, with equal results; on a CPU."""
    kl: KLSection = KLSection()

    @model_validator(mode="after")
    def _check_surrogate(self) -> "PPOSection":
        if self.surrogate == "gmpo":
            raise ValueError(
                "surrogate is gmpo, a mean over a completion with one advantage, but in PPO each token has its own; "
                "take another surrogate, or grpo"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> "PPOSection":
        if self.critic_process and self.critic != "separate":
            raise ValueError(
                f"critic_process is true, but critic is {self.critic}: which another process cannot compute; "
                "set critic to separate, or critic_process to false"
            )
        if self.critic == "none" and self.lam != 1:
            raise ValueError(f"lam is {self.lam}, which weighs values, but critic is none; set lam: 1.0")
        if self.critic == "none" and self.lam_per_length is not None:
            raise ValueError(
                f"lam_per_length is {self.lam_per_length}, which weighs values, but critic is none; set it to null"
            )
        if self.critic != "separate" and self.value_steps:
            raise ValueError(
                f"value_steps is {self.value_steps}, but critic is {self.critic}, and only a separate one can be "
                "trained alone; set critic: separate, or value_steps: 0"
            )
        return self


class PPORecipe(PtxRecipe):
    """Train a policy by PPO against a reward."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["ppo"] = "ppo"
    ppo: PPOSection = PPOSection()

    @model_validator(mode="after")
    def _check_value_steps(self) -> "PPORecipe":
        if self.run.steps is not None and self.ppo.value_steps >= self.run.steps:
            raise ValueError(
                f"ppo.value_steps is {self.ppo.value_steps}, but the run has {self.run.steps} steps, so the policy "
                "would never be trained; lower it, or raise run.steps"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_process(self) -> "PPORecipe":
        if self.ppo.critic_process and self.scale.ranks > 1:
            raise ValueError(
                f"ppo.critic_process is for one process, but scale.ranks is {self.scale.ranks}; set one of them back"
            )
        return self


PPO_RULES: tuple[Rule, ...] = (
    *policy_rules("ppo"),
    Rule(
        "ppo.value_clip ppo.value_coef ppo.value_lam",
        is_("ppo.critic", "none"),
        "ppo.critic is none, so there are no values; set shared or separate, or leave this out",
    ),
    Rule(
        "ppo.lam",
        lambda v: v["ppo.lam_per_length"] is not None and v["ppo.value_lam"] is not None,
        "ppo.lam_per_length and ppo.value_lam are set, which are used in its place; leave this out",
    ),
    Rule(
        "ppo.value_clip",
        is_updated_once("ppo"),
        ONE_UPDATE.replace(NO_RATIO, "the values are still its own"),
    ),
)


def _passes(cfg: PPORecipe) -> Passes:
    return Passes.of_drawing(cfg, old_policy=True, critic=cfg.ppo.critic)


SPEC = Spec(
    recipe=PPORecipe,
    title="PPO",
    code="tunesmith.learn.trainers.ppo:PPO",
    headline=("reward", "objective/kl", "completions/mean_length"),
    best="reward",
    passes=_passes,
    rules=(
        *PPO_RULES,
        no_kl_alarm("ppo"),
        Rule(
            "optimizer.head_learning_rate",
            is_("ppo.critic", "none"),
            "ppo.critic is none, so there is no value head; set shared or separate, or leave this out",
        ),
    ),
)
