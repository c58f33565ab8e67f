"""Tables of rotary positions."""

from collections.abc import Sequence

import torch

from tunesmith.kernels.attention.records import Rope
from tunesmith.models.architecture import RopeSource

_ROWS = 512
"""Tables are sized in multiples of this many positions."""


class RopeTables:
    """Cosines and sines of every position up to the longest requested.

    The angle is rounded to float32 as transformers does. Its cosine is computed in float64, because torch's vectorised
    float32 cosine depends on the element's index in the tensor.
    """

    def __init__(self, sources: Sequence[RopeSource]) -> None:
        self._sources = sources
        self._tables: list[Rope] = []
        self._num_rows = 0

    def reserve(self, num_positions: int) -> int:
        """Make tables of at least `num_positions` rows; returns how many `get` can give without making new ones."""
        if self._num_rows < num_positions:
            self._num_rows = -(-num_positions // _ROWS) * _ROWS
            self._tables = [_rope_table(source, self._num_rows) for source in self._sources]
        return self._num_rows

    def get(self, index: int, num_positions: int) -> Rope:
        """The table of source `index`, with at least `num_positions` rows."""
        self.reserve(num_positions)
        return self._tables[index]


def _rope_table(source: RopeSource, num_positions: int) -> Rope:
    frequency_F = source.frequency_F.float()
    angle_PF = (torch.arange(num_positions, device=frequency_F.device)[:, None].float() * frequency_F).double()
    return Rope((angle_PF.cos() * source.scaling).float(), (angle_PF.sin() * source.scaling).float())
