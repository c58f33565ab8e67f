"""Reads a transformers model as an `Architecture`, by the names and kinds of its parts, not by its class.

Transformers names parts alike in all families. What a name does not say, a module's own output or the config does. A
parameter that no part accounts for is an error, and `engine/models/decoder.py` compares the logits of every model that
was read with transformers' own.

Shape legend: H hidden.
"""

from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.engine.kernels.attention.records import AttentionSettings
from tunesmith.engine.kernels.gated.api import Activation
from tunesmith.engine.models.architecture import (
    Architecture,
    Block,
    Experts,
    Mlp,
    Norm,
    Projection,
    RopeSource,
    Stack,
    UnsupportedArchitecture,
    adapter_of,
    base_layer,
    is_adapted,
    output_size,
)
from tunesmith.engine.models.int8_base import Int8Linear, int8_tensors

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_MOST_DIFFERENCE = 0.02
"""Of a norm's output from its formula, as a share of the largest number; bfloat16 rounds by a fifth of it."""


def describe(model: PreTrainedModel) -> Architecture:
    """The architecture of `model`, a causal language model or its trunk.

    Raises:
        UnsupportedArchitecture: the message names the unsupported part.
    """
    trunk: PreTrainedModel = model.base_model  # type: ignore[assignment]
    if any(part._forward_hooks or part._forward_pre_hooks for part in (model, trunk)):  # type: ignore[reportPrivateUsage]
        raise UnsupportedArchitecture("the model has forward hooks, which only its own forward would call")
    _refuse_by_config(trunk.config)
    try:
        architecture = _read(trunk, None if model is trunk else _output_layer(model.get_output_embeddings()))
    except (AttributeError, ValueError) as error:  # a part with a known name and another make
        raise UnsupportedArchitecture(str(error)) from error
    _require_all_read(trunk, architecture)
    rounded = int8_tensors(model)
    dtypes = {parameter.dtype for parameter in model.parameters() if id(parameter) not in rounded}
    if len(dtypes) != 1 and not torch.is_autocast_enabled("cpu"):  # which makes one of them
        raise UnsupportedArchitecture(f"its weights have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return architecture


def _refuse_by_config(config: Any) -> None:
    """Refuse settings that leave no parameter, and may not show in the logits of a few tokens."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedArchitecture("it attends to an encoder")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedArchitecture("its attention is not causal")
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedArchitecture("it clips queries, keys and values")


def _read(trunk: Any, output: Projection | None) -> Architecture:
    config = trunk.config
    layers = list(cast(nn.ModuleList, _part(trunk, "layers", "h")))
    kinds, ropes = _ropes(trunk)
    logits_scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1)
    return Architecture(
        embedding=_part(trunk, "embed_tokens", "wte", "embed_in"),
        positions=_optional(trunk, "wpe"),
        blocks=tuple(_block(layer, config, kinds, index) for index, layer in enumerate(layers)),
        ropes=ropes,
        final_norm=_norm(_part(trunk, "norm", "ln_f", "final_layer_norm", "final_layernorm")),
        output=output,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        context_length=config.max_position_embeddings,
        embedding_scale=float(getattr(trunk, "embedding_multiplier", 1)),
        output_scale=1.0 if output is None else float(logits_scale),
    )


def _block(layer: Any, config: Any, kinds: list[str], index: int) -> Block:
    attention = _part(layer, "self_attn", "attention", "attn")
    mlp, (settings, qkv) = _part(layer, "mlp"), _attention(attention, config, index)
    norms = [None if module is None else _norm(module) for module in _norm_places(layer)]
    uses_rope = bool(kinds) and bool(getattr(attention, "use_rope", True))
    kind = (kinds or [""])[0] if len(kinds) < 2 else getattr(attention, "layer_type", None) or config.layer_types[index]
    return Block(
        norm_attention=norms[0],
        qkv=qkv,
        q_norm=_optional_norm(attention, "q_norm", "q_layernorm"),
        k_norm=_optional_norm(attention, "k_norm", "k_layernorm"),
        rope=kinds.index(kind) if uses_rope else None,
        attention=settings,
        out=_linear(_part(attention, "o_proj", "dense", "c_proj")),
        norm_after_attention=norms[1],
        norm_mlp=norms[2],
        mlp=_experts(mlp, config) if hasattr(mlp, "experts") else _mlp(mlp, config),
        norm_after_mlp=norms[3],
        is_parallel=getattr(layer, "use_parallel_residual", norms[2] is None and norms[3] is None),
        residual_scale=float(getattr(layer, "residual_multiplier", 1)),
    )


def _norm_places(layer: nn.Module) -> tuple[nn.Module | None, ...]:
    """The norms before and after attention, and before and after the MLP.

    `post_attention_layernorm` is the last but one where the MLP has no other before it.
    """
    first, second = _optional(layer, "input_layernorm", "ln_1"), _optional(layer, "post_attention_layernorm", "ln_2")
    before_mlp = _optional(layer, "pre_feedforward_layernorm")
    after_mlp = _optional(layer, "post_feedforward_layernorm")
    if before_mlp is not None or (first is None and after_mlp is not None):  # Gemma 2, and OLMo 2
        return first, second, before_mlp, after_mlp
    return first, _optional(layer, "post_self_attn_layernorm"), second, _optional(layer, "post_mlp_layernorm")


def _attention(module: Any, config: Any, index: int) -> tuple[AttentionSettings, Projection]:
    """The settings of an attention layer, and the projection to queries, keys and values."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // num_heads
    width, key_width = num_heads * head_dim, num_kv_heads * head_dim
    if hasattr(module, "q_proj"):
        qkv = _linear(module.q_proj, module.k_proj, module.v_proj)
        width, key_width, _ = qkv.sizes
    elif hasattr(module, "query_key_value"):
        qkv, key_width = _linear(module.query_key_value), width  # of GPT-NeoX, whatever else its config names
    else:
        qkv = _linear(_part(module, "qkv_proj", "c_attn"), sizes=(width, key_width, key_width))
    softcap = getattr(module, "attn_logit_softcapping", None)
    num_heads, num_kv_heads = width // head_dim, key_width // head_dim
    window, sinks_H = _window(module, config, index), getattr(module, "sinks", None)
    return AttentionSettings(num_heads, num_kv_heads, head_dim, module.scaling, window, softcap, sinks_H), qkv


def _window(module: Any, config: Any, index: int) -> int | None:
    """Of an attention layer: its own, or the config's, which may be for some layers alone."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise UnsupportedArchitecture(f"layer {index} is of the kind {kind!r}")
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    if kind == "full_attention" or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def _mlp(module: Any, config: Any) -> Mlp:
    if hasattr(module, "gate_proj"):
        gate_up = _linear(module.gate_proj, module.up_proj)
    elif hasattr(module, "gate_up_proj"):
        size = output_size(base_layer(module.gate_up_proj))
        gate_up = _linear(module.gate_up_proj, sizes=(size // 2, size - size // 2))
    else:
        gate_up = _linear(_part(module, "c_fc", "fc1", "dense_h_to_4h"))
    down = _linear(_part(module, "down_proj", "c_proj", "fc2", "dense_4h_to_h"))
    return Mlp(gate_up, _activation(config), down)


def _experts(module: Any, config: Any) -> Experts:
    router, experts = _part(module, "gate", "router"), module.experts
    if not isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter) or not hasattr(router, "top_k"):
        raise UnsupportedArchitecture(f"its experts are a {type(experts).__name__}")
    is_transposed = bool(getattr(experts, "is_transposed", False))
    return Experts(
        router=_linear(_as_linear(router)),
        num_chosen=router.top_k,
        normalises=bool(getattr(router, "norm_topk_prob", True)),
        gate_up=Stack(experts, "gate_up_proj", is_transposed),
        is_interleaved=not getattr(experts, "is_concatenated", True),
        activation=_activation(config),
        limit=getattr(experts, "limit", None),
        alpha=float(getattr(experts, "alpha", 1)),
        down=Stack(experts, "down_proj", is_transposed),
    )


def _as_linear(router: Any) -> nn.Linear:
    """A linear map with the router's own parameters; its forward does more than that."""
    num_outputs, num_inputs = router.weight.shape
    made = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    made.weight, made.bias = router.weight, getattr(router, "bias", None)  # type: ignore[assignment]
    return made


def _activation(config: Any) -> Activation:
    keys = ("hidden_activation", "hidden_act", "activation_function")
    name = next((name for key in keys if (name := getattr(config, key, None)) is not None), None)
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitecture(f"its activation is {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _ropes(trunk: Any) -> tuple[list[str], tuple[RopeSource, ...]]:
    """The kinds of layers that have rotary positions of their own (Gemma 3), else one without a name, and their
    angles; both are empty for a model without rotary positions.
    """
    module = _optional(trunk, "rotary_emb")
    if module is None:
        return [], ()
    kinds = sorted(module.rope_type) if isinstance(module.rope_type, dict) else [""]  # type: ignore[arg-type]
    return kinds, tuple(_rope(module, f"{kind}_" if kind else "") for kind in kinds)


def _rope(module: Any, prefix: str) -> RopeSource:
    kinds = module.rope_type
    kind = kinds[prefix.removesuffix("_")] if isinstance(kinds, dict) else kinds
    if kind in ("dynamic", "longrope"):
        raise UnsupportedArchitecture(f"its rotary positions are {kind!r}, whose angles depend on the length")
    return RopeSource(getattr(module, f"{prefix}inv_freq"), float(getattr(module, f"{prefix}attention_scaling")))


def _optional_norm(owner: nn.Module, *names: str) -> Norm | None:
    module = _optional(owner, *names)
    return None if module is None else _norm(module)


@torch.no_grad()
def _norm(module: Any) -> Norm:
    """LayerNorm, or what its output says that it is: the class does not tell."""
    if isinstance(module, nn.LayerNorm):
        if module.weight is None:
            raise UnsupportedArchitecture("a LayerNorm has no weight")
        return Norm("layer", module, module.eps)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight_H = getattr(module, "weight", None)
    if epsilon is None or not isinstance(weight_H, nn.Parameter) or weight_H.dim() != 1:
        raise UnsupportedArchitecture(f"a norm is a {type(module).__name__}")
    if weight_H.device.type == "meta":  # nothing can be computed there, and nothing will be
        return Norm("rms", module, float(epsilon))
    x_H = torch.linspace(-1, 2, len(weight_H), device=weight_H.device).to(weight_H.dtype)
    output_H, wide_H = module.forward(x_H).float(), x_H.float()
    rms_H = wide_H * torch.rsqrt(wide_H.square().mean() + epsilon)
    layer_H = nn.functional.layer_norm(wide_H, wide_H.shape, eps=epsilon)
    forms: tuple[tuple[Literal["rms", "layer"], float, torch.Tensor], ...]
    forms = (("rms", 0.0, rms_H), ("rms", 1.0, rms_H), ("layer", 0.0, layer_H))
    errors = [float((output_H - normed_H * (offset + weight_H.float())).abs().max()) for _, offset, normed_H in forms]
    kind, offset, _ = forms[errors.index(min(errors))]
    if not min(errors) <= _MOST_DIFFERENCE * float(output_H.abs().max()):
        raise UnsupportedArchitecture(f"a norm is a {type(module).__name__}, which is neither RMSNorm nor LayerNorm")
    return Norm(kind, module, float(epsilon), offset)


def _linear(*modules: nn.Module, sizes: tuple[int, ...] | None = None) -> Projection:
    bases = tuple(base_layer(module) for module in modules)
    for base in bases:
        if type(base) not in (nn.Linear, Conv1D, Int8Linear):  # a quantised weight, or an adapter of another kind
            raise UnsupportedArchitecture(f"a linear layer is a {type(base).__name__}")
        if not isinstance(base, Int8Linear) and "weight" not in base._parameters:  # `torch.nn.utils.weight_norm`
            raise UnsupportedArchitecture("the weight of a linear layer is computed by a hook")
    adapters = tuple(adapter_of(module) for module in modules)
    return Projection(bases, sizes or tuple(output_size(base) for base in bases), adapters)


def _output_layer(module: nn.Module | None) -> Projection:
    if module is None:
        raise UnsupportedArchitecture("it has no output layer")
    if is_adapted(module):  # its weight is read directly, and may be tied to the embedding
        raise UnsupportedArchitecture("its output layer has an adapter")
    return _linear(module)


def _part(owner: nn.Module, *names: str) -> Any:
    """The first of the parts that `owner` has. Raises UnsupportedArchitecture if it has none of them."""
    part = _optional(owner, *names)
    if part is None:
        raise UnsupportedArchitecture(f"{type(owner).__name__} has no part named {' or '.join(names)}")
    return part


def _optional(owner: nn.Module, *names: str) -> nn.Module | None:
    return next((part for name in names if (part := getattr(owner, name, None)) is not None), None)


def _require_all_read(trunk: nn.Module, architecture: Architecture) -> None:
    """Refuse a model with a parameter that is none of the architecture's."""
    blocks = architecture.blocks
    modules = {architecture.embedding, architecture.positions, architecture.final_norm.module}
    read = {id(block.attention.sinks_H) for block in blocks}
    for block in blocks:
        read.update(id(parameter) for projection in block.projections for parameter in projection.parameters)
        norms = (block.norm_attention, block.norm_after_attention, block.norm_mlp, block.norm_after_mlp)
        modules.update(norm.module for norm in (*norms, block.q_norm, block.k_norm) if norm is not None)
    read.update(id(parameter) for module in modules if module is not None for parameter in module.parameters())
    unread = [name for name, one in trunk.named_parameters() if id(one) not in read and ".lora_" not in name]
    if unread:
        raise UnsupportedArchitecture(f"its part {unread[0].removesuffix('.weight')} is not known")
