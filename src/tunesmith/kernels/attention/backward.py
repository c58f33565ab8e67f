"""Gradients of packed attention from queries, keys and values alone, in chunks of sequences.

Sequences are padded to the longest of their chunk, and the query heads of a key/value head stand below each other as
rows of one matrix, so that all products are batched matmuls.

Shape legend: T tokens, X = query heads * D, Y = key/value heads * D, B sequences of a chunk, L longest of them,
C tokens with copies, K key/value heads, G query heads of a key/value head, D head width, M = B * K matrices,
R = G * L rows of a matrix.
"""

from collections.abc import Iterator

import torch

from tunesmith.kernels.arguments import without_autocast
from tunesmith.kernels.attention import torch_impl
from tunesmith.kernels.attention.packing import ALONE, Segments
from tunesmith.kernels.attention.records import AttentionSettings, Rope

_CHUNK_BYTES = 64 * 2**20
_SCORE_BYTES = 16  # of one score in all of its copies at once


def gradients(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    grad_TX: torch.Tensor,
    rope: Rope | None,
    segments: Segments,
    settings: AttentionSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of the output. Scores, softmax and its backward are in float32.

    Sequences that share another are taken with a copy of it each; what the copies get is summed.
    """
    if all(parent == ALONE for parent in segments.parents):
        return _of_sequences(q_TX, k_TY, v_TY, grad_TX, rope, segments.lengths, settings)
    index_C = torch.cat(segments.token_indices()).to(q_TX.device)
    lengths = tuple(len(tokens) for tokens in segments.token_indices())
    # What a parent's own tokens give is counted with the parent.
    is_own_C = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, segments.prefixes, strict=True)])
    is_own_C1 = is_own_C.to(q_TX.device)[:, None]
    results = _of_sequences(
        q_TX[index_C], k_TY[index_C], v_TY[index_C], grad_TX[index_C] * is_own_C1, rope, lengths, settings
    )
    summed: list[torch.Tensor] = []
    for whole, part in zip((q_TX, k_TY, v_TY), results, strict=True):
        wide = part if part.dtype == torch.float64 else part.float()
        sums = torch.zeros(whole.shape, dtype=wide.dtype, device=whole.device)
        summed.append(sums.index_add_(0, index_C, wide).to(whole.dtype))
    return summed[0], summed[1], summed[2]


def _of_sequences(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    grad_TX: torch.Tensor,
    rope: Rope | None,
    lengths: tuple[int, ...],
    settings: AttentionSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq_TX, dk_TY, dv_TY = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q_TX, k_TY, v_TY)
    )
    start = 0
    for chunk in _chunks(lengths, settings):
        here = slice(start, start + sum(chunk))
        start = here.stop
        results = _of_chunk(q_TX[here], k_TY[here], v_TY[here], grad_TX[here], rope, chunk, settings)
        for whole, part in zip((dq_TX, dk_TY, dv_TY), results, strict=True):
            whole[here] = part
    return dq_TX, dk_TY, dv_TY


def _chunks(lengths: tuple[int, ...], settings: AttentionSettings) -> Iterator[tuple[int, ...]]:
    """Runs of sequences whose padded scores stay within the bound; a single sequence always goes."""
    chunk: list[int] = []
    for length in lengths:
        longest = max([*chunk, length])
        if chunk and (len(chunk) + 1) * longest**2 * settings.num_heads * _SCORE_BYTES > _CHUNK_BYTES:
            yield tuple(chunk)
            chunk = []
        chunk.append(length)
    if chunk:
        yield tuple(chunk)


def _of_chunk(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    grad_TX: torch.Tensor,
    rope: Rope | None,
    lengths: tuple[int, ...],
    settings: AttentionSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, head_dim = q_TX.device, settings.head_dim
    lengths_B = torch.tensor(lengths, device=device)
    longest = max(lengths)
    positions_L = torch.arange(longest, device=device)
    is_token_BL = positions_L < lengths_B[:, None]
    # Padded tokens read some token of the chunk; none of what they give is used.
    index_BL = (lengths_B.cumsum(0) - lengths_B)[:, None] + torch.where(is_token_BL, positions_L, 0)
    positions_T = positions_L.expand_as(is_token_BL)[is_token_BL]

    def folded(x_TZ: torch.Tensor) -> torch.Tensor:
        """[T, heads * D] as [M, rows, D]."""
        x_BLKGD = x_TZ[index_BL].unflatten(2, (settings.num_kv_heads, -1, head_dim))
        return x_BLKGD.permute(0, 2, 3, 1, 4).reshape(len(lengths) * settings.num_kv_heads, -1, head_dim)

    def unfolded(x_MRD: torch.Tensor) -> torch.Tensor:
        """[M, rows, D] as [T, heads, D]."""
        x_BKGLD = x_MRD.view(len(lengths), settings.num_kv_heads, -1, longest, head_dim)
        return x_BKGLD.permute(0, 3, 1, 2, 4).flatten(2, 3)[is_token_BL]

    def turned(x_TZ: torch.Tensor) -> torch.Tensor:
        return torch_impl.rotated(x_TZ.unflatten(1, (-1, head_dim)), positions_T, rope).flatten(1)

    q_MRD, k_MLD, v_MLD = folded(turned(q_TX)), folded(turned(k_TY)), folded(v_TY)
    grad_MRD = (
        folded(grad_TX)
        * is_token_BL.repeat_interleave(settings.num_kv_heads, 0).repeat(1, settings.group_size)[..., None]
    )
    seen_LL = torch_impl.seen(positions_L[:, None], positions_L, settings.window)
    results = _of_matrices(q_MRD, k_MLD, v_MLD, grad_MRD, seen_LL.repeat(settings.group_size, 1), settings)
    dq_THD, dk_TKD, dv_TKD = (unfolded(result) for result in results)
    dq_THD, dk_TKD = (torch_impl.rotated(x_THD, positions_T, rope, sign=-1.0) for x_THD in (dq_THD, dk_TKD))
    return dq_THD.flatten(1), dk_TKD.flatten(1), dv_TKD.flatten(1)


@without_autocast
def _of_matrices(
    q_MRD: torch.Tensor,
    k_MLD: torch.Tensor,
    v_MLD: torch.Tensor,
    grad_MRD: torch.Tensor,
    seen_RL: torch.Tensor,
    settings: AttentionSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of turned queries, turned keys and values."""
    dtype = q_MRD.dtype
    scores_MRL = torch.bmm(q_MRD, k_MLD.mT).float() * settings.scale
    slope_MRL = None
    if settings.softcap is not None:
        capped_MRL = torch.tanh(scores_MRL / settings.softcap)
        scores_MRL, slope_MRL = capped_MRL * settings.softcap, 1 - capped_MRL * capped_MRL
    p_MRL = scores_MRL.masked_fill_(~seen_RL, float("-inf")).softmax(-1)
    dv_MLD = torch.bmm(p_MRL.to(dtype).mT, grad_MRD)
    dp_MRL = torch.bmm(grad_MRD, v_MLD.mT).float()
    ds_MRL = p_MRL * (dp_MRL - (p_MRL * dp_MRL).sum(-1, keepdim=True))
    if slope_MRL is not None:
        ds_MRL = ds_MRL * slope_MRL
    ds_MRL = (ds_MRL * settings.scale).to(dtype)
    return torch.bmm(ds_MRL, k_MLD), torch.bmm(ds_MRL.mT, q_MRD), dv_MLD
