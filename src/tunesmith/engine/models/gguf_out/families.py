"""Families of models that llama.cpp computes: its name of each, what it computes beside a plain decoder, and the
values of its header.

Structure is read from the `Architecture` of the native engine, names of tensors from the table of the `gguf` package,
which the way in has too. What llama.cpp would compute otherwise is refused by name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.log import get_logger
from tunesmith.engine.models.architecture import Architecture, Block, Experts

_logger = get_logger(__name__)

Order = Callable[[torch.Tensor, Architecture], torch.Tensor]
"""Reorders the rows of a weight, its bias, or the upper factor of its adapter."""

_GELU = frozenset({"gelu", "gelu_tanh"})


@dataclass(frozen=True, slots=True)
class Family:
    """The computation of one of llama.cpp's architectures.

    `period`: of the layers, all but every n-th have a sliding window; 0 for an architecture without windows. `untied`:
    it reads an output layer even where it is the embedding; `tied`: it knows none of its own. `offset` is added to the
    weights of norms. `rope_period`: every n-th layer has no rotary positions.
    """

    arch: str
    orders: Mapping[str, Order]
    activations: frozenset[str] = frozenset({"silu"})
    period: int = 0
    tied: bool = False
    untied: bool = False
    offset: float = 0.0
    has_rope_factors: bool = False
    has_scales: bool = False
    has_softcaps: bool = False
    rope_period: int = 0


def _turned_queries(tensor: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    return _neighbours(tensor, architecture.blocks[0].attention.num_heads)


def _turned_keys(tensor: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    return _neighbours(tensor, architecture.blocks[0].attention.num_kv_heads)


def _neighbours(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head with its two halves interleaved: llama.cpp turns neighbours, transformers f and F + f."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _grouped(tensor: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """All queries, then all keys, then all values; GPT-NeoX has them head by head."""
    num_heads = architecture.blocks[0].attention.num_heads
    return tensor.reshape(num_heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


_INTERLEAVED: Mapping[str, Order] = {"attn_q": _turned_queries, "attn_k": _turned_keys}
_LLAMA = Family("llama", _INTERLEAVED, has_rope_factors=True)
_GELU_TANH = frozenset({"gelu_tanh"})

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Family("qwen2", {}),
    "qwen3": Family("qwen3", {}),
    "gemma": Family("gemma", {}, _GELU_TANH, tied=True, offset=1),
    "gemma2": Family("gemma2", {}, _GELU_TANH, period=2, tied=True, offset=1, has_softcaps=True),
    "gemma3_text": Family("gemma3", {}, _GELU_TANH, period=6, offset=1),
    "gpt2": Family("gpt2", {}, _GELU_TANH),
    "phi3": Family("phi3", {}),
    "olmo2": Family("olmo2", {}, untied=True),
    "olmo3": Family("olmo2", {}, period=4, untied=True),
    "granite": Family("granite", _INTERLEAVED, has_rope_factors=True, has_scales=True),
    "smollm3": Family("smollm3", _INTERLEAVED, rope_period=4),
    "seed_oss": Family("seed_oss", {}),
    "starcoder2": Family("starcoder2", {}, _GELU),
    "gpt_neox": Family("gptneox", {"attn_qkv": _grouped}, _GELU, untied=True),
    "phi": Family("phi2", {}, _GELU, untied=True),
    "stablelm": Family("stablelm", {}, untied=True),
    "cohere": Family("command-r", {}, tied=True),
}
"""By transformers' `model_type`."""


def family_of(model_type: str, name: str) -> Family:
    """The family of a model; `name` is how the user calls it.

    Raises:
        ModelError: llama.cpp does not compute it, or nobody has tried that with a file of ours.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"{name} is of the family {model_type!r}, which is not written as GGUF; known are {', '.join(FAMILIES)}. "
            "Export it without --format, and try llama.cpp's own convert_hf_to_gguf.py"
        )
    return FAMILIES[model_type]


def check_family(family: Family, architecture: Architecture, *, is_tied: bool) -> None:
    """Refuse a model that llama.cpp would load and compute otherwise.

    Raises:
        ModelError: the message names the part.
    """
    blocks = architecture.blocks
    first = blocks[0].attention
    differing = [index for index, block in enumerate(blocks) if _shape(block) != _shape(blocks[0])]
    expected = _scale(family, architecture)
    checks = {
        f"layers of several shapes (0 and {(differing or [0])[0]})": differing,
        "experts": any(isinstance(block.mlp, Experts) for block in blocks),
        "attention sinks": any(block.attention.sinks_H is not None for block in blocks),
        f"attention scores times {first.scale:.6g} instead of {expected:.6g}": not family.has_scales
        and not math.isclose(first.scale, expected, rel_tol=1e-6),
        f"the activation {_activation(blocks[0])}": _activation(blocks[0]) not in family.activations,
        "capped attention scores": first.softcap is not None and not family.has_softcaps,
        "capped logits": architecture.final_softcap is not None and family.offset == 0,
        "an output layer of its own": family.tied and not is_tied,
        "multiples of embeddings or residuals": not family.has_scales
        and {architecture.embedding_scale, blocks[0].residual_scale} != {1.0},
        "multiples of logits": not (family.has_scales or family.arch == "command-r") and architecture.output_scale != 1,
        "layers without rotary positions": [block.rope is not None for block in blocks]
        != [_has_rope(family, index) for index in range(len(blocks))],
    }
    if found := [what for what, is_found in checks.items() if is_found]:
        raise ModelError(
            f"llama.cpp's {family.arch!r} has no place for {' and '.join(found)} of this model, so a GGUF file of it "
            "would say other things; export it without --format"
        )


def _shape(block: Block) -> tuple[object, ...]:
    attention = block.attention
    return attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale, attention.softcap


def _activation(block: Block) -> str:
    return block.mlp.activation


def _has_rope(family: Family, index: int) -> bool:
    if family.arch == "gpt2":
        return False
    return not family.rope_period or (index + 1) % family.rope_period != 0


def _scale(family: Family, architecture: Architecture) -> float:
    """The factor of attention scores in llama.cpp; of the 27 billion parameters of Gemma 2 and 3 it takes another."""
    attention, num_layers = architecture.blocks[0].attention, len(architecture.blocks)
    if (family.arch, num_layers) in (("gemma2", 46), ("gemma3", 62)):
        return (architecture.embedding.embedding_dim // attention.num_heads) ** -0.5  # type: ignore[operator]
    return attention.head_dim**-0.5


def add_header(writer: gguf.GGUFWriter, family: Family, architecture: Architecture, config: Any) -> None:
    """Add the values that llama.cpp computes with; `config` is transformers'."""
    block = architecture.blocks[0]
    attention = block.attention
    writer.add_block_count(len(architecture.blocks))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(block.mlp.down.weights[0].shape[1])
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_vocab_size(config.vocab_size)
    norm = architecture.final_norm
    if norm.kind == "rms" and family.arch != "command-r":  # whose norm is a LayerNorm of a class of its own
        writer.add_layer_norm_rms_eps(norm.epsilon)
    else:
        writer.add_layer_norm_eps(norm.epsilon)
    if family.arch in ("gptneox", "stablelm"):
        writer.add_parallel_residual(block.is_parallel)
    if family.has_scales:
        writer.add_attention_scale(attention.scale)
        writer.add_embedding_scale(architecture.embedding_scale)
        writer.add_residual_scale(block.residual_scale)
        writer.add_logit_scale(1 / architecture.output_scale)
    elif family.arch == "command-r":
        writer.add_logit_scale(architecture.output_scale)
    if attention.softcap is not None:
        writer.add_attn_logit_softcapping(attention.softcap)
    if architecture.final_softcap is not None:
        writer.add_final_logit_softcapping(architecture.final_softcap)
    writer.add_context_length(_add_windows(writer, family, architecture))
    if family.arch != "gpt2":
        _add_rope(writer, architecture, config)


def _add_windows(writer: gguf.GGUFWriter, family: Family, architecture: Architecture) -> int:
    """Add the sliding windows. Returns the context length: within the window, where llama.cpp knows none."""
    windows = [block.attention.window for block in architecture.blocks]
    widths = {window for window in windows if window is not None}
    context_length = architecture.context_length
    if not family.period or len(widths) > 1:
        if not widths or min(widths) >= context_length:
            return context_length
        _logger.warning(
            "llama.cpp's %r has no sliding windows: the context length in the file is the window, %d tokens, instead "
            "of %d",
            *(family.arch, min(widths), context_length),
        )
        return min(widths)
    if widths:
        writer.add_sliding_window(min(widths))
    pattern = [window is not None for window in windows]
    if pattern != [index % family.period < family.period - 1 for index in range(len(windows))]:
        writer.add_sliding_window_pattern(pattern)
    return context_length


def _add_rope(writer: gguf.GGUFWriter, architecture: Architecture, config: Any) -> None:
    by_kind = config.rope_parameters
    plain = by_kind.get("full_attention", by_kind)
    writer.add_rope_freq_base(plain["rope_theta"])
    if "sliding_attention" in by_kind:
        writer.add_rope_freq_base_swa(by_kind["sliding_attention"]["rope_theta"])
    share = plain.get("partial_rotary_factor", 1.0) or 1.0
    writer.add_rope_dimension_count(int(architecture.blocks[0].attention.head_dim * share))
    if plain["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(plain["factor"])


def rope_factors(family: Family, architecture: Architecture, config: Any) -> torch.Tensor | None:
    """The divisors of the frequencies of rotary positions in llama.cpp, `[head_dim / 2]`; None if it needs none.

    Raises:
        ModelError: positions of a kind that llama.cpp's architecture does not compute.
    """
    if family.arch == "gpt2":
        return None
    by_kind = config.rope_parameters
    plain = by_kind.get("full_attention", by_kind)
    kind = plain["rope_type"]
    if kind in ("default", "linear"):
        return None
    if kind != "llama3" or not family.has_rope_factors:
        raise ModelError(
            f"rotary positions of the kind {kind!r} are not written for llama.cpp's {family.arch!r}; export it without "
            "--format"
        )
    scaled_F, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    dim = architecture.blocks[0].attention.head_dim
    plain_F = plain["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain_F / scaled_F
