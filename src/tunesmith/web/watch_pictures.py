"""Which metrics are drawn together on the watch page: the pictures of the reports, and one of the stages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.reports.figures import MAIN, PICTURES, labels

MAX_LINES = 8
"""Lines of one picture, as many as there are colours; further metrics stand in the table."""

_STAGE = re.compile(r"time/(?!step_s)([^/]+)_s")


@dataclass(frozen=True, slots=True)
class PictureLine:
    """A metric and what it is called in the legend."""

    name: str
    label: str


@dataclass(frozen=True, slots=True)
class WatchPicture:
    """A chart of the page; those that are `is_main` stand open, the rest in a fold."""

    id: str
    title: str
    unit: str
    is_main: bool
    lines: tuple[PictureLine, ...]


def pictures(names: Sequence[str]) -> tuple[WatchPicture, ...]:
    """The pictures that have at least one of the metrics `names`, the main ones first."""
    found = [
        _picture(one.id, one.title, one.unit, one.id in MAIN, one.pattern, names)
        for one in sorted(PICTURES, key=lambda one: one.id not in MAIN)
    ]
    found.append(_stages(names))
    return tuple(one for one in found if one.lines)


def _stages(names: Sequence[str]) -> WatchPicture:
    matching = [found for name in names if (found := _STAGE.fullmatch(name))][:MAX_LINES]
    lines = tuple(PictureLine(found[0], found[1]) for found in matching)
    return WatchPicture("stages", "Time of each stage", "seconds", True, lines)


def _picture(id: str, title: str, unit: str, is_main: bool, pattern: str, names: Sequence[str]) -> WatchPicture:
    matching = [name for name in names if re.fullmatch(pattern, name)][:MAX_LINES]
    lines = tuple(PictureLine(name, label) for name, label in labels(matching).items())
    return WatchPicture(id, title, unit, is_main, lines)
