"""Progress of long work: a live bar with rate, ETA and reward on a terminal, a plain line now and then elsewhere.
All on stderr.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_INTERVAL_S = 10.0


class Reporter:
    """Receives the progress of some work; this base class shows nothing."""

    def begin(self, done: int) -> None:
        """The work begins now, with `done` items finished before: rates count from here."""

    def update(self, done: int, facts: Mapping[str, float] | None = None) -> None:
        """`done` items are finished; `facts` are figures to show, by name."""


class _Bar(Reporter):
    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total, facts="", rate="")
        self._start_s, self._start_done = time.monotonic(), 0

    def begin(self, done: int) -> None:
        self._start_s, self._start_done = time.monotonic(), done
        self._progress.reset(self._task, completed=done)

    def update(self, done: int, facts: Mapping[str, float] | None = None) -> None:
        rate = format_rate(done - self._start_done, time.monotonic() - self._start_s)
        if facts is None:
            self._progress.update(self._task, completed=done, rate=rate)
        else:
            self._progress.update(self._task, completed=done, rate=rate, facts=format_facts(facts))


class _Lines(Reporter):
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._start_s = self._last_s = time.monotonic()
        self._start_done = 0

    def begin(self, done: int) -> None:
        self._start_s, self._start_done = time.monotonic(), done

    def update(self, done: int, facts: Mapping[str, float] | None = None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _PLAIN_INTERVAL_S and done < self._total:
            return
        self._last_s = now_s
        elapsed_s = now_s - self._start_s
        num_new = done - self._start_done
        eta_s = elapsed_s / num_new * (self._total - done) if num_new else 0.0
        text = f"{self._label} {done}/{self._total}, {elapsed_s:.0f} s, {format_rate(num_new, elapsed_s)}, "
        text += f"{eta_s:.0f} s left"
        sys.stderr.write(f"{text}  {format_facts(facts or {})}".rstrip() + "\n")


def format_facts(facts: Mapping[str, float]) -> str:
    """Figures after the bar, such as `reward 0.412  kl 3.10`."""
    return "  ".join(f"{name} {value:.3f}" for name, value in facts.items())


def format_rate(done: int, elapsed_s: float) -> str:
    """`9.4/s`, or `21.3 s each` below one per second; empty before the first item."""
    if not done or elapsed_s <= 0:
        return ""
    return f"{done / elapsed_s:.1f}/s" if done >= elapsed_s else f"{elapsed_s / done:.1f} s each"


@contextmanager
def progress(label: str, total: int, *, enabled: bool = True) -> Iterator[Reporter]:
    """A reporter for `total` items of work called `label`."""
    if not enabled:
        yield Reporter()
    elif not sys.stderr.isatty():
        yield _Lines(label, total)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            yield _Bar(bar, label, total)
