"""Numbers out of metric rows: finite values, thinned to what a screen can show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

Row = Mapping[str, Any]
"""One line of `metrics.jsonl`: `{"step": 3, "reward": 0.4, ...}`."""

MAX_POINTS = 1_000
"""Points drawn for one line; more than a screen has pixels only makes the page slow."""


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric. `values[i]` is None where the run recorded something that is not finite."""

    key: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The (step, value) points that are finite."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    @property
    def num_dropped(self) -> int:
        """Number of recorded values that are not finite."""
        return len(self.values) - len(self.finite)


def number(value: object) -> float | None:
    """`value` as a finite float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) else None


def steps_of(rows: Sequence[Row]) -> list[float]:
    """The step of each row; its 1-based position where the row has none."""
    steps = (number(row.get("step")) for row in rows)
    return [position if step is None else step for position, step in enumerate(steps, 1)]


def series(rows: Sequence[Row], key: str) -> Series:
    """The series of `key` over the rows that recorded it; None and NaN in the rows count as recorded but not finite."""
    steps = steps_of(rows)
    recorded = [(step, number(row[key])) for step, row in zip(steps, rows, strict=True) if key in row]
    return Series(key, tuple(step for step, _ in recorded), tuple(value for _, value in recorded))


def numeric_keys(rows: Sequence[Row]) -> list[str]:
    """Names with at least one finite value, in order of first appearance, `step` left out."""
    found: dict[str, None] = {}
    for row in rows:
        for key, value in row.items():
            if key not in found and key != "step" and number(value) is not None:
                found[key] = None
    return list(found)


def downsample(line: Series, limit: int = MAX_POINTS) -> Series:
    """At most `limit` points: the first, the last, and the lowest and highest of each bucket, so no spike is lost."""
    count = len(line.values)
    if count <= limit:
        return line
    num_buckets = (limit - 2) // 2
    kept = [0]
    for bucket in range(num_buckets):
        start, stop = (1 + (count - 2) * edge // num_buckets for edge in (bucket, bucket + 1))
        kept.extend(_extremes(line.values, start, stop))
    kept.append(count - 1)
    return Series(line.key, tuple(line.steps[i] for i in kept), tuple(line.values[i] for i in kept))


def _extremes(values: Sequence[float | None], start: int, stop: int) -> list[int]:
    finite = [(value, index) for index, value in enumerate(values[start:stop], start) if value is not None]
    if not finite:
        return [start]
    return sorted({min(finite)[1], max(finite)[1]})


def bucket_means(line: Series, limit: int) -> Series:
    """At most `limit` points, each the mean of a bucket: for stacked areas, whose lines must share their steps."""
    count = len(line.values)
    if count <= limit:
        return line
    steps: list[float] = []
    means: list[float | None] = []
    for bucket in range(limit):
        start, stop = count * bucket // limit, count * (bucket + 1) // limit
        finite = [value for value in line.values[start:stop] if value is not None]
        steps.append(line.steps[start])
        means.append(sum(finite) / len(finite) if finite else None)
    return Series(line.key, tuple(steps), tuple(means))


def evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]
