"""Progress of long work: a live bar with rate, ETA and reward on a terminal, a plain line now and then elsewhere.
All on stderr.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tunesmith.base.core.trace import Watcher, watching

_PLAIN_INTERVAL_S = 10.0
_SILENCE_S = 60.0
"""Seconds without an update after which the stage that the work is in is shown."""

_RECENT = 100
"""Updates whose times tell the pace."""


class Reporter(Watcher):
    """Shows the progress of `total` items of work called `label`: by `bar`, without one by lines, or not at all.

    Of an item that takes long, such as the step that is followed by an evaluation, the stage is shown once a minute.
    """

    def __init__(self, label: str, total: int, bar: Progress | None = None, *, enabled: bool = True) -> None:
        self._label, self._total, self._enabled = label, total, enabled
        self._pace, self._last_s = Pace(), time.monotonic()
        self._thread = threading.get_ident()
        self._done, self._facts, self._stage, self._stage_s = 0, "", "", 0.0
        self._bar = bar
        self._task = None if bar is None else bar.add_task(label, total=total, facts="", rate="")

    def begin(self, done: int) -> None:
        """The work begins now, with `done` items finished before: rates count from here."""
        self._pace, self._done = Pace(done), done
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, completed=done)

    def update(self, done: int, facts: Mapping[str, float] | None = None) -> None:
        """`done` items are finished; `facts` are figures to show, by name."""
        now_s = time.monotonic()
        self._done = done
        self._pace.note(done, now_s)
        parts = [format_rate(done - self._pace.first, now_s - self._pace.start_s), self._pace.remaining(self._total)]
        if facts is not None:
            self._facts = "  ".join(f"{name} {value:.3f}" for name, value in facts.items())
        if self._bar is not None and self._task is not None:
            self._last_s = now_s
            self._bar.update(self._task, completed=done, rate=", ".join(filter(None, parts)), facts=self._facts)
        elif self._enabled and (now_s - self._last_s >= _PLAIN_INTERVAL_S or done >= self._total):
            self._last_s = now_s
            text = [f"{self._label} {done}/{self._total}", f"{now_s - self._pace.start_s:.0f} s", *filter(None, parts)]
            sys.stderr.write(f"{', '.join(text)}  {self._facts}".rstrip() + "\n")

    def enter(self, path: str) -> None:
        """The span `path` begins; see `core.trace.Watcher`."""
        if threading.get_ident() == self._thread and "/" not in path:
            self._stage, self._stage_s = path, time.monotonic()
        self.went_on()

    def leave(self, path: str) -> None:
        """The span `path` ends; see `core.trace.Watcher`."""
        if path == self._stage:
            self._stage = ""

    def went_on(self) -> None:
        """The stage that runs got further: it is shown if nothing else was for a while."""
        now_s = time.monotonic()
        if now_s - self._last_s < _SILENCE_S or not self._stage or threading.get_ident() != self._thread:
            return
        self._last_s = now_s
        stage = f"{self._stage} for {now_s - self._stage_s:.0f} s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, facts=stage)
        elif self._enabled:
            sys.stderr.write(f"{self._label} {self._done}/{self._total}, {now_s - self._pace.start_s:.0f} s, {stage}\n")


class Pace:
    """Seconds an item, from the times at which items were finished; `first` of them were finished before `start_s`.

    The first time counts for nothing: what is done once, such as compiling, delays it. An interval counts for at most
    three times the median: one long pause is not expected to recur.
    """

    def __init__(self, first: int = 0, start_s: float | None = None) -> None:
        self.first, self.start_s = first, time.monotonic() if start_s is None else start_s
        self._marks = deque[tuple[int, float]](maxlen=_RECENT)

    def note(self, done: int, now_s: float) -> None:
        """`done` items are finished by `now_s`."""
        self._marks.append((done, now_s))

    def item_s(self) -> float | None:
        """Seconds of one item; None before items were finished at two times."""
        pairs = list(pairwise(self._marks))
        if not pairs or self._marks[-1][0] == self._marks[0][0]:
            return None
        intervals_s = [after - before for (_, before), (_, after) in pairs]
        most_s = 3 * median(intervals_s)
        return sum(min(one, most_s) for one in intervals_s) / (self._marks[-1][0] - self._marks[0][0])

    def remaining(self, total: int) -> str:
        """`95 s left`, until `total` items are finished; empty while that would mean nothing."""
        item_s = self.item_s()
        return "" if item_s is None else f"{item_s * (total - self._marks[-1][0]):.0f} s left"


def format_rate(done: int, elapsed_s: float) -> str:
    """`9.4/s`, or `21.3 s each` below one per second; empty before the first item."""
    if not done or elapsed_s <= 0:
        return ""
    return f"{done / elapsed_s:.1f}/s" if done >= elapsed_s else f"{elapsed_s / done:.1f} s each"


@contextmanager
def progress(label: str, total: int, *, enabled: bool = True) -> Iterator[Reporter]:
    """A reporter for `total` items of work called `label`, which watches the stages of the work."""
    if not enabled:
        yield Reporter(label, total, enabled=False)
    elif not sys.stderr.isatty():
        reporter = Reporter(label, total)
        with watching(reporter):
            yield reporter
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            reporter = Reporter(label, total, bar)
            with watching(reporter):
                yield reporter
