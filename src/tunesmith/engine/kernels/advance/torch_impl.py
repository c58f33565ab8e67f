"""The definition of the end of a decoding step, in torch alone; nothing waits for the device.

Shape legend: S slots, K tokens that are drawn between two looks of the host, V vocabulary, R rows of seen tokens.
"""

from dataclasses import dataclass

import torch

POSITION = 5
"""The column of `SlotState.integers_S6` that counts up; column 1 is the row of the seen tokens."""

TOKEN, LOGP, RAW_LOGP, VALUE = range(4)
"""Columns of `SlotState.drawn_SK4`."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of running completions on a device: tensors changed in place, contiguous along their last dimension.

    token_S int64, position_S int32: the last token of each slot, which is computed next, and its position.
    left_S int32: tokens that may yet be drawn; 0 for a slot without a completion, or whose completion has ended.
    to_mask_S int32: tokens that must be drawn before a stop id ends anything.
    integers_S6 int64: arguments of the draw, in the order of `kernels.sample.api.draw_in_triton`.
    drawn_SK4 float32 [S, K + 1, 4]: of the first `count_S` tokens id (exact below 2^24), log-prob, raw log-prob, value.
    count_S int64: tokens that were drawn; status_S int32: 0, or why there was no token.
    is_stop_V bool: tokens that end a completion. seen_RV bool: tokens of a completion and its prompt, None without
    a repetition penalty; its last row is for slots without a completion.
    """

    token_S: torch.Tensor
    position_S: torch.Tensor
    left_S: torch.Tensor
    to_mask_S: torch.Tensor
    integers_S6: torch.Tensor
    drawn_SK4: torch.Tensor
    count_S: torch.Tensor
    status_S: torch.Tensor
    is_stop_V: torch.Tensor
    seen_RV: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Results of the draw, contiguous: token_S int64, scores_S2 float32 (log-prob, raw log-prob), status_S int32, and
    value_S float32, None without values.
    """

    token_S: torch.Tensor
    scores_S2: torch.Tensor
    status_S: torch.Tensor
    value_S: torch.Tensor | None


def advance(state: SlotState, drawn: DrawnTokens) -> None:
    """Take one token for each slot that has some left.

    A slot whose completion ends, by a stop id or by its length, keeps token and position: it computes the same again,
    which changes nothing, until the host looks.
    """
    value_S = torch.zeros_like(drawn.scores_S2[:, 0]) if drawn.value_S is None else drawn.value_S
    row_S4 = torch.stack((drawn.token_S, *drawn.scores_S2.unbind(1), value_S), -1)
    runs_S = state.left_S > 0
    state.drawn_SK4.scatter_(1, state.count_S[:, None, None].expand(-1, 1, 4), row_S4[:, None])
    state.count_S.add_(runs_S)
    state.status_S.copy_(torch.where(runs_S & (state.status_S == 0), drawn.status_S, state.status_S))
    if state.seen_RV is not None:
        state.seen_RV.index_put_((state.integers_S6[:, 1], drawn.token_S), torch.ones_like(runs_S))

    is_stop_S = state.is_stop_V[drawn.token_S] & (state.to_mask_S <= 0)
    state.left_S.sub_(runs_S.int()).masked_fill_(is_stop_S, 0)
    state.to_mask_S.sub_(1)
    goes_on_S = state.left_S > 0
    state.token_S.copy_(torch.where(goes_on_S, drawn.token_S, state.token_S))
    state.position_S.add_(goes_on_S)
    state.integers_S6[:, POSITION].add_(goes_on_S)
