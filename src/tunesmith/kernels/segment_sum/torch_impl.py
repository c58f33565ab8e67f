"""The definition of sums over the sequences of a packed batch.

Shapes: T elements of all segments, one segment after the other; D columns; S segments.
"""

import torch
from torch import Tensor

from tunesmith.kernels.masking import widened


def segment_sum(values_TD: Tensor, offset_S1: Tensor) -> Tensor:
    """The sum of the rows of each segment, `[S, D]`, in fp32 or wider, by plain autograd.

    Segment s has the rows `offset_S1[s]` to `offset_S1[s + 1]`, the last one left out. An empty one gives 0.
    """
    wide_TD = widened(values_TD)
    if not wide_TD.shape[0]:  # torch's own refuses to reduce nothing
        return wide_TD.sum(0, keepdim=True).expand(len(offset_S1) - 1, -1)
    return torch.segment_reduce(wide_TD.contiguous(), "sum", offsets=offset_S1, initial=0.0)


def segment_gradient(d_sum_SD: Tensor, offset_S1: Tensor, num_rows: int) -> Tensor:
    """What each row of a segment gets of the gradient of the segment's sum, `[T, D]`: all of it."""
    return d_sum_SD.repeat_interleave(offset_S1.diff(), dim=0, output_size=num_rows)
