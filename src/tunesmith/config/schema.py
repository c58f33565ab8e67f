"""Schema of recipes: YAML files with sections; `algorithm` names the trainer.

To add an algorithm:

1. a section class with its settings, in `algorithm_sections.py`;
2. a recipe class here: a subclass of `Recipe`, of `SamplingRecipe` if it samples completions, or of `PolicyRecipe` if
   it scores them too, with a field `algorithm: Literal["<name>"] = "<name>"` and a field for each section; its
   docstring is the command's help;
3. an entry in the tuple from which `RECIPES` is made.

Loading, `--help`, flags, the reference page and suggestions for misspelt keys read the rest from the classes.
"""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tunesmith.config.algorithm_sections import (
    BestOfNSection,
    DistillSection,
    DPOSection,
    GRPOSection,
    KLSection,
    PPOSection,
    RewardEvaluationSection,
    RewardTrainerSection,
    SFTSection,
)
from tunesmith.config.levels import Level
from tunesmith.config.live_sections import (
    LivePPOSection,
    LivePromptsSection,
    LiveRolloutSection,
    LiveSection,
    OnlineDPOSection,
)
from tunesmith.config.scale_sections import SamplingScaleSection, ScaleSection
from tunesmith.config.sections import (
    AlarmsSection,
    DemonstrationsSection,
    EvaluationSection,
    GRPORolloutSection,
    ModelSection,
    OptimizerSection,
    PairsSection,
    PromptsSection,
    RewardSource,
    RolloutSection,
    RunSection,
    Section,
)


class Recipe(Section):
    """Sections of every recipe."""

    ALLOWS_DROPOUT: ClassVar[bool] = True
    """False where ratios compare the log-probs of two passes, so that `model.lora.dropout` must be 0."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    algorithm: str = ""
    """Trainer that reads the recipe; without it, the one that has most of the file's sections."""
    description: str = ""
    """One line for `tunesmith recipes ls`."""
    level: Level | None = None
    """Set of settings, over those of a shipped recipe and under yours, see docs/ladder.md: `baseline` is textbook code,
    `optimal` all that there is; null sets nothing."""
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()
    scale: ScaleSection = ScaleSection()

    @model_validator(mode="after")
    def _check_sections(self) -> "Recipe":
        if self.scale.is_exact and not self.run.num_threads:
            raise ValueError(
                "scale.reduction is exact, but sums also depend on the number of threads; set run.num_threads, which "
                "is that of each rank"
            )
        if self.scale.pipeline > 1 and self.algorithm in ("reward", "distill"):
            raise ValueError(
                f"scale.pipeline is {self.scale.pipeline}, but {self.algorithm} needs the states of all layers on one "
                "rank; set it to 1"
            )
        if self.scale.shards_parameters and self.optimizer.state == "int8":
            raise ValueError(
                "optimizer.state is int8, whose blocks would lie on several ranks with scale.shard: parameters; set "
                "one of them back"
            )
        if self.scale.is_exact and self.model.dtype == "float16":
            raise ValueError(
                "scale.reduction is exact, which has no range for scaled float16 gradients; set another model.dtype"
            )
        if not self.ALLOWS_DROPOUT and self.model.lora.dropout > 0:
            raise ValueError(
                f"model.lora.dropout is {self.model.lora.dropout:g}, but the ratios of this algorithm compare two "
                "passes over the same tokens; set it to 0"
            )
        return self


class RewardRecipe(Recipe):
    """Train a reward model on preference pairs."""

    algorithm: Literal["reward"] = "reward"
    pairs: PairsSection = PairsSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()
    evaluation: RewardEvaluationSection = RewardEvaluationSection()


class SFTRecipe(Recipe):
    """Fine-tune a language model on demonstrations."""

    algorithm: Literal["sft"] = "sft"
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    sft: SFTSection = SFTSection()


class DPORecipe(Recipe):
    """Train a policy on preference pairs directly, without a reward model: DPO, IPO, SimPO, ORPO, KTO and others."""

    algorithm: Literal["dpo"] = "dpo"
    pairs: PairsSection = PairsSection()
    dpo: DPOSection = DPOSection()

    @model_validator(mode="after")
    def _check_rankings(self) -> "DPORecipe":
        if self.pairs.rankings != "pairs":
            raise ValueError(
                f"pairs.rankings is {self.pairs.rankings}, which reward models alone know; set it to pairs"
            )
        return self


class SamplingRecipe(Recipe):
    """Recipes that sample completions of prompts."""

    prompts: PromptsSection = PromptsSection()
    rollout: RolloutSection = RolloutSection()
    scale: SamplingScaleSection = SamplingScaleSection()
    alarms: AlarmsSection = AlarmsSection()

    @model_validator(mode="after")
    def _check_scale(self) -> "SamplingRecipe":
        if self.scale.ranks > 1 and self.rollout.backend == "vllm":
            raise ValueError(
                f"scale.ranks is {self.scale.ranks}, but ranks draw with engines of their own; set rollout.backend to "
                "native or transformers, or scale.ranks to 1"
            )
        if self.scale.ranks > 1 and self.rollout.score_while_drawing:
            raise ValueError(
                f"rollout.score_while_drawing is for one process, but scale.ranks is {self.scale.ranks}; set one of "
                "them back"
            )
        if self.scale.workers and self.rollout.backend != "native":
            raise ValueError(
                f"scale.workers is {self.scale.workers}, but rollout.backend is {self.rollout.backend}; workers draw "
                "by the native engine: set rollout.backend to native, or scale.workers to 0"
            )
        if self.scale.workers and self.scale.ranks > 1:
            raise ValueError(
                f"scale.workers is {self.scale.workers}, but {self.scale.ranks} ranks draw already; set workers to "
                "0, or ranks to 1"
            )
        if self.scale.address is not None and not self.scale.workers:
            raise ValueError(
                f"scale.address is {self.scale.address}, but scale.workers is 0; set it to the number of actors"
            )
        if self.scale.staleness and not self.scale.workers:
            raise ValueError(
                f"scale.staleness is {self.scale.staleness}, but no other process can draw ahead; set scale.workers to "
                "1 or more, or scale.staleness to 0"
            )
        return self


class PolicyRecipe(SamplingRecipe):
    """Recipes that sample completions and score them."""

    reward: Annotated[tuple[RewardSource, ...], Field(min_length=1)] = (RewardSource(source="sentiment"),)

    @model_validator(mode="after")
    def _check_horizon(self) -> "PolicyRecipe":
        check_horizon(self, self.rollout, self.algorithm)
        return self


class PPORecipe(PolicyRecipe):
    """Train a policy by PPO against a reward."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["ppo"] = "ppo"
    ppo: PPOSection = PPOSection()

    @model_validator(mode="after")
    def _check_critic_process(self) -> "PPORecipe":
        if self.ppo.critic_process and self.scale.ranks > 1:
            raise ValueError(
                f"ppo.critic_process is for one process, but scale.ranks is {self.scale.ranks}; set one of them back"
            )
        return self


class GRPORecipe(PolicyRecipe):
    """Train a policy by GRPO against a reward: each completion is compared with its group, no critic."""

    ALLOWS_DROPOUT = False

    algorithm: Literal["grpo"] = "grpo"
    rollout: GRPORolloutSection = GRPORolloutSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()


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


class DistillRecipe(SamplingRecipe):
    """Train a student on its own completions to follow the distributions of teachers."""

    algorithm: Literal["distill"] = "distill"
    distill: DistillSection = DistillSection()


class LiveRecipe(Recipe):
    """Train a policy on votes while they are given."""

    algorithm: Literal["live"] = "live"
    prompts: LivePromptsSection = LivePromptsSection()
    rollout: LiveRolloutSection = LiveRolloutSection()
    dpo: OnlineDPOSection = OnlineDPOSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()
    ppo: LivePPOSection = LivePPOSection()
    grpo: GRPOSection = GRPOSection()
    live: LiveSection = LiveSection()

    @model_validator(mode="after")
    def _check_schedule_and_horizon(self) -> "LiveRecipe":
        if self.scale.ranks > 1 or self.scale.is_exact:
            raise ValueError("scale.ranks and scale.reduction are not for the live loop, which trains in one process")
        if self.optimizer.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule is {self.optimizer.schedule}, which needs an end, but the live loop has none; "
                "set it to constant"
            )
        check_horizon(self, self.rollout, self.live.update)
        return self


def check_horizon(recipe: Recipe, rollout: RolloutSection, section: str) -> None:
    """Raise ValueError if the time scale of the adaptive KL coefficient in `section` is shorter than one step."""
    kl = getattr(getattr(recipe, section, None), "kl", None)
    num_sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    if isinstance(kl, KLSection) and kl.target is not None and num_sequences > kl.horizon:
        raise ValueError(
            f"{section}.kl.horizon is {kl.horizon:g}, less than the {num_sequences} completions of one step; "
            f"set it to {num_sequences} or more"
        )


RECIPES: dict[str, type[Recipe]] = {
    recipe.model_fields["algorithm"].default: recipe
    for recipe in (SFTRecipe, RewardRecipe, DPORecipe, PPORecipe, GRPORecipe, BestOfNRecipe, DistillRecipe, LiveRecipe)
}
"""Schema of each algorithm, by its name on the command line."""
