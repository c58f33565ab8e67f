"""Frozen linear maps in 8 bits, on which adapters are trained: the trainer and the engine compute the same numbers.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314) stores a frozen base in few bits and multiplies in 16. Here the products
are in 8 bits too (`engine/kernels/linear_int8`), in the forward pass of training as in drawing, so that the engine
needs no copy of the weights, and log-probs stay equal to the bit. Gradients flow through the weight that the 8 bits
stand for.

Shape legend: T tokens, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.base.core.system import drop_mapped_pages
from tunesmith.engine.kernels.linear_int8.api import PackedInt8, linear, pack, stored, unpacked
from tunesmith.engine.kernels.native import shared
from tunesmith.engine.models.architecture import (
    Architecture,
    Mlp,
    Projection,
    Stack,
    joined_bias,
    output_size,
    weight_of,
)


class Int8Linear(nn.Module):
    """A frozen linear map in 8 bits. Maps of one input, such as those of queries, keys and values, lie in one weight,
    the parameters `numbers` and `scales` of all of them, of which this one has the outputs from `first` on. They are
    parameters in `weight` already.

    `turns_neighbours` is the order of rotary positions of its model, which was proved before it was rounded: a proof
    compares two computations, and what rounds their inputs to 8 bits enlarges their distance.
    """

    def __init__(self, module: nn.Module, weight: PackedInt8, first: int, *, turns_neighbours: bool) -> None:
        super().__init__()
        self.turns_neighbours = turns_neighbours
        self.numbers, self.scales = weight.numbers, weight.scales
        self.bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
        self.first, self.out_features, self.in_features = first, output_size(module), weight.num_inputs
        self.was_transposed = isinstance(module, Conv1D)
        self._num_outputs, self._dtype = weight.num_outputs, weight.like.dtype

    @property
    def packed(self) -> PackedInt8:
        """The weight of all maps of the input."""
        return stored(self.numbers, self.scales, self._num_outputs, self.in_features, self._dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight that the 8 bits stand for, `[O, I]` in the dtype of the model: made anew each time, no grad."""
        return unpacked(self.packed)[self.first : self.first + self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The map of the last dimension of `x`, for transformers' own forward pass."""
        y_TO = linear(x.flatten(0, -2), self.packed, None)[:, self.first : self.first + self.out_features]
        y_TO = y_TO if self.bias is None else y_TO + self.bias
        return y_TO.unflatten(0, x.shape[:-1])

    def plain(self) -> nn.Module:
        """A map of the dtype of the model with the weight that the 8 bits stand for, of the kind that it was."""
        weight_OI = self.weight.clone()
        if self.was_transposed:
            made: Any = Conv1D(self.out_features, self.in_features)
            weight_OI = weight_OI.t().contiguous()
        else:
            made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(weight_OI, requires_grad=False)
        made.bias = self.bias
        return made


def int8_tensors(model: nn.Module) -> set[int]:
    """The ids of the parameters of `model` that hold weights in 8 bits, with their scales."""
    held = [part for part in model.modules() if isinstance(part, Int8Linear)]
    return {id(one) for part in held for one in (part.numbers, part.scales)}


def int8_map_of(model: nn.Module) -> Int8Linear | None:
    """One of the linear maps of `model` in 8 bits; None if it has none."""
    return next((part for part in model.modules() if isinstance(part, Int8Linear)), None)


def has_int8_base(model: nn.Module) -> bool:
    """True if linear maps of `model` are in 8 bits."""
    return int8_map_of(model) is not None


def is_int8(projection: Projection | Stack) -> bool:
    """True if the projection's weights are in 8 bits; those of experts never are."""
    return isinstance(projection, Projection) and isinstance(projection.modules[0], Int8Linear)


def packed_of(projection: Projection) -> PackedInt8:
    """The weight of a projection in 8 bits: the memory that the model itself holds."""
    first = projection.modules[0]
    assert isinstance(first, Int8Linear), "the projection is not in 8 bits"
    return first.packed


def base_outputs(projection: Projection, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of the modules of a projection in 8 bits, `[T, O]` each, with a gradient to `x_TI`; without the bias
    of modules with DoRA.
    """
    y_TO = linear(x_TI, packed_of(projection), joined_bias(projection))
    return y_TO.split([output_size(module) for module in projection.modules], dim=-1)


@torch.no_grad()
def round_base(model: PreTrainedModel, architecture: Architecture) -> None:
    """Replace the linear maps of attention and of MLPs by frozen ones in 8 bits, in place, one after the other, so that
    no second copy of the weights is held. `architecture` is that of `model`, and proved. Embeddings, norms, the output
    layer, routers, and experts stay as they are.
    """
    projections = [one for block in architecture.blocks for one in (block.qkv, block.out)]
    for block in architecture.blocks:
        if isinstance(block.mlp, Mlp):
            projections += (block.mlp.gate_up, block.mlp.down)
    turns = any(block.num_neighbours for block in architecture.blocks)
    places = {id(child): (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    # One buffer for all, as freed ones of several sizes would leave holes in a heap that never shrinks.
    sizes = [sum(weight_of(module).numel() for module in projection.modules) for projection in projections]
    buffer = weight_of(projections[0].modules[0]).new_empty(max(sizes))
    for projection, size in zip(projections, sizes, strict=True):
        parts = [weight_of(module) for module in projection.modules]
        weight_OI = torch.cat(parts, out=buffer[:size].view(-1, parts[0].shape[1]))
        for part in parts:
            drop_mapped_pages(part.data_ptr(), part.numel() * part.element_size())
        packed, first = pack(weight_OI, kernels=shared("auto")), 0
        held = replace(packed, numbers=_frozen(packed.numbers), scales=_frozen(packed.scales))
        for module in projection.modules:
            rounded = Int8Linear(module, held, first, turns_neighbours=turns)
            first += output_size(module)
            parent, name = places[id(module)]
            setattr(parent, name, rounded.train(module.training))
            module.register_parameter("weight", None)  # the architecture still holds the module


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@torch.no_grad()
def unround(model: nn.Module) -> None:
    """Replace the maps in 8 bits by plain ones with the weights that these stand for, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Int8Linear):
                setattr(parent, name, child.plain())
