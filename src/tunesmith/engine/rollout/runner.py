"""Forward passes of the engine: packed weights, keys and values in the paged cache.

The forward itself is `engine/models/decoder.py`, shared with the trainer; here are the engine's linear maps and
attention.

Shape legend: T tokens, R rows that tokens are sampled from, H hidden, X query width, Y key width, I inputs, O outputs,
V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.kernels.attention.api import attend
from tunesmith.engine.kernels.attention.records import Places, SharedPrefixes
from tunesmith.engine.kernels.linear.api import BlocksLikeTorch, PackedWeight
from tunesmith.engine.kernels.linear.api import linear as packed_linear
from tunesmith.engine.kernels.linear.api import pack as pack_panels
from tunesmith.engine.kernels.linear.exact import is_by_tiles, linear
from tunesmith.engine.kernels.linear.grouped import each_group
from tunesmith.engine.kernels.linear_int8.api import PackedInt8
from tunesmith.engine.kernels.linear_int8.api import linear as int8_linear
from tunesmith.engine.kernels.linear_int8.api import pack as pack_int8
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import decoder as flat
from tunesmith.engine.models.adapter import add_low_rank, dora_scale, is_dora, stretch
from tunesmith.engine.models.architecture import (
    Architecture,
    Block,
    Projection,
    Stack,
    joined_bias,
    output_size,
    weight_of,
)
from tunesmith.engine.models.decoder import Decoder, OnLayer, Ops
from tunesmith.engine.models.embedding import embedded
from tunesmith.engine.models.fingerprint import Fingerprint, TensorId
from tunesmith.engine.models.int8_base import is_int8, packed_of
from tunesmith.engine.rollout.kv_cache import CacheShape
from tunesmith.engine.rollout.recorded_step import MOST_ROWS, RecordedStep
from tunesmith.engine.rollout.scheduler import Plan, Rows

_log = get_logger(__name__)

_MIN_ROWS = 4
"""Rows that steps are padded to where torch multiplies: oneDNN is slower for two rows than for four, and may sum one
row otherwise."""

_PACKED_ROWS = 64
"""Number of input rows that oneDNN's packed layout is chosen for."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The concatenated weights of a projection: in panels for our kernels, in oneDNN's layout, or plain."""

    weight: PackedWeight | PackedInt8 | torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]

    @property
    def is_by_row(self) -> bool:
        """True if kernels of ours multiply, for which a single row is as good as several."""
        return isinstance(self.weight, PackedWeight | PackedInt8)

    def __call__(self, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs, views of one tensor `[T, sum(sizes)]`."""
        if isinstance(self.weight, PackedWeight):
            y_TO = packed_linear(x_TI, self.weight, self.bias)
        elif isinstance(self.weight, PackedInt8):
            y_TO = int8_linear(x_TI, self.weight, self.bias)
        elif self.weight.is_mkldnn:
            y_TO = torch.ops.mkldnn._linear_pointwise.default(x_TI, self.weight, self.bias, "none", [], "")
        else:
            y_TO = linear(x_TI, self.weight, self.bias)
        if len(self.sizes) == 1:
            return (y_TO,)
        return y_TO.split_with_sizes(self.sizes, -1)  # `split` is Python, and slower


class Packer:
    """Packs projections, in the model's dtype or in 8 bits. The layout for a shape is measured once, with the first
    weight of that shape.
    """

    def __init__(self, kernels: Kernels, weights: Weights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._blocks = BlocksLikeTorch(kernels)

    @torch.no_grad()
    def pack(self, projection: Projection) -> PackedLinear:
        """A copy of the projection's current weights; or these themselves, if they are in 8 bits in the model."""
        bias_O = joined_bias(projection)
        if is_int8(projection):  # no copy: these weights are frozen
            return PackedLinear(packed_of(projection), bias_O, projection.sizes)
        parts = projection.weights
        weight_OI = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        return self.pack_weight(weight_OI, bias_O, projection.sizes)

    @torch.no_grad()
    def pack_experts(self, stack: Stack) -> list[PackedLinear]:
        """Copies of the experts' current weights."""
        biases = [None] * len(stack.weights) if stack.bias_EO is None else [bias_O.clone() for bias_O in stack.bias_EO]
        parts = zip(stack.weights, biases, strict=True)
        return [self.pack_weight(weight_OI.contiguous(), bias_O, (len(weight_OI),)) for weight_OI, bias_O in parts]

    def pack_weight(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, sizes: tuple[int, ...]) -> PackedLinear:
        """A copy of a weight, with its bias."""
        if self._weights == "int8":
            return PackedLinear(pack_int8(weight_OI, kernels=self._kernels), bias_O, sizes)
        block = self._blocks.of(weight_OI)
        if block is not None:
            return PackedLinear(pack_panels(weight_OI, block, kernels=self._kernels), bias_O, sizes)
        if _can_be_packed(weight_OI.dtype) and not is_by_tiles(weight_OI, weight_OI):
            return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_ROWS), bias_O, sizes)
        return PackedLinear(weight_OI.clone(), bias_O, sizes)


def _can_be_packed(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # oneDNN refuses bfloat16 on processors without instructions for it.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class AdaptedLinear:
    """A projection with adapters: the base is packed once, the small adapter tensors are copied by `refresh`.

    The operations are the trainer's (`engine/models/adapter.py`), for all modules of the projection at once, with the
    same bits: the matrices A are concatenated, the matrices B are blocks of one block-diagonal matrix. `base` gives the
    outputs of all modules as one tensor, without the biases of DoRA modules.
    """

    def __init__(self, projection: Projection, base: PackedLinear) -> None:
        self._projection = projection
        self._base = base
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current adapters."""
        modules, adapters = self._projection.modules, self._projection.adapters
        used = [adapter for adapter in adapters if adapter is not None]
        widths = [output_size(module) for module in modules]
        scaling_R = torch.cat([torch.full((len(adapter.down_RI),), adapter.scaling) for adapter in used])
        self._down_RI = torch.cat([adapter.down_RI for adapter in used])
        self._scaling_R: torch.Tensor | None = scaling_R
        if all(math.frexp(adapter.scaling)[0] == 0.5 for adapter in used):  # scaling by a power of two is exact
            self._down_RI, self._scaling_R = (self._down_RI * scaling_R[:, None]).to(self._down_RI.dtype), None
        self._up_OR = self._down_RI.new_zeros(sum(widths), len(scaling_R))
        self._scale_O, self._bias_O = self._dora_scales(widths)
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

    def _dora_scales(self, widths: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """DoRA's scales (1 for other modules) and the biases added after scaling (0 for other modules)."""
        parts = list(zip(self._projection.modules, self._projection.adapters, widths, strict=True))
        if not any(is_dora(adapter) for _, adapter, _ in parts):
            return None, None
        scales, biases = [], []
        for module, adapter, width in parts:
            weight_OI = weight_of(module)
            dora = adapter if is_dora(adapter) else None
            scales.append(torch.ones(width) if dora is None else dora_scale(dora, weight_OI))
            bias_O = None if dora is None else module.bias
            biases.append(weight_OI.new_zeros(width) if bias_O is None else bias_O)
        has_bias = any(module.bias is not None for module in self._projection.modules)
        return torch.cat(scales), torch.cat(biases) if has_bias else None  # type: ignore[arg-type]


def cache_shape(architecture: Architecture) -> CacheShape:
    """The cache's size per token."""
    settings = architecture.blocks[0].attention
    return CacheShape(len(architecture.blocks), settings.num_kv_heads, settings.head_dim, architecture.dtype)


def read_in_place(architecture: Architecture) -> list[torch.Tensor]:
    """The tensors of the model that every step reads, because nothing is packed of them."""
    modules = [architecture.embedding, architecture.positions, architecture.final_norm.module]
    for block in architecture.blocks:
        norms = (block.norm_attention, block.norm_after_attention, block.norm_mlp, block.norm_after_mlp)
        modules += [norm.module for norm in (*norms, block.q_norm, block.k_norm) if norm is not None]
    sinks = [block.attention.sinks_H for block in architecture.blocks if block.attention.sinks_H is not None]
    return [*(one for module in modules if module is not None for one in module.parameters()), *sinks]


def projections(architecture: Architecture) -> list[Projection | Stack]:
    """All linear maps, the output layer last."""
    return [*(projection for block in architecture.blocks for projection in block.projections), architecture.head]


class CachedDecoder:
    """`decoder` with attention over the paged cache, and with linear maps of its own, by the id of the projection."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.linears: dict[int, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {}
        self.experts: dict[int, list[PackedLinear]] = {}
        self.min_rows = _MIN_ROWS

    @torch.no_grad()
    def forward(
        self,
        ids_T: torch.Tensor,
        places: Places,
        storage: torch.Tensor,
        num_positions: int,
        *,
        prefixes: SharedPrefixes | None = None,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` after the final norm; keys and values are written to `storage`.

        Positions are below `num_positions`. On a GPU nothing waits for the device.
        """
        x_TH = embedded(self.decoder.architecture, ids_T, places.positions_T)
        return self._layers(x_TH, places, storage, num_positions, prefixes=prefixes, on_layer=on_layer)

    def _layers(
        self,
        x_TH: torch.Tensor,
        places: Places,
        storage: torch.Tensor,
        num_positions: int,
        *,
        prefixes: SharedPrefixes | None = None,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """`forward` from the embeddings `[T, H]` on."""
        decoder = self.decoder

        def attention(
            layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
        ) -> torch.Tensor:
            rope = None if block.rope is None else decoder.ropes.get(block.rope, num_positions)
            cache_2NW, settings, kernels = storage[layer], block.attention, decoder.kernels
            return attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings, prefixes=prefixes, kernels=kernels)

        ops = decoder.across(Ops(self._linear, self._experts, attention, decoder.kernels, on_layer=on_layer))
        return flat.from_layer(0, decoder.architecture, x_TH, ops)

    def hidden_states(
        self, tokens: Rows, storage: torch.Tensor, block_tables: torch.Tensor, *, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """As `forward`, of tokens that the host lists."""
        count, device = len(tokens.token_ids), storage.device
        missing = max(0, self.min_rows - count)
        ids_T, positions_T, table_rows_T = (
            torch.tensor(values + values[-1:] * missing, dtype=dtype, device=device)
            for values, dtype in (
                (tokens.token_ids, torch.int64),
                (tokens.positions, torch.int32),
                (tokens.table_rows, torch.int32),
            )
        )
        places = Places(positions_T, table_rows_T, block_tables.to(device))
        return self.forward(ids_T, places, storage, max(tokens.positions) + 1, on_layer=on_layer)[:count]

    @torch.no_grad()
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]`."""
        ops = self.decoder.across(Ops(self._linear, self._experts, _no_attention, self.decoder.kernels))
        return flat.logits(self.decoder.architecture, hidden_RH, ops)

    def _linear(self, projection: Projection, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.linears[id(projection)](x_TI)

    def _experts(self, stack: Stack, x_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        experts = self.experts[id(stack)]
        return each_group(x_RI, counts, lambda expert, rows_RI: experts[expert](rows_RI)[0])


def _no_attention(layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the output layer has no attention")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The rows that tokens are sampled from, in the order of `plan.drawn`; `hidden_RH` is after the final norm. Each
    completion's row is followed by those of its drafts, if the plan has any.
    """

    hidden_RH: torch.Tensor
    logits_RV: torch.Tensor


class Runner(CachedDecoder):
    """Steps of a plan on a CPU, with packed copies of the weights as of the last `repack`."""

    def __init__(self, decoder: Decoder, current: Fingerprint, packer: Packer) -> None:
        super().__init__(decoder)
        self.architecture = decoder.architecture
        self._projections = projections(decoder.architecture)
        self._packer = packer
        self._packed: dict[int, list[TensorId | None]] = {}
        self._step: RecordedStep | None = None
        self._can_record = not decoder.is_divided and decoder.part is None
        self.repack(current)

    @property
    def has_adapters(self) -> bool:
        """True if only adapters are trained, so that the packed weights never change."""
        return any(any(projection.adapters) for projection in self._projections)

    @property
    def is_idle(self) -> bool:
        """True if there are adapters, and all are zero."""
        adapted = [packed for packed in self.linears.values() if isinstance(packed, AdaptedLinear)]
        return bool(adapted) and all(packed.is_idle for packed in adapted)

    def repack(self, current: Fingerprint) -> None:
        """Pack the current weights, those of `current`, one projection after the other, so that no second copy of all
        is held. What did not change is not packed again: with adapters, no base is.
        """
        self.forget_step()
        for projection in self._projections:
            key, now = id(projection), [current.of(parameter) for parameter in projection.parameters]
            if None in now or self._packed.pop(key, None) != now:
                self.linears.pop(key, None)  # free the old copy first
                self.experts.pop(key, None)
                if isinstance(projection, Stack):
                    self.experts[key] = self._packer.pack_experts(projection)
                else:
                    self.linears[key] = self._pack(projection)
            elif isinstance(packed := self.linears.get(key), AdaptedLinear):
                packed.refresh()
            self._packed[key] = now
        packed = [*self.linears.values(), *(one for experts in self.experts.values() for one in experts)]
        self.min_rows = 1 if all(isinstance(one, PackedLinear) and one.is_by_row for one in packed) else _MIN_ROWS

    def forget_step(self) -> None:
        """Release the recorded step, which holds the cache's storage."""
        self._step = None

    def _layers(
        self, x_TH: torch.Tensor, places: Places, storage: torch.Tensor, num_positions: int, **options: Any
    ) -> torch.Tensor:
        if any(options.values()) or not self._can_record or len(x_TH) > MOST_ROWS:
            return super()._layers(x_TH, places, storage, num_positions, **options)
        if self._step is not None and self._step.fits(places, storage, num_positions):
            return self._step.run(x_TH, places)
        self.forget_step()
        step = RecordedStep(super()._layers, x_TH, places, storage, self.decoder.ropes.reserve(num_positions))
        if step.problem:
            self._can_record = False
            _log.debug("decoding steps are not recorded: %s is computed by torch", step.problem)
        else:
            self._step = step
        return step.hidden_TH

    def _pack(self, projection: Projection) -> PackedLinear | AdaptedLinear:
        if not any(projection.adapters):
            return self._packer.pack(projection)
        width = sum(output_size(module) for module in projection.modules)
        base = Projection(projection.modules, (width,), projection.adapters)
        return AdaptedLinear(projection, self._packer.pack(base))

    @torch.no_grad()
    def run(
        self, plan: Plan, storage: torch.Tensor, block_tables: torch.Tensor, *, on_layer: OnLayer | None = None
    ) -> StepOutput:
        """Write keys and values of the plan's tokens to `storage`, and compute the rows to sample from.

        The plan's copies must have been done.
        """
        tokens = Rows(
            plan.decode.token_ids + plan.prefill.token_ids,
            plan.decode.positions + plan.prefill.positions,
            plan.decode.table_rows + plan.prefill.table_rows,
        )
        hidden_TH = self.hidden_states(tokens, storage, block_tables, on_layer=on_layer)
        rows = list(range(len(plan.decode.token_ids)))
        repeats: list[int] = [1] * len(rows)
        end = len(rows)
        for chunk in plan.chunks:
            end += chunk.stop - chunk.start
            if chunk.sequences:
                rows.append(end - 1)
                repeats.append(len(chunk.sequences))
        if not rows:
            return StepOutput(hidden_TH[:0], hidden_TH.new_zeros((0, *self.decoder.architecture.head.sizes)))
        padded_RH = hidden_TH  # all, where no prompt is computed
        if plan.chunks or len(rows) < self.min_rows:
            padded_RH = hidden_TH[rows + rows[-1:] * (self.min_rows - len(rows))]
        hidden_RH, logits_RV = padded_RH[: len(rows)], self.logits(padded_RH)[: len(rows)]
        if max(repeats) > 1:
            repeat_R = torch.tensor(repeats)
            hidden_RH, logits_RV = (x.repeat_interleave(repeat_R, dim=0) for x in (hidden_RH, logits_RV))
        return StepOutput(hidden_RH, logits_RV)
