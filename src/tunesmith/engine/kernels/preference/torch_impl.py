"""The definition of selection by votes, in torch: slow, plain, and what the kernels are tested against.

Of each pair the output that was chosen is selected, of a tie the mean of both:

    selected_b = A_b if choice_b > 1/2, B_b if choice_b < 1/2, else (A_b + B_b) / 2
    weights    = weights + scale * sum_b vote_weight_b * selected_b

Shape legend: B pairs, N numbers of an output.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """Pairs of outputs A and B `[B, N]`, and for each the rater's choice: 1 is A, 0 is B, 0.5 is a tie.

    Choices may be booleans, whole numbers or floats. `vote_weights_B` is how much each vote counts; None is 1 for all.
    """

    outputs_a_BN: torch.Tensor
    outputs_b_BN: torch.Tensor
    choices_B: torch.Tensor
    vote_weights_B: torch.Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """The batch on this device."""
        given = (self.outputs_a_BN, self.outputs_b_BN, self.choices_B, self.vote_weights_B)
        moved = [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in given]
        return type(self)(*moved)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Selected:
    """The selected outputs `[B, N]` and the updated weights `[N]`, each in the dtype of what was given."""

    selected_BN: torch.Tensor
    weights_N: torch.Tensor


def select(a_BN: torch.Tensor, b_BN: torch.Tensor, choices_B: torch.Tensor) -> torch.Tensor:
    """The selected outputs `[B, N]`; one that was not selected has no influence, even where it is not finite."""
    choice_B1 = choices_B.to(a_BN.dtype)[:, None]
    tied_BN = torch.where(choice_B1 < 0.5, b_BN, 0.5 * a_BN + 0.5 * b_BN)
    return torch.where(choice_B1 > 0.5, a_BN, tied_BN)


def select_and_update(batch: PreferenceBatch, weights_N: torch.Tensor, scale: float) -> Selected:
    """Selected outputs and updated weights; sums are in float32, or float64 for float64 outputs.

    The mean of a tie enters the sum before it is rounded to the dtype of the outputs.
    """
    dtype, votes_B = batch.outputs_a_BN.dtype, batch.vote_weights_B
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    selected_BN = select(batch.outputs_a_BN.to(wide), batch.outputs_b_BN.to(wide), batch.choices_B)
    counted_BN = selected_BN if votes_B is None else selected_BN * votes_B.to(wide)[:, None]
    updated_N = weights_N.to(wide) + scale * counted_BN.sum(0)
    return Selected(selected_BN.to(dtype), updated_N.to(weights_N.dtype))
