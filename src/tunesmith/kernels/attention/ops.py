"""`torch.ops.tunesmith.attend`: attention in Triton as an operator that torch.compile and CUDA graphs know.

Triton is imported by the first call, not here. An operator takes no records, so those of `records` come in parts.

Shape legend: T tokens, X = query heads * head width, N blocks, W numbers of a block.
"""

from collections.abc import Sequence

import torch

from tunesmith.kernels.attention.records import AttentionSettings, Places, Rope, SharedPrefixes


@torch.library.custom_op("tunesmith::attend", mutates_args=("cache_2NW",))
def attend(
    qkv: Sequence[torch.Tensor],
    rope: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    cache_2NW: torch.Tensor,
    prefixes: Sequence[torch.Tensor],
    heads: Sequence[int],
    scores: Sequence[float],
) -> torch.Tensor:
    """The result of `torch_impl.attend`, [T, X]; no `rope` or `prefixes` are empty lists. No gradient.

    `heads` are the numbers of query heads and key/value heads, the head width and the window; `scores` are scale and
    soft-cap; 0 is no window and no cap.
    """
    from tunesmith.kernels.attention.triton_impl import forward

    num_heads, num_kv_heads, head_dim, window = heads
    scale, softcap = scores
    settings = AttentionSettings(num_heads, num_kv_heads, head_dim, scale, window or None, softcap or None)
    q_TX, k_TY, v_TY = qkv
    shared = SharedPrefixes(*prefixes) if prefixes else None
    return forward((q_TX, k_TY, v_TY), Rope(*rope) if rope else None, Places(*places), cache_2NW, shared, settings)


@attend.register_fake
def _(qkv: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
    return torch.empty(qkv[0].shape, dtype=qkv[0].dtype, device=qkv[0].device)
