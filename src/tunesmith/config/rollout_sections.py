"""The sections of a recipe that say how completions are drawn during training, and how what was drawn is weighted."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.sections import NonNegative, Positive, PositiveInt, Section


class ImportanceSection(Section):
    """Correction of tokens that were drawn from another distribution than the policy that is trained: weights
    pi / mu (truncated importance sampling, Yao et al. 2025)."""

    SHORTHAND = "mode"

    mode: Literal["off", "truncate", "mask"] = Field(
        default="truncate", description="Cut weights to [floor, cap], give those outside of it 0, or do nothing."
    )
    level: Literal["token", "sequence"] = Field(
        default="token", description="A weight for each token, or one for a completion: the product of its tokens'."
    )
    cap: Positive = Field(default=2.0, description="Largest weight.")
    floor: NonNegative = Field(default=0.0, description="Smallest weight; 0 is off.")

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> "ImportanceSection":
        if self.floor >= self.cap:
            raise ValueError(f"floor is {self.floor}, not below cap, {self.cap}; lower the first")
        return self


class RolloutSection(Section):
    """How completions are drawn during training."""

    backend: Literal["native", "transformers"] = Field(
        default="native", description="Engine that draws completions: Tunesmith's own, or `transformers.generate`."
    )
    prompts_per_step: PositiveInt = Field(default=16, description="Prompts drawn for one training step.")
    completions_per_prompt: PositiveInt = Field(default=1, description="Completions of each prompt.")
    max_new_tokens: PositiveInt = Field(default=32, description="Limit of a completion, in tokens.")
    min_new_tokens: int = Field(
        default=0, ge=0, description="No end-of-sequence token is drawn before this many tokens."
    )
    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = Field(
        default=1.0, description="Sampling temperature; log-probs in training are taken at the same temperature."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus size; 1 is off.")
    top_k: int = Field(default=0, ge=0, description="Number of candidates; 0 is off.")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Tokens less likely than this share of the likeliest are not drawn; 0 is off."
    )
    repetition_penalty: Positive = Field(
        default=1.0, description="Above 1, tokens of the prompt and the completion become less likely; 1 is off."
    )
    num_slots: PositiveInt = Field(
        default=128, description="Completions that are drawn at a time, by the native engine."
    )
    kv_cache_mb: PositiveInt | None = Field(
        default=None,
        description="Budget of the native engine's key/value cache; null takes what all slots need at most, up to a "
        "quarter of the machine's memory.",
    )
    unload_during_update: bool = Field(
        default=True, description="Free the native engine's cache and packed weights during the update."
    )
    score_while_drawing: bool = Field(
        default=False,
        description="Ask rewards in a thread beside the engine's, for each group as soon as it has ended; functions "
        "are then called with one group at a time.",
    )
    batch_size: PositiveInt = Field(
        default=64, description="Sequences generated at a time, by the transformers engine."
    )
    importance: ImportanceSection = ImportanceSection()

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "RolloutSection":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; "
                "lower the first"
            )
        return self


class GRPORolloutSection(RolloutSection):
    """How groups of completions are drawn."""

    prompts_per_step: PositiveInt = Field(default=8, description="Prompts drawn for one training step.")
    completions_per_prompt: Annotated[int, Field(ge=2)] = Field(
        default=8, description="Completions of each prompt: the group that a completion is measured against."
    )
