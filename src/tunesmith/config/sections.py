"""The sections of a recipe. Every default stands here and nowhere else.

Sections are frozen, an unknown key is an error. `SHORTHAND` names the field that a bare value sets: `model: smollm2`
means `model: {name: smollm2}`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.lora_sections import LoraSection
from tunesmith.config.section import Fraction, NonNegative, Positive, PositiveInt, Section

OnError = Literal["fail", "drop", "zero"]


class ModelSection(Section):
    """Which model to start from, and how it is held in memory."""

    SHORTHAND = "name"

    name: str = Field(
        default="smollm2",
        description="Hub id, local folder, GGUF file, the alias `smollm2`, `scratch`, or `tiny:<family>`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Compute dtype of the weights; auto takes bfloat16 where the machine computes in it, else float32.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    num_trainable_layers: PositiveInt | None = Field(
        default=None,
        description="Train the top layers alone and freeze what lies below, embeddings included; null trains all.",
    )
    lora: LoraSection = LoraSection()
    seed: int = Field(default=0, ge=0, description="Seed of random weights, for `scratch` and `tiny:<family>` alone.")
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that the model's folder or repository brings along; only for code that you read.",
    )

    @model_validator(mode="after")
    def _adapters_train_alone(self) -> "ModelSection":
        if self.lora.rank and self.num_trainable_layers is not None:
            raise ValueError(
                "lora.rank and num_trainable_layers both say what is trained; set lora.rank to 0 to train layers, or "
                "num_trainable_layers to null to train adapters"
            )
        return self


class PromptsSection(Section):
    """Where prompts come from and how they are cut and split."""

    SHORTHAND = "source"

    source: str = Field(
        default="films",
        description="File (JSONL, JSON, CSV, Parquet), `datasets` folder or hub id (`org/name:split`) with a `prompt` "
        "or `messages` column, or built in: `films`, `arithmetic`.",
    )
    heldout_source: str = Field(
        default="", description="Prompts of a source of their own for evaluation; none of `source` are held out then."
    )
    skip_bad: bool = Field(default=False, description="Drop rows that cannot be used, and count them by reason.")
    text_column: str = Field(default="prompt", description="Column that holds the prompt: text, or a list of messages.")
    max_tokens: PositiveInt = Field(default=512, description="A longer prompt is a bad row.")
    prefix_tokens: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="Cut each text to its first n tokens, n drawn from this range: `[2, 8]`."
    )
    heldout_fraction: Fraction = Field(
        default=0.0, description="Share of prompts kept away from training, by a hash of the prompt."
    )
    split_column: str | None = Field(
        default=None, description="Column by whose value prompts are held out together; null takes the prompt itself."
    )

    @model_validator(mode="after")
    def _prefix_range_is_ordered(self) -> "PromptsSection":
        if self.prefix_tokens and self.prefix_tokens[0] > self.prefix_tokens[1]:
            raise ValueError(f"prefix_tokens is {list(self.prefix_tokens)}; give the smaller number first")
        return self


class PairsSection(Section):
    """Preference rows for the reward trainer."""

    SHORTHAND = "source"

    source: str = Field(
        default="",
        description="File (JSONL, JSON, CSV, Parquet), `datasets` folder or hub id (`org/name:split`) with `chosen` "
        "and `rejected`, and optionally `prompt`, `margin`, `tie`; or with `prompt` and ranked `completions`.",
    )
    heldout_source: str = Field(
        default="", description="Rows of a source of their own for evaluation; none of `source` are held out then."
    )
    skip_bad: bool = Field(default=False, description="Drop rows that cannot be used, and count them by reason.")
    dialogues: Literal["messages", "text"] = Field(
        default="messages",
        description='HH-RLHF dialogues ("\\n\\nHuman: ...") become messages for the chat template, or stay text.',
    )
    rankings: Literal["pairs", "plackett_luce"] = Field(
        default="pairs",
        description="A ranking of K completions is K(K-1)/2 pairs, or one loss over its order (Plackett-Luce).",
    )
    max_tokens: PositiveInt = Field(default=1024, description="Limit of prompt plus completion; see `truncate`.")
    truncate: Literal["none", "left"] = Field(
        default="none",
        description="What is too long is a bad row, or loses its beginning, both sides the same tokens.",
    )
    heldout_fraction: Fraction = Field(
        default=0.1, description="Share of prompts whose pairs are kept for the accuracy figure."
    )


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


class RewardTrainerSection(Section):
    """The Bradley-Terry reward model."""

    num_layers: PositiveInt | None = Field(
        default=None, description="Keep the lowest n layers of the model alone, a smaller reward model; null keeps all."
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs.")
    pairs_per_step: PositiveInt = Field(default=16, description="Pairs in one optimizer step.")
    micro_batch_size: PositiveInt = Field(
        default=16, description="Pairs in one forward and backward pass; gradients are accumulated."
    )
    margin: Literal["none", "column"] = Field(
        default="none", description="`column`: the chosen reward must win by the row's `margin` (Llama 2)."
    )
    center_coef: NonNegative = Field(
        default=0.0, description="Weight of (chosen + rejected)^2, which holds rewards near zero."
    )


class RunSection(Section):
    """Where a run is written and how often it reports."""

    dir: str = Field(default="runs", description="Folder that holds the run folders.")
    name: str = Field(default="", description="Name in the run folder's name; empty takes the recipe's.")
    seed: int = Field(default=0, ge=0, description="Seed of everything that is drawn.")
    steps: PositiveInt | None = Field(
        default=None, description="Training steps; null runs over the data once per epoch (reward) or 100 (PPO)."
    )
    log_every: PositiveInt = Field(default=1, description="Steps between lines of metrics on a plain terminal.")
    sample_every: PositiveInt = Field(default=1, description="Steps between stored samples.")
    checkpoint_every: int = Field(
        default=20,
        ge=0,
        description="Steps between checkpoints, and one at the end; 0 writes one only when a signal stops the run.",
    )
    checkpoint_in_background: bool = Field(
        default=True, description="Write checkpoints while the next step runs, from a copy of the state in memory."
    )
    eval_every: int = Field(
        default=0, ge=0, description="Steps between evaluations on held-out data; 0 evaluates at the end."
    )
    keep_checkpoints: PositiveInt = Field(
        default=2, description="Newest checkpoints that are kept; the best one is kept besides."
    )
    num_threads: int = Field(default=0, ge=0, description="CPU threads; 0 takes all cores. Part of a run's identity.")
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="Trackers; none by default."
    )


class AlarmsSection(Section):
    """Signs of a policy that leaves the path; each is recorded as a finding, none stops the run."""

    max_kl: Positive | None = Field(
        default=50.0, description="KL to the reference in nats per completion; null is off."
    )
    length_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=3.0, description="Growth or fall of the mean completion length since the first steps; null is off."
    )
    min_entropy_share: Fraction | None = Field(
        default=0.1, description="Share of the first steps' entropy per token that must be left; null is off."
    )
