"""The definition of the end of a decoding step, in torch alone; nothing waits for the device.

Shape legend: S slots, K tokens that are drawn between two looks of the host, V vocabulary, R rows of seen tokens.
"""

import torch

from tunesmith.kernels.advance.records import POSITION, DrawnTokens, SlotState


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
