"""Neighbouring ranks that compute each linear map together, each with a part of its weight."""

from typing import Any

import torch
import torch.distributed as dist

from tunesmith.engine.distributed import ranks


class TensorGroup:
    """This rank among `count` neighbours, `index` from 0; every rank of the training must make its own.

    What `sum` and `join` return has the same bits on all of them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.index = ranks.rank() % count
        self._group: Any = None  # all ranks
        if count < ranks.num_ranks():  # every rank makes all groups, as torch wants it
            starts = range(0, ranks.num_ranks(), count)
            groups = [dist.new_group(list(range(start, start + count))) for start in starts]
            self._group = groups[ranks.rank() // count]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in float32 at least."""
        if self.count == 1:
            return tensor
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=self._group)
        return wide.to(tensor.dtype)

    def join(self, part_RO: torch.Tensor, size: int) -> torch.Tensor:
        """`[R, size]`, the columns of all ranks one after the other, each with as many but for the last ones."""
        if self.count == 1:
            return part_RO
        width = -(-size // self.count)
        padded_RW = torch.nn.functional.pad(part_RO, (0, width - part_RO.shape[1])).contiguous()
        parts = [torch.empty_like(padded_RW) for _ in range(self.count)]
        dist.all_gather(parts, padded_RW, group=self._group)
        return torch.cat(parts, 1)[:, :size]
