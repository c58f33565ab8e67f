"""The definition of selection by votes, in torch: slow, plain, and what the kernels are tested against.

Of each pair the output that was chosen is selected, of a tie the mean of both:

    selected_b = A_b if choice_b > 1/2, B_b if choice_b < 1/2, else (A_b + B_b) / 2
    weights    = weights + scale * sum_b vote_weight_b * selected_b

Shape legend: B pairs, N numbers of an output.
"""

import torch

from tunesmith.kernels.preference.records import Selected


def select_and_update(
    outputs_a_BN: torch.Tensor,
    outputs_b_BN: torch.Tensor,
    choices_B: torch.Tensor,
    weights_N: torch.Tensor,
    scale: float,
    vote_weights_B: torch.Tensor | None = None,
) -> Selected:
    """Selected outputs and updated weights; sums are in float32, or float64 for float64 outputs.

    An output that was not selected has no influence, even where it is not finite. The mean of a tie enters the sum
    before it is rounded to the dtype of the outputs.
    """
    wide = torch.float64 if outputs_a_BN.dtype == torch.float64 else torch.float32
    a_BN, b_BN = outputs_a_BN.to(wide), outputs_b_BN.to(wide)
    choice_B1 = choices_B.to(wide)[:, None]
    tied_BN = torch.where(choice_B1 < 0.5, b_BN, 0.5 * a_BN + 0.5 * b_BN)
    selected_BN = torch.where(choice_B1 > 0.5, a_BN, tied_BN)
    counted_BN = selected_BN if vote_weights_B is None else selected_BN * vote_weights_B.to(wide)[:, None]
    updated_N = weights_N.to(wide) + scale * counted_BN.sum(0)
    return Selected(selected_BN.to(outputs_a_BN.dtype), updated_N.to(weights_N.dtype))


def share_of_a(choices_B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Share of A in the selected row, `[B]`: 1, 0, or a half for a tie."""
    choice_B = choices_B.to(torch.float32)
    return torch.where(choice_B > 0.5, 1.0, torch.where(choice_B < 0.5, 0.0, 0.5)).to(dtype)
