"""The trace of a profile in Chrome's format, which Perfetto and chrome://tracing open.

It is made of torch's trace and of our samples: steps and stages get tracks of their own above the operators of each
thread, and memory, slots, GIL and the processor time of each thread become counters. Times are microseconds since the
first profiled step began.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]

RAW_TRACE = "torch.json"
TRACE = "trace.json.gz"

SPAN_MARK, STEP_MARK = "tunesmith stage: ", "tunesmith step: "
"""Begin of the names of our spans and steps in torch's trace."""

CORES = "cores: "
"""Begin of the names of counters of threads."""

STAGE, STEP, OPERATOR = "stage", "step", "cpu_op"
"""Categories of events."""

LAUNCHES = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

_KEPT = (OPERATOR, "user_annotation", *LAUNCHES, *KERNELS)
_STAGE_TRACK = 2**22
"""Added to a thread's id for the track of its stages; thread ids of Linux are smaller."""


def build(raw: Mapping[str, Any], samples: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of torch's trace `raw` and the `samples` of the same steps, sorted by time.

    Raises:
        ValueError: if torch recorded no step.
    """
    process = int(samples["process"])
    base_us = float(raw.get("baseTimeNanoseconds", 0)) / 1e3
    spans = [event for event in raw["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in spans if event["name"].removeprefix(STEP_MARK) in samples["steps"]]
    if not steps:
        raise ValueError("torch's profiler recorded no step")
    start_us, end_us = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    events = [
        _moved(event, start_us) for event in spans if event.get("cat") in _KEPT and start_us <= event["ts"] < end_us
    ]
    events += _counters(samples, process, base_us + start_us, end_us - start_us)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_names(events, samples, process), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": samples["run"],
            "device": samples["device"],
            "num_threads": samples["num_threads"],
            "main_thread": samples["main_thread"],
            "start_ns": round((base_us + start_us) * 1e3),
        },
    }


def _moved(event: Event, start_us: float) -> Event:
    """`event` in our time; stages and steps on the tracks of stages."""
    moved = {name: event[name] for name in ("ph", "cat", "name", "pid", "tid")}
    moved |= {"ts": round(event["ts"] - start_us, 3), "dur": round(event["dur"], 3)}
    for mark, category in ((SPAN_MARK, STAGE), (STEP_MARK, STEP)):
        if event["cat"] == "user_annotation" and event["name"].startswith(mark):
            name = event["name"].removeprefix(mark)
            return {**moved, "name": name, "cat": category, "tid": event["tid"] + _STAGE_TRACK}
    if event["cat"] != OPERATOR:
        moved["args"] = {name: value for name, value in event.get("args", {}).items() if name == "correlation"}
    return moved


def _counters(samples: Mapping[str, Any], process: int, start_us: float, duration_us: float) -> Iterator[Event]:
    """Counter events of all series, for the time from `start_us` on."""
    threads = {thread: CORES + name for thread, name in unique_names(samples["threads"]).items()}
    named = {**samples["counters"], **{threads[thread]: series for thread, series in samples["cores"].items()}}
    for name, series in named.items():
        for time_ns, value in series:
            ts = round(time_ns / 1e3 - start_us, 3)
            if 0 <= ts < duration_us:
                yield {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": ts, "args": {"value": value}}


def unique_names(threads: Mapping[str, str]) -> dict[str, str]:
    """The name of each thread; its id is added where several have the same."""
    names = list(threads.values())
    return {thread: f"{name} {thread}" if names.count(name) > 1 else name for thread, name in threads.items()}


def _names(events: Iterable[Event], samples: Mapping[str, Any], process: int) -> Iterator[Event]:
    """Metadata events: the names of processes and tracks, stages first."""
    tracks = dict.fromkeys((event["pid"], event["tid"]) for event in events if event["ph"] == "X")
    for pid in dict.fromkeys(pid for pid, _ in tracks):
        name = samples["run"] if pid == process else f"GPU {pid}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    threads = samples["threads"]
    for pid, tid in tracks:
        is_stages = pid == process and tid >= _STAGE_TRACK
        thread = tid - _STAGE_TRACK if is_stages else tid
        is_main = thread == samples["main_thread"]
        name = threads.get(str(thread), f"thread {thread}") if pid == process else f"stream {tid}"
        label = f"stages of {name}" if is_stages else name
        order = (0 if is_stages else 1) + (0 if is_main else 2)
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": order}}


def thread_of(event: Event) -> int:
    """The thread that the event happened in, also of a stage."""
    tid = int(event["tid"])
    return tid - _STAGE_TRACK if event["cat"] in (STAGE, STEP) else tid


def write(path: Path, trace: Mapping[str, Any]) -> None:
    """Write `trace` as compressed JSON."""
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(trace, file, separators=(",", ":"), ensure_ascii=False)


def read(path: Path) -> dict[str, Any]:
    """A trace that `write` wrote.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)
