"""Masked sums, and records of sums that add up over micro-batches and ranks.

Shapes: B sequences, T tokens, S sums of one record. A mask is true (or non-zero) where a token counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Self, TypeVar

import torch
from torch import Tensor

from tunesmith.core.errors import InputError

Denominator = float | Tensor
"""A number of tokens or pairs: of the whole optimizer step, over all micro-batches and ranks, not of the tensors at
hand. Where a function says so, one number for each row, shape `[B, 1]`.
"""


def check_shapes(**tensors: Tensor | None) -> None:
    """Raise `InputError` naming every shape if the given tensors differ in it: broadcasting would hide the mistake."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(
            f"These tensors have different shapes: {listed}. They must have one shape; pad or trim them alike."
        )


def check_denominator(name: str, value: Denominator) -> None:
    """Raise `InputError` if `value` is a plain number that is not positive. Reading a tensor would stall a GPU."""
    if not isinstance(value, Tensor) and not value > 0:
        raise InputError(f"{name} is {value}; it must be positive. Skip a step that has nothing to learn from.")


def kept(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`x_BT` with zeros outside the mask, in fp32 or wider. NaN in the padding reaches neither value nor gradient."""
    wide_BT = x_BT if x_BT.dtype in (torch.float32, torch.float64) else x_BT.float()
    return wide_BT.masked_fill(~mask_BT, 0.0)


def shared_out(x_BT: Tensor, denominator: Denominator) -> Tensor:
    """The sum of all elements over `denominator`, a differentiable scalar; or, with a denominator for each row, the sum
    of the elements over that of their row.
    """
    if isinstance(denominator, Tensor) and denominator.dim() > 0:
        return (x_BT / denominator).sum()
    return x_BT.sum() / denominator


def total(x_BT: Tensor) -> Tensor:
    """Detached sum of all elements, a scalar in fp64, so that counts and squares stay exact over a long rollout."""
    return x_BT.detach().sum(dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Sums:
    """Base of statistics whose fields are all sums: detached fp64 scalars on the device of the loss.

    Adding two records gives the record of both batches, whatever their sizes. Over ranks:
    `unpack(all_reduced(pack()))`.
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


SumsT = TypeVar("SumsT", bound=Sums)


def merged(records: Iterable[SumsT]) -> SumsT:
    """The record of all batches together. Raises `InputError` if there is none."""
    listed = list(records)
    if not listed:
        raise InputError("No statistics were given; merge at least one record.")
    return reduce(add, listed)
