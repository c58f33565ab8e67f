"""Seeds and orders as pure functions: the same (seed, keys) gives the same value on every machine and Python version."""

import hashlib
import random


def derive(seed: int, *keys: int | str) -> int:
    """A 63-bit seed for the stream named by `keys` under `seed`, for example `derive(0, "rollout", step)`."""
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(seed: int, epoch: int, length: int) -> list[int]:
    """The order of `length` items in `epoch`: a pure function of its arguments, so a resumed run needs no stored order."""
    order = list(range(length))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return order


def items_at(seed: int, position: int, count: int, length: int) -> list[int]:
    """Indices of the `count` items that follow `position`, an absolute count of items drawn, epoch after epoch.

    >>> items_at(seed=0, position=2, count=3, length=3) == [permutation(0, 0, 3)[2], *permutation(0, 1, 3)[:2]]
    True
    """
    epochs: dict[int, list[int]] = {}
    indices: list[int] = []
    for absolute in range(position, position + count):
        epoch, index = divmod(absolute, length)
        order = epochs.setdefault(epoch, permutation(seed, epoch, length))
        indices.append(order[index])
    return indices
