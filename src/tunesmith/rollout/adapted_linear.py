"""Linear maps with adapters in the engine: the base packed once and for all, what is trained beside it taken anew.

The operations are the trainer's (`models/adapter.py`) for all modules of a projection at a time, so the bits are the
same: the matrices A stand below each other, the matrices B in the blocks of one matrix whose other numbers are zero.
Shape legend: T tokens, I inputs, O outputs, R ranks of all adapters.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

from tunesmith.models.adapter import Adapter, add_low_rank, dora_scale, stretch
from tunesmith.models.architecture import Projection, output_size, weight_of

Base = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""The outputs of all modules as one tensor, without the biases of those that DoRA stretches."""


class AdaptedLinear:
    """A projection some of whose modules have adapters. `follow` takes these as they are now."""

    def __init__(self, projection: Projection, base: Base) -> None:
        self._projection = projection
        self._base = base
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the small tensors."""
        modules, adapters = self._projection.modules, self._projection.adapters
        used = [adapter for adapter in adapters if adapter is not None]
        widths = [output_size(module) for module in modules]
        scaling_R = torch.cat([torch.full((len(adapter.down_RI),), adapter.scaling) for adapter in used])
        self._down_RI = torch.cat([adapter.down_RI for adapter in used])
        self._scaling_R: torch.Tensor | None = scaling_R
        if all(math.frexp(adapter.scaling)[0] == 0.5 for adapter in used):  # a power of two changes no digits
            self._down_RI, self._scaling_R = (self._down_RI * scaling_R[:, None]).to(self._down_RI.dtype), None
        self._up_OR = self._down_RI.new_zeros(sum(widths), len(scaling_R))
        self._scale_O, self._bias_O = self._stretches(widths)
        row = column = 0
        for adapter, width in zip(adapters, widths, strict=True):
            if adapter is not None:
                rank = adapter.up_OR.shape[1]
                self._up_OR[row : row + width, column : column + rank] = adapter.up_OR
                column += rank
            row += width

    @property
    def is_idle(self) -> bool:
        """True if every B is zero."""
        return not bool(self._up_OR.any())

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, as the trainer computes them."""
        inner_TR = linear(x_TI, self._down_RI)
        if self._scaling_R is not None:
            inner_TR = (inner_TR * self._scaling_R).to(inner_TR.dtype)
        (y_TO,) = self._base(x_TI)
        y_TO = add_low_rank(y_TO, inner_TR, self._up_OR)
        if self._scale_O is not None:
            y_TO = stretch(y_TO, self._scale_O, self._bias_O)
        sizes = self._projection.sizes
        return (y_TO,) if len(sizes) == 1 else y_TO.split_with_sizes(sizes, -1)

    def _stretches(self, widths: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """DoRA's scales, 1 for modules without, and the biases that are added behind them, 0 where there is none."""
        parts = list(zip(self._projection.modules, self._projection.adapters, widths, strict=True))
        if not any(has_bias_apart(adapter) for _, adapter, _ in parts):
            return None, None
        scales, biases = [], []
        for module, adapter, width in parts:
            stretched = adapter if has_bias_apart(adapter) else None
            weight_OI = weight_of(module)
            scales.append(torch.ones(width) if stretched is None else dora_scale(stretched, weight_OI))
            bias_O = None if stretched is None else module.bias
            biases.append(weight_OI.new_zeros(width) if bias_O is None else bias_O)
        has_bias = any(module.bias is not None for module in self._projection.modules)
        return torch.cat(scales), torch.cat(biases) if has_bias else None  # type: ignore[arg-type]


def base_of(projection: Projection) -> Projection:
    """What is packed of a projection with adapters: its modules as they are, with one output."""
    width = sum(output_size(module) for module in projection.modules)
    return Projection(projection.modules, (width,), projection.adapters)


def has_bias_apart(adapter: Adapter | None) -> bool:
    """True for DoRA, which stretches what the weight gives and adds the bias afterwards."""
    return adapter is not None and adapter.magnitude_O is not None
