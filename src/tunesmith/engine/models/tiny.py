"""Models built in code: tiny random ones of each family for tests, and `scratch`, a transformer to train from nothing.

They share a byte-level tokenizer: three special tokens in SmolLM2's order, then the 256 bytes. As in SmolLM2 the
padding token is the end-of-sequence token, so code that masks by token id instead of by length fails on them.
"""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tunesmith.base.config.sections import TINY_FAMILIES
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.loaded import LoadedModel, cast_parameters, disable_dropout

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + 256

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
"""The families that every test of models goes through."""

_WINDOW = {"sliding_window": 16}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 8}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

_CONFIGS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {**_WINDOW},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 5.0},
    "gemma3": {**_GEMMA, **_KINDS},
    "gemma": {},
    "phi3": {**_WINDOW},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {**_MULTIPLIERS},
    "phi": {**_PARTIAL},
    "gpt_neox": {**_PARTIAL, "num_key_value_heads": 4},
    "stablelm": {**_PARTIAL, "use_parallel_residual": True},
    "mixtral": {**_EXPERTS, **_WINDOW},
    "olmoe": {**_EXPERTS},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {**_EXPERTS, **_WINDOW, **_KINDS},
    "starcoder2": {**_WINDOW},
    "olmo3": {**_WINDOW, **_KINDS},
    "seed_oss": {},
    "ministral": {**_WINDOW, **_KINDS},
    "glm4": {},
    "cohere": {},
    "exaone4": {**_WINDOW, **_KINDS},
}
"""Fields of the tiny config of a family, besides the sizes that all have."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of 259 tokens that encodes any text, byte by byte, with a ChatML template; pad equals eos (id 2)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[EOS_ID],
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(family: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: object) -> LoadedModel:
    """A random model of `family` (see `TINY_FAMILIES`) with 2 layers of width 32, and the byte tokenizer.

    `overrides` go into the family's config. The same seed gives the same weights; the global generator is left alone.
    Raises ModelError for an unknown family.
    """
    model = _build(AutoModelForCausalLM, _tiny_config(family, overrides), seed, dtype)
    return LoadedModel(model, byte_tokenizer(), f"tiny:{family}", dtype)


def scratch_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: object) -> LoadedModel:
    """A Llama-style transformer of 4 layers x 8 heads (width 256, 3.4M parameters) on bytes, with random weights."""
    fields: dict[str, object] = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **_special_ids(),
        **overrides,
    }
    model = _build(AutoModelForCausalLM, LlamaConfig(**fields), seed, dtype)  # type: ignore[arg-type]
    return LoadedModel(model, byte_tokenizer(), "scratch", dtype)


def _special_ids() -> dict[str, int]:
    return {"vocab_size": VOCABULARY_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}


def _tiny_config(family: str, overrides: dict[str, object]) -> PretrainedConfig:
    # Ten times the usual 0.02, which at width 32 gives logits so flat that a test could not tell tokens apart.
    shared: dict[str, object] = {**_special_ids(), "initializer_range": 0.2}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        return GPT2Config(**{**shared, **sizes, **overrides})  # type: ignore[arg-type]
    if family not in _CONFIGS:
        raise ModelError(f"there is no tiny model of family {family!r}; families are {', '.join(TINY_FAMILIES)}")
    modern: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family != "qwen2",
    }
    model_type = {"gemma3": "gemma3_text"}.get(family, family)
    return AutoConfig.for_model(model_type, **{**shared, **modern, **_CONFIGS[family], **overrides})


def _build(auto_class: Any, config: PretrainedConfig, seed: int, dtype: torch.dtype) -> Any:
    # Without a padding token while weights are drawn: its embedding would be zero, and here it is the eos's too.
    pad_token_id, config.pad_token_id = config.pad_token_id, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config).eval()
    model.config.pad_token_id = pad_token_id
    cast_parameters(model, dtype)
    disable_dropout(model)
    if model.can_generate():
        model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    return model
