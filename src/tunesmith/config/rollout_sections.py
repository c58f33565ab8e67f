"""Sections of training by reward: how completions are sampled, scored and weighted."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.sections import Finite, NonNegative, NonNegativeInt, Positive, PositiveInt, Section


class ImportanceSection(Section):
    """Off-policy correction: importance weights pi / mu of trained to sampling distribution (Yao et al. 2025)."""

    SHORTHAND = "mode"

    mode: Literal["off", "truncate", "mask"] = "truncate"
    """Clamp weights to [floor, cap], zero those outside of it, or do nothing."""
    level: Literal["token", "sequence"] = "token"
    """One weight for each token, or one for each completion: the product over its tokens."""
    cap: Positive = 2.0
    """Largest weight."""
    floor: NonNegative = 0.0
    """Smallest weight; 0 is off."""

    @model_validator(mode="after")
    def _check_floor(self) -> "ImportanceSection":
        if self.floor >= self.cap:
            raise ValueError(f"floor is {self.floor}, not below cap, {self.cap}; lower the first")
        return self


class RolloutSection(Section):
    """Sampling of completions during training."""

    backend: Literal["native", "transformers"] = "native"
    """Inference engine: Tunesmith's own, or `transformers.generate`."""
    prompts_per_step: PositiveInt = 16
    """Prompts of one training step."""
    completions_per_prompt: PositiveInt = 1
    """Completions of each prompt."""
    max_new_tokens: PositiveInt = 32
    """Limit of a completion, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """No end-of-sequence token is sampled before this many tokens."""
    temperature: Annotated[float, Field(ge=1e-06, allow_inf_nan=False)] = 1.0
    """Sampling temperature; log-probs in training are computed at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus size; 1 is off."""
    top_k: NonNegativeInt = 0
    """Number of candidates; 0 is off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens less likely than this share of the likeliest are not sampled; 0 is off."""
    repetition_penalty: Positive = 1.0
    """Above 1, tokens of the prompt and the completion become less likely; 1 is off."""
    num_slots: PositiveInt = 128
    """Completions sampled at a time, by the native engine."""
    kv_cache_mb: PositiveInt | None = None
    """Size of the native engine's KV cache; null is what all slots need at most, up to a quarter of the memory."""
    unload_during_update: bool = True
    """Free the native engine's cache and packed weights during the update."""
    score_while_drawing: bool = False
    """Score each group as soon as it has ended, in a second thread; functions are called with one group at a time."""
    batch_size: PositiveInt = 64
    """Completions sampled at a time, by the transformers engine."""
    importance: ImportanceSection = ImportanceSection()

    @model_validator(mode="after")
    def _check_min_new_tokens(self) -> "RolloutSection":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; "
                "lower the first"
            )
        return self


class GRPORolloutSection(RolloutSection):
    """Sampling of groups of completions."""

    prompts_per_step: PositiveInt = 8
    completions_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt: the group that is their baseline."""


OnError = Literal["fail", "drop", "zero"]


class RewardSource(Section):
    """One reward and its weight in the sum."""

    SHORTHAND = "source"

    source: str
    """`./file.py:name`, `package.module:name`, a built-in (`sentiment`, `length`, `format`, `unique_chars`, `overlong`,
    `arithmetic`, `gsm8k`), or a reward model: run folder, local folder or hub id."""
    weight: Finite = 1.0
    """Weight in the sum of rewards."""
    label: str | int | None = None
    """For a classifier with several labels: the label whose logit is the reward."""
    transform: Literal["raw", "log_odds"] = "raw"
    """`log_odds`: the label's logit minus the log-sum-exp of the others."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments of a built-in, for example `{pattern: ...}` of `format`."""
    on_error: OnError = "fail"
    """If the reward has no number for a completion (it raised, timed out, returned NaN, ...): end the run, leave the
    completion out of training, or count 0."""
    timeout_s: Positive | None = None
    """Limit of one call of a function, in seconds; it then runs in a separate thread. null sets no limit and calls
    it in the main thread, which some libraries need (signals, SQLite)."""


class EvaluationSection(Section):
    """Accuracy on held-out prompts, before and after training, for verifiable rewards."""

    correct_at: Finite | None = None
    """A completion is correct if its reward reaches this; null measures no accuracy."""
    num_prompts: PositiveInt | None = None
    """Number of held-out prompts to use; null is all."""
    completions_per_prompt: PositiveInt = 4
    """Sampled completions of each prompt, besides one greedy completion."""
