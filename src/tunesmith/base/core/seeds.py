"""Seeds and orders as pure functions: the same arguments give the same value on every machine and Python version."""

import hashlib
import random
from collections.abc import Hashable, Iterable
from functools import lru_cache

LARGEST_SEED = 2**63 - 1
"""Generators and kernels take seeds as signed 64-bit integers."""


def derive(seed: int, *keys: int | str) -> int:
    """A 63-bit seed for the stream named by `keys` under `seed`, for example `derive(0, "rollout", step)`."""
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(seed: int, epoch: int, length: int) -> list[int]:
    """The order of `length` items in `epoch`: a pure function, so a resumed run needs no stored order."""
    order = list(range(length))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return order


class Groups:
    """The items of a data set by a key of each, for orders in which those with equal keys follow each other."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        members: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            members.setdefault(key, []).append(index)
        self.members = list(members.values())
        self.num_items = sum(map(len, self.members))


def permutation_of_groups(seed: int, epoch: int, groups: Groups) -> list[int]:
    """An order of the items in which those of a group follow each other; the groups are shuffled, and the items of
    each: one group may have all items.
    """
    place = permutation(derive(seed, "within groups"), epoch, groups.num_items)
    order = permutation(seed, epoch, len(groups.members))
    return [index for group in order for index in sorted(groups.members[group], key=place.__getitem__)]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int, groups: Groups | None) -> list[int]:
    """The order of an epoch, which takes a tenth of a second for 100,000 items and is needed at each step."""
    return permutation(seed, epoch, length) if groups is None else permutation_of_groups(seed, epoch, groups)


def steps_of_epochs(num_epochs: int, length: int, per_step: int) -> int:
    """Steps that pass `num_epochs` times over `length` items, at most `per_step` in each, and no item twice.

    >>> steps_of_epochs(3, 10, 4), steps_of_epochs(3, 10, 32)
    (8, 3)
    """
    return -(-length * num_epochs // min(per_step, length))


def items_at(seed: int, position: int, count: int, length: int, groups: Groups | None = None) -> list[int]:
    """Indices of the `count` items that follow `position`, an absolute count of items drawn, epoch after epoch.

    With `groups` of the same items, those of a group stay together.

    >>> items_at(seed=0, position=2, count=3, length=3) == [permutation(0, 0, 3)[2], *permutation(0, 1, 3)[:2]]
    True
    """
    places = (divmod(absolute, length) for absolute in range(position, position + count))
    return [_order(seed, epoch, length, groups)[index] for epoch, index in places]
