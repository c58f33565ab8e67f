"""The state of running completions on a device.

Shape legend: S slots, K tokens that are drawn between two looks of the host, V vocabulary, R rows of seen tokens.
"""

from dataclasses import dataclass, fields

import torch

from tunesmith.core.errors import InputError

POSITION = 5
"""The column of `SlotState.integers_S6` that counts up; column 1 is the row of the seen tokens."""

TOKEN, LOGP, RAW_LOGP, VALUE = range(4)
"""Columns of `SlotState.drawn_SK4`."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """Tensors that keep their place and are changed in place, all contiguous along their last dimension.

    token_S int64, position_S int32: the last token of each slot, which is computed next, and where it stands.
    left_S int32: tokens that may yet be drawn; 0 for a slot without a completion, or whose completion has ended.
    to_mask_S int32: tokens that must be drawn before a stop id ends anything.
    integers_S6 int64: what the draw is told, as `kernels.sample.api.draw_in_triton` has it.
    drawn_SK4 float32 [S, K + 1, 4]: of the first `count_S` tokens id (exact below 2^24), log-prob, raw log-prob, value.
    count_S int64: tokens that were drawn; status_S int32: 0, or why there was no token.
    is_stop_V bool: tokens that end a completion. seen_RV bool: tokens that stand in a completion and its prompt, None
    where nobody asks; its last row is for slots without a completion.

    Raises:
        InputError: a tensor has another dtype or number of dimensions.
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

    def __post_init__(self) -> None:
        for field, (dtype, dims) in zip(fields(self), _TYPES, strict=True):
            tensor: torch.Tensor | None = getattr(self, field.name)
            if tensor is None:
                continue
            if tensor.dtype != dtype or tensor.dim() != dims or tensor.stride(-1) != 1:
                raise InputError(
                    f"{field.name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
                    f"give {dtype} with {dims} dimensions, the last one contiguous"
                )


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Results of the draw: token_S int64, scores_S2 float32 (log-prob, raw log-prob), status_S int32, and value_S
    float32, None without values.
    """

    token_S: torch.Tensor
    scores_S2: torch.Tensor
    status_S: torch.Tensor
    value_S: torch.Tensor | None


_TYPES = (
    (torch.int64, 1),
    (torch.int32, 1),
    (torch.int32, 1),
    (torch.int32, 1),
    (torch.int64, 2),
    (torch.float32, 3),
    (torch.int64, 1),
    (torch.int32, 1),
    (torch.bool, 1),
    (torch.bool, 2),
)
