"""Linear maps of one input as one matrix product, from the very memory that is trained.

The weights of queries, keys and values (and of gate and up) become views of one tensor, side by side. The modules and
their parameters stay the same objects, and training changes them in place; so the engine follows every update without
a copy, and a captured CUDA graph that reads them stays right.

Shape legend: T tokens, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.models.architecture import Projection, weight_of
from tunesmith.models.decoder import module_outputs


@dataclass(frozen=True, slots=True)
class SharedLinear:
    """A projection whose weight is the modules' own memory."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    sizes: tuple[int, ...]

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, views of one tensor `[T, sum(sizes)]`."""
        y_TO = nn.functional.linear(x_TI, self.weight_OI, self.bias_O)
        return (y_TO,) if len(self.sizes) == 1 else y_TO.split_with_sizes(self.sizes, -1)


@dataclass(frozen=True, slots=True)
class ModuleLinear:
    """A projection computed module by module: with adapters, or where some modules have a bias and others none."""

    projection: Projection

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, as the trainer computes them."""
        return module_outputs(self.projection, x_TI)


@torch.no_grad()
def share(projection: Projection) -> SharedLinear | ModuleLinear:
    """The projection as one product; its modules' weights and biases are moved side by side if they are not there yet.

    No number changes. What is done again finds everything in its place and moves nothing.
    """
    biases = [module.bias for module in projection.modules]
    if any(projection.adapters) or len({bias is None for bias in biases}) == 2:
        return ModuleLinear(projection)
    if len(projection.modules) == 1:
        return SharedLinear(weight_of(projection.modules[0]), biases[0], projection.sizes)  # type: ignore[arg-type]
    weight_OI = _side_by_side([module.weight for module in projection.modules])  # type: ignore[misc]
    bias_O = None if biases[0] is None else _side_by_side(biases)  # type: ignore[arg-type]
    return SharedLinear(weight_OI, bias_O, projection.sizes)


def _side_by_side(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """All rows as one tensor, of which the parameters are views."""
    first = parameters[0].detach()
    rows = sum(map(len, parameters))
    size = (rows, *first.shape[1:])
    if _are_adjacent(parameters):
        return first.as_strided(size, first.stride(), first.storage_offset())
    joined = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _are_adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """True if the parameters stand one behind the other in one storage, without gaps."""
    first = parameters[0]
    end = first.data_ptr()
    for parameter in parameters:
        is_same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_same and parameter.is_contiguous() and parameter.data_ptr() == end):
            return False
        end += parameter.numel() * parameter.element_size()
    return True
