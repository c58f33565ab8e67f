"""Models built in code: tiny random ones of each family for tests, and `scratch`, a transformer to train from nothing.

They share a byte-level tokenizer: three special tokens in SmolLM2's order, then the 256 bytes. As in SmolLM2 the
padding token is the end-of-sequence token, so code that masks by token id instead of by length fails on them.
"""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tunesmith.core.errors import ModelError
from tunesmith.models.loaded import LoadedModel, cast_parameters, disable_dropout

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + 256
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")

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
    """A random model of `family` (see `FAMILIES`) with 2 layers of width 32, and the byte tokenizer.

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
    match family:
        case "llama":
            return LlamaConfig(**{**shared, **modern, **overrides})  # type: ignore[arg-type]
        case "mistral":
            return MistralConfig(**{**shared, **modern, "sliding_window": 16, **overrides})  # type: ignore[arg-type]
        case "qwen2":
            return Qwen2Config(**{**shared, **modern, **overrides})  # type: ignore[arg-type]
        case "qwen3":
            return Qwen3Config(**{**shared, **modern, **overrides})  # type: ignore[arg-type]
        case "gemma2":
            gemma = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0, "sliding_window": 16}
            return Gemma2Config(**{**shared, **modern, **gemma, **overrides})  # type: ignore[arg-type]
        case "gemma3":
            gemma = {"query_pre_attn_scalar": 8, "sliding_window": 16}
            kinds = {"layer_types": ["sliding_attention", "full_attention"]}
            return Gemma3TextConfig(**{**shared, **modern, **gemma, **kinds, **overrides})  # type: ignore[arg-type]
        case "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
            return GPT2Config(**{**shared, **sizes, **overrides})  # type: ignore[arg-type]
        case _:
            raise ModelError(f"there is no tiny model of family {family!r}; families are {', '.join(FAMILIES)}")


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
