"""The end of a decoding step in Triton: one launch for what is some twenty small ones in torch.

Shape legend: S slots, V vocabulary, R rows of seen tokens.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.advance.torch_impl import DrawnTokens, SlotState
from tunesmith.engine.kernels.launching import ceil_div

BLOCK_SLOTS = 128


def advance(state: SlotState, drawn: DrawnTokens) -> None:
    """As `torch_impl.advance`."""
    num_slots = len(state.token_S)
    with torch.cuda.device_of(state.token_S):
        cast(Any, advance_kernel)[(ceil_div(num_slots, BLOCK_SLOTS),)](
            *(state.token_S, state.position_S, state.left_S, state.to_mask_S, state.integers_S6, state.drawn_SK4),
            *(state.count_S, state.status_S, state.is_stop_V, state.seen_RV),
            *(drawn.token_S, drawn.scores_S2, drawn.status_S, drawn.value_S),
            *(num_slots, state.drawn_SK4.stride(0), 0 if state.seen_RV is None else state.seen_RV.stride(0)),
            HAS_SEEN=state.seen_RV is not None,
            HAS_VALUE=drawn.value_S is not None,
            BLOCK=BLOCK_SLOTS,
        )


@triton.jit
def advance_kernel(
    tokens,
    positions,
    lefts,
    to_masks,
    integers,
    drawn,
    counts,
    states,
    is_stop,
    seen,
    new_tokens,
    new_scores,
    new_states,
    new_values,
    num_slots,
    drawn_stride,
    seen_stride,
    HAS_SEEN: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some slots; each is read and written by one program alone."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = slot < num_slots
    token = tl.load(new_tokens + slot, mask=here, other=0)
    left = tl.load(lefts + slot, mask=here, other=0)
    count = tl.load(counts + slot, mask=here, other=0)
    to_mask = tl.load(to_masks + slot, mask=here, other=0)
    runs = left > 0

    row = drawn + slot.to(tl.int64) * drawn_stride + count * 4
    tl.store(row, token.to(tl.float32), mask=here)
    tl.store(row + 1, tl.load(new_scores + 2 * slot, mask=here, other=0.0), mask=here)
    tl.store(row + 2, tl.load(new_scores + 2 * slot + 1, mask=here, other=0.0), mask=here)
    value = tl.zeros([BLOCK], tl.float32)
    if HAS_VALUE:
        value = tl.load(new_values + slot, mask=here, other=0.0)
    tl.store(row + 3, value, mask=here)
    tl.store(counts + slot, count + runs.to(tl.int64), mask=here)
    state = tl.load(states + slot, mask=here, other=0)
    new_state = tl.load(new_states + slot, mask=here, other=0)
    tl.store(states + slot, tl.where(runs & (state == 0), new_state, state), mask=here)
    if HAS_SEEN:
        seen_row = tl.load(integers + 6 * slot + 1, mask=here, other=0)
        tl.store(seen + seen_row * seen_stride + token, tl.full([BLOCK], 1, tl.int1), mask=here)

    stops = (tl.load(is_stop + token, mask=here, other=0) != 0) & (to_mask <= 0)
    left = tl.where(stops, 0, left - runs.to(tl.int32))
    tl.store(lefts + slot, left, mask=here)
    tl.store(to_masks + slot, to_mask - 1, mask=here)
    goes_on = here & (left > 0)
    position = tl.load(positions + slot, mask=here, other=0)
    noise_position = tl.load(integers + 6 * slot + 5, mask=here, other=0)
    tl.store(tokens + slot, token, mask=goes_on)
    tl.store(positions + slot, position + 1, mask=goes_on)
    tl.store(integers + 6 * slot + 5, noise_position + 1, mask=goes_on)
