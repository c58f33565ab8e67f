"""Moves weights between layouts, in place and tensor by tensor, so that no rank ever holds two whole models.

A layout says which part of each tensor each rank holds. From pipeline stages to tensor parallel slices, or from shards
to slices and back, a rank receives what it lacks from one that has it; bits do not change.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.system import trim_memory
from tunesmith.engine.distributed.ranks import Message, exchange, rank

Piece = tuple[tuple[range, ...], ...]
"""The part of a tensor that a rank holds: for each dimension the indices, as ranges that lie one after the other in
memory. A dimension without a range makes it empty.
"""

Layout = Sequence[Mapping[str, Piece]]
"""For each rank its piece of each tensor, by name. Of two ranks the pieces of a tensor are equal, or disjoint."""

Slices = tuple[slice, ...]

_TRIMS = 16
"""Times that a rank gives freed memory back to the system while it moves all that it holds."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Numbers that the rank `source` has at `here` of its piece of a tensor, and `target` wants at `there` of its."""

    source: int
    target: int
    here: Slices
    there: Slices


def shape_of(piece: Piece) -> tuple[int, ...]:
    """The shape of a piece."""
    return tuple(sum(map(len, ranges)) for ranges in piece)


@torch.no_grad()
def reshard(tensors: Mapping[str, torch.Tensor], source: Layout, target: Layout) -> None:
    """Move `tensors` from the layout `source` to `target`; every rank must call it, outside of a backward pass.

    Each tensor keeps its identity and gets other contents and another shape (`.data`); it is empty where a rank holds
    nothing of it. They are moved one after the other, in an order that keeps the fullest rank small: at its peak a rank
    holds little more than its larger share.

    Raises:
        InputError: ranks of `source` hold pieces that overlap, or lack a part of what `target` needs.
    """
    blocks = {name: _blocks(name, source, target) for name in tensors}
    num_bytes, num_freed = sum(tensor.nbytes for tensor in tensors.values()), 0
    for name in _order(tensors, source, target):
        if blocks[name]:
            num_freed += tensors[name].nbytes
            tensors[name].data = _moved(tensors[name].data, blocks[name], target[rank()][name])
        if num_freed > num_bytes / _TRIMS:
            num_freed = 0
            trim_memory()  # new pieces seldom fit into the gaps that old ones leave


def _moved(old: torch.Tensor, blocks: Sequence[_Block], piece: Piece) -> torch.Tensor:
    """This rank's new `piece` of a tensor of which it has `old`, after the exchange of `blocks`."""
    new = old.new_empty(shape_of(piece))
    sent: list[Message] = []
    received: list[Message] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in blocks:
        if block.source == block.target == rank():
            new[block.there] = old[block.here]
        elif block.source == rank():
            sent.append(Message(block.target, old[block.here].contiguous()))
        elif block.target == rank():
            part = new[block.there]
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            copies += [(part, buffer)] * (buffer is not part)
            received.append(Message(block.source, buffer))
    exchange(sent, received, "reshard")
    for part, found in copies:
        part.copy_(found)
    return new


def _blocks(name: str, source: Layout, target: Layout) -> list[_Block]:
    """The parts of its new piece that each rank needs, from itself where it has them; none if no piece changes."""
    if all(before[name] == after[name] for before, after in zip(source, target, strict=True)):
        return []
    holders: dict[Piece, list[int]] = {}
    for index, pieces in enumerate(source):
        holders.setdefault(pieces[name], []).append(index)
    found: list[_Block] = []
    for to, wanted in enumerate(pieces[name] for pieces in target):
        count = 0
        for piece, ranks in holders.items():
            # A rank's own numbers cost no message. Where several hold the piece, targets ask different ones in turn, so
            # that one rank does not send to all.
            owner = to if to in ranks else ranks[to % len(ranks)]
            for dimensions in itertools.product(*map(_common, piece, wanted)):
                here, there = zip(*dimensions, strict=True)
                count += math.prod(part.stop - part.start for part in here)
                found.append(_Block(owner, to, here, there))
        if count != math.prod(shape_of(wanted)):
            raise InputError(
                f"rank {to} needs {math.prod(shape_of(wanted))} numbers of {name}, and the ranks hold {count} of them; "
                "give a layout whose pieces cover each tensor and are equal or disjoint"
            )
    return found


def _common(held: Sequence[range], wanted: Sequence[range]) -> list[tuple[slice, slice]]:
    """Positions in each of the indices that are in both."""
    found: list[tuple[slice, slice]] = []
    for (a, offset), (b, other) in itertools.product(_offsets(held), _offsets(wanted)):
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start < stop:
            places = (offset + start - a.start, other + start - b.start)
            found.append((slice(places[0], places[0] + stop - start), slice(places[1], places[1] + stop - start)))
    return found


def _offsets(ranges: Sequence[range]) -> list[tuple[range, int]]:
    return list(zip(ranges, itertools.accumulate(map(len, ranges), initial=0), strict=False))


def _order(tensors: Mapping[str, torch.Tensor], source: Layout, target: Layout) -> list[str]:
    """Names in an order in which no rank grows much before it shrinks: the next has the smallest peak of any rank."""

    def sizes(layout: Layout) -> dict[str, list[int]]:
        return {
            name: [math.prod(shape_of(own[name])) * tensor.itemsize for own in layout]
            for name, tensor in tensors.items()
        }

    before, after, waiting, order = sizes(source), sizes(target), list(tensors), list[str]()
    held = [sum(of_rank) for of_rank in zip(*before.values(), strict=True)]
    while waiting:
        best = min(waiting, key=lambda name: max(map(sum, zip(held, after[name], strict=True))))
        held = [size + new - old for size, new, old in zip(held, after[best], before[best], strict=True)]
        waiting.remove(best)
        order.append(best)
    return order
