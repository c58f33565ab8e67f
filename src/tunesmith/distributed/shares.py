"""The elements of each parameter whose masters and moments a rank holds."""

from collections.abc import Sequence
from itertools import accumulate


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
