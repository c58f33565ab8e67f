"""Rules for the keys that a query attends to.

Shape legend: B sequences, Q queries, K keys.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeyMask:
    """Mask rules: a query attends to the keys that pass every given rule, without any to all.

    Query i stands at position `offset + i` and key j at j. By default the last query stands at the last key, as when
    queries go on from a cache.

    - `causal`: no key after the query.
    - `window`: of the keys up to the query's own, the last so many.
    - `keys_B2`: int64 `[B, 2]`, the first key of each sequence and the one after its last; others are padding.
    - `allowed_BQK`: boolean `[B or 1, Q or 1, K]`, for whatever indices cannot say.
    """

    causal: bool = True
    window: int | None = None
    offset: int | None = None
    keys_B2: torch.Tensor | None = None
    allowed_BQK: torch.Tensor | None = None
