"""Seeds and orders as pure functions: the same arguments give the same value on every machine and Python version."""

import hashlib
import random
from collections.abc import Hashable, Sequence


def derive(seed: int, *keys: int | str) -> int:
    """A 63-bit seed for the stream named by `keys` under `seed`, for example `derive(0, "rollout", step)`."""
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(seed: int, epoch: int, length: int) -> list[int]:
    """The order of `length` items in `epoch`: a pure function, so a resumed run needs no stored order."""
    order = list(range(length))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return order


def permutation_of_groups(seed: int, epoch: int, keys: Sequence[Hashable]) -> list[int]:
    """An order of the items in which those with equal keys follow each other: the groups are shuffled, not their
    items.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    members = list(groups.values())
    return [index for group in permutation(seed, epoch, len(members)) for index in members[group]]


def items_at(seed: int, position: int, count: int, length: int, *, keys: Sequence[Hashable] | None = None) -> list[int]:
    """Indices of the `count` items that follow `position`, an absolute count of items drawn, epoch after epoch.

    With `keys`, one for each item, items of equal key stay together.

    >>> items_at(seed=0, position=2, count=3, length=3) == [permutation(0, 0, 3)[2], *permutation(0, 1, 3)[:2]]
    True
    """
    orders: dict[int, list[int]] = {}
    indices: list[int] = []
    for absolute in range(position, position + count):
        epoch, index = divmod(absolute, length)
        if epoch not in orders:
            orders[epoch] = (
                permutation(seed, epoch, length) if keys is None else permutation_of_groups(seed, epoch, keys)
            )
        indices.append(orders[epoch][index])
    return indices
