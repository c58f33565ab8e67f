"""The schema of a recipe: a YAML file with the sections of `config.sections`; `algorithm` says which trainer reads."""

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.algorithm_sections import (
    DPOSection,
    GRPOSection,
    KLSection,
    PPOSection,
    RewardEvaluationSection,
    RewardTrainerSection,
    SFTSection,
)
from tunesmith.config.live_sections import (
    LivePPOSection,
    LivePromptsSection,
    LiveRolloutSection,
    LiveSection,
    OnlineDPOSection,
)
from tunesmith.config.rollout_sections import EvaluationSection, GRPORolloutSection, RewardSource, RolloutSection
from tunesmith.config.sections import (
    AlarmsSection,
    DemonstrationsSection,
    ModelSection,
    OptimizerSection,
    PairsSection,
    PromptsSection,
    RunSection,
    Section,
)


def check_horizon(kl: KLSection, rollout: RolloutSection, section: str) -> None:
    """Raise ValueError if an adaptive KL coefficient would react within less than one step's completions."""
    num_sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    if kl.target is not None and num_sequences > kl.horizon:
        raise ValueError(
            f"{section}.kl.horizon is {kl.horizon:g}, less than the {num_sequences} completions of one step; "
            f"set it to {num_sequences} or more"
        )


class Recipe(Section):
    """What every recipe has."""

    schema_version: Literal[1] = Field(default=1, description="Version of this schema.")
    description: str = Field(default="", description="One line for `tunesmith recipes ls`.")
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _no_dropout_where_two_passes_are_compared(self) -> "Recipe":
        if getattr(self, "algorithm", "") in ("ppo", "grpo") and self.model.lora.dropout > 0:
            raise ValueError(
                f"model.lora.dropout is {self.model.lora.dropout:g}, but the ratios of this algorithm compare two "
                "passes over the same tokens; set it to 0"
            )
        return self


class RewardRecipe(Recipe):
    """Train a reward model on preference pairs."""

    algorithm: Literal["reward"] = Field(default="reward", description="Trainer that reads the recipe.")
    pairs: PairsSection = PairsSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()
    evaluation: RewardEvaluationSection = RewardEvaluationSection()


class SFTRecipe(Recipe):
    """Fine-tune a language model on demonstrations."""

    algorithm: Literal["sft"] = Field(default="sft", description="Trainer that reads the recipe.")
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    sft: SFTSection = SFTSection()


class DPORecipe(Recipe):
    """Train a policy on preference pairs directly, without a reward model: DPO, IPO, SimPO, ORPO, KTO and others."""

    algorithm: Literal["dpo"] = Field(default="dpo", description="Trainer that reads the recipe.")
    pairs: PairsSection = PairsSection()
    dpo: DPOSection = DPOSection()

    @model_validator(mode="after")
    def _rankings_are_pairs(self) -> "DPORecipe":
        if self.pairs.rankings != "pairs":
            raise ValueError(
                f"pairs.rankings is {self.pairs.rankings}, which reward models alone know; set it to pairs"
            )
        return self


class PPORecipe(Recipe):
    """Train a policy by PPO against a reward."""

    algorithm: Literal["ppo"] = Field(default="ppo", description="Trainer that reads the recipe.")
    prompts: PromptsSection = PromptsSection()
    reward: tuple[RewardSource, ...] = Field(default=(RewardSource(source="sentiment"),), min_length=1)
    rollout: RolloutSection = RolloutSection()
    ppo: PPOSection = PPOSection()
    alarms: AlarmsSection = AlarmsSection()

    @model_validator(mode="after")
    def _kl_horizon_spans_a_step(self) -> "PPORecipe":
        check_horizon(self.ppo.kl, self.rollout, "ppo")
        return self


class GRPORecipe(Recipe):
    """Train a policy by GRPO against a reward: each completion is compared with its group, no critic."""

    algorithm: Literal["grpo"] = Field(default="grpo", description="Trainer that reads the recipe.")
    prompts: PromptsSection = PromptsSection()
    reward: tuple[RewardSource, ...] = Field(default=(RewardSource(source="sentiment"),), min_length=1)
    rollout: GRPORolloutSection = GRPORolloutSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()
    alarms: AlarmsSection = AlarmsSection()

    @model_validator(mode="after")
    def _kl_horizon_spans_a_step(self) -> "GRPORecipe":
        check_horizon(self.grpo.kl, self.rollout, "grpo")
        return self


class LiveRecipe(Recipe):
    """`tunesmith live`: a policy that learns from votes while they are given."""

    algorithm: Literal["live"] = Field(default="live", description="Trainer that reads the recipe.")
    prompts: LivePromptsSection = LivePromptsSection()
    rollout: LiveRolloutSection = LiveRolloutSection()
    dpo: OnlineDPOSection = OnlineDPOSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()
    ppo: LivePPOSection = LivePPOSection()
    grpo: GRPOSection = GRPOSection()
    live: LiveSection = LiveSection()

    @model_validator(mode="after")
    def _fits_a_loop_without_end(self) -> "LiveRecipe":
        if self.optimizer.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule is {self.optimizer.schedule}, which needs an end, but the live loop has none; "
                "set it to constant"
            )
        if self.live.update == "ppo":
            check_horizon(self.ppo.kl, self.rollout, "ppo")
        if self.live.update == "grpo":
            check_horizon(self.grpo.kl, self.rollout, "grpo")
        return self


PolicyRecipe = PPORecipe | GRPORecipe
"""Recipes that draw completions and follow a reward."""

AnyRecipe = SFTRecipe | RewardRecipe | DPORecipe | PPORecipe | GRPORecipe
"""Recipes of `tunesmith train`: a run with an end, in a folder of its own."""

RECIPES: dict[str, type[AnyRecipe | LiveRecipe]] = {
    "sft": SFTRecipe,
    "reward": RewardRecipe,
    "dpo": DPORecipe,
    "ppo": PPORecipe,
    "grpo": GRPORecipe,
    "live": LiveRecipe,
}
"""Schema of each algorithm, by the name that the command line uses."""
