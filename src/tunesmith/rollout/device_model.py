"""A decoder as the engine on a device computes it: the trainer's own memory, and nothing that asks the host.

The forward is `models/decoder.py`'s. Where tokens stand is read from tensors on the device, so the same calls, captured
once in a CUDA graph, stay right while sequences grow.

Shape legend: T tokens, R rows that are drawn from, H hidden, X query width, Y key width, L layers.
"""

from collections.abc import Sequence

import torch

from tunesmith.kernels.attention.api import attend
from tunesmith.kernels.attention.records import Places, SharedPrefixes
from tunesmith.models import decoder as flat
from tunesmith.models.architecture import Block, Projection
from tunesmith.models.decoder import Decoder, OnLayer, Pass
from tunesmith.models.loaded import PreTrainedModel
from tunesmith.rollout.kv_cache import BLOCK_TOKENS, CacheShape
from tunesmith.rollout.runner import cache_shape
from tunesmith.rollout.scheduler import Rows
from tunesmith.rollout.shared_weights import ModuleLinear, SharedLinear, share


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
