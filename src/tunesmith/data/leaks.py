"""Prompts that stand both in training and in held-out data: what a model is judged by must be new to it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.data.split import prompt_key
from tunesmith.schema.records import Demonstration, Finding, Pair, Prompt, Ranking

Item = Prompt | Pair | Ranking | Demonstration

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
    first_place: dict[str, str] = {}
    for item in train:
        first_place.setdefault(prompt_key(item), _place(item))
    return tuple(Leak(_place(item), first_place[key]) for item in heldout if (key := prompt_key(item)) in first_place)


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


def _place(item: Item) -> str:
    return item.id if isinstance(item, Prompt) else item.prompt.id
