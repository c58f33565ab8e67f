"""Held-out data by a hash of the prompt, so that all rows of a prompt are on one side; leaks between both sides."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Demonstration, Finding, Pair, Prompt, Text
from tunesmith.collect.data.rows import Item, place_of

T = TypeVar("T")

MIN_SHARED_WORDS = 3
"""Fewer words at the beginning of both sides of a pair are taken for chance, not for a prompt."""


@dataclass(frozen=True, slots=True)
class Split(Generic[T]):
    """Items to train on and items kept away from training, each in its original order."""

    train: list[T]
    heldout: list[T]


def prompt_key(item: Item) -> str:
    """Key by which an item is split: its prompt, without regard to case and white space.

    A pair without a prompt is split by what its two sides begin with in common, up to the last line break or message:
    the dialogue before the answer. On one line it is whole words, three or more: many texts begin with "The". If they
    have nothing in common, by both. A demonstration is split by what comes before its first answer: continued
    conversations are on the same side as those that they continue.
    """
    if isinstance(item, Prompt):
        return _normal(item.content)
    if isinstance(item, Demonstration):
        return _normal(item.opening)
    if not isinstance(item, Pair):
        return _normal(item.prompt.content)
    shared = item.prompt.content or _common_start(item.chosen, item.rejected)
    return _normal(shared) or f"{_normal(item.chosen)}\x1d{_normal(item.rejected)}"


def split_by_prompt(
    items: Sequence[T],
    fraction: float,
    seed: int,
    key: Callable[..., str] = prompt_key,
    *,
    num_heldout: int | None = None,
    marked: Collection[str] = (),
) -> Split[T]:
    """`items` divided so that about `fraction` of the distinct prompts are held out.

    A prompt is held out if its hash, a number in [0, 1) that depends on the seed and the prompt alone, is below
    `fraction`: rows added later, or another file, move no prompt to the other side. With `0 < fraction < 1` and two
    prompts or more no side stays empty. `num_heldout` asks for exactly so many prompts instead, those with the smallest
    hashes. Prompts whose keys are `marked` are held out besides, and then a side may stay empty. Raises DataError if
    `num_heldout` leaves none for training.
    """
    keys = [key(item) for item in items]
    position_of = {name: _position(seed, name) for name in keys}
    ranked = sorted(position_of, key=lambda name: (position_of[name], name))
    if num_heldout is None:
        num_heldout = sum(position < fraction for position in position_of.values())
        if 0 < fraction < 1 and len(ranked) > 1 and not marked:
            num_heldout = min(max(num_heldout, 1), len(ranked) - 1)
    elif not 0 <= num_heldout < len(ranked):
        raise DataError(
            f"{num_heldout} prompts are to be held out of {len(ranked)} distinct ones; ask for fewer or give more"
        )
    heldout = {*ranked[:num_heldout], *marked}
    return Split(
        train=[item for item, name in zip(items, keys, strict=True) if name not in heldout],
        heldout=[item for item, name in zip(items, keys, strict=True) if name in heldout],
    )


def _position(seed: int, name: str) -> float:
    digest = hashlib.sha256(f"{seed}\x1f{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _normal(content: Text) -> str:
    if isinstance(content, str):
        return " ".join(content.casefold().split())
    return "\x1e".join(f"{message['role']}\x1f{_normal(message['content'])}" for message in content)


def _common_start(first: Text, second: Text) -> Text:
    length = _num_common(first, second)
    if not isinstance(first, str) or not isinstance(second, str):
        return first[:length]
    start = first[:length]
    if "\n" in start.strip():
        return start[: start.rindex("\n")]
    ends_in_a_word = not start[-1:].isspace() and any(text[length : length + 1].strip() for text in (first, second))
    words = start.split()[:-1] if ends_in_a_word else start.split()
    return " ".join(words) if len(words) >= MIN_SHARED_WORDS else ""


def _num_common(first: Text, second: Text) -> int:
    """Length of the common start, by bisection: comparing slices is fast even for texts of a megabyte."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Leak:
    """A held-out item whose prompt is also trained on, with the places of both.

    Example: `Leak(heldout="test.jsonl:4", train="train.jsonl:17")`.
    """

    heldout: str
    train: str


def leaks(train: Sequence[Item], heldout: Sequence[Item]) -> tuple[Leak, ...]:
    """One leak for each item of `heldout` whose prompt, without regard to case and white space, is in `train`."""
    if not heldout:
        return ()
    first_place = {prompt_key(item): place_of(item) for item in reversed(train)}
    keys = [(item, prompt_key(item)) for item in heldout]
    return tuple(Leak(place_of(item), first_place[key]) for item, key in keys if key in first_place)


def leak_finding(found: Sequence[Leak], num_heldout: int) -> Finding | None:
    """A warning for the run's record that counts the leaks and shows the first; None without leaks."""
    if not found:
        return None
    shown = ", ".join(f"{leak.heldout} = {leak.train}" for leak in found[:_NUM_SHOWN])
    more = f" and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    message = (
        f"{len(found)} of {num_heldout} held-out prompts are trained on ({shown}{more}); figures on them are too good, "
        "remove these rows from either side"
    )
    return Finding(step=0, name="leak", severity="warning", message=message)
