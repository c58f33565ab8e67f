"""Resources of each step of a training: processor, interpreter lock, memory, faults, bytes, threads, and a GPU's.

Names and meanings are in docs/metrics.md. A figure that cannot be measured here is absent. What costs microseconds is
read at each step. What the kernel has to put together is read so rarely that it takes less than a five-hundredth of
the time; those figures are means since their last reading.
"""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import psutil

from tunesmith.base.core.errors import NativeUnavailableError
from tunesmith.base.core.system import fsync_s
from tunesmith.base.core.trace import Trace, Watcher, trace, watching
from tunesmith.base.runs import cgroup
from tunesmith.base.runs.environment import core_numbers, core_seconds, usable_cores
from tunesmith.observe.profiling.gpu import GPU, open_gpu
from tunesmith.observe.profiling.sampler.api import Sampler, Samples, has_lock
from tunesmith.observe.profiling.stacks import Stacks

Metrics = dict[str, float]

_SHORTEST_S = 0.25
_PARTS_OF_COST = 500
"""The slow readings are at least so many seconds apart, and so many times as long as one takes: the kernel counts
processor time in hundredths of a second, and large machines have much to read."""

_PLACES_S = 1.0
"""Seconds that a row of `places.jsonl` is of, at least."""

_ABSENT = (OSError, ValueError, LookupError, AttributeError, psutil.Error)
"""Errors of a figure that this system does not have, or does not show to this user."""


class _Pauses:
    """Seconds in which Python's garbage collector stopped the thread that it ran in, since the process began."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start_s = 0.0

    def __call__(self, phase: str, _: object) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._start_s = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._start_s


class Meter(Watcher):
    """Measures the spans of the thread that made it, and the process; `step` returns figures since the last call."""

    def __init__(self, sampler: Sampler | None = None, gpu: GPU | None = None, stacks: Stacks | None = None) -> None:
        self._sampler = sampler
        self._stacks = Stacks() if stacks is None else stacks
        self._first_step, self._is_new, self._places_due_s = 1, False, 0.0
        self._gpu = gpu
        self._thread = threading.get_ident()
        self._depth = 0
        self._stage = ""
        self._began = (0.0, 0.0)
        self._stages: dict[str, tuple[float, float]] = {}  # wall and processor seconds since the last step
        self._pauses = _Pauses()
        gc.callbacks.append(self._pauses)
        self._last, self._last_slow = self._fast(), _slow()
        self._slow_due_s = _SHORTEST_S + self._last_slow["wall_s"]

    def enter(self, path: str) -> None:
        """A span begins; see `core.trace.Watcher`."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        self._stacks.path = path
        if self._depth == 1:
            self._stage = path.partition("/")[0]
            if self._sampler is not None:
                self._sampler.enter(self._stage)
            if self._gpu is not None:
                self._gpu.enter(self._stage)
            self._began = time.perf_counter(), time.process_time()

    def leave(self, path: str) -> None:
        """A span ends."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        self._stacks.path = path.rpartition("/")[0] if self._depth else ""
        if self._depth == 0:
            wall_s, process_s = self._stages.get(self._stage, (0.0, 0.0))
            wall_s += time.perf_counter() - self._began[0]
            self._stages[self._stage] = wall_s, process_s + time.process_time() - self._began[1]
            if self._sampler is not None:
                self._sampler.enter("")
            if self._gpu is not None:
                self._gpu.leave()

    def step(self) -> Metrics:
        """The figures since the last call, or since the meter was made."""
        last, self._last = self._last, self._fast()
        metrics = _fast_metrics(_difference(self._last, last))
        if self._last["wall_s"] >= self._slow_due_s:
            last, self._last_slow = self._last_slow, _slow()
            cost_s = time.perf_counter() - self._last["wall_s"]
            self._slow_due_s = self._last["wall_s"] + max(_SHORTEST_S, _PARTS_OF_COST * cost_s)
            metrics |= _slow_metrics(_difference(self._last_slow, last))
        stages, self._stages = self._stages, {}
        metrics |= {f"cpu/stage/{name}": cpu_s / wall_s for name, (wall_s, cpu_s) in stages.items() if wall_s > 0}
        if self._sampler is not None:
            metrics |= _sampled_metrics(self._sampler.take())
        if self._gpu is not None:
            metrics |= self._gpu.step()
        return metrics

    def _fast(self) -> Metrics:
        """Counters that cost microseconds to read, in the units of their metrics."""
        return {**_fast(), "gc/pause_s": self._pauses.seconds}

    def close(self) -> None:
        """Stop measuring."""
        gc.callbacks.remove(self._pauses)

    def begin(self, step: int, *, is_new: bool) -> None:
        """The next step is `step`, if `is_new` the first of this process. What was seen until now belongs to none."""
        self._first_step, self._is_new, self._places_due_s = step, is_new, 0.0
        self._stacks.take()

    def places(self, step: int, *, is_last: bool = False) -> list[dict[str, object]]:
        """The row of `places.jsonl` for the steps up to `step`, once they have taken a second together, or with
        `is_last`. The first row of a process, which is of its first step alone, is `new`.
        """
        now_s = time.perf_counter()
        if self._first_step > step or (now_s < self._places_due_s and not is_last):
            return []
        row = {"first_step": self._first_step, "step": step, "new": self._is_new, "places": self._stacks.take()}
        self._first_step, self._is_new, self._places_due_s = step + 1, False, now_s + _PLACES_S
        return [row] if row["places"] or row["new"] else []


@contextmanager
def metering() -> Iterator[Meter]:
    """A meter of the thread that enters the block, which watches the spans inside of it."""
    with ExitStack() as stack:
        stacks = Stacks()
        try:
            sampler = Sampler(stacks.look)
            stack.callback(sampler.stop)
        except NativeUnavailableError:  # what else needs a compiler has said so
            sampler = None
        gpu = open_gpu()
        if gpu is not None:
            stack.callback(gpu.close)
        meter = Meter(sampler, gpu, stacks)
        stack.callback(meter.close)
        stack.enter_context(watching(meter))
        yield meter


@contextmanager
def measured(measures: bool, step: int, keep: Callable[[list[dict[str, object]]], None]) -> Iterator[Trace]:
    """A trace, among whose metrics are the figures of a meter if `measures` is true; `keep` receives the rows of
    `places.jsonl` for the step.
    """
    with metering() if measures else nullcontext() as meter, trace() as record:
        if meter is not None:
            meter.begin(step, is_new=False)
        yield record
        if meter is not None:
            record.sums |= meter.step()
            keep(meter.places(step, is_last=True))


def usable_cpu() -> float:
    """Cores that this process may use: those that it may run on, or what the quota of its control group gives."""
    return min(usable_cores(), cgroup.quota_cores() or float("inf"))


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> Metrics:
    return {name: value - before[name] for name, value in now.items() if name in before}


def _fast() -> Metrics:
    """Counters that cost microseconds to read, in the units of their metrics."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counters = {
        "wall_s": time.perf_counter(),
        "process_s": usage.ru_utime + usage.ru_stime,
        "cpu/system_s": usage.ru_stime,
        "faults/minor": usage.ru_minflt,
        "faults/major": usage.ru_majflt,
        "io/fsync_s": fsync_s(),
    }
    _add(counters, "memory/growth_mb", _resident_mb)
    return counters


def _fast_metrics(change: Metrics) -> Metrics:
    wall_s, process_s = change.pop("wall_s"), change.pop("process_s")
    return {**change, "cpu/process": process_s / wall_s} if wall_s > 0 else change


def _slow() -> Metrics:
    """Counters for which the kernel goes through all cores or threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counters = {"wall_s": time.perf_counter(), "process_s": usage.ru_utime + usage.ru_stime}
    for read in (_machine, _io, _run_delays):
        try:
            counters |= read()
        except _ABSENT:
            continue
    throttled_s = cgroup.throttled_s()
    return counters if throttled_s is None else {**counters, "cpu/throttled_s": throttled_s}


def _slow_metrics(change: Metrics) -> Metrics:
    """Metrics of the time between two slow readings, and of this moment."""
    wall_s, metrics = change.pop("wall_s"), {"cpu/cores": usable_cpu()}
    process = change.pop("process_s") / wall_s
    delays = [max(0.0, value) for name, value in change.items() if name.startswith("delay/")]
    if delays:
        metrics["cpu/run_delay_s"] = sum(delays)
    busy = {name: value / wall_s for name, value in change.items() if name.startswith("cpu/core/")}
    if busy:
        metrics |= {name: min(1.0, share) for name, share in busy.items()}
        metrics["cpu/machine"] = sum(busy.values())
        mine = [value for number in core_numbers() if (value := busy.get(f"cpu/core/{number}")) is not None]
        beyond_quota = max(0.0, len(mine) - metrics["cpu/cores"])  # cores that others may use and take nothing away
        metrics["cpu/others"] = max(0.0, sum(mine) - process - beyond_quota)
    if "stolen_s" in change:
        metrics["cpu/stolen"] = change["stolen_s"] / wall_s
    metrics |= {name: change[name] for name in ("io/read_mb", "io/written_mb", "cpu/throttled_s") if name in change}
    _add(metrics, "cpu/threads", lambda: psutil.Process().num_threads())
    _add(metrics, "memory/available_gb", available_gb)
    return metrics


def _sampled_metrics(taken: Mapping[str, Samples]) -> Metrics:
    metrics: Metrics = {}
    num_asks = sum(samples.num_asks for samples in taken.values())
    if num_asks:
        metrics["gil/late_ms"] = sum(samples.late_ns for samples in taken.values()) / num_asks / 1e6
        if has_lock():
            metrics["gil/wait_ms"] = sum(samples.waited_ns for samples in taken.values()) / num_asks / 1e6
            metrics["gil/busy_share"] = sum(samples.num_blocked for samples in taken.values()) / num_asks
            waits = sum(samples.num_training_waits for samples in taken.values())
            metrics["gil/waiting_share"] = waits / num_asks
    for stage, samples in taken.items():
        if stage and has_lock():
            metrics[f"gil/stage/{stage}"] = samples.num_blocked / samples.num_asks
            metrics[f"gil/waiting/{stage}"] = samples.num_training_waits / samples.num_asks
        if stage and samples.peak_bytes:
            metrics[f"memory/stage_peak_gb/{stage}"] = samples.peak_bytes / 1e9
    return metrics


def available_gb() -> float:
    """Memory that can be had without swapping, in GB; the control group's limit counts too."""
    available, limit = psutil.virtual_memory().available, cgroup.memory_bytes()
    return min(available, available if limit is None else limit - psutil.Process().memory_info().rss) / 1e9


def _add(metrics: Metrics, name: str, read: Callable[[], float]) -> None:
    try:
        metrics[name] = float(read())
    except _ABSENT:
        return


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _machine() -> Metrics:
    """Busy seconds of each core, by all processes, and seconds that the hypervisor took from those of this process."""
    cores, mine = core_seconds(), core_numbers()
    counters = {f"cpu/core/{number}": core.busy for number, core in enumerate(cores)}
    if psutil.LINUX:
        counters["stolen_s"] = sum(core.stolen for number, core in enumerate(cores) if number in mine)
    return counters


def _io() -> Metrics:
    counters = psutil.Process().io_counters()
    return {"io/read_mb": counters.read_bytes / 1e6, "io/written_mb": counters.write_bytes / 1e6}


def _run_delays() -> Metrics:
    """Seconds that each thread has waited for a core while it could have run, by its number."""
    delays: Metrics = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            delays[f"delay/{task.name}"] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except _ABSENT:  # a thread that has just ended, or a kernel that does not count this
            continue
    return delays
