"""Computes one step of a plan: packed weights, keys and values in the paged cache, hidden states of the drawn rows.

The forward itself is `models/decoder.py`'s, the trainer's own; here is how the engine does its linear maps and its
attention. Shape legend: T tokens, R rows that are drawn from, H hidden, X query width, Y key width, L layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.kernels.attention.api import attend
from tunesmith.kernels.attention.records import Places
from tunesmith.kernels.linear.api import BlocksLikeTorch, PackedWeight, linear
from tunesmith.kernels.linear.api import pack as pack_panels
from tunesmith.kernels.native import Kernels
from tunesmith.models import decoder as flat
from tunesmith.models.adapter import Adapter, add_low_rank, dora_scale, stretch
from tunesmith.models.architecture import Architecture, Block, Projection, output_size, weight_of
from tunesmith.models.decoder import Decoder, OnLayer, Pass
from tunesmith.rollout.kv_cache import CacheShape
from tunesmith.rollout.scheduler import Plan, Rows

_MIN_ROWS = 4
"""A step with fewer rows is filled up: oneDNN takes longer for two than for four, and one row it may sum otherwise."""

_PACKED_ROWS = 64
"""Rows that the packed layout is chosen for."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weights of a projection side by side: in panels for our kernel, in the layout of oneDNN, or as they stand."""

    weight: PackedWeight | torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, views of one tensor `[T, sum(sizes)]`."""
        if isinstance(self.weight, PackedWeight):
            y_TO = linear(x_TI, self.weight, self.bias)
        elif self.weight.is_mkldnn:
            y_TO = torch.ops.mkldnn._linear_pointwise.default(x_TI, self.weight, self.bias, "none", [], "")
        else:
            y_TO = nn.functional.linear(x_TI, self.weight, self.bias)
        if len(self.sizes) == 1:
            return (y_TO,)
        return y_TO.split_with_sizes(self.sizes, -1)  # `split` is Python, and slower


class Packer:
    """Packs projections; what suits a shape is tried out once, when the first weight of that shape comes."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._blocks = BlocksLikeTorch(kernels)

    @torch.no_grad()
    def pack(self, projection: Projection) -> PackedLinear:
        """A copy of the projection's weights as they are now."""
        parts = [weight_of(module) for module in projection.modules]
        weight_OI = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        bias_O = _joined_bias(projection, parts)
        block = self._blocks.of(weight_OI)
        if block is not None:
            return PackedLinear(pack_panels(weight_OI, block, kernels=self._kernels), bias_O, projection.sizes)
        if _can_be_packed(weight_OI.dtype):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_ROWS)
            return PackedLinear(packed, bias_O, projection.sizes)
        return PackedLinear(weight_OI.clone(), bias_O, projection.sizes)


def _joined_bias(projection: Projection, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    biases = [
        None if has_bias_apart(adapter) else module.bias
        for module, adapter in zip(projection.modules, projection.adapters, strict=True)
    ]
    if all(bias is None for bias in biases):
        return None
    filled = [
        weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(parts, biases, strict=True)
    ]
    return torch.cat(filled)  # type: ignore[arg-type]


def _can_be_packed(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # oneDNN refuses bfloat16 on processors that it has no code for.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
        inner_TR = nn.functional.linear(x_TI, self._down_RI)
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


def cache_shape(architecture: Architecture) -> CacheShape:
    """What the cache must hold for each token."""
    settings = architecture.blocks[0].attention
    return CacheShape(len(architecture.blocks), settings.num_kv_heads, settings.head_dim, architecture.dtype)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows that tokens are drawn from, in the order of `plan.drawn`; `hidden_RH` is behind the final norm."""

    hidden_RH: torch.Tensor
    logits_RV: torch.Tensor


class Runner:
    """Packed weights of `decoder`, as they were when it was made, or at the last `repack`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        architecture = decoder.architecture
        self._projections = [
            projection
            for block in architecture.blocks
            for projection in (block.qkv, block.out, block.gate_up, block.down)
        ]
        self._projections.append(architecture.head)
        self._packer = Packer(decoder.kernels)
        self._packed: dict[int, PackedLinear | AdaptedLinear] = {}
        self._frozen: dict[int, tuple[int, ...] | None] = {}
        self.repack()

    @property
    def has_adapters(self) -> bool:
        """True if adapters alone are trained, so that the packed weights stay as they are."""
        return any(any(projection.adapters) for projection in self._projections)

    @property
    def is_idle(self) -> bool:
        """True if there are adapters, and they change nothing yet."""
        adapted = [packed for packed in self._packed.values() if isinstance(packed, AdaptedLinear)]
        return bool(adapted) and all(packed.is_idle for packed in adapted)

    def repack(self) -> None:
        """Pack the weights as they are now; one projection after the other, so that there are never two of all.

        Weights that are frozen and as they were are left as they are packed: of a model with adapters, all.
        """
        for projection in self._projections:
            key, state = id(projection), _frozen_state(projection)
            held = self._packed.get(key)
            if held is None or state is None or self._frozen[key] != state:
                self._packed.pop(key, None)
                del held
                self._packed[key] = self._pack(projection)
                self._frozen[key] = state
            elif isinstance(held, AdaptedLinear):
                held.follow()

    def _pack(self, projection: Projection) -> PackedLinear | AdaptedLinear:
        if not any(projection.adapters):
            return self._packer.pack(projection)
        return AdaptedLinear(projection, self._packer.pack(base_of(projection)))

    @torch.no_grad()
    def run(
        self,
        plan: Plan,
        storage: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        on_layer: OnLayer | None = None,
    ) -> Drawn:
        """Write keys and values of the plan's tokens into `storage`, and compute what is drawn from.

        The plan's copies must have been done.
        """
        tokens = Rows(
            plan.decode.token_ids + plan.prefill.token_ids,
            plan.decode.positions + plan.prefill.positions,
            plan.decode.table_rows + plan.prefill.table_rows,
        )
        hidden_TH = self.hidden_states(tokens, storage, block_tables, on_layer=on_layer)
        rows = list(range(len(plan.sequences)))
        repeats: list[int] = [1] * len(rows)
        end = len(rows)
        for chunk in plan.chunks:
            end += chunk.stop - chunk.start
            if chunk.sequences:
                rows.append(end - 1)
                repeats.append(len(chunk.sequences))
        hidden_RH = hidden_TH[rows]
        logits_RV = self.logits(hidden_RH)
        if max(repeats, default=1) > 1:
            repeat_R = torch.tensor(repeats)
            hidden_RH, logits_RV = (x.repeat_interleave(repeat_R, dim=0) for x in (hidden_RH, logits_RV))
        return Drawn(hidden_RH, logits_RV)

    @torch.no_grad()
    def hidden_states(
        self, tokens: Rows, storage: torch.Tensor, block_tables: torch.Tensor, *, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Hidden states of `tokens`, `[T, H]`; their keys and values are written."""
        count = len(tokens.token_ids)
        missing = max(0, _MIN_ROWS - count)
        ids_T, positions_T, table_rows_T = (
            torch.tensor(values + values[-1:] * missing, dtype=dtype)
            for values, dtype in (
                (tokens.token_ids, torch.int64),
                (tokens.positions, torch.int32),
                (tokens.table_rows, torch.int32),
            )
        )
        places = Places(positions_T, table_rows_T, block_tables)
        num_positions = int(positions_T.max()) + 1

        def attention(
            layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
        ) -> torch.Tensor:
            rope = None if block.rope is None else self._decoder.ropes.get(block.rope, num_positions)
            return attend(
                q_TX, k_TY, v_TY, rope, places, storage[layer], block.attention, kernels=self._decoder.kernels
            )

        way = Pass(self._linear, attention, self._decoder.kernels, on_layer=on_layer)
        return flat.hidden_states(self._decoder.architecture, ids_T, positions_T, way)[:count]

    @torch.no_grad()
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]`."""
        count = len(hidden_RH)
        if count == 0:
            return hidden_RH.new_zeros((0, *self._decoder.architecture.head.sizes))
        if count < _MIN_ROWS:
            hidden_RH = torch.cat([hidden_RH, hidden_RH[-1:].expand(_MIN_ROWS - count, -1)])
        way = Pass(self._linear, _no_attention, self._decoder.kernels)
        return flat.logits(self._decoder.architecture, hidden_RH, way)[:count]

    def _linear(self, projection: Projection, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._packed[id(projection)](x_TI)


def _frozen_state(projection: Projection) -> tuple[int, ...] | None:
    """Torch's counts of the changes of a projection's weights; None if they are trained."""
    parameters = [parameter for module in projection.modules for parameter in module.parameters()]
    if any(parameter.requires_grad for parameter in parameters):
        return None
    return tuple(parameter._version for parameter in parameters)


def _no_attention(layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the output layer has no attention")
