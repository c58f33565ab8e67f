"""A decoder as the engine on a device computes it: the trainer's own memory, and nothing that asks the host.

The forward is `models/decoder.py`'s. Where tokens stand is read from tensors on the device, so the same calls, captured
once in a CUDA graph, stay right while sequences grow.

Shape legend: T tokens, R rows that are drawn from, H hidden, X query width, Y key width, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.kernels.attention.api import attend
from tunesmith.kernels.attention.records import Places, SharedPrefixes
from tunesmith.models import decoder as flat
from tunesmith.models.architecture import Block, Projection, weight_of
from tunesmith.models.decoder import Decoder, OnLayer, Pass, module_outputs
from tunesmith.models.loaded import PreTrainedModel
from tunesmith.rollout.kv_cache import BLOCK_TOKENS, CacheShape
from tunesmith.rollout.runner import cache_shape
from tunesmith.rollout.scheduler import Rows


class DeviceModel:
    """`module` as `decoder` computes it, with its projections side by side."""

    def __init__(self, module: PreTrainedModel, decoder: Decoder) -> None:
        self.decoder = decoder
        self._module = module
        self._linears: dict[int, SharedLinear | ModuleLinear] = {}
        self._addresses: tuple[int, ...] = ()
        self.follow()

    @property
    def cache_shape(self) -> CacheShape:
        """What the cache must hold for each token."""
        return cache_shape(self.decoder.architecture)

    def follow(self) -> bool:
        """Whether all weights still stand where they stood, as after an update in place; else they are found anew, and
        what was captured with the old addresses must go.
        """
        if self._addresses and self._addresses_now() == self._addresses:
            return True
        architecture = self.decoder.architecture
        projections = [
            projection
            for block in architecture.blocks
            for projection in (block.qkv, block.out, block.gate_up, block.down)
        ]
        self._linears = {id(projection): share(projection) for projection in (*projections, architecture.head)}
        self._addresses = self._addresses_now()
        return False

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._module.parameters())

    @torch.no_grad()
    def forward(
        self,
        ids_T: torch.Tensor,
        places: Places,
        storage: torch.Tensor,
        *,
        prefixes: SharedPrefixes | None = None,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` behind the final norm; keys and values are written to `storage`.

        Everything is on the model's device, and nothing waits for it.
        """
        decoder, num_positions = self.decoder, places.block_tables_RN.shape[1] * BLOCK_TOKENS

        def attention(
            layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
        ) -> torch.Tensor:
            rope = None if block.rope is None else decoder.ropes.get(block.rope, num_positions)
            kernels = decoder.kernels
            cache_2NW, settings = storage[layer], block.attention
            return attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings, prefixes=prefixes, kernels=kernels)

        way = Pass(self._linear, attention, decoder.kernels, on_layer=on_layer)
        return flat.hidden_states(decoder.architecture, ids_T, places.positions_T, way)

    def hidden_states(
        self, tokens: Rows, storage: torch.Tensor, block_tables: torch.Tensor, *, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Hidden states of tokens that the host lists, `[T, H]`; their keys and values are written."""
        device = storage.device
        ids_T = torch.tensor(tokens.token_ids, device=device)
        positions_T, rows_T = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (tokens.positions, tokens.table_rows)
        )
        places = Places(positions_T, rows_T, block_tables.to(device))
        return self.forward(ids_T, places, storage, on_layer=on_layer)

    @torch.no_grad()
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]`."""
        way = Pass(self._linear, _no_attention, self.decoder.kernels)
        return flat.logits(self.decoder.architecture, hidden_RH, way)

    def _linear(self, projection: Projection, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._linears[id(projection)](x_TI)


def _no_attention(layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the output layer has no attention")


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
