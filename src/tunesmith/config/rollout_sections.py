"""Sections of training by reward: how completions are sampled, scored and weighted."""

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


OnError = Literal["fail", "drop", "zero"]


class RewardSource(Section):
    """One reward and its weight in the sum."""

    SHORTHAND = "source"

    source: str = Field(
        ...,
        description="`./file.py:name`, `package.module:name`, a built-in (`sentiment`, `length`, `format`, "
        "`unique_chars`, `overlong`, `arithmetic`, `gsm8k`), or a reward model: run folder, local folder or hub id.",
    )
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Weight in the sum of rewards.")
    label: str | int | None = Field(
        default=None, description="For a classifier with several labels: the label whose logit is the reward."
    )
    transform: Literal["raw", "log_odds"] = Field(
        default="raw", description="`log_odds`: the label's logit minus the log-sum-exp of the others."
    )
    arguments: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Keyword arguments of a built-in, for example `{pattern: ...}` of `format`."
    )
    on_error: OnError = Field(
        default="fail",
        description="What happens where the reward has no number for a completion (it raised, took too long, returned "
        "NaN, ...): end the run, leave the completion out of training, or count 0.",
    )
    timeout_s: Positive | None = Field(
        default=None,
        description="Seconds that one call of a function may take; it then runs in a thread of its own. null waits "
        "for ever and keeps functions in the main thread, which some libraries need (signals, SQLite).",
    )


class EvaluationSection(Section):
    """Share of right answers on held-out prompts, before and after, for rewards that can be verified."""

    correct_at: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="A completion is right if its reward reaches this; null measures no accuracy.",
    )
    num_prompts: PositiveInt | None = Field(
        default=None, description="Held-out prompts that are asked; null asks all of them."
    )
    completions_per_prompt: PositiveInt = Field(
        default=4, description="Sampled completions of each prompt; one greedy completion comes on top."
    )
