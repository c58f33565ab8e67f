"""Attention with Tunesmith's kernels, selected by name in any transformers model.

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tunesmith")

It computes the same as "eager", but keys and values are not copied for each query head, there is no float mask of the
size of the scores, and the softmax (`engine/kernels/masked_softmax`) is one pass instead of four. Causal order and
padding are derived from indices; any other mask has one byte for each query and key.

Shape legend: B sequences, H query heads, G query heads of a key/value head, Q queries, K keys, D numbers of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.kernels.masked_softmax.api import masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels

ATTENTION_NAME = "tunesmith"
"""The value of `attn_implementation`."""

_UNKNOWN = ("position_bias", "s_aux", "cache")
"""Arguments of some models that would change the result and are not supported here."""


def register_attention(kernels: Kernels | None = None) -> None:
    """Register `attn_implementation="tunesmith"` for all models of this process. A later call replaces an earlier one.

    `kernels` chooses the kernel of the softmax, by default `Kernels("auto")`.
    """
    used = kernels or Kernels()

    def attention(*inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_forward(*inputs, kernels=used, **options)

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_of_layers)


def attention_forward(
    module: torch.nn.Module,
    query_BHQD: torch.Tensor,
    key_BHKD: torch.Tensor,
    value_BHKD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kernels: Kernels,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [B, Q, H, D], probabilities [B, H, Q, K]), the signature of transformers' attention interface.

    `attention_mask` comes from `mask_of_layers`: None for causal order (or no mask, if the module is not causal); bool
    `[B, 1, 1, K]` for padding in addition; bool `[B, 1, Q, K]` for a full mask. A caller's float mask is added to the
    scores.

    Raises:
        ModelError: the model passes an argument that changes the result and is not supported.
    """
    unknown = [name for name in _UNKNOWN if options.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which {ATTENTION_NAME!r} does not "
            "know; choose attn_implementation='eager'"
        )
    batch, num_heads, num_queries, width = query_BHQD.shape
    num_groups, num_keys = key_BHKD.shape[1:3]
    scale = width**-0.5 if options.get("scaling") is None else float(options["scaling"])
    # The query heads that share keys and values are rows of one product.
    folded = query_BHQD.reshape(batch, num_groups, -1, width)
    scores_BHQK = (folded @ key_BHKD.transpose(2, 3)).view(batch, num_heads, num_queries, num_keys)
    if options.get("softcap") is not None:
        cap = float(options["softcap"])
        scores_BHQK, scale = cap * torch.tanh(scores_BHQK * (scale / cap)), 1.0
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1):
        scores_BHQK, scale, mask = _masked(scores_BHQK * scale, attention_mask), 1.0, KeyMask(causal=False)
    else:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        mask = _key_mask(attention_mask, num_queries, causal=bool(causal))
    probability_BHQK = masked_softmax(scores_BHQK, scale=scale, mask=mask, kernels=kernels)
    dropped_BHQK = torch.dropout(probability_BHQK, options.get("dropout", 0.0), module.training)
    out = dropped_BHQK.view(batch, num_groups, -1, num_keys) @ value_BHKD
    return out.view(batch, num_heads, num_queries, -1).transpose(1, 2).contiguous(), probability_BHQK


def mask_of_layers(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The smallest mask that `attention_forward` needs; transformers passes it to each layer.

    None for causal order with the last query at the last key; with padding, one boolean per key. For all else (sliding
    windows, packed rows, bidirectional images, static caches) the mask of "sdpa".
    """
    num_known = kv_length + kv_offset
    is_plain = mask_function is causal_mask_function and isinstance(q_offset, int) and q_offset + q_length == num_known
    if is_plain and attention_mask is None:
        return None
    if is_plain and attention_mask is not None and attention_mask.shape[-1] >= num_known:
        return attention_mask[:, None, None, kv_offset:num_known].bool()
    options["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )


def _masked(scores_BHQK: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Scores with a mask of floats added, or with -inf where one of booleans for each head forbids."""
    if attention_mask.dtype == torch.bool:
        return scores_BHQK.masked_fill(~attention_mask, -torch.inf)
    return scores_BHQK + attention_mask


def _key_mask(attention_mask: torch.Tensor | None, num_queries: int, *, causal: bool) -> KeyMask:
    if attention_mask is None:
        return KeyMask(causal=causal)
    # One query sees the same with and without causal order.
    return KeyMask(causal=causal and attention_mask.shape[2] < num_queries, allowed_BQK=attention_mask[:, 0])
