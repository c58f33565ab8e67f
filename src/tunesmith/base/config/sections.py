"""Base class of all recipe sections, and those that several recipes share: model, optimizer, data, rollout, reward.

Every default is declared in `base/config/*sections.py` and nowhere else. Sections are frozen, unknown keys are errors.
`SHORTHAND` names the field that a bare value sets: `model: smollm2` means `model: {name: smollm2}`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from tunesmith.base.core.http import problem_of_address
from tunesmith.base.core.seeds import LARGEST_SEED
from tunesmith.base.schema.weights import Weights

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


Pessimism = NonNegative | Literal["worst"]
"""What is taken off the mean of a reward model's heads: a multiple of their standard deviation, or all down to the
lowest head (Coste et al. 2023, arXiv 2310.02743, whose penalty is the variance)."""


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused. The docstring below a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
    SHORTHAND: ClassVar[str | None] = None


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), made by PEFT."""

    SHORTHAND = "rank"

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: Positive | None = None
    """Adapters are scaled by alpha / rank; null is twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of an adapter, in training. Not for PPO and GRPO, whose ratios compare two passes."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Linear layers with an adapter, by the end of their name: `[q_proj, v_proj]`; `all-linear`: all but the output."""
    use_dora: bool = False
    """Train the magnitude of each weight row apart from its direction (DoRA, Liu et al. 2024, arXiv 2402.09353)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
    seed: Seed = 0
    """Seed of the initial adapter weights."""


SELF = "self"
"""Teacher that is the student itself."""

TINY_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
    "phi",
    "gpt_neox",
    "stablelm",
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "gpt_oss",
    "starcoder2",
    "olmo3",
    "seed_oss",
    "ministral",
    "glm4",
    "cohere",
    "exaone4",
    "gpt2",
)
"""Families of which there are tiny random models, `tiny:<family>`."""


class ModelSection(Section):
    """The model to start from, and how it is held in memory."""

    SHORTHAND = "name"

    name: str = "smollm2"
    """Hub id, local folder, GGUF file, the alias `smollm2`, `scratch`, or `tiny:<family>`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; auto is bfloat16 where the hardware computes in it, else float32."""
    forward: Literal["auto", "padded", "full"] = "auto"
    """Forward pass of training: auto packs tokens without padding, on a CPU; `padded` is the model's own over padded
    rows, with the output layer in blocks; `full` is a textbook's, with the logits of all positions. Families that
    Tunesmith does not know are computed by their own forward, with the logits that are scored."""
    kernels: Literal["auto", "native", "triton", "torch"] = "auto"
    """Kernels of the model, its log-probs, the optimizer and the native engine: auto is C++ on a CPU and Triton on a
    GPU where they can be had, else torch."""
    share_prefixes: bool = True
    """Compute common prefixes of neighbouring rows once, such as the prompt of a group; in packed passes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    num_trainable_layers: PositiveInt | None = None
    """Train only the top n layers, freeze the others and the embeddings; null trains all."""
    lora: LoraSection = LoraSection()
    base: Weights = "model"
    """The frozen weights under adapters: as the model has them, or rounded to 8 bits when it is loaded, which halves
    their memory; trainer and native engine compute the same numbers with them, from one copy. On a CPU."""
    reference: Weights = "model"
    """The frozen copy that a policy's KL or DPO refers to, or that is its own teacher: as the model is, or with
    products in 8 bits, which is faster and a little off: with SmolLM2 its KL to the exact one is 0.009 nats a token. On
    a CPU."""
    seed: Seed = 0
    """Seed of random weights, for `scratch` and `tiny:<family>`."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder or repository; only for code that you have read."""

    @model_validator(mode="after")
    def _adapters_or_layers(self) -> "ModelSection":
        if self.lora.rank and self.num_trainable_layers is not None:
            raise ValueError(
                "lora.rank and num_trainable_layers both say what is trained; set lora.rank to 0 to train layers, or "
                "num_trainable_layers to null to train adapters"
            )
        return self


Truncate = Literal["none", "left", "both"]
Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


class OptimizerSection(Section):
    """AdamW on float32 masters, gradient clipping and the learning-rate schedule."""

    SHORTHAND = "learning_rate"

    learning_rate: Positive = 1e-5
    """Peak learning rate."""
    head_learning_rate: Positive | None = None
    """Learning rate of value and reward heads; null takes learning_rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this global norm."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up of the learning rate."""
    schedule: Schedule = "constant"
    """Decay after the warm-up; `warmup_stable_decay` stays at the peak, then decays linearly over decay_share."""
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Final learning rate as a share of the peak; not for `constant`."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of all steps, at the end, over which `warmup_stable_decay` decays."""
    max_refused_steps: PositiveInt = 5
    """Consecutive steps with non-finite gradients after which training stops."""
    state: Literal["float32", "int8"] = "float32"
    """Storage of the two moments: `int8` needs 2 bytes a weight instead of 8, and more time."""
    fused: bool = True
    """Update all parameters in one pass over memory; false is torch's AdamW, operation by operation. Not for int8."""
    loss_scale: Positive = 65536.0
    """For float16 weights: initial loss scale, a power of two. Halved on overflow, which skips the update."""
    loss_scale_window: PositiveInt = 200
    """Updates without overflow after which the loss scale doubles."""

    @field_validator("loss_scale")
    @classmethod
    def _check_power_of_two(cls, scale: float) -> float:
        if scale < 1 or not scale.is_integer() or int(scale) & (int(scale) - 1):
            raise ValueError(f"loss_scale is {scale:g}; give a power of two from 1 on, so that no bit is lost")
        return scale


class DataSection(Section):
    """Rows of a source, and the rows held out of it for evaluation."""

    SHORTHAND = "source"

    source: str = ""
    """Rows to train on."""
    heldout_source: str = ""
    """A separate source for evaluation; no rows of `source` are held out then."""
    skip_bad: bool = False
    """Drop rows that cannot be used, and count them by reason."""
    heldout_fraction: Fraction = 0.0
    """Share of rows held out of training."""


class PromptsSection(DataSection):
    """Source of prompts, and how they are cut and split."""

    source: str = "films"
    """File (JSONL, JSON, CSV, Parquet), `datasets` folder or hub id (`org/name:split`) with a `prompt` or `messages`
    column, or built in: `films`, `arithmetic`."""
    text_column: str = "prompt"
    """Column that holds the prompt: text, or a list of messages."""
    max_tokens: PositiveInt = 512
    """Limit of a prompt; longer ones are bad rows."""
    prefix_tokens: tuple[PositiveInt, PositiveInt] | None = None
    """Cut each text to its first n tokens, n sampled from this range: `[2, 8]`."""
    heldout_fraction: Fraction = 0.0
    """Share of prompts held out of training, by a hash of the prompt."""
    split_column: str | None = None
    """Column whose equal values are held out together; null is the prompt itself."""

    @model_validator(mode="after")
    def _check_prefix_range(self) -> "PromptsSection":
        if self.prefix_tokens and self.prefix_tokens[0] > self.prefix_tokens[1]:
            raise ValueError(f"prefix_tokens is {list(self.prefix_tokens)}; give the smaller number first")
        return self


class PairsSection(DataSection):
    """Preference rows for the reward model and DPO."""

    source: str = ""
    """File (JSONL, JSON, CSV, Parquet), `datasets` folder or hub id (`org/name:split`) with `chosen` and `rejected`,
    and optionally `prompt`, `margin`, `tie`; or with `prompt` and ranked `completions`."""
    dialogues: Literal["messages", "text"] = "messages"
    """HH-RLHF dialogues ("\\n\\nHuman: ...") become messages for the chat template, or remain text."""
    rankings: Literal["pairs", "plackett_luce"] = "pairs"
    """Train on a ranking of K completions as K(K-1)/2 pairs, or on the likelihood of its order (Plackett-Luce)."""
    max_tokens: PositiveInt = 1024
    """Limit of prompt plus completion; see `truncate`."""
    truncate: Truncate = "none"
    """A row that is too long is bad (`none`), or loses its beginning, the same tokens on both sides (`left`), or the
    beginning of its prompt and the ends of long completions, half of the limit staying for each (`both`)."""
    raters: Literal["equal", "estimated"] = "equal"
    """Votes count the same whoever gave them, or by what the rows to train on say of their raters (columns `rater` and
    `chosen_side`): little if a rater is careless or takes one side, the other way if they have the answers mixed up."""
    heldout_fraction: Fraction = 0.1
    """Share of prompts whose pairs are held out to measure accuracy."""


class PairsSource(Section):
    """One of several sources of pairs."""

    SHORTHAND = "source"

    source: Annotated[str, Field(min_length=1)]
    """File, folder or hub id, as `pairs.source`."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "source"
    """Name in metrics and in the report: letters, digits, `_`, `.`, `-`. By default that of the file or data set,
    without its extension."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Times that a pair which is trained on comes in an epoch: 2 is twice; 0.5 takes the pairs of half of the prompts.
    1000 at most, because an epoch is listed in memory. Without effect in `heldout_sources`."""
    max_pairs: PositiveInt | None = None
    """Read so many pairs at most, those of prompts drawn by `run.seed`; null reads all."""

    @model_validator(mode="before")
    @classmethod
    def _name_by_source(cls, values: object) -> object:
        return _named(cast(Mapping[str, object], values)) if isinstance(values, Mapping) else values


def _named(values: Mapping[str, object]) -> Mapping[str, object]:
    """The values of a source, with a name if the source gives one and there was none."""
    source = values.get("source")
    if not isinstance(source, str) or values.get("name") is not None:
        return values
    last = source.removeprefix("data:").rstrip("/").rpartition("/")[2]
    stem = re.sub(r"(\.[A-Za-z]+)?(\.gz)?$", "", last)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", stem).lstrip("_.-")
    return {**values, "name": name} if name else values


class MixedPairsSection(PairsSection):
    """Preference rows for the reward model, from one source or from several."""

    sources: tuple[PairsSource, ...] = ()
    """Several sources in place of `source`, each with a name and a weight; held-out pairs of each are judged apart."""
    heldout_sources: tuple[PairsSource, ...] = ()
    """Sources that are only evaluated on, each apart, without the pairs whose prompts are trained on."""

    @model_validator(mode="after")
    def _check_sources(self) -> "MixedPairsSection":
        for key in ("source", "heldout_source"):
            if self.sources and getattr(self, key):
                raise ValueError(f"both {key} and sources are given; leave one of them out")
        names = [one.name for one in (*self.sources, *self.heldout_sources)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several sources have the name {repeated[0]!r}; give each a name of its own")
        return self


class DemonstrationsSection(DataSection):
    """Demonstrations, and which of their tokens are trained on."""

    source: str = ""
    """File (JSONL, JSON, CSV, Parquet), `datasets` folder, hub id (`org/name:split`) or `data:path`, with `prompt` and
    `completion`, with `messages`, or with `text`."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens in the loss: all assistant turns of the completion, its last turn, or all tokens, the prompt's too. Of
    `text`, always all."""
    max_tokens: PositiveInt = 1024
    """Limit of a demonstration; a longer one is a bad row, or is cut."""
    truncate: Literal["none", "right"] = "none"
    """`right`: keep the first `max_tokens` tokens of a longer demonstration."""
    heldout_fraction: Fraction = 0.05
    """Share of demonstrations held out, by a hash of the prompt or of the opening of the conversation."""


class RunSection(Section):
    """Run folder, seed, length, and how often a run reports, evaluates and writes checkpoints."""

    dir: str = "runs"
    """Folder that holds the run folders."""
    name: str = ""
    """Part of the run folder's name; empty is the recipe's name."""
    seed: Seed = 0
    """Seed of all sampling and shuffling."""
    steps: PositiveInt | None = None
    """Training steps; null is all epochs over the data, or 100 where completions are sampled."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics on a plain terminal."""
    sample_every: PositiveInt = 1
    """Steps between stored samples."""
    checkpoint_every: NonNegativeInt = 20
    """Steps between checkpoints, besides one at the end; 0 writes one only when a signal stops the run."""
    checkpoint_in_background: bool = True
    """Write checkpoints during the next step, from a copy of the state in memory."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out data; 0 evaluates only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best one."""
    num_threads: NonNegativeInt = 0
    """CPU threads; 0 is `OMP_NUM_THREADS`, if it is set, else all cores. Cannot change when a run is resumed."""
    keep_freed_memory: bool = True
    """Keep freed blocks for the next ones instead of returning them to the system (glibc); holds for the process."""
    measure: bool = True
    """Measure processor, interpreter lock, memory and disk in each step, for less than a hundredth of its time."""
    hang_after_s: NonNegative = 300.0
    """Seconds without progress, no stage begun or ended, after which a run reports itself as hanging; 0 is never."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Experiment trackers."""


class AlarmsSection(Section):
    """Limits beyond which training looks unhealthy; each is recorded as a finding, none stops the run."""

    max_kl: Positive | None = 50.0
    """KL to the reference in nats per completion; null is off."""
    length_factor: Annotated[float, Field(gt=1)] | None = 3.0
    """Factor by which the mean completion length may grow or shrink since the first steps; null is off."""
    min_entropy_share: Fraction | None = 0.1
    """Lowest entropy per token, as a share of the first steps' entropy; null is off."""
    max_unfamiliar: Fraction | None = 0.5
    """Largest share of completions on which the heads of a reward model differ more than on 95 % of the answers of
    held-out votes; null is off."""
    max_cut_share: Fraction | None = 0.1
    """Largest share of importance weights that are cut, over three steps; null is off."""
    max_logp_difference: Positive | None = 0.3
    """Largest mean difference of a token's log-prob by the engine and by the trainer, in nats, over three steps; null
    is off. Temperature and filters of the sampling are in neither."""


class ImportanceSection(Section):
    """Off-policy correction: importance weights pi / mu of trained to sampling distribution (Yao et al. 2025)."""

    SHORTHAND = "mode"

    mode: Literal["off", "truncate", "mask"] = "truncate"
    """Clamp weights to [floor, cap], zero those outside of it, or do nothing."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight for each token, or one for each completion: the product over its tokens, or their geometric mean."""
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

    backend: Literal["native", "transformers", "vllm"] = "native"
    """Inference engine: Tunesmith's own, `transformers.generate`, or vLLM: a server, or in this process."""
    server_url: str | None = None
    """A vLLM server, such as `http://localhost:8000`; null is vLLM in this process."""
    server_timeout_s: Positive = 300.0
    """A request to the server that takes longer is sent again; a server that is away for longer ends the run."""
    server_folder: str | None = None
    """Folder of weights for the server, which must see it under the same path; null is the system's temporary
    folder."""
    vllm_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keywords of `vllm.LLM`, for vLLM in this process: `{gpu_memory_utilization: 0.3}`."""
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
    """Completions sampled at a time by the native engine, or asked of a server."""
    weights: Weights | Literal["auto"] = "model"
    """Weights that the native engine multiplies with: in the model's dtype, or rounded to 8 bits, which is faster and
    leaves its log-probs some hundredths of a nat from the trainer's, for which `importance` corrects. `auto` measures
    when a run begins, and takes 8 bits where they are faster by a fifth or more and are corrected."""
    drafts: bool = True
    """With up to four completions at a time, the native engine also computes guesses of the tokens behind the next one.
    Nothing but the time depends on it."""
    kv_cache_mb: PositiveInt | None = None
    """Size of the native engine's KV cache; null is what all slots need at most, up to a quarter of the memory."""
    unload_during_update: bool = True
    """Free the native engine's cache and packed weights during the update."""
    score_while_drawing: bool = False
    """Score each group as soon as it has ended, in a second thread; functions are called with one group at a time."""
    recompute_logps: bool = False
    """Compute the log-probs of the old policy by a forward pass, even where those of the engine are exact."""
    batch_size: PositiveInt = 64
    """Completions sampled at a time, by the transformers engine."""
    importance: ImportanceSection = ImportanceSection()

    @property
    def own_weights(self) -> Weights:
        """`weights`; those of the model where `auto` has not been decided."""
        return "model" if self.weights == "auto" else self.weights

    @model_validator(mode="after")
    def _check_lengths_and_server(self) -> "RolloutSection":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; "
                "lower the first"
            )
        if self.backend != "vllm" and (self.server_url is not None or self.vllm_options):
            raise ValueError(
                f"server_url and vllm_options are for vLLM, but backend is {self.backend}; set backend to vllm"
            )
        if self.server_url is not None and not self.server_url.startswith(("http://", "https://")):
            raise ValueError(f"server_url is {self.server_url}; give one such as http://localhost:8000")
        return self


class GRPORolloutSection(RolloutSection):
    """Sampling of groups of completions."""

    prompts_per_step: PositiveInt = 8
    completions_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt: the group that is their baseline."""


BUILTIN_TOOLS = ("calculator", "search", "python")
"""Names of the tools that come with Tunesmith (`learn/environments/tools/`)."""


class EnvironmentSection(Section):
    """An environment, tools, or both, that the policy talks to over several turns."""

    SHORTHAND = "source"

    source: str | None = None
    """Class or function that makes an environment: `./file.py:Env` or `package.module:Env`; or one of another package,
    such as `textarena:Wordle-v0`."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keywords of the class or function."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call: `./file.py:name`, `package.module:name`, `calculator`, `search`, `python`."""
    search_folder: str | None = None
    """Folder of text files that the tool `search` looks in."""
    allow_unconfined: bool = False
    """Let the tool `python` run on a machine that cannot lock it in, with all rights of the run itself."""
    max_turns: PositiveInt = 8
    """Turns of the model at most; `rollout.max_new_tokens` is the limit of each."""
    max_tokens: PositiveInt | None = None
    """Tokens of all turns and replies at most; null is `max_turns` times those of a turn and of a reply, up to the
    model's context."""
    max_reply_tokens: PositiveInt = 256
    """Longer replies are cut in the middle."""
    timeout_s: Positive = 60.0
    """Time limit of each call of the environment."""
    max_calls: PositiveInt = 64
    """Calls of environments that may run at a time."""
    reply_loss_coef: NonNegative = 0.0
    """Weight of the cross-entropy of what the environment replied, learnt beside the rewards (ECHO, Shrivastava et al.
    2026, arXiv 2605.24517, who take 0.05); 0 is off."""
    processes: NonNegativeInt = 0
    """Processes that make and hold the environments, each several; 0: threads of the training's own process. One whose
    call takes too long is killed, and one that ends breaks its own trajectories alone. For environments that compute
    for long in Python, crash, hang, or use what threads may not share."""

    @property
    def is_given(self) -> bool:
        """True if the policy talks to anything."""
        return self.source is not None or bool(self.tools)

    def tokens_of(self, max_new_tokens: int) -> int:
        """Tokens of all turns and replies at most, with turns of `max_new_tokens`."""
        return self.max_tokens or self.max_turns * (max_new_tokens + self.max_reply_tokens)


OnError = Literal["fail", "drop", "zero"]

BUILTIN_REWARDS = ("sentiment", "length", "format", "unique_chars", "overlong", "arithmetic", "gsm8k", "environment")
"""Names of the rewards that come with Tunesmith (`learn/rewards/builtin.py`)."""


class RewardSource(Section):
    """One reward and its weight in the sum."""

    SHORTHAND = "source"

    source: str
    """`./file.py:name`, `package.module:name`, a built-in (`sentiment`, `length`, `format`, `unique_chars`, `overlong`,
    `arithmetic`, `gsm8k`), a reward model: run folder, local folder or hub id, or `judge:` and a judge: a YAML file of
    its settings, a server's address, or a model."""
    weight: Finite = 1.0
    """Weight in the sum of rewards."""
    label: str | int | None = None
    """For a classifier with several labels: the label whose logit is the reward."""
    transform: Literal["raw", "log_odds"] = "raw"
    """`log_odds`: the label's logit minus the log-sum-exp of the others."""
    pessimism: Pessimism = 0.0
    """For a reward model with several heads: the reward is the mean of the heads minus this times their standard
    deviation; `worst` is the lowest head."""
    weights: Weights = "model"
    """Of a reward model: `int8` rounds its linear maps to 8 bits, which is faster and a little off. On a CPU."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments of a built-in, for example `{pattern: ...}` of `format`."""
    on_error: OnError = "fail"
    """If the reward has no number for a completion (it raised, timed out, returned NaN, ...): end the run, leave the
    completion out of training, or count 0."""
    timeout_s: Positive | None = None
    """Limit of one call of a function, in seconds; it then runs in a separate thread. null sets no limit and calls
    it in the main thread, which some libraries need (signals, SQLite)."""
    workers: NonNegativeInt = 0
    """Processes that call a function or a reward model, each with whole groups; 0: the training's own process. For
    functions that compute for long in Python, and judge a completion without the other groups; and for models that
    score beside the drawing (`rollout.score_while_drawing`), each process with a copy."""

    @field_validator("source")
    @classmethod
    def _check_address(cls, given: str) -> str:
        # The recipe is kept in the run folder and shown.
        if given.lower().startswith("judge:http") and (problem := problem_of_address(given.partition(":")[2])):
            raise ValueError(f"the judge's address is {problem}")
        return given


class EvaluationSection(Section):
    """Accuracy on held-out prompts, before and after training, for verifiable rewards."""

    correct_at: Finite | None = None
    """A completion is correct if its reward reaches this; null measures no accuracy."""
    num_prompts: PositiveInt | None = None
    """Number of held-out prompts to use; null is all."""
    completions_per_prompt: PositiveInt = 4
    """Sampled completions of each prompt, besides one greedy completion."""
