"""Arguments and results of an update by preferences.

Shape legend: B pairs, N numbers of an output.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Selected:
    """The selected outputs `[B, N]` and the updated weights `[N]`, each in the dtype of what was given."""

    selected_BN: torch.Tensor
    weights_N: torch.Tensor
