"""The definition of scale, mask and softmax, in torch: slow, plain, and what the kernels are tested against.

    p_j = exp(scale x_j - m) / sum_k exp(scale x_k - m) over the keys k that the query sees, m the largest scale x_k
    p_j = 0 for a key that it does not see, and for every key where it sees none

Shape legend: B sequences, H heads, Q queries, K keys.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeyMask:
    """Mask rules: a query attends to the keys that pass every given rule, without any to all.

    Query i is at position `offset + i` and key j at j. By default the last query is at the last key, as when
    queries go on from a cache.

    - `causal`: no key after the query.
    - `window`: of the keys up to the query's own, the last so many.
    - `keys_B2`: int64 `[B, 2]`, the first key of each sequence and the one after its last; others are padding.
    - `allowed_BQK`: boolean `[B or 1, Q or 1, K]`, for whatever indices cannot say.
    """

    causal: bool = True
    window: int | None = None
    offset: int | None = None
    keys_B2: torch.Tensor | None = None
    allowed_BQK: torch.Tensor | None = None


def visible(shape: torch.Size, mask: KeyMask, device: torch.device) -> torch.Tensor:
    """Mask of the keys that each query attends to, boolean `[B or 1, 1, Q or 1, K]`, for scores [B, H, Q, K]."""
    num_queries, num_keys = shape[2:]
    offset = num_keys - num_queries if mask.offset is None else mask.offset
    query_Q1 = offset + torch.arange(num_queries, device=device)[:, None]
    key_K = torch.arange(num_keys, device=device)
    seen = torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=device)
    if mask.causal:
        seen = seen & (key_K <= query_Q1)
    if mask.window is not None:
        seen = seen & (key_K > query_Q1 - mask.window)
    if mask.keys_B2 is not None:
        first_B1, end_B1 = mask.keys_B2.unsqueeze(-1).unbind(1)
        seen = seen & ((key_K >= first_B1) & (key_K < end_B1))[:, None, None]
    if mask.allowed_BQK is not None:
        seen = seen & mask.allowed_BQK[:, None]
    return seen


def masked_softmax(scores_BHQK: torch.Tensor, scale: float, mask: KeyMask) -> torch.Tensor:
    """Probabilities `[B, H, Q, K]` in the dtype of the scores, from float32, or float64 for float64.

    A row in which a visible score is NaN or +inf is NaN where it is visible; -inf is a weight of 0, and a row with no
    other is 0.
    """
    wide = torch.float64 if scores_BHQK.dtype == torch.float64 else torch.float32
    seen = visible(scores_BHQK.shape, mask, scores_BHQK.device)
    scaled_BHQK = (scores_BHQK.to(wide) * scale).masked_fill(~seen, -torch.inf)
    if not scaled_BHQK.numel():
        return scores_BHQK.clone()
    largest_BHQ1 = scaled_BHQK.detach().amax(-1, keepdim=True)
    largest_BHQ1 = largest_BHQ1.masked_fill(largest_BHQ1 == -torch.inf, 0.0)
    weight_BHQK = torch.exp(scaled_BHQK - largest_BHQ1)
    total_BHQ1 = weight_BHQK.sum(-1, keepdim=True)
    probability_BHQK = weight_BHQK / total_BHQ1.masked_fill(total_BHQ1 == 0, 1.0)
    return probability_BHQK.masked_fill(~seen, 0.0).to(scores_BHQK.dtype)


def scores_gradient(probability_BHQK: torch.Tensor, d_probability_BHQK: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the scores, in their dtype: scale p_j (dp_j - sum_k p_k dp_k), summed in float32 (or float64)."""
    wide = torch.float64 if probability_BHQK.dtype == torch.float64 else torch.float32
    p_BHQK, d_BHQK = probability_BHQK.to(wide), d_probability_BHQK.to(wide)
    mean_BHQ1 = (p_BHQK * d_BHQK).sum(-1, keepdim=True)
    return (scale * p_BHQK * (d_BHQK - mean_BHQ1)).to(probability_BHQK.dtype)
