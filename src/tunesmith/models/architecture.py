"""Describes a transformers model as a decoder that `models/decoder.py` can compute; one reader per model family.

The records hold the model's own modules, never copies, so every user sees the trained weights.
Shape legend: H hidden, F half of the rotated dimensions of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    Gemma2ForCausalLM,
    Gemma2Model,
    Gemma3ForCausalLM,
    Gemma3TextModel,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.pytorch_utils import Conv1D

from tunesmith.core.errors import ModelError
from tunesmith.kernels.attention.records import AttentionSettings
from tunesmith.kernels.gated.api import Activation
from tunesmith.kernels.logprob.head import OutputLayer
from tunesmith.models.adapter import Adapter


class UnsupportedArchitecture(ModelError):
    """The model has a part that the flat decoder does not support; transformers' own code computes it."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm with weight `offset + weight` (Gemma's offset is 1), or LayerNorm with a bias."""

    kind: Literal["rms", "layer"]
    module: nn.Module
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear maps of one input. `sizes` are the output widths of the modules, or of the parts of a single module.

    `adapters` has one entry for each module, None without an adapter.
    """

    modules: tuple[nn.Module, ...]
    sizes: tuple[int, ...]
    adapters: tuple[Adapter | None, ...]


@dataclass(frozen=True, slots=True)
class RopeSource:
    """Angles are position * frequency_F; cosine and sine are multiplied by `scaling`."""

    frequency_F: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. `rope` is an index into `Architecture.ropes`; norms that a family lacks are None.

    `gate_up` has two outputs where the activation of the first gates the second, one where there is no gate.
    """

    norm_attention: Norm
    qkv: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    rope: int | None
    attention: AttentionSettings
    out: Projection
    norm_after_attention: Norm | None
    norm_mlp: Norm
    gate_up: Projection
    activation: Activation
    down: Projection
    norm_after_mlp: Norm | None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole decoder. `positions` is the table of learned positions, where a family has one; `output` is the output
    layer, None for a trunk alone, such as that of a reward model.
    """

    embedding: nn.Module
    positions: nn.Module | None
    blocks: tuple[Block, ...]
    ropes: tuple[RopeSource, ...]
    final_norm: Norm
    output: Projection | None
    final_softcap: float | None
    context_length: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.final_norm.module.weight.dtype  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.final_norm.module.weight.device  # type: ignore[return-value]

    @property
    def head(self) -> Projection:
        """The output layer. Raises ModelError for a trunk, which has none."""
        if self.output is None:
            raise ModelError("the model has no output layer; give a causal language model")
        return self.output

    @property
    def output_layer(self) -> OutputLayer:
        """The weights that turn hidden states into logits; the model's own."""
        (module,) = self.head.modules
        return OutputLayer(weight_of(module), module.bias, self.final_softcap)  # type: ignore[arg-type]


def describe(model: PreTrainedModel) -> Architecture:
    """The architecture of `model`, a causal language model or its trunk.

    Raises:
        UnsupportedArchitecture: the message names the unsupported part.
    """
    read = next((read for *classes, read in _FAMILIES if type(model) in classes), None)
    if read is None:
        families = ", ".join(sorted(family.__name__ for family, _, _ in _FAMILIES))
        raise UnsupportedArchitecture(f"{type(model).__name__} is none of {families}, nor the trunk of one")
    trunk: PreTrainedModel = model.base_model  # type: ignore[assignment]
    if any(part._forward_hooks or part._forward_pre_hooks for part in (model, trunk)):  # type: ignore[reportPrivateUsage]
        raise UnsupportedArchitecture("the model has forward hooks, which only its own forward would call")
    output = None if model is trunk else _output_layer(model.lm_head)  # type: ignore[arg-type]
    architecture = read(trunk, output)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 and not torch.is_autocast_enabled("cpu"):  # which makes one of them
        raise UnsupportedArchitecture(f"its weights have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return architecture


def _llama_like(trunk: Any, output: Projection | None) -> Architecture:
    """Llama, Mistral, Qwen2 (biases), Qwen3 (norms of queries and keys)."""
    config = trunk.config
    # Mistral's window is in its config, that of other families in the layer.
    window = config.sliding_window if config.model_type == "mistral" else None
    blocks = [
        _gated_block(
            layer,
            config,
            rope=0,
            activation=config.hidden_act,
            window=getattr(layer.self_attn, "sliding_window", window),
        )
        for layer in trunk.layers
    ]
    ropes = (_rope(trunk.rotary_emb, ""),)
    context_length = config.max_position_embeddings
    return Architecture(trunk.embed_tokens, None, tuple(blocks), ropes, _rms(trunk.norm), output, None, context_length)


def _gemma(trunk: Any, output: Projection | None) -> Architecture:
    """Gemma 2 and 3: norms before and after each part, alternating windows, capped logits."""
    config = trunk.config
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedArchitecture("its attention is not causal")
    layers: list[Any] = list(trunk.layers)
    # Gemma 3 turns by other angles in layers with a window.
    kinds = sorted(set(config.layer_types)) if isinstance(trunk, Gemma3TextModel) else [""]
    ropes = tuple(_rope(trunk.rotary_emb, f"{kind}_" if kind else "") for kind in kinds)
    blocks = [
        replace(
            _gated_block(
                layer,
                config,
                rope=0 if kinds == [""] else kinds.index(layer.self_attn.layer_type),
                activation=config.hidden_activation,
                window=layer.self_attn.sliding_window,
                softcap=layer.self_attn.attn_logit_softcapping,
                offset=1.0,
            ),
            norm_after_attention=_rms(layer.post_attention_layernorm, 1.0),
            norm_mlp=_rms(layer.pre_feedforward_layernorm, 1.0),
            norm_after_mlp=_rms(layer.post_feedforward_layernorm, 1.0),
        )
        for layer in layers
    ]
    norm, cap, context_length = _rms(trunk.norm, 1.0), config.final_logit_softcapping, config.max_position_embeddings
    return Architecture(trunk.embed_tokens, None, tuple(blocks), ropes, norm, output, cap, context_length)


def _gated_block(
    layer: Any,
    config: Any,
    *,
    rope: int,
    activation: str,
    window: int | None,
    softcap: float | None = None,
    offset: float = 0.0,
) -> Block:
    """A layer with RMSNorms and a gated MLP; `offset` is of the norms."""
    attention, mlp = layer.self_attn, layer.mlp
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    return Block(
        norm_attention=_rms(layer.input_layernorm, offset),
        qkv=_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_rms(attention.q_norm, offset) if hasattr(attention, "q_norm") else None,
        k_norm=_rms(attention.k_norm, offset) if hasattr(attention, "k_norm") else None,
        rope=rope,
        attention=_attention(attention, num_heads, num_kv_heads, window, softcap=softcap),
        out=_linear(attention.o_proj),
        norm_after_attention=None,
        norm_mlp=_rms(layer.post_attention_layernorm, offset),
        gate_up=_linear(mlp.gate_proj, mlp.up_proj),
        activation=_activation(activation),
        down=_linear(mlp.down_proj),
        norm_after_mlp=None,
    )


def _gpt2(trunk: Any, output: Projection | None) -> Architecture:
    config = trunk.config
    if config.add_cross_attention:
        raise UnsupportedArchitecture("it attends to an encoder")
    blocks = tuple(_gpt2_block(layer, config) for layer in trunk.h)
    norm, context_length = _layer_norm(trunk.ln_f), config.max_position_embeddings
    return Architecture(trunk.wte, trunk.wpe, blocks, (), norm, output, None, context_length)


def _gpt2_block(layer: Any, config: Any) -> Block:
    width = config.n_embd
    return Block(
        norm_attention=_layer_norm(layer.ln_1),
        qkv=_linear(layer.attn.c_attn, sizes=(width, width, width)),
        q_norm=None,
        k_norm=None,
        rope=None,
        attention=_attention(layer.attn, config.n_head, config.n_head, None),
        out=_linear(layer.attn.c_proj),
        norm_after_attention=None,
        norm_mlp=_layer_norm(layer.ln_2),
        gate_up=_linear(layer.mlp.c_fc),
        activation=_activation(config.activation_function),
        down=_linear(layer.mlp.c_proj),
        norm_after_mlp=None,
    )


def _attention(
    module: Any, num_heads: int, num_kv_heads: int, window: int | None, *, softcap: float | None = None
) -> AttentionSettings:
    return AttentionSettings(num_heads, num_kv_heads, module.head_dim, module.scaling, window=window, softcap=softcap)


def _rms(module: Any, offset: float = 0.0) -> Norm:
    epsilon = getattr(module, "variance_epsilon", None)
    return Norm("rms", module, module.eps if epsilon is None else epsilon, offset)


def _layer_norm(module: Any) -> Norm:
    return Norm("layer", module, module.eps)


def _linear(*modules: nn.Module, sizes: tuple[int, ...] | None = None) -> Projection:
    bases = tuple(base_layer(module) for module in modules)
    for base in bases:
        if type(base) not in (nn.Linear, Conv1D):  # a quantised weight, or an adapter of another kind
            raise UnsupportedArchitecture(f"a linear layer is a {type(base).__name__}")
    adapters = tuple(adapter_of(module) for module in modules)
    return Projection(bases, sizes or tuple(output_size(base) for base in bases), adapters)


def _output_layer(module: nn.Module) -> Projection:
    if is_adapted(module):  # its weight is read directly, and may be tied to the embedding
        raise UnsupportedArchitecture("its output layer has an adapter")
    return _linear(module)


def base_layer(module: nn.Module) -> nn.Module:
    """The linear map under a PEFT adapter; `module` itself without one."""
    return module.base_layer if is_adapted(module) else module  # type: ignore[return-value]


def is_adapted(module: nn.Module) -> bool:
    """True if PEFT added a LoRA adapter to this layer."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapter_of(module: Any) -> Adapter | None:
    """The active adapter of a PEFT layer; None in other layers, and if it is disabled.

    Raises:
        UnsupportedArchitecture: several adapters, one that was merged, or one of a kind that is neither LoRA nor DoRA.
    """
    if not is_adapted(module) or module.disable_adapters:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names and not module.merged:
        return None
    magnitudes = getattr(module, "lora_magnitude_vector", {})
    is_plain = len(names) == 1 and not module.merged and module.lora_A[names[0]].weight.dim() == 2
    if (
        not is_plain
        or module.lora_B[names[0]].bias is not None
        or (names[0] in module.lora_variant) != bool(magnitudes)
    ):
        raise UnsupportedArchitecture("it has several adapters, a merged one, or one that is neither LoRA nor DoRA")
    name = names[0]
    magnitude = magnitudes[name].weight if magnitudes else None
    dropout = module.lora_dropout[name]
    return Adapter(
        module.lora_A[name].weight,
        module.lora_B[name].weight,
        float(module.scaling[name]),
        magnitude,
        None if isinstance(dropout, nn.Identity) else dropout,
    )


def output_size(module: nn.Module) -> int:
    """Output width of a linear map; GPT-2's `Conv1D` has a transposed weight."""
    return module.weight.shape[1] if isinstance(module, Conv1D) else module.weight.shape[0]  # type: ignore[index]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight as `[out, in]`, a view of the module's own."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def _rope(module: Any, prefix: str) -> RopeSource:
    kinds = module.rope_type
    kind = kinds[prefix.removesuffix("_")] if isinstance(kinds, dict) else kinds
    if kind in ("dynamic", "longrope"):
        raise UnsupportedArchitecture(f"its rotary positions are {kind!r}, whose angles depend on the length")
    return RopeSource(getattr(module, f"{prefix}inv_freq"), float(getattr(module, f"{prefix}attention_scaling")))


def _activation(name: str) -> Activation:
    known: dict[str, Activation] = {"silu": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise UnsupportedArchitecture(f"its activation is {name!r}; known are {', '.join(known)}")
    return known[name]


_FAMILIES: tuple[tuple[type[PreTrainedModel], type[PreTrainedModel], Callable[..., Architecture]], ...] = (
    (LlamaForCausalLM, LlamaModel, _llama_like),
    (MistralForCausalLM, MistralModel, _llama_like),
    (Qwen2ForCausalLM, Qwen2Model, _llama_like),
    (Qwen3ForCausalLM, Qwen3Model, _llama_like),
    (GPT2LMHeadModel, GPT2Model, _gpt2),
    (Gemma2ForCausalLM, Gemma2Model, _gemma),
    (Gemma3ForCausalLM, Gemma3TextModel, _gemma),
)
"""Causal language model, its trunk, and what reads the trunk."""
