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
    """Shows the progress of `total` items of work called `label`: by `bar`, without one by lines, or not at all."""

    def __init__(self, label: str, total: int, bar: Progress | None = None, *, enabled: bool = True) -> None:
        self._label, self._total, self._enabled = label, total, enabled
        self._start_s = self._last_s = time.monotonic()
        self._start_done = 0
        self._facts = ""
        self._bar = bar
        self._task = None if bar is None else bar.add_task(label, total=total, facts="", rate="")

    def begin(self, done: int) -> None:
        """The work begins now, with `done` items finished before: rates count from here."""
        self._start_s, self._start_done = time.monotonic(), done
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, completed=done)

    def update(self, done: int, facts: Mapping[str, float] | None = None) -> None:
        """`done` items are finished; `facts` are figures to show, by name."""
        now_s = time.monotonic()
        elapsed_s, num_new = now_s - self._start_s, done - self._start_done
        rate = format_rate(num_new, elapsed_s)
        self._facts = self._facts if facts is None else format_facts(facts)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, rate=rate, facts=self._facts)
        elif self._enabled and (now_s - self._last_s >= _PLAIN_INTERVAL_S or done >= self._total):
            self._last_s = now_s
            eta_s = elapsed_s / num_new * (self._total - done) if num_new else 0.0
            text = f"{self._label} {done}/{self._total}, {elapsed_s:.0f} s, {rate}, {eta_s:.0f} s left"
            sys.stderr.write(f"{text}  {self._facts}".rstrip() + "\n")


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
    if not enabled or not sys.stderr.isatty():
        yield Reporter(label, total, enabled=enabled)
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
            yield Reporter(label, total, bar)
