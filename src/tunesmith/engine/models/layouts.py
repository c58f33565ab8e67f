"""Layouts of a model's parameters over ranks: pipeline stages, tensor parallel slices, shards, and their products.

Tensor parallel ranks each hold some heads and a part of the MLP's width (Shoeybi et al., Megatron-LM, 2019): linear
maps whose outputs are divided hold rows of `[out, in]`, those whose inputs are divided hold columns, and embedding and
output layer are divided by the vocabulary. Everything else is whole on each of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from tunesmith.base.core.errors import InputError
from tunesmith.engine.distributed.reshard import Layout, Piece
from tunesmith.engine.models.architecture import Architecture, Block, Experts, Norm, Projection, Stack, weight_of


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension that tensor parallel ranks divide: each has a part of each of the `sizes` along it."""

    dimension: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter. `layers` are those that compute with it; -1 is the embedding, and the number of layers the head."""

    name: str
    shape: tuple[int, ...]
    layers: tuple[int, ...]
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class Division:
    """Numbers of ranks whose product is that of all: copies, shards (FSDP), stages and tensor parallel ones, the last
    of which are neighbours.
    """

    copies: int = 1
    shards: int = 1
    stages: int = 1
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        """Of all copies."""
        return self.copies * self.shards * self.stages * self.tensor


def parts_of(module: nn.Module, architecture: Architecture) -> list[Part]:
    """The parameters of `module`, which has all its weights, as `named_parameters` gives them.

    Raises:
        InputError: a parameter is none of the decoder's.
    """
    found: dict[int, tuple[list[int], Cut | None]] = {}
    for layer, parameter, cut in _places(architecture):
        found.setdefault(id(parameter), ([], cut))[0].append(layer)
    parts: list[Part] = []
    for name, parameter in module.named_parameters():
        if id(parameter) not in found:
            raise InputError(f"{name} is no part of the decoder, so it cannot be divided")
        layers, cut = found[id(parameter)]
        parts.append(Part(name, tuple(parameter.shape), tuple(sorted(set(layers))), cut))
    return parts


def layout_of(parts: Sequence[Part], division: Division) -> Layout:
    """The piece of each parameter on each rank.

    As in `torch.chunk`, the first parts of an uneven division are larger. Shards divide the first dimension of what a
    tensor parallel rank has (FSDP2). Stages have consecutive layers, as many each as possible.
    """
    num_layers = max(layer for part in parts for layer in part.layers)
    return [
        {part.name: _piece(part, division, index, num_layers) for part in parts} for index in range(division.num_ranks)
    ]


def stage_of(layer: int, num_stages: int, num_layers: int) -> int:
    """The stage of a layer; -1 stands for the embedding, `num_layers` for the final norm and the output layer."""
    return min(max(layer, 0), num_layers - 1) * num_stages // num_layers


def _piece(part: Part, division: Division, index: int, num_layers: int) -> Piece:
    rest, tensor = divmod(index, division.tensor)
    rest, stage = divmod(rest, division.stages)
    shard = rest % division.shards
    ranges = [(range(size),) for size in part.shape]
    if stage not in {stage_of(layer, division.stages, num_layers) for layer in part.layers}:
        return ((), *ranges[1:])
    if part.cut is not None:
        ranges[part.cut.dimension] = _cut(part.cut.sizes, tensor, division.tensor)  # type: ignore[assignment]
    ranges[0] = _shard(ranges[0], shard, division.shards)  # type: ignore[assignment]
    return tuple(ranges)


def _cut(sizes: Sequence[int], index: int, count: int) -> tuple[range, ...]:
    """Part `index` of each of `count` parts of consecutive sizes."""
    found: list[range] = []
    start = 0
    for size in sizes:
        step = -(-size // count)
        found.append(range(start + min(index * step, size), start + min((index + 1) * step, size)))
        start += size
    return tuple(one for one in found if one)


def _shard(ranges: Sequence[range], index: int, count: int) -> tuple[range, ...]:
    """Part `index` of `count` of the indices in all `ranges`."""
    step = -(-sum(map(len, ranges)) // count)
    begin, end, offset = index * step, (index + 1) * step, 0
    found: list[range] = []
    for one in ranges:
        found.append(one[max(0, begin - offset) : max(0, end - offset)])
        offset += len(one)
    return tuple(one for one in found if one)


def _places(architecture: Architecture) -> Iterator[tuple[int, nn.Parameter, Cut | None]]:
    """Each parameter with its layer, and how tensor parallel ranks divide it."""
    blocks = architecture.blocks
    for parameter in architecture.embedding.parameters():
        yield -1, parameter, Cut(0, (parameter.shape[0],))
    if architecture.positions is not None:
        yield from ((-1, parameter, None) for parameter in architecture.positions.parameters())
    for layer, block in enumerate(blocks):
        yield from ((layer, parameter, cut) for parameter, cut in _of_block(block))
    yield from ((len(blocks), parameter, None) for parameter in architecture.final_norm.module.parameters())
    if architecture.output is not None:
        yield from (
            (len(blocks), parameter, cut) for parameter, cut in _of_projection(architecture.output, by_rows=True)
        )


def _of_block(block: Block) -> Iterator[tuple[nn.Parameter, Cut | None]]:
    norms: tuple[Norm | None, ...] = (block.norm_attention, block.q_norm, block.k_norm, block.norm_after_attention)
    for norm in (*norms, block.norm_mlp, block.norm_after_mlp):
        if norm is not None:
            yield from ((parameter, None) for parameter in norm.module.parameters())
    if isinstance(block.attention.sinks_H, nn.Parameter):
        yield block.attention.sinks_H, Cut(0, (block.attention.num_heads,))
    yield from _of_projection(block.qkv, by_rows=True)
    yield from _of_projection(block.out, by_rows=False)
    if isinstance(block.mlp, Experts):
        yield from ((parameter, None) for parameter in block.mlp.router.parameters)
        yield from _of_experts(block.mlp)
    else:
        yield from _of_projection(block.mlp.gate_up, by_rows=True)
        yield from _of_projection(block.mlp.down, by_rows=False)


def _of_projection(projection: Projection, *, by_rows: bool) -> Iterator[tuple[nn.Parameter, Cut | None]]:
    """A projection whose outputs are divided (`by_rows`), or its inputs: then outputs are sums over the ranks."""
    alone = len(projection.modules) == 1
    for index, (module, adapter) in enumerate(zip(projection.modules, projection.adapters, strict=True)):
        sizes = projection.sizes if alone else (projection.sizes[index],)
        cut = Cut(0, sizes) if by_rows else Cut(1, (weight_of(module).shape[1],))
        of_inputs, of_outputs = (None, cut) if by_rows else (cut, None)
        is_transposed = isinstance(module, Conv1D)
        yield module.weight, Cut(1 - cut.dimension if is_transposed else cut.dimension, cut.sizes)  # type: ignore[misc]
        if module.bias is not None:
            yield module.bias, of_outputs  # type: ignore[misc]
        if adapter is not None:
            yield from ((adapter.down_RI, of_inputs), (adapter.up_OR, of_outputs))
            if adapter.magnitude_O is not None:
                yield adapter.magnitude_O, of_outputs


def _of_experts(experts: Experts) -> Iterator[tuple[nn.Parameter, Cut | None]]:
    """Each expert is divided like an MLP."""
    gate_up, down = experts.gate_up, experts.down
    width = down.weight_EOI.shape[2]
    sizes = (2 * width,) if experts.is_interleaved else (width, width)
    yield gate_up.weight, Cut(_axis(gate_up, 1), sizes)
    if gate_up.bias_EO is not None:
        yield gate_up.bias_EO, Cut(1, sizes)
    yield down.weight, Cut(_axis(down, 2), (width,))
    if down.bias_EO is not None:
        yield down.bias_EO, None


def _axis(stack: Stack, axis: int) -> int:
    """The dimension of the parameter that is `axis` of `[E, O, I]`."""
    return 3 - axis if stack.is_transposed else axis
