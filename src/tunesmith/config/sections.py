"""Base class of all recipe sections, and those that most recipes share: model, optimizer, data, run.

Every default is declared in `config/*sections.py` and nowhere else. Sections are frozen, unknown keys are errors.
`SHORTHAND` names the field that a bare value sets: `model: smollm2` means `model: {name: smollm2}`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    SHORTHAND: ClassVar[str | None] = None


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in place of all weights, made by PEFT."""

    SHORTHAND = "rank"

    rank: int = Field(
        default=0, ge=0, description="Rank of the adapters, which alone are trained; 0 trains the weights themselves."
    )
    alpha: Positive | None = Field(
        default=None, description="Adapters are scaled by alpha / rank; null takes twice the rank."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Dropout of what enters an adapter, where gradients are taken. Not for PPO and GRPO, whose ratios "
        "compare two passes.",
    )
    target_modules: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="Names, or ends of names, of the linear layers that get an adapter: `[q_proj, v_proj]`. "
        "`all-linear` is every one but the output layer.",
    )
    use_dora: bool = Field(
        default=False,
        description="Learn the length of each row of a weight beside its direction (DoRA, Liu et al. 2024, arXiv "
        "2402.09353).",
    )
    use_rslora: bool = Field(
        default=False, description="Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the first adapter weights.")


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


Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


class OptimizerSection(Section):
    """AdamW on float32 masters, gradient clipping and the learning-rate schedule."""

    SHORTHAND = "learning_rate"

    learning_rate: Positive = Field(default=1e-5, description="Peak learning rate.")
    head_learning_rate: Positive | None = Field(
        default=None, description="Learning rate of value and reward heads; null takes learning_rate."
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="AdamW's decay of the two moments.")
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decoupled weight decay; not applied to vectors (norms, biases)."
    )
    max_grad_norm: Positive = Field(default=1.0, description="Gradients are scaled down to this global norm.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises linearly to its peak."
    )
    schedule: Schedule = Field(
        default="constant",
        description="Fall of the learning rate after the warm-up; `warmup_stable_decay` keeps the peak until "
        "decay_share of the steps are left, then falls linearly.",
    )
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of the peak at which the fall ends; not for `constant`."
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="Share of all steps over which `warmup_stable_decay` falls, at the end."
    )
    max_refused_steps: PositiveInt = Field(
        default=5, description="Non-finite steps in a row after which training stops."
    )
    state: Literal["float32", "int8"] = Field(
        default="float32",
        description="What the two moments are kept in: `int8` takes 2 bytes a weight instead of 8, and more time.",
    )
    loss_scale: Positive = Field(
        default=65536.0,
        description="For float16 weights alone: the factor on the loss at the start, a power of two. It halves where a "
        "gradient overflows; that update is left out.",
    )
    loss_scale_window: PositiveInt = Field(
        default=200, description="Updates without overflow after which the factor on the loss doubles."
    )

    @field_validator("loss_scale")
    @classmethod
    def _is_a_power_of_two(cls, scale: float) -> float:
        if scale < 1 or not scale.is_integer() or int(scale) & (int(scale) - 1):
            raise ValueError(f"loss_scale is {scale:g}; give a power of two from 1 on, so that no bit is lost")
        return scale


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


class DemonstrationsSection(Section):
    """Demonstrations, and which of their tokens are learnt."""

    SHORTHAND = "source"

    source: str = Field(
        default="",
        description="File (JSONL, JSON, CSV, Parquet), `datasets` folder, hub id (`org/name:split`) or `data:path`, "
        "with `prompt` and `completion`, with `messages`, or with `text`.",
    )
    heldout_source: str = Field(
        default="", description="Rows of a source of their own for evaluation; none of `source` are held out then."
    )
    skip_bad: bool = Field(default=False, description="Drop rows that cannot be used, and count them by reason.")
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Tokens that are learnt: of the completion, in a conversation every turn of the assistant in it; "
        "of its last turn alone; or all tokens, the prompt's too. Of `text` all are learnt either way.",
    )
    max_tokens: PositiveInt = Field(default=1024, description="A longer demonstration is a bad row, or is cut.")
    truncate: Literal["none", "right"] = Field(
        default="none", description="`right`: keep the first `max_tokens` tokens of a longer demonstration."
    )
    heldout_fraction: Fraction = Field(
        default=0.05,
        description="Share of demonstrations kept away from training, by a hash of the prompt or of how the "
        "conversation opens.",
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
