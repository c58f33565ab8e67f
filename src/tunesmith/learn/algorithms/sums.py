"""Masked sums, and records of sums that add up over micro-batches and ranks.

Shapes: B sequences, T tokens, S sums of one record. A mask is true (or non-zero) where a token counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sums:
    """Base of statistics whose fields are all sums: detached fp64 scalars on the device of the loss.

    Adding two records gives the record of both batches, whatever their sizes.
    """

    def __add__(self, other: Self) -> Self:
        return type(self).unpack(self.pack() + other.pack())

    def pack(self) -> Tensor:
        """The fields as one vector, shape S, in the order of their declaration."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unpack(cls, sums_S: Tensor) -> Self:
        """The record whose `pack()` is `sums_S`."""
        return cls(**dict(zip((field.name for field in fields(cls)), sums_S.unbind(), strict=True)))

    def floats(self) -> dict[str, float]:
        """The fields as plain numbers by name. Waits for the device once."""
        return dict(zip((field.name for field in fields(self)), self.pack().tolist(), strict=True))


class Additive(Protocol):
    """A record that can be added to others of its type."""

    def __add__(self, other: Any, /) -> Any: ...


class Measured(Additive, Protocol):
    """A record that can be added to others of its type, and has metrics."""

    def metrics(self) -> dict[str, float]:
        """The metrics by name."""
        ...


@dataclass(frozen=True, slots=True)
class Beside:
    """Statistics of a loss, and `others` beside them. Records of the same parts add up."""

    stats: Measured
    others: Measured

    def __add__(self, other: "Beside") -> "Beside":
        return Beside(self.stats + other.stats, self.others + other.others)

    def metrics(self) -> dict[str, float]:
        """Those of both."""
        return {**self.stats.metrics(), **self.others.metrics()}


SumsT = TypeVar("SumsT", bound=Additive)


def merged(records: Iterable[SumsT]) -> SumsT:
    """The record of all batches together, of one at least."""
    return reduce(add, records)
