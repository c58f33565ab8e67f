"""Linear maps with adapters in the engine: the base packed once and for all, what is trained beside it taken anew.

The order of the operations is the trainer's (`models/adapter.py`), so the bits are too. Shape legend: T tokens, I
inputs, O outputs, R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tunesmith.models.adapter import Adapter, add_low_rank, dora_scale, stretch
from tunesmith.models.architecture import Projection, output_size, weight_of

Base = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""The outputs of each module of a projection, without the biases of those that DoRA stretches."""


@dataclass(frozen=True, slots=True)
class _Beside:
    """What is computed beside one module; its share of the joint A are the rows from `start` to `stop`."""

    up_OR: torch.Tensor
    start: int
    stop: int
    scale_O: torch.Tensor | None
    bias_O: torch.Tensor | None


class AdaptedLinear:
    """A projection some of whose modules have adapters. `follow` takes the adapters as they are now."""

    def __init__(self, projection: Projection, base: Base) -> None:
        self._projection = projection
        self._base = base
        self._down_RI: torch.Tensor | None = None
        self._scaling_R: torch.Tensor | None = None
        self._beside: list[_Beside | None] = []
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the small tensors; the matrices A of one input are put together, so that it is read once."""
        downs: list[torch.Tensor] = []
        scalings: list[torch.Tensor] = []
        self._beside = []
        rank = 0
        for module, adapter in zip(self._projection.modules, self._projection.adapters, strict=True):
            if adapter is None:
                self._beside.append(None)
                continue
            downs.append(adapter.down_RI)
            scalings.append(torch.full((len(adapter.down_RI),), adapter.scaling, dtype=torch.float32))
            stretches = adapter.magnitude_O is not None
            scale_O = dora_scale(adapter, weight_of(module)).clone() if stretches else None
            bias_O = module.bias if stretches else None  # type: ignore[assignment]
            start, rank = rank, rank + len(adapter.down_RI)
            self._beside.append(_Beside(adapter.up_OR.clone(), start, rank, scale_O, bias_O))  # type: ignore[arg-type]
        self._down_RI, scaling_R = torch.cat(downs), torch.cat(scalings)
        self._scaling_R = None if bool((scaling_R == 1).all()) else scaling_R

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, as the trainer computes them."""
        assert self._down_RI is not None
        inner_TR = linear(x_TI, self._down_RI)
        if self._scaling_R is not None:
            inner_TR = (inner_TR * self._scaling_R).to(inner_TR.dtype)
        outputs: list[torch.Tensor] = []
        for y_TO, beside in zip(self._base(x_TI), self._beside, strict=True):
            if beside is None:
                outputs.append(y_TO)
                continue
            y_TO = add_low_rank(y_TO, inner_TR[:, beside.start : beside.stop], beside.up_OR)
            outputs.append(y_TO if beside.scale_O is None else stretch(y_TO, beside.scale_O, beside.bias_O))
        sizes = self._projection.sizes
        return outputs if len(outputs) == len(sizes) else outputs[0].split_with_sizes(sizes, -1)


def base_of(projection: Projection) -> Projection:
    """What is packed of a projection with adapters: its modules as they are, one output for each."""
    sizes = tuple(output_size(module) for module in projection.modules)
    return Projection(projection.modules, sizes, projection.adapters)


def has_bias_apart(adapter: Adapter | None) -> bool:
    """True for DoRA, which stretches what the weight gives and adds the bias afterwards."""
    return adapter is not None and adapter.magnitude_O is not None
