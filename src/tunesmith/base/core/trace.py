"""Spans: the duration of each named stage of a step, and figures of what was done in it.

`with span("rollout"):` costs about a microsecond: it only adds to the open trace. Spans nest, and their names join to a
path; `span("update/forward")` names a path by itself. The time of a span includes that of the spans inside it. Entering
a span is also a fault point, see `core.faults`. `count` adds to a figure of the stage that runs.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from tunesmith.base.core import faults


@dataclass(slots=True)
class Trace:
    """Seconds and number of calls of every span that ended while this trace was open, and the figures of `count`.

    A figure is its entry of `sums`, divided by that of `out_of` if there is one. `failed_in` is the path of the
    innermost span that an error left, empty if none did. `start_s` is by `time.perf_counter`.
    """

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    num_calls: dict[str, int] = field(default_factory=dict[str, int])
    sums: dict[str, float] = field(default_factory=dict[str, float])
    out_of: dict[str, float] = field(default_factory=dict[str, float])
    covered_s: float = 0.0
    wall_s: float = 0.0
    failed_in: str = ""
    start_s: float = field(default_factory=time.perf_counter)

    def add(self, name: str, duration_s: float, *, is_outermost: bool) -> None:
        """Add one finished span of `duration_s` seconds; only the outermost ones count as covered time."""
        self.seconds[name] = self.seconds.get(name, 0.0) + duration_s
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        self.covered_s += duration_s if is_outermost else 0.0

    def count(self, figure: str, value: float, out_of: float | None) -> None:
        """Add to a figure, named `<stage>/<name>`; see the function `count`."""
        self.sums[figure] = self.sums.get(figure, 0.0) + value
        if out_of is not None:
            self.out_of[figure] = self.out_of.get(figure, 0.0) + out_of

    def include(self, other: "Trace", under: str = "") -> None:
        """Add the spans of `other`, below the path `under`; they ran concurrently and cover none of its time. Its
        figures are then those of the outermost stage of `under`.
        """
        for name, duration_s in other.seconds.items():
            path = f"{under}/{name}" if under else name
            self.seconds[path] = self.seconds.get(path, 0.0) + duration_s
            self.num_calls[path] = self.num_calls.get(path, 0) + other.num_calls[name]
        for figure, value in other.sums.items():
            own = f"{under.partition('/')[0]}/{figure.rpartition('/')[2]}" if under else figure
            self.count(own, value, other.out_of.get(figure))

    def metrics(self) -> dict[str, float]:
        """`time/<stage>_s` for each span, `time/other_s` for what no span covers, `time/step_s`, and all figures.

        The outermost stages and `other` sum to the wall time of the step.
        """
        stages = {f"time/{name}_s": s for name, s in self.seconds.items()}
        figures = {name: value / self.out_of.get(name, 1.0) for name, value in self.sums.items()}
        other_s = max(0.0, self.wall_s - self.covered_s)
        return {**stages, "time/other_s": other_s, "time/step_s": self.wall_s, **figures}


_open_trace: ContextVar[Trace | None] = ContextVar("tunesmith_open_trace", default=None)
_path: ContextVar[str] = ContextVar("tunesmith_span_path", default="")


class Watcher:
    """Receives the begin and the end of spans, what goes on in them, and the values of gauges, in the thread in which
    they occur.

    A subclass overrides what it needs; a method must take microseconds and not raise.
    """

    def enter(self, path: str) -> None:
        """The span `path` begins."""

    def leave(self, path: str) -> None:
        """The span `path` ends, also by an error."""

    def went_on(self) -> None:
        """The stage that runs got further: it made a forward pass, drew a token, or ended a part of its work."""

    def gauge(self, name: str, value: float) -> None:
        """The quantity `name` is `value` from now on."""


_watchers: tuple[Watcher, ...] = ()


@contextmanager
def watching(watcher: Watcher) -> Generator[None, None, None]:
    """Call `watcher` for spans in open traces and for gauges inside the block, in whatever thread."""
    global _watchers
    _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        _watchers = tuple(other for other in _watchers if other is not watcher)


def gauge(name: str, value: float) -> None:
    """Tell the watchers, if there are any, that the quantity `name` is `value` from now on."""
    for watcher in _watchers:
        watcher.gauge(name, value)


def went_on() -> None:
    """Tell the watchers, if there are any, that the stage that runs got further."""
    for watcher in _watchers:
        watcher.went_on()


@contextmanager
def trace(record: Trace | None = None) -> Generator[Trace, None, None]:
    """Open a trace, usually one for each training step; `Trace.wall_s` is set when the block ends.

    `record` is a trace to open again: its time includes that since it was made.
    """
    record = Trace() if record is None else record
    trace_token, path_token = _open_trace.set(record), _path.set("")
    try:
        yield record
    finally:
        record.wall_s = time.perf_counter() - record.start_s
        _open_trace.reset(trace_token)
        _path.reset(path_token)


@contextmanager
def span(name: str) -> Generator[None, None, None]:
    """Time the block under `name` in the open trace; without an open trace the block just runs."""
    record = _open_trace.get()
    if record is None:
        yield
        return
    outer = _path.get()
    path = f"{outer}/{name}" if outer else name
    token, watchers = _path.set(path), _watchers
    start_s = time.perf_counter()  # what watchers take is part of the stage that they measure
    for watcher in watchers:
        watcher.enter(path)
    try:
        faults.reach(path)
        yield
    except BaseException:
        record.failed_in = record.failed_in or path
        raise
    finally:
        for watcher in reversed(watchers):
            watcher.leave(path)
        record.add(path, time.perf_counter() - start_s, is_outermost=not outer)
        _path.reset(token)


def include(record: Trace) -> None:
    """Add the spans of `record`, which another thread has filled, below the current one in the open trace."""
    current = _open_trace.get()
    if current is not None:
        current.include(record, under=_path.get())


def count(name: str, value: float, *, out_of: float | None = None) -> None:
    """Add `value` to the figure `name` of the outermost open span, `<stage>/<name>` among the metrics of the trace. The
    stage that runs goes on.

    With `out_of` the figure is a share or a mean: all values over all `out_of`, which must be positive.
    """
    went_on()
    record = _open_trace.get()
    if record is not None:
        record.count(f"{_path.get().partition('/')[0]}/{name}", value, out_of)
