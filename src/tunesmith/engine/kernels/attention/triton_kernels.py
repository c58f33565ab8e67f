"""The Triton kernels of attention over a paged cache; `triton_impl.py` launches them.

Shape legend: T tokens, R rows of a tile (query heads of one token, or of several), C keys of a tile, D head width,
H heads of a program.
"""

# A launch hands over pointers, strides and sizes one by one.
# ruff: noqa: PLR0913
# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from tunesmith.engine.kernels.triton_softmax import tanh

_PAGE = tl.constexpr(16)  # tokens in a block of the cache, `attention.records.BLOCK_TOKENS`


@triton.jit
def _turned(row, at, is_inside, d, cos, sin, HALF: tl.constexpr):
    """Numbers of one token's heads, float32; the first 2 HALF dimensions `d` of each are turned by its angles."""
    x = tl.load(row + at, mask=is_inside, other=0.0).to(tl.float32)
    if HALF > 0:
        is_first = d < HALF
        is_turned = d < 2 * HALF
        y = tl.load(row + at + tl.where(is_first, HALF, -HALF), mask=is_inside & is_turned, other=0.0).to(tl.float32)
        angle = tl.where(is_first, d, d - HALF)
        c = tl.load(cos + angle, mask=is_turned, other=1.0)
        s = tl.load(sin + angle, mask=is_turned, other=0.0)
        x = x * c + tl.where(is_first, -y, y) * s
    return x


@triton.jit
def write_kernel(
    q,
    k,
    v,
    cos,
    sin,
    positions,
    table_rows,
    tables,
    keys,
    values,
    turned,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads of one token: the first QUERY_PARTS programs turn queries, the others keys, and write them with values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token)
    d = tl.arange(0, BLOCK_D)[None, :]
    cos += position.to(tl.int64) * HALF
    sin += position.to(tl.int64) * HALF
    if part < QUERY_PARTS:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        at, is_inside = head * D + d, (head < HEADS) & (d < D)
        x = _turned(q + token * q_stride, at, is_inside, d, cos, sin, HALF)
        tl.store(turned + token * (HEADS * D) + at, x.to(turned.dtype.element_ty), mask=is_inside)
    else:
        head = (part - QUERY_PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        at, is_inside = head * D + d, (head < KV_HEADS) & (d < D)
        x = _turned(k + token * k_stride, at, is_inside, d, cos, sin, HALF)
        row = tl.load(table_rows + token).to(tl.int64)
        block = tl.load(tables + row * table_stride + position // _PAGE).to(tl.int64)
        place = (block * _PAGE + position % _PAGE) * (KV_HEADS * D) + at
        tl.store(keys + place, x.to(keys.dtype.element_ty), mask=is_inside)
        tl.store(values + place, tl.load(v + token * v_stride + at, mask=is_inside), mask=is_inside)


@triton.jit
def _attended(
    q_RD,
    position_R,
    table,
    span,
    keys_values,
    KV_WIDTH: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    USES_DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(largest scores, sums of weights, weighted sums of values) of rows over the keys of a span (begin, end)."""
    begin, end = span
    keys, values = keys_values
    ROWS: tl.constexpr = q_RD.shape[0]
    BLOCK_D: tl.constexpr = q_RD.shape[1]
    d_D = tl.arange(0, BLOCK_D)
    largest_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    sum_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if WIDEN or not USES_DOT:
        q_RD = q_RD.to(tl.float32)
    for start in range(begin // BLOCK_C * BLOCK_C, end, BLOCK_C):
        key_C = start + tl.arange(0, BLOCK_C)
        is_key_C = (key_C >= begin) & (key_C < end)
        block_C = tl.load(table + key_C // _PAGE, mask=is_key_C, other=0).to(tl.int64)
        at_CD = ((block_C * _PAGE + key_C % _PAGE) * KV_WIDTH)[:, None] + d_D[None, :]
        is_inside_CD = is_key_C[:, None] & (d_D < D)[None, :]
        k_CD = tl.load(keys + at_CD, mask=is_inside_CD, other=0.0)
        v_CD = tl.load(values + at_CD, mask=is_inside_CD, other=0.0)
        if WIDEN or not USES_DOT:
            k_CD = k_CD.to(tl.float32)
            v_CD = v_CD.to(tl.float32)
        if USES_DOT:
            score_RC = tl.dot(q_RD, tl.trans(k_CD), input_precision="ieee") * SCALE
        else:
            score_RC = tl.sum(q_RD[:, None, :] * k_CD[None, :, :], axis=2) * SCALE
        if SOFTCAP > 0:
            score_RC = SOFTCAP * tanh(score_RC / SOFTCAP)
        is_seen_RC = is_key_C[None, :] & (key_C[None, :] <= position_R[:, None])
        if WINDOW > 0:
            is_seen_RC = is_seen_RC & (key_C[None, :] > position_R[:, None] - WINDOW)
        score_RC = tl.where(is_seen_RC, score_RC, float("-inf"))
        new_R = tl.maximum(largest_R, tl.max(score_RC, axis=1))
        # Before the first key that a row sees both are -inf, whose difference is NaN.
        base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        weight_RC = tl.exp(score_RC - base_R[:, None])
        shrink_R = tl.exp(largest_R - base_R)
        total_R = total_R * shrink_R + tl.sum(weight_RC, axis=1)
        if USES_DOT:
            part_RD = tl.dot(weight_RC.to(v_CD.dtype), v_CD, input_precision="ieee")
        else:
            part_RD = tl.sum(weight_RC[:, :, None] * v_CD[None, :, :], axis=1)
        sum_RD = sum_RD * shrink_R[:, None] + part_RD
        largest_R = new_R
    return largest_R, total_R, sum_RD


@triton.jit
def _keep(partials, slot, head_R, is_row_R, found, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write what was found of rows, each to its slot (one for all, or one each) and its head."""
    largest, total, sums = partials
    largest_R, total_R, sum_RD = found
    d_D = tl.arange(0, BLOCK_D)
    at_R = slot * HEADS + head_R
    tl.store(largest + at_R, largest_R, mask=is_row_R)
    tl.store(total + at_R, total_R, mask=is_row_R)
    tl.store(sums + at_R[:, None] * D + d_D[None, :], sum_RD, mask=is_row_R[:, None] & (d_D < D)[None, :])


@triton.jit
def attend_kernel(
    q,
    keys,
    values,
    positions,
    table_rows,
    tables,
    starts,
    out,
    largest,
    total,
    sums,
    q_stride,
    table_stride,
    num_slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    USES_DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Query heads of one token and one key/value head over one split; the result itself if that IS_WHOLE."""
    place, split = tl.program_id(0), tl.program_id(1)
    token = (place // (KV_HEADS * HEAD_TILES)).to(tl.int64)
    kv_head = place // HEAD_TILES % KV_HEADS
    position = tl.load(positions + token)
    begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, position + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, position - WINDOW + 1)
    if HAS_PREFIXES:
        begin = tl.maximum(begin, tl.load(starts + token))
    if begin >= end:
        return
    row_R, d_D = (place % HEAD_TILES) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    is_row_R, head_R = row_R < HEADS // KV_HEADS, kv_head * (HEADS // KV_HEADS) + row_R
    at_RD, is_inside_RD = head_R[:, None] * D + d_D[None, :], is_row_R[:, None] & (d_D < D)[None, :]
    q_RD = tl.load(q + token * q_stride + at_RD, mask=is_inside_RD, other=0.0)
    position_R = tl.zeros([ROWS], tl.int32) + position
    table = tables + tl.load(table_rows + token).to(tl.int64) * table_stride
    pair, span = (keys + kv_head * D, values + kv_head * D), (begin, end)
    found = _attended(
        q_RD, position_R, table, span, pair, KV_HEADS * D, D, SCALE, SOFTCAP, WINDOW, USES_DOT, WIDEN, BLOCK_C
    )
    if IS_WHOLE:
        result_RD = (found[2] / found[1][:, None]).to(out.dtype.element_ty)
        tl.store(out + token * (HEADS * D) + at_RD, result_RD, mask=is_inside_RD)
    else:
        # One further with prefixes: a split in which a prefix ends and the token's own part begins takes two slots.
        slot = token * num_slots + split + HAS_PREFIXES
        _keep((largest, total, sums), slot, head_R, is_row_R, found, HEADS, D, BLOCK_D)


@triton.jit
def prefix_kernel(
    q,
    keys,
    values,
    positions,
    table_rows,
    tables,
    members,
    lengths,
    largest,
    total,
    sums,
    q_stride,
    table_stride,
    num_slots,
    num_members,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    USES_DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Query heads of some members of one prefix, and one key/value head, over one split of the prefix."""
    prefix, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    row_R, d_D = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    member_R, head_R = row_R // (HEADS // KV_HEADS), kv_head * (HEADS // KV_HEADS) + row_R % (HEADS // KV_HEADS)
    token_R = tl.load(members + prefix * num_members + member_R, mask=member_R < num_members, other=-1)
    is_row_R = token_R >= 0
    position_R = tl.load(positions + token_R, mask=is_row_R, other=-1)
    begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, tl.load(lengths + prefix))
    end = tl.minimum(end, tl.max(position_R, axis=0) + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.min(tl.where(is_row_R, position_R, 2147483647), axis=0) - WINDOW + 1)
    if begin >= end:
        return
    row = tl.load(table_rows + tl.max(token_R, axis=0)).to(tl.int64)  # of any member: their tables begin alike
    token_R = token_R.to(tl.int64)
    q_at_RD = (token_R * q_stride + head_R * D)[:, None] + d_D[None, :]
    q_RD = tl.load(q + q_at_RD, mask=is_row_R[:, None] & (d_D < D)[None, :], other=0.0)
    pair, span = (keys + kv_head * D, values + kv_head * D), (begin, end)
    table = tables + row * table_stride
    found = _attended(
        q_RD, position_R, table, span, pair, KV_HEADS * D, D, SCALE, SOFTCAP, WINDOW, USES_DOT, WIDEN, BLOCK_C
    )
    _keep((largest, total, sums), token_R * num_slots + split, head_R, is_row_R, found, HEADS, D, BLOCK_D)


@triton.jit
def _merged(partials, begin, end, state, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr):
    """A state (largest score, sum of weights, weighted sum of values) with the slots from `begin` to `end` added."""
    largest, total, sums, d_D = partials
    most, weight, sum_D = state
    for start in range(begin, end, BLOCK_S):
        slot_S = start + tl.arange(0, BLOCK_S)
        is_slot_S = slot_S < end
        at_S = slot_S * HEADS
        largest_S = tl.load(largest + at_S, mask=is_slot_S, other=float("-inf"))
        total_S = tl.load(total + at_S, mask=is_slot_S, other=0.0)
        is_inside_SD = is_slot_S[:, None] & (d_D < D)[None, :]
        sum_SD = tl.load(sums + at_S[:, None] * D + d_D[None, :], mask=is_inside_SD, other=0.0)
        new = tl.maximum(most, tl.max(largest_S, axis=0))
        # Of a window that sees nothing of a prefix both are -inf, whose difference is NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, share_S = tl.exp(most - base), tl.exp(largest_S - base)
        weight = weight * shrink + tl.sum(total_S * share_S, axis=0)
        sum_D = sum_D * shrink + tl.sum(sum_SD * share_S[:, None], axis=0)
        most = new
    return most, weight, sum_D


@triton.jit
def merge_kernel(
    positions,
    starts,
    largest,
    total,
    sums,
    out,
    num_slots,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one token from the slots that hold something: of its prefix, then of its own part."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d_D = tl.arange(0, BLOCK_D)
    position = tl.load(positions + token)
    begin, end = position * 0, position // SPLIT + 1
    if WINDOW > 0:
        begin = tl.maximum(begin, position - WINDOW + 1)
    at = token * num_slots * HEADS + head
    partials = (largest + at, total + at, sums + at * D, d_D)
    state = (tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([BLOCK_D], tl.float32))
    if HAS_PREFIXES:
        start = tl.load(starts + token)
        last = tl.minimum((start + SPLIT - 1) // SPLIT, end)
        last = tl.where(begin < start, last, 0)  # nothing of the prefix is inside of the window
        state = _merged(partials, begin // SPLIT, last, state, HEADS, D, BLOCK_S)
        end = tl.where(start <= position, end, 0)  # its own part is empty inside of the prefix
        begin = tl.maximum(begin, start)
    state = _merged(partials, begin // SPLIT + HAS_PREFIXES, end + HAS_PREFIXES, state, HEADS, D, BLOCK_S)
    result_D = state[2] / tl.where(state[1] == 0.0, 1.0, state[1])
    tl.store(out + (token * HEADS + head) * D + d_D, result_D.to(out.dtype.element_ty), mask=d_D < D)
