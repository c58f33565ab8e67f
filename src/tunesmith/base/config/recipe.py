"""The sections that recipes of all algorithms have, of those that draw completions, and of those that score them."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from tunesmith.base.config.levels import Level
from tunesmith.base.config.policy_sections import KLSection, PtxDemonstrationsSection, PtxSection
from tunesmith.base.config.scale_sections import SamplingScaleSection, ScaleSection
from tunesmith.base.config.sections import (
    AlarmsSection,
    EnvironmentSection,
    ModelSection,
    OptimizerSection,
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

    ALLOWS_PIPELINE: ClassVar[bool] = True
    """False where the states of all layers are needed on one rank, so that `scale.pipeline` must be 1."""

    OWN: ClassVar[str] = ""
    """Name of the algorithm's own section, where it is not that of the algorithm."""

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

    @property
    def section_name(self) -> str:
        """Name of the section with the algorithm's own settings."""
        return self.OWN or self.algorithm

    @property
    def section(self) -> Any:
        """The section with the algorithm's own settings."""
        return getattr(self, self.section_name)

    @classmethod
    def data_section(cls) -> str:
        """Name of the section that says which rows are trained on."""
        return next(name for name in ("prompts", "pairs", "demonstrations") if name in cls.model_fields)

    @model_validator(mode="after")
    def _check_sections(self) -> "Recipe":
        if self.scale.is_exact and not self.run.num_threads:
            raise ValueError(
                "scale.reduction is exact, but sums also depend on the number of threads; set run.num_threads, which "
                "is that of each rank"
            )
        if self.scale.pipeline > 1 and not self.ALLOWS_PIPELINE:
            raise ValueError(
                f"scale.pipeline is {self.scale.pipeline}, but {self.algorithm} needs the states of all layers on one "
                "rank; set it to 1"
            )
        if self.scale.shards_parameters and self.optimizer.state == "int8":
            raise ValueError(
                "optimizer.state is int8, whose blocks would lie on several ranks with scale.shard: parameters; set "
                "one of them back"
            )
        rounded = [name for name in ("base", "reference") if getattr(self.model, name) == "int8"]
        if rounded and (self.scale.pipeline > 1 or self.scale.shards_parameters):
            raise ValueError(
                f"model.{rounded[0]} is int8, whose weights ranks cannot divide; leave out scale.pipeline and "
                f"scale.shard: parameters, or set model.{rounded[0]} to model"
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


class SamplingRecipe(Recipe):
    """Recipes that sample completions of prompts."""

    prompts: PromptsSection = PromptsSection()
    rollout: RolloutSection = RolloutSection()
    scale: SamplingScaleSection = SamplingScaleSection()
    alarms: AlarmsSection = AlarmsSection()

    @property
    def max_completion_tokens(self) -> int:
        """Tokens behind a prompt at most."""
        return self.rollout.max_new_tokens

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


ENVIRONMENT_REWARD = {"source": "environment", "on_error": "drop"}
"""The reward that an environment gave; a trajectory that broke has no reward."""


class PolicyRecipe(SamplingRecipe):
    """Recipes that sample completions and score them."""

    reward: Annotated[tuple[RewardSource, ...], Field(min_length=1)] = (RewardSource(source="sentiment"),)
    environment: EnvironmentSection = EnvironmentSection()

    @property
    def max_completion_tokens(self) -> int:
        """Tokens behind a prompt at most: with an environment those of all turns and replies."""
        if not self.environment.is_given:
            return self.rollout.max_new_tokens
        return self.environment.tokens_of(self.rollout.max_new_tokens)

    @model_validator(mode="before")
    @classmethod
    def _reward_of_environment(cls, given: Any) -> Any:
        """An environment's own reward, where the recipe has an environment and names no reward."""
        if not isinstance(given, dict):
            return given
        sections = cast(dict[str, Any], given)
        environment: Any = sections.get("environment")
        has_any = isinstance(environment, str)
        if isinstance(environment, dict):
            named = cast(dict[str, Any], environment)
            has_any = bool(named.get("source") or named.get("tools"))
        return {**sections, "reward": [ENVIRONMENT_REWARD]} if has_any and not sections.get("reward") else sections

    @model_validator(mode="after")
    def _check_environment(self) -> "PolicyRecipe":
        if not self.environment.is_given:
            return self
        if self.scale.staleness or self.scale.pipeline > 1:
            raise ValueError(
                "with an environment completions are drawn in the step that learns them, by processes that have all "
                "layers; set scale.staleness to 0 and scale.pipeline to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_horizon(self) -> "PolicyRecipe":
        check_horizon(self, self.rollout, self.algorithm)
        return self


class PtxRecipe(PolicyRecipe):
    """Recipes whose policy loss may have a term of supervised learning."""

    demonstrations: PtxDemonstrationsSection = PtxDemonstrationsSection()
    ptx: PtxSection = PtxSection()


def check_horizon(recipe: Recipe, rollout: RolloutSection, section: str) -> None:
    """Raise ValueError if the time scale of the adaptive KL coefficient in `section` is shorter than one step."""
    kl = getattr(getattr(recipe, section, None), "kl", None)
    num_sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    if isinstance(kl, KLSection) and kl.target is not None and num_sequences > kl.horizon:
        raise ValueError(
            f"{section}.kl.horizon is {kl.horizon:g}, less than the {num_sequences} completions of one step; "
            f"set it to {num_sequences} or more"
        )
