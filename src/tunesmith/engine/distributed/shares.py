"""The elements of each parameter whose masters and moments a rank holds, and parts of parameters that are divided."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tunesmith.engine.distributed import ranks


def ranges_of(sizes: Sequence[int], num_ranks: int, block: int) -> list[list[range]]:
    """For each rank, the range of elements of each parameter that it owns; `sizes` are elements of each parameter.

    All parameters, one after the other in blocks of `block` elements, are cut into `num_ranks` equal parts. A range
    begins at a multiple of `block`, and may be empty.

    >>> ranges_of([5, 4], 2, block=2)
    [[range(0, 4), range(0, 0)], [range(4, 5), range(0, 4)]]
    """
    blocks = [-(-size // block) for size in sizes]
    total, firsts = sum(blocks), [0, *accumulate(blocks)]
    return [
        [
            _cut(size, (total * rank // num_ranks - first) * block, (total * (rank + 1) // num_ranks - first) * block)
            for size, first in zip(sizes, firsts, strict=False)
        ]
        for rank in range(num_ranks)
    ]


def _cut(size: int, start: int, stop: int) -> range:
    start, stop = min(max(start, 0), size), min(max(stop, 0), size)
    return range(start, stop) if start < stop else range(0)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """The contents of a parameter: gathered if it is divided; on rank 0 also of one that another pipeline stage has,
    from the last that has it. All ranks must call it.
    """
    held, stages = local(parameter), ranks.stages()
    if isinstance(parameter, DTensor):
        return gathered_like(held, parameter)
    if stages is None:
        return held
    shapes = ranks.of_all_stages([held.shape], "shapes")
    holder = max((index for index, shape in enumerate(shapes) if shape.numel()), default=0)
    if ranks.data_rank() == 0 and holder > 0:
        if stages.index == holder:
            stages.send(0, held)
        elif stages.index == 0:
            return stages.receive(holder, held.new_empty(shapes[holder]))
    return held


def gathered_like(part: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The tensor of which each rank has a `part`: the same elements as of `parameter`."""
    mesh = parameter.device_mesh
    for index, placement in enumerate(parameter.placements):
        parts: list[Any] = [None] * mesh.size(index)
        dist.all_gather_object(parts, part, group=mesh.get_group(index))  # parts may differ in size
        part = torch.cat(parts, dim=_dim(placement))
    return part


def own_part(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a whole `tensor` that this rank has of `parameter`."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    for index, placement in reversed(list(enumerate(parameter.placements))):
        dim = _dim(placement)
        parts = tensor.chunk(mesh.size(index), dim)  # fewer for a short tensor
        place = mesh.get_local_rank(index)
        tensor = parts[place] if place < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of `parameter` on this rank, without gradient."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _dim(placement: Any) -> int:
    """The dimension that is divided; torch has a class for it, and one for what tensor parallelism divided before."""
    return placement.dim
