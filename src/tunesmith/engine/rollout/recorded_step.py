"""The layers of a decoding step on a CPU, recorded once and replayed for other tokens.

Shape legend: T tokens, H hidden.
"""

from collections.abc import Callable

import torch

from tunesmith.engine.kernels.attention.records import Places
from tunesmith.engine.kernels.recording import Recording

MOST_ROWS = 256
"""Largest step that is recorded. The arithmetic of larger ones takes many times as long as Python's part."""

Layers = Callable[[torch.Tensor, Places, torch.Tensor, int], torch.Tensor]
"""Computes hidden states `[T, H]` from embeddings `[T, H]`, places, the cache's storage and the number of positions."""


class RecordedStep:
    """`compute` for as many tokens as `x_TH` has or fewer, over one cache. Their positions are below `num_positions`.

    `problem` names the operation that cannot be repeated; it is empty if `run` can be called. `hidden_TH` is the result
    for the first tokens.
    """

    def __init__(
        self, compute: Layers, x_TH: torch.Tensor, places: Places, storage: torch.Tensor, num_positions: int
    ) -> None:
        self._x_TH, self._storage, self._tables_RN = x_TH.clone(), storage, places.block_tables_RN
        self._places = Places(places.positions_T.clone(), places.table_rows_T.clone(), self._tables_RN)
        self._num_positions = num_positions
        with Recording(len(x_TH)) as self._recording:
            self._hidden_TH = compute(self._x_TH, self._places, storage, self._num_positions)
        self.problem = self._recording.problem

    @property
    def hidden_TH(self) -> torch.Tensor:
        """A copy of the hidden states `[T, H]` of the tokens that the step was recorded with."""
        return self._hidden_TH.clone()

    def fits(self, places: Places, storage: torch.Tensor, num_positions: int) -> bool:
        """True if `run` can compute this step."""
        is_same = storage is self._storage and places.block_tables_RN is self._tables_RN
        return is_same and len(places.positions_T) <= len(self._x_TH) and num_positions <= self._num_positions

    def run(self, x_TH: torch.Tensor, places: Places) -> torch.Tensor:
        """Hidden states `[T, H]`, with the bits of `compute`."""
        count = len(x_TH)
        self._x_TH[:count] = x_TH
        self._places.positions_T[:count] = places.positions_T
        self._places.table_rows_T[:count] = places.table_rows_T
        self._recording.replay(count)
        return self._hidden_TH[:count].clone()
