"""Tables of rotary positions."""

from collections.abc import Sequence

import torch

from tunesmith.engine.kernels.attention.records import Rope
from tunesmith.engine.models.architecture import RopeSource

_ROWS = 512
"""Tables are sized in multiples of this many positions."""


class RopeTables:
    """Cosines and sines of every position up to the longest requested.

    The angle is rounded to float32 as transformers does. Its cosine is computed in float64, because torch's vectorised
    float32 cosine depends on the element's index in the tensor.
    """

    def __init__(self, sources: Sequence[RopeSource]) -> None:
        self._sources = sources
        self._made_of = [source.frequency_F.clone() for source in sources]
        self._made: tuple[int, list[Rope]] = 0, []  # replaced as a whole: another thread may compute the same model

    @property
    def are_current(self) -> bool:
        """True unless the model's frequencies changed since."""
        pairs = zip(self._sources, self._made_of, strict=True)
        return all(torch.equal(source.frequency_F, before_F) for source, before_F in pairs)

    def reserve(self, num_positions: int) -> int:
        """Make tables of at least `num_positions` rows; returns how many `get` can give without making new ones."""
        return self._enough(num_positions)[0]

    def get(self, index: int, num_positions: int) -> Rope:
        """The table of source `index`, with at least `num_positions` rows."""
        return self._enough(num_positions)[1][index]

    def _enough(self, num_positions: int) -> tuple[int, list[Rope]]:
        made = self._made
        if made[0] < num_positions:
            num_rows = -(-num_positions // _ROWS) * _ROWS
            self._made = made = num_rows, [_rope_table(source, num_rows) for source in self._sources]
        return made


def _rope_table(source: RopeSource, num_positions: int) -> Rope:
    frequency_F = source.frequency_F.float()
    angle_PF = (torch.arange(num_positions, device=frequency_F.device)[:, None].float() * frequency_F).double()
    return Rope((angle_PF.cos() * source.scaling).float(), (angle_PF.sin() * source.scaling).float())
