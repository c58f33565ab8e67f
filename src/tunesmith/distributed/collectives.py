"""Reductions over the training ranks; the identity where torch.distributed was not started."""

import torch
import torch.distributed as dist


def sum_over_ranks(value: float) -> float:
    """The sum of `value` over all ranks, for example the number of loss tokens: one global denominator."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
