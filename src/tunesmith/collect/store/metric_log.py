"""The metrics of a run or a live loop, read from its `metrics.jsonl` as it grows; the run is not affected."""

import math
import os
import socket
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.runs.listing import object_in
from tunesmith.base.runs.lock import HOLDER_FILE, is_locked
from tunesmith.collect.store.content import MAX_NAME, is_storable
from tunesmith.collect.store.records import Heartbeat, Metric, Series

METRICS_FILE = "metrics.jsonl"


class NewLines:
    """Lines that were added to a file since the last call. A resumed run cuts its files back, and may have added more
    since: then all lines are new.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._end, self._last = 0, b""
        self._once = Once(get_logger(__name__))

    def read(self, forget: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
        """(Start, line) of each whole new line; `forget` is called first if those before do not count any more."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._restart(forget)
                    file.seek(0)
                for line in takewhile(lambda line: line.endswith(b"\n"), file):
                    start, self._end, self._last = self._end, self._end + len(line), line
                    yield start, line
        except OSError as error:
            self._restart(forget)
            if not isinstance(error, FileNotFoundError):
                self._once.warning(f"{self._file} cannot be read: {error.strerror or error}")

    def _restart(self, forget: Callable[[], None]) -> None:
        if self._end:
            self._end, self._last = 0, b""
            forget()


@dataclass(slots=True)
class _Column:
    """The values of a metric, NaN where they were not finite, and the places of their rows."""

    rows: "array[int]" = field(default_factory=lambda: array("I"))
    values: "array[float]" = field(default_factory=lambda: array("d"))


class MetricLog:
    """Metrics of the run in the folder `run`. Safe to call from any number of threads.

    The id of a point is the number of its line, so it is the same in another process. Where a resumed run has cut the
    file back, ids go on beyond those of the lines before.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lines = NewLines(run / METRICS_FILE)
        self._lock = threading.Lock()
        self._num_before = 0
        self._steps: list[int] = []
        self._times: list[float] = []
        self._ends: list[int] = []  # number of points up to the end of each row
        self._columns: dict[str, _Column] = {}

    def names(self) -> list[str]:
        """Names of all metrics, sorted."""
        with self._updated():
            return sorted(self._columns)

    def last_id(self) -> int:
        """Id of the newest points, 0 if there are none."""
        with self._updated():
            return self._num_before + len(self._steps)

    def last_step(self) -> int | None:
        """Step of the newest points; None if there are none."""
        with self._updated():
            return self._steps[-1] if self._steps else None

    def series(self, name: str, after_id: int = 0, points: int = 2000) -> Series:
        """The metric's points with an id above `after_id`, in order: all if at most `points`, else the minimum, the
        maximum and the first gap (a value of None) of each of `points // 2` buckets.
        """
        with self._updated():
            column = self._columns.get(name, _Column())
            start, end = bisect_left(column.rows, max(0, after_id - self._num_before)), len(column.rows)
            if start == end:
                return Series(name, (), after_id, 0, False)
            is_sampled = end - start > points
            places = _extremes(column.values, start, max(1, points // 2)) if is_sampled else range(start, end)
            found = tuple(self._metric(name, column, place) for place in places)
            return Series(name, found, found[-1].id, end - start, is_sampled)

    def after(self, cursor: int, limit: int) -> tuple[list[Metric], int]:
        """(Points of every name with an id above `cursor`, in order: at most `limit`, or those of one row; the number
        of further ones).
        """
        with self._updated():
            start = max(0, cursor - self._num_before)
            if start >= len(self._ends):
                return [], 0
            before = self._ends[start - 1] if start else 0
            end = max(start + 1, bisect_right(self._ends, before + limit))
            found = [
                self._metric(name, column, place)
                for name, column in self._columns.items()
                for place in range(bisect_left(column.rows, start), bisect_left(column.rows, end))
            ]
            return sorted(found, key=lambda one: one.id), self._ends[-1] - self._ends[end - 1]

    def recent(self, limit: int) -> dict[str, Metric]:
        """The last point of each name that is among the newest `limit` points."""
        with self._updated():
            first = bisect_right(self._ends, self._ends[-1] - limit) if self._ends else 0
            last = ((name, self._metric(name, one, -1)) for name, one in self._columns.items() if one.rows[-1] >= first)
            return dict(last)

    def _metric(self, name: str, column: _Column, place: int) -> Metric:
        row, value = column.rows[place], column.values[place]
        known = None if math.isnan(value) else value
        return Metric(self._num_before + row + 1, self._steps[row], self._times[row], name, known)

    @contextmanager
    def _updated(self) -> Generator[None]:
        """Hold the lock, after reading what is new."""
        with self._lock:
            for _, line in self._lines.read(self._forget):
                values = object_in(line)
                if values is not None:
                    self._add(values)
            yield

    def _add(self, values: Mapping[str, object]) -> None:
        row, num_points = len(self._steps), self._ends[-1] if self._ends else 0
        begun = self._times[-1] if row else started_at(self._run)
        self._steps.append(int(_finite(values.get("step"), self._steps[-1] + 1 if row else 0)))
        self._times.append(begun + _finite(values.get("time/step_s"), 0.0))
        columns = self._columns
        for name, value in values.items():
            if type(value) is not float:  # most are, and a long run has millions
                if value is not None and type(value) is not int:
                    continue
                value = _finite(value, math.nan)
            column = columns.get(name)
            if column is None:
                if name == "step" or not name.strip() or len(name) > MAX_NAME or not is_storable(name):
                    continue
                column = columns[name] = _Column()
            column.rows.append(row)
            column.values.append(value if math.isfinite(value) else math.nan)
            num_points += 1
        self._ends.append(num_points)

    def _forget(self) -> None:
        self._num_before += len(self._steps)
        for known in (self._steps, self._times, self._ends, self._columns):
            known.clear()


def _extremes(values: "array[float]", start: int, num_buckets: int) -> list[int]:
    """Places of the minimum, the maximum and the first gap of each bucket of the values from `start` on, and those of
    the first and the last value.
    """
    num = len(values) - start
    places = {start, len(values) - 1}
    for bucket in range(num_buckets):
        first = start + num * bucket // num_buckets
        part = values[first : start + num * (bucket + 1) // num_buckets]
        known = part
        if math.isnan(sum(part)):  # `min` of what holds NaN depends on the order
            known = array("d", (value for value in part if not math.isnan(value)))
            places.update([first + place for place, value in enumerate(part) if math.isnan(value)][:1])
        if known:
            places |= {first + part.index(min(known)), first + part.index(max(known))}
    return sorted(places)


def heartbeat_of(run: Path) -> Heartbeat:
    """The heartbeat of a run whose trainer writes none: it is alive while it holds its lock."""
    state = run_state(run)
    moment = time.time() if state == "running" else _modified_at(run / METRICS_FILE) or started_at(run)
    return Heartbeat(os.getpid(), socket.gethostname(), moment, state)


def run_state(run: Path) -> str:
    """`running` while a process holds its lock; then `finished`, `stopped`, or `died` if it left its lock file."""
    if is_locked(run):
        return "running"
    if (run / "result.json").exists():
        return "finished"
    return "died" if (run / HOLDER_FILE).exists() else "stopped"


def started_at(run: Path) -> float:
    """Start time of a run, from its recipe, which is written first and only once."""
    return _modified_at(run / "recipe.yaml") or time.time()


def _finite(value: object, default: float) -> float:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else default
    except OverflowError:  # an integer that no float holds
        return default


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
