"""The schema of a recipe. Every default stands here and nowhere else.

A recipe is one YAML file with the sections below; `algorithm` says which trainer reads it. Sections are frozen, an
unknown key is an error. `SHORTHAND` names the field that a bare value sets: `model: smollm2` means
`model: {name: smollm2}`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    SHORTHAND: ClassVar[str | None] = None


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
    seed: int = Field(default=0, ge=0, description="Seed of random weights, for `scratch` and `tiny:<family>` alone.")


class PromptsSection(Section):
    """Where prompts come from and how they are cut and split."""

    SHORTHAND = "source"

    source: str = Field(
        default="films", description="JSONL file (also .gz) with a `prompt` column, or `films`, the built-in openings."
    )
    text_column: str = Field(default="prompt", description="Column that holds the prompt: text, or a list of messages.")
    max_tokens: PositiveInt = Field(default=512, description="A longer prompt is an error.")
    prefix_tokens: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="Cut each text to its first n tokens, n drawn from this range: `[2, 8]`."
    )
    heldout_fraction: Fraction = Field(
        default=0.0, description="Share of prompts kept away from training, by a hash of the prompt."
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
        description="JSONL file (also .gz) with `chosen` and `rejected`, and optionally `prompt`, `margin`, `tie`.",
    )
    max_tokens: PositiveInt = Field(default=1024, description="A longer prompt plus completion is an error.")
    heldout_fraction: Fraction = Field(
        default=0.1, description="Share of prompts whose pairs are kept for the accuracy figure."
    )


class RewardSource(Section):
    """One reward and its weight in the sum."""

    SHORTHAND = "source"

    source: str = Field(
        ...,
        description="`./file.py:name`, `package.module:name`, a built-in (`sentiment`, `length`, `format`, "
        "`unique_chars`), or a reward model: run folder, local folder or hub id.",
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


class RolloutSection(Section):
    """How completions are drawn during training."""

    backend: Literal["transformers"] = Field(default="transformers", description="Engine that draws completions.")
    prompts_per_step: PositiveInt = Field(default=16, description="Prompts drawn for one training step.")
    completions_per_prompt: PositiveInt = Field(default=1, description="Completions of each prompt.")
    max_new_tokens: PositiveInt = Field(default=32, description="Limit of a completion, in tokens.")
    min_new_tokens: int = Field(
        default=0, ge=0, description="No end-of-sequence token is drawn before this many tokens."
    )
    temperature: Positive = Field(
        default=1.0, description="Sampling temperature; log-probs in training are taken at the same temperature."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus size; 1 is off.")
    top_k: int = Field(default=0, ge=0, description="Number of candidates; 0 is off.")
    batch_size: PositiveInt = Field(default=64, description="Sequences generated at a time.")

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "RolloutSection":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; "
                "lower the first"
            )
        return self


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
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Fall of the learning rate after the warm-up."
    )
    max_refused_steps: PositiveInt = Field(
        default=5, description="Non-finite steps in a row after which training stops."
    )


class KLSection(Section):
    """KL divergence to the reference policy: estimator, place and coefficient."""

    SHORTHAND = "coef"

    coef: NonNegative = Field(default=0.05, description="Coefficient; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="Estimator of the KL, after Schulman (2020)."
    )
    place: Literal["reward", "loss"] = Field(
        default="reward", description="Subtract it from the reward per token, or add it to the loss."
    )
    target: Positive | None = Field(
        default=None, description="Nats per sequence that an adaptive coefficient aims at; null keeps it fixed."
    )
    horizon: Positive = Field(
        default=10_000.0, description="Completions over which the adaptive coefficient reacts (Ziegler et al. 2019)."
    )


class PPOSection(Section):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    num_epochs: PositiveInt = Field(default=2, description="Passes over each rollout.")
    num_minibatches: PositiveInt = Field(default=1, description="Optimizer steps in each pass.")
    micro_batch_size: PositiveInt = Field(
        default=16, description="Sequences in one forward and backward pass; gradients are accumulated."
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="The ratio is clipped below 1 - clip_low."
    )
    clip_high: Positive = Field(default=0.2, description="The ratio is clipped above 1 + clip_high.")
    value_clip: Positive | None = Field(
        default=0.2, description="Values may move this far from the rollout's; null is off."
    )
    value_coef: NonNegative = Field(default=0.1, description="Weight of the value loss.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    gamma: Fraction = Field(default=1.0, description="Discount of later rewards.")
    lam: Fraction = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(
        default=True, description="Shift and scale advantages to mean 0 and variance 1 over the rollout."
    )
    whiten_rewards: bool = Field(
        default=False, description="Scale rewards to variance 1 over the rollout, keeping their mean."
    )
    target_kl: Positive | None = Field(
        default=None, description="Stop a rollout's updates once the KL to its own policy exceeds this, per token."
    )
    critic: Literal["shared", "separate"] = Field(
        default="shared", description="Value head on the policy's trunk, or a model of its own."
    )
    kl: KLSection = KLSection()


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
        default=0, ge=0, description="Steps between checkpoints; 0 writes the last one alone."
    )
    eval_every: int = Field(
        default=0, ge=0, description="Steps between evaluations on held-out data; 0 evaluates at the end."
    )
    keep_checkpoints: PositiveInt = Field(default=2, description="Newest checkpoints that are kept.")
    num_threads: int = Field(default=0, ge=0, description="CPU threads; 0 takes all cores. Part of a run's identity.")
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="Trackers; none by default."
    )


class Recipe(Section):
    """What every recipe has."""

    schema_version: Literal[1] = Field(default=1, description="Version of this schema.")
    description: str = Field(default="", description="One line for `tunesmith recipes ls`.")
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()


class RewardRecipe(Recipe):
    """`tunesmith train reward`: a reward model from preference pairs."""

    algorithm: Literal["reward"] = Field(default="reward", description="Trainer that reads the recipe.")
    pairs: PairsSection = PairsSection()
    reward_model: RewardTrainerSection = RewardTrainerSection()


class PPORecipe(Recipe):
    """`tunesmith train ppo`: a policy that follows a reward."""

    algorithm: Literal["ppo"] = Field(default="ppo", description="Trainer that reads the recipe.")
    prompts: PromptsSection = PromptsSection()
    reward: tuple[RewardSource, ...] = Field(default=(RewardSource(source="sentiment"),), min_length=1)
    rollout: RolloutSection = RolloutSection()
    ppo: PPOSection = PPOSection()

    @model_validator(mode="after")
    def _kl_horizon_spans_a_step(self) -> "PPORecipe":
        num_sequences = self.rollout.prompts_per_step * self.rollout.completions_per_prompt
        if self.ppo.kl.target is not None and num_sequences > self.ppo.kl.horizon:
            raise ValueError(
                f"ppo.kl.horizon is {self.ppo.kl.horizon:g}, less than the {num_sequences} completions of one step; "
                f"set it to {num_sequences} or more"
            )
        return self


RECIPES: dict[str, type[RewardRecipe] | type[PPORecipe]] = {"reward": RewardRecipe, "ppo": PPORecipe}
"""Schema of each algorithm, by the name that the command line uses."""
