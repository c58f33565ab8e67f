"""A thread that looks at the process every few milliseconds: Python's stack, memory, time of each thread, the GIL."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from tunesmith.base.core.errors import NativeUnavailableError
from tunesmith.base.core.trace import Watcher
from tunesmith.base.runs.environment import rss_gb
from tunesmith.observe.profiling.sampler.api import Sampler as GILSampler
from tunesmith.observe.profiling.sampler.api import has_lock
from tunesmith.observe.profiling.stacks import current_frames

STACK_PERIOD_S = 0.005
COUNTER_PERIOD_S = 0.02
COUNTS_PER_GIL = 5
"""Readings of the other counters for one of the GIL, which is asked for every 20 ms."""

_OWN_CODE = str(Path(__file__).parent)
_TASKS = Path("/proc/self/task")

Series = list[tuple[int, float]]
"""(time, value) of a quantity; times are nanoseconds since 1970, as in torch's traces."""


@dataclass(slots=True)
class Samples:
    """Samples of a process. `stacks[i]` has the functions of a stack, outermost first; `looks` has (time, stack index).

    `counters` are quantities of the process by name, `cores` the share of a processor that each thread used by its id,
    `threads` the names of the threads.
    """

    stacks: list[list[str]] = field(default_factory=list)
    looks: list[tuple[int, int]] = field(default_factory=list)
    counters: dict[str, Series] = field(default_factory=dict)
    cores: dict[int, Series] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)


class Sampler(Watcher):
    """Samples the thread that makes it, and the process, until `stop`."""

    def __init__(self) -> None:
        self.samples = Samples()
        self._main = threading.get_ident()
        self._gil = _open_gil()
        self._num_counts = 0
        self._index: dict[tuple[CodeType, ...], int] = {}
        self._used_ns: dict[int, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and name the functions of the stacks that it saw."""
        self._ended.set()
        self._thread.join()
        if self._gil is not None:
            self._gil.stop()
        self.samples.stacks = [
            [_name(code) for code in reversed(codes) if not code.co_filename.startswith(_OWN_CODE)]
            for codes in self._index
        ]

    def gauge(self, name: str, value: float) -> None:
        """Record a value of the counter `name`."""
        self.samples.counters.setdefault(name, []).append((time.time_ns(), value))

    def _run(self) -> None:
        next_counters_s = 0.0
        while not self._ended.wait(STACK_PERIOD_S):
            self._look()
            now_s = time.monotonic()
            if now_s >= next_counters_s:
                next_counters_s = now_s + COUNTER_PERIOD_S
                self._count()

    def _look(self) -> None:
        frame, codes = current_frames().get(self._main), list[CodeType]()
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        self.samples.looks.append((time.time_ns(), self._index.setdefault(tuple(codes), len(self._index))))

    def _count(self) -> None:
        self.gauge("resident memory (GB)", rss_gb())
        self._num_counts += 1
        if self._gil is not None and self._num_counts % COUNTS_PER_GIL == 0 and (asks := self._gil.take().get("")):
            self.gauge("GIL busy", asks.num_blocked / asks.num_asks)
        names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
        for thread_id, now_ns, used_ns in _thread_times():
            last_ns, last_used_ns = self._used_ns.get(thread_id, (now_ns, used_ns))
            self._used_ns[thread_id] = now_ns, used_ns
            if now_ns > last_ns:
                share = (used_ns - last_used_ns) / (now_ns - last_ns)
                self.samples.cores.setdefault(thread_id, []).append((now_ns, min(1.0, share)))
                if thread_id not in self.samples.threads:
                    self.samples.threads[thread_id] = names.get(thread_id) or _kernel_name(thread_id)


def _open_gil() -> GILSampler | None:
    """A native thread that asks for the GIL; None where there is no GIL or no compiler."""
    try:
        return GILSampler() if has_lock() else None
    except NativeUnavailableError:
        return None


def _name(code: CodeType) -> str:
    """`file:function`, the file without folder; those of packages with the folder, because many have the same name."""
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_qualname}"


def _thread_times() -> Iterator[tuple[int, int, int]]:
    """(id, time, processor time) of each thread of the process, in ns; nothing where the system does not tell."""
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            used_ns = int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
        yield int(task.name), time.time_ns(), used_ns


def _kernel_name(thread_id: int) -> str:
    """The name that a thread of C++ gave itself; without one it has that of the process."""
    try:
        name, process = ((_TASKS / str(number) / "comm").read_text().strip() for number in (thread_id, os.getpid()))
    except OSError:
        return "native thread"
    return "native thread" if name == process else name
