"""The definition of attention, in torch alone, for any floating dtype and any device.

Shape legend: T tokens, X = query heads * D, Y = key/value heads * D, H query heads, K key/value heads, D head width,
C tokens of a context, G query heads of a key/value head, P positions, F half of the rotated width, N blocks,
W numbers of a block.
"""

from dataclasses import replace

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import without_autocast
from tunesmith.engine.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope, Segments


def attend(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    rope: Rope | None,
    places: Places,
    cache_2NW: torch.Tensor,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Attention of each token over its own sequence up to itself, [T, X]; keys and values go into the cache first.

    The cache is `[2, num_blocks, 16 * Y]`, keys in 0 and values in 1; here a block is `[16, K, D]`.

    Raises:
        InputError: a place lies outside of the tables, the cache or the rotary tables.
    """
    require_places(places, rope, cache_2NW.shape[1])
    device = q_TX.device
    positions_T, rows_T = places.positions_T.long().to(device), places.table_rows_T.long().to(device)
    tables_RN = places.block_tables_RN.long().to(device)
    q_THD = rotated(q_TX.unflatten(1, (-1, settings.head_dim)), positions_T, rope)
    k_TKD = rotated(k_TY.unflatten(1, (-1, settings.head_dim)), positions_T, rope)
    blocks_NCKD = cache_2NW.unflatten(2, (BLOCK_TOKENS, settings.num_kv_heads, settings.head_dim))
    block_T, slot_T = tables_RN[rows_T, positions_T // BLOCK_TOKENS], positions_T % BLOCK_TOKENS
    blocks_NCKD[0, block_T, slot_T] = k_TKD
    blocks_NCKD[1, block_T, slot_T] = v_TY.unflatten(1, (-1, settings.head_dim))
    out_TX = torch.empty_like(q_TX, memory_format=torch.contiguous_format)
    for row in rows_T.unique().tolist():
        of_row_T = (rows_T == row).nonzero()[:, 0]
        num_blocks = int(positions_T[of_row_T].max()) // BLOCK_TOKENS + 1
        blocks_N = tables_RN[row, :num_blocks]
        k_CKD, v_CKD = blocks_NCKD[0, blocks_N].flatten(0, 1), blocks_NCKD[1, blocks_N].flatten(0, 1)
        out_TX[of_row_T] = _one_sequence(q_THD[of_row_T], k_CKD, v_CKD, positions_T[of_row_T], settings)
    return out_TX


def attend_packed(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    rope: Rope | None,
    segments: Segments,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Attention of packed sequences, [T, X]; gradients by autograd."""
    outs_TX: list[torch.Tensor] = []
    for tokens_C, prefix in zip(segments.token_indices(), segments.prefixes, strict=True):
        here_C = tokens_C.to(q_TX.device)
        outs_TX.append(_packed_sequence(q_TX[here_C[prefix:]], k_TY[here_C], v_TY[here_C], rope, settings))
    return torch.cat(outs_TX)


@without_autocast
def packed_gradients(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    grad_TX: torch.Tensor,
    rope: Rope | None,
    segments: Segments,
    settings: AttentionSettings,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v and the sinks from that of `attend_packed`'s output, by autograd of one sequence at a time.

    Gradients of shared keys and values, and of sinks, are summed in float32 (float64 for float64).
    """
    qkv = (q_TX, k_TY, v_TY)
    sinks_H = None if settings.sinks_H is None else settings.sinks_H.detach().to(_wide(q_TX.dtype)).requires_grad_()
    settings = replace(settings, sinks_H=sinks_H)
    d_sinks_H = None if sinks_H is None else torch.zeros_like(sinks_H)
    sums = [torch.zeros(x_TZ.shape, dtype=_wide(x_TZ.dtype), device=x_TZ.device) for x_TZ in qkv]
    for tokens_C, prefix in zip(segments.token_indices(), segments.prefixes, strict=True):
        here_C = tokens_C.to(grad_TX.device)
        indices = (here_C[prefix:], here_C, here_C)
        with torch.enable_grad():
            leaves = [x_TZ.detach()[index].requires_grad_() for x_TZ, index in zip(qkv, indices, strict=True)]
            out_TX = _packed_sequence(leaves[0], leaves[1], leaves[2], rope, settings)
        wanted = leaves if sinks_H is None else [*leaves, sinks_H]
        parts = torch.autograd.grad(out_TX, wanted, grad_TX[indices[0]])
        for sum_TZ, index, part in zip(sums, indices, parts[:3], strict=True):
            sum_TZ.index_add_(0, index, part.to(sum_TZ.dtype))
        d_sinks_H = None if d_sinks_H is None else d_sinks_H + parts[3]
    return *(sum_TZ.to(x_TZ.dtype) for sum_TZ, x_TZ in zip(sums, qkv, strict=True)), d_sinks_H


def _packed_sequence(
    q_TX: torch.Tensor, k_CY: torch.Tensor, v_CY: torch.Tensor, rope: Rope | None, settings: AttentionSettings
) -> torch.Tensor:
    """Attention of the last T tokens of one sequence of C tokens, [T, X]."""
    positions_C = torch.arange(len(k_CY), device=q_TX.device)
    positions_T = positions_C[len(k_CY) - len(q_TX) :]
    q_THD, k_CKD, v_CKD = (x_TZ.unflatten(1, (-1, settings.head_dim)) for x_TZ in (q_TX, k_CY, v_CY))
    k_CKD = rotated(k_CKD, positions_C, rope)
    return _one_sequence(rotated(q_THD, positions_T, rope), k_CKD, v_CKD, positions_T, settings)


def rotated(x_THD: torch.Tensor, positions_T: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """The first 2F dimensions of each head rotated by the angles of its position, computed in float32 or float64."""
    if rope is None:
        return x_THD
    wide = _wide(x_THD.dtype)
    half = rope.cos_PF.shape[1]
    cos_T1F = rope.cos_PF.to(x_THD.device, wide)[positions_T][:, None]
    sin_T1F = rope.sin_PF.to(x_THD.device, wide)[positions_T][:, None]
    first, second = x_THD[..., :half].to(wide), x_THD[..., half : 2 * half].to(wide)
    turned = torch.cat((first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), -1)
    return torch.cat((turned.to(x_THD.dtype), x_THD[..., 2 * half :]), -1)


def require_places(places: Places, rope: Rope | None, num_blocks: int) -> None:
    """Raise InputError if a token is outside of the tables, the cache or the rotary tables."""
    num_rows, width = places.block_tables_RN.shape
    num_positions = width * BLOCK_TOKENS if rope is None else min(width * BLOCK_TOKENS, len(rope.cos_PF))
    for name, values, limit in (
        ("position", places.positions_T, num_positions),
        ("table row", places.table_rows_T, num_rows),
        ("block", _used_blocks(places, num_rows, num_positions), num_blocks),
    ):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise InputError(
                f"{name}s lie in [{int(values.min())}, {int(values.max())}]; they must lie in [0, {limit})"
            )


def _used_blocks(places: Places, num_rows: int, num_positions: int) -> torch.Tensor:
    """The entries of the tables that the tokens read, flat."""
    rows_T = places.table_rows_T.clamp(0, num_rows - 1).long()
    last_T1 = places.positions_T.clamp(0, num_positions - 1)[:, None] // BLOCK_TOKENS
    index_N = torch.arange(places.block_tables_RN.shape[1], device=places.block_tables_RN.device)
    return places.block_tables_RN[rows_T][index_N <= last_T1]


@without_autocast
def _one_sequence(
    q_THD: torch.Tensor,
    k_CKD: torch.Tensor,
    v_CKD: torch.Tensor,
    positions_T: torch.Tensor,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Attention of the tokens at `positions_T` over one sequence, [T, X]; later tokens are masked."""
    wide = _wide(q_THD.dtype)
    q_TKGD = q_THD.unflatten(1, (settings.num_kv_heads, -1)).to(wide)
    scores_TKGC = torch.einsum("tkgd,ckd->tkgc", q_TKGD, k_CKD.to(wide)) * settings.scale
    if settings.softcap is not None:
        scores_TKGC = settings.softcap * torch.tanh(scores_TKGC / settings.softcap)
    positions_C = torch.arange(len(k_CKD), device=q_THD.device)
    is_seen_TC = positions_C <= positions_T[:, None]
    if settings.window is not None:
        is_seen_TC &= positions_C > positions_T[:, None] - settings.window
    scores_TKGC = scores_TKGC.masked_fill(~is_seen_TC[:, None, None], float("-inf"))
    if settings.sinks_H is not None:
        sinks_KG1 = settings.sinks_H.to(wide).view(settings.num_kv_heads, -1, 1)
        scores_TKGC = torch.cat((scores_TKGC, sinks_KG1.expand(len(scores_TKGC), -1, -1, -1)), -1)
    p_TKGC = scores_TKGC.softmax(-1)[..., : len(k_CKD)]
    return torch.einsum("tkgc,ckd->tkgd", p_TKGC, v_CKD.to(wide)).flatten(1).to(q_THD.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
