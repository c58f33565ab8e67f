"""Where the rows of an x stand, as all kernels are told it, and which of them Triton takes."""

import torch

from tunesmith.kernels.arguments import step_of

LONGEST = 8192
"""Numbers of a row that Triton keeps in registers: 16 for each of 512 threads."""


def layout_of(x_RH: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(rows, their length, rows of a group, distance of two groups, distance of two rows of a group).

    A matrix has groups of one row; the heads of a token are a group.
    """
    if x_RH.dim() == 2:
        return x_RH.shape[0], x_RH.shape[1], 1, step_of(x_RH, 0), 0
    return x_RH.shape[0] * x_RH.shape[1], x_RH.shape[2], x_RH.shape[1], step_of(x_RH, 0), step_of(x_RH, 1)
