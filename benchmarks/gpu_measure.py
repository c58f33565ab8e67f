"""Clock, launches and kernels of `benchmarks.gpu` on one device, and the ceilings of the device."""

import importlib.util
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Case, Setting
from benchmarks.common import Work, memory_facts, seconds_of, wait

_ROUNDS = 3
_BUDGET_S, _MANY, _BUDGET_OF_MANY_S = 0.15, 8, 0.06
"""Seconds of measuring for one work, and for one among many; at least one call in each round."""

_MOST_CALLS, _WARM_UP_CALLS = 100, 3
_DEFAULT_L2_BYTES, _TIMES_L2 = 64 * 2**20, 4
"""Work of fewer bytes than so many L2 caches may find some of them there, so the cache is flushed before it."""

_OTHERS_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
"""Errors of a foreign compiler or library; ours goes on without it."""

_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median and least; those of the processor, and how many calls were measured.

    `host_s` near `median_s` says that the device waited for the processor.
    """

    median_s: float
    least_s: float
    host_s: float
    num_calls: int

    @classmethod
    def of(cls, seconds: Sequence[float], host: Sequence[float] | None = None) -> "Timing":
        """The timing of several calls."""
        return cls(statistics.median(seconds), min(seconds), statistics.median(host or seconds), len(seconds))


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and floating-point operations that one part of a work needs at least."""

    num_bytes: int
    num_flops: int = 0

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The longer of both, at the measured rates: while bytes move, the matrix units can work."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of a row.

    `timings` has `ours`, `eager`, `compile`, `liger`, and other ways of ours by name; `notes` says why one of them is
    missing. `floors` are the parts of the work, one after the other. `max_error` is None where nothing is compared.
    """

    size: str
    picked: str
    against: str
    floors: tuple[Floor, ...] = ()
    timings: Mapping[str, Timing] = field(default_factory=dict[str, Timing])
    max_error: float | None = None
    tolerance: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    facts: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures on `device`. `quick` calls everything once or twice, and its figures say nothing."""

    device: torch.device
    quick: bool = False

    def wait(self) -> None:
        """Return when the device has finished."""
        wait(self.device)

    def warm_up(self, work: Work) -> None:
        """Do what is slow once: compiling, and memory that is new."""
        for _ in range(1 if self.quick else _WARM_UP_CALLS):
            work()
        self.wait()

    def wall_s(self, work: Work) -> float:
        """Seconds of one call by the wall."""
        self.wait()
        return seconds_of(lambda: (work(), self.wait()))

    def measure(self, works: Mapping[str, Work], num_bytes: int, *, by_wall: bool = False) -> dict[str, Timing]:
        """The timing of each of `works`, which are warm and move `num_bytes`; they take turns, in three rounds.

        On a GPU a call is timed by events around it, unless `by_wall`, for work that is partly the processor's. The
        cache is flushed by reading, so that nothing is left to be written back in the measured time.
        """
        flush = self._flush(num_bytes)
        budget_s = (_BUDGET_S if len(works) <= _MANY else _BUDGET_OF_MANY_S) / _ROUNDS
        calls = dict.fromkeys(works, 1)
        if not self.quick:
            calls = {
                name: max(1, min(_MOST_CALLS, round(budget_s / max(self.wall_s(work), 1e-6))))
                for name, work in works.items()
            }
        once = self._by_events if self.device.type == "cuda" and not by_wall else self._by_wall
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for index in range(1 if self.quick else _ROUNDS):
            names, first = list(works), index % len(works)
            for name in names[first:] + names[:first]:
                found[name] += once(works[name], calls[name], flush)
        return {name: Timing.of(*zip(*pairs, strict=True)) for name, pairs in found.items()}

    def _by_events(self, work: Work, num_calls: int, flush: Work) -> list[tuple[float, float]]:
        """(device, host) seconds of each call."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_calls)]
        host: list[float] = []
        self.wait()
        for start, end in events:
            flush()
            start.record()
            host.append(seconds_of(work))
            end.record()
        self.wait()
        return [(start.elapsed_time(end) / 1e3, host_s) for (start, end), host_s in zip(events, host, strict=True)]

    def _by_wall(self, work: Work, num_calls: int, flush: Work) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for _ in range(num_calls):
            flush()
            self.wait()
            start_s = time.perf_counter()
            host_s = seconds_of(work)
            self.wait()
            found.append((time.perf_counter() - start_s, host_s))
        return found

    def _flush(self, num_bytes: int) -> Work:
        if self.device.type != "cuda":
            return lambda: None
        properties = torch.cuda.get_device_properties(self.device)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or _DEFAULT_L2_BYTES
        if num_bytes > _TIMES_L2 * l2_bytes:
            return lambda: None
        buffer = torch.zeros(_TIMES_L2 * l2_bytes // 4, device=self.device)
        return lambda: buffer.sum()


def captured(work: Work) -> Work:
    """`work`, which is warm and does not wait for the device, as one launch of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def longest_kernels(work: Work, device: torch.device, most: int = 20) -> dict[str, float]:
    """Milliseconds on the device in one call of `work`, which is warm, by kernel, the longest first; empty on a CPU."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        Clock(device).wait()
    totals: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            totals[event.name[:100]] += event.time_range.elapsed_us() / 1e3
    return {"all": totals.total(), **dict(totals.most_common(most))}


def count_launches(work: Work, device: torch.device) -> dict[str, float]:
    """Counts of one call of `work`, which is warm.

    `operators`: calls of torch's operators by the processor, those by other operators included. `launches`: kernels
    launched one by one, and `graphs` as a whole. `kernels` ran on the device, `copies` are copies and fills there.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    clock = Clock(device)
    clock.wait()
    with profile(activities=activities) as profiler:
        work()
        clock.wait()
    counts: dict[str, float] = dict.fromkeys(("operators", "launches", "graphs", "kernels", "copies"), 0.0)
    for event in profiler.events() or ():
        name = event.name
        if getattr(event, "is_user_annotation", False):  # a named span, shown on the device's line as well
            continue
        if event.device_type.name == "CUDA":
            counts["copies" if name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
            continue
        counts["operators"] += name.startswith(("aten::", "tunesmith::"))
        counts["launches"] += name in _LAUNCHES
        counts["graphs"] += name == "cudaGraphLaunch"
    return counts


def measured_case(case: Case, clock: Clock) -> Measured:
    """Error first, then memory, then the times of all ways that can run: ours, torch, torch.compile and Liger."""
    error = case.max_error()
    memory = memory_facts(case.ours, case.plain, clock.device) if case.measures_memory else {}
    works: dict[str, Work] = {"ours": case.ours, **case.variants, "eager": case.plain}
    for work in works.values():
        clock.warm_up(work)
    others: dict[str, Work] = {}
    notes: dict[str, str] = {}
    if case.compiles:
        torch.compiler.reset()  # the same lines with other tensors would be compiled again for any shape
        # For its shapes alone; a quick run traces it, and compiles nothing.
        others["compile"] = torch.compile(case.plain, dynamic=False, backend="eager" if clock.quick else "inductor")
    if case.liger is not None:
        others["liger"] = case.liger
    elif importlib.util.find_spec("liger_kernel") is None:
        notes["liger"] = "not installed"
    for name, work in list(others.items()):
        try:
            clock.warm_up(work)
        except _OTHERS_ERRORS as error_:
            notes[name] = f"{type(error_).__name__}: {error_}"[:300]
            del others[name]
    works |= others
    if case.by_graph and clock.device.type == "cuda":
        works = {name: captured(work) for name, work in works.items()}
    timings = clock.measure(works, case.num_bytes, by_wall=case.by_wall)
    floors = (Floor(case.num_bytes, case.num_flops),)
    return Measured(
        case.size, case.picked, case.against, floors, timings, error, case.tolerance, notes=notes, facts=memory
    )


def copy(setting: Setting, clock: Clock) -> Measured:
    """The fastest `copy_` of 1, 2 and 4 GB; bytes are those read and those written."""
    gigabyte = setting.sized(1 << 26, 1 << 16, 1 << 30)
    timings: dict[int, Timing] = {}
    for times in (1, 2, 4):
        source = torch.ones(times * gigabyte // 4, device=setting.device)
        target = torch.zeros_like(source)
        works = {"ours": lambda source=source, target=target: target.copy_(source)}
        clock.warm_up(works["ours"])
        timings[times] = clock.measure(works, 2 * times * gigabyte)["ours"]
    rates = {times: 2 * times * gigabyte / timing.median_s / 1e9 for times, timing in timings.items()}
    best = max(rates, key=lambda times: rates[times])
    return Measured(
        size=f"{best * gigabyte} bytes",
        picked="torch",
        against="nothing",
        floors=(Floor(2 * best * gigabyte),),
        timings={"ours": timings[best]},
        facts={"gb_per_s": {f"{times * gigabyte} bytes": rate for times, rate in rates.items()}},
    )


def matrix(setting: Setting, clock: Clock) -> Measured:
    """The product of two square matrices of random numbers in bfloat16: zeros would be faster than any data."""
    width = setting.sized(1024, 64, 8192)
    a, b = (setting.normal(width, width, dtype=torch.bfloat16, stream=i) for i in range(2))
    out = torch.empty_like(a)
    works = {"ours": lambda: torch.mm(a, b, out=out)}
    clock.warm_up(works["ours"])
    floors, timings = (Floor(3 * 2 * width**2, 2 * width**3),), clock.measure(works, 3 * 2 * width**2)
    return Measured(f"{width} x {width} x {width} bfloat16", "torch", "nothing", floors, timings)
