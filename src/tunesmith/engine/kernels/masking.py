"""Tensors of tokens with a mask: what the definitions of several operations share.

Shapes: B sequences, T tokens. A mask is true (or non-zero) where a token counts.
"""

import torch
from torch import Tensor

from tunesmith.base.core.errors import InputError

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


def widened(x_BT: Tensor) -> Tensor:
    """`x_BT` itself if it is float32 or float64, else in float32."""
    return x_BT if x_BT.dtype in (torch.float32, torch.float64) else x_BT.float()


def kept(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`x_BT` with zeros outside the mask, in fp32 or wider. NaN in the padding reaches neither value nor gradient."""
    return widened(x_BT).masked_fill(~mask_BT, 0.0)


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
