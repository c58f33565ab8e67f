"""Light tables: parts of TRL's trainers that Tunesmith does or leaves to TRL, and names that TRL 1.16 lacks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

WORKS: Mapping[str, str] = MappingProxyType(
    {
        "rollout": "completions are drawn by Tunesmith's engine, each prompt once for its group",
        "forward": "models compute without padding, and what neighbouring rows begin with once",
        "optimizer": "AdamW in one pass over memory",
    }
)
"""Work of a trainer that Tunesmith does -> what is different then."""

_POLICY = ("GRPOTrainer", "RLOOTrainer")
TRAINERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys((*_POLICY, "PPOTrainer"), tuple(WORKS)),
        **dict.fromkeys(("DPOTrainer", "KTOTrainer", "SFTTrainer", "RewardTrainer"), ("forward", "optimizer")),
    }
)
"""Trainers of `tunesmith.integrations.trl` -> work that it does in them."""

MOVED = (*TRAINERS, "PPOConfig")
"""Names to import from `tunesmith.integrations.trl`."""

OVERRIDES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("_generate", "_generate_single_turn"), "rollout"),
        **dict.fromkeys(("_get_per_token_logps_and_entropies", "compute_loss"), "forward"),
        "create_optimizer": "optimizer",
    }
)
"""Methods that a subclass in a script may have -> the work that they are part of."""

RUN_TIME = (
    "on a GPU, for families of models that Tunesmith does not know, and with dropout TRL does all, and the log says so",
)
"""Conditions beside the settings, known only when the script runs."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A setting, field of a config or argument of a trainer, with which TRL does `works` itself.

    It holds for all values but the `usual` ones, and mappings with keys of `keys` alone; with `only`, for objects that
    these classes make, which are given by the name of the class.
    """

    name: str
    works: tuple[str, ...]
    why: str
    usual: tuple[object, ...] = (None, False)
    keys: frozenset[str] = frozenset()
    only: tuple[str, ...] = ()
    trainers: tuple[str, ...] = tuple(name for name in TRAINERS if name != "PPOTrainer")

    def holds(self, value: object) -> bool:
        """True if TRL does the work for this value."""
        if self.only:
            return value in self.only
        return value not in self.usual and not (isinstance(value, dict) and value.keys() <= self.keys)


GENERATION = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("eos_token_id", "stop_strings", "suppress_tokens"),
        *("pad_token_id", "bos_token_id", "cache_implementation", "use_cache", "num_beams", "do_sample"),
    }
)
"""Keys of `generation_kwargs` that the engine has, or that do not change what it draws."""

_ALL, _MODEL = tuple(WORKS), ("rollout", "forward")
_VISION = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForMultimodalLM")
_ADAPTERS = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig", "IA3Config", "OFTConfig", "VeraConfig")

REASONS: tuple[Reason, ...] = (
    Reason("use_vllm", ("rollout",), "vLLM draws, as the script asks", trainers=_POLICY),
    Reason("rollout_func", ("rollout",), "that function draws", trainers=_POLICY),
    *(
        Reason(name, ("rollout",), "transformers draws, as the script asks", trainers=_POLICY)
        for name in ("use_transformers_continuous_batching", "use_transformers_paged")
    ),
    Reason("generation_kwargs", ("rollout",), "the engine has not all of these", keys=GENERATION, trainers=_POLICY),
    Reason("model", _MODEL, "the model sees images", only=_VISION),
    Reason("peft_config", _MODEL, "adapters other than LoRA and DoRA are TRL's", only=_ADAPTERS),
    *(
        Reason(name, _ALL, "quantised weights are read by their own library alone")
        for name in ("quantization_config", "load_in_4bit", "load_in_8bit")
    ),
    *(
        Reason(name, _ALL, "the parameters are divided among processes", (None, False, "", []))
        for name in ("deepspeed", "fsdp")
    ),
    Reason("use_liger_kernel", _MODEL, "Liger replaces the forward pass of layers"),
    Reason("torch_compile", _MODEL, "the compiled model is called, as the script asks"),
    Reason("router_aux_loss_coef", ("forward",), "the loss of routers comes from the model's own pass", (None, 0)),
    Reason("use_weighting", ("forward",), "it needs the sum of squared probabilities", trainers=("DPOTrainer",)),
    Reason("compute_loss_func", ("forward",), "that function reads all logits", trainers=("SFTTrainer",)),
    Reason("label_smoothing_factor", ("forward",), "it needs all logits", (None, 0), trainers=("SFTTrainer",)),
    Reason("optim", ("optimizer",), "another optimizer is asked for", (None, "adamw_torch", "adamw_torch_fused")),
    Reason("optimizers", ("optimizer",), "the script brings its own", (None, (None, None))),
    Reason("optimizer_cls_and_kwargs", ("optimizer",), "the script brings its own"),
)
"""The settings with which TRL's own code does a part of the work."""

REMOVED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("PPOTrainer", "PPOConfig"), ("1.12", "import it from tunesmith.integrations.trl")),
        "AutoModelForCausalLMWithValueHead": ("1.12", "give PPO the plain model"),
        "tokenizer": ("0.11", "processing_class"),
        "max_seq_length": ("0.19", "max_length"),
        "max_prompt_length": ("0.28", "cut long prompts in the data"),
        "use_liger_loss": ("0.27", "leave it out"),
        "vllm_device": ("0.17", "vllm_mode"),
        "vllm_guided_decoding_regex": ("0.27", "vllm_structured_outputs_regex"),
        "wandb_log_unique_prompts": ("0.26", "log_unique_prompts"),
        "generate_during_eval": ("0.28", "a callback"),
        "ref_model_init_kwargs": ("0.28", "ref_model"),
        "reference_free": ("0.28", "leave it out"),
    }
)
"""Names, fields and arguments of old scripts that TRL 1.16 lacks -> the last version with them, what to do instead."""


def reasons(trainer: str, name: str, value: object) -> Iterator[Reason]:
    """Why TRL does a part of the work of `trainer` with this setting."""
    return (one for one in REASONS if one.name == name and trainer in one.trainers and one.holds(value))
