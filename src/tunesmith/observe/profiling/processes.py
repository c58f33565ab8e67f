"""Facts about a process, from /proc and psutil: states, threads, connections, children. What is gone is left out."""

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

STOPPED, TRACED, DEVICE, ZOMBIE, GONE = "stopped", "held by a debugger", "waiting for a device", "a zombie", "gone"

_STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": DEVICE, "T": STOPPED, "t": TRACED, "Z": ZOMBIE}
_START = 19  # field of `stat`, counted from the state
_SAMPLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread: its id, its state, the kernel function that it waits in, and the cores that it uses."""

    tid: int
    state: str
    wait_channel: str
    cores: float


def start_of(pid: int) -> int | None:
    """The time at which the process was started, in clock ticks since the machine was; None if there is no such one."""
    fields = _stat(f"/proc/{pid}")
    return int(fields[_START]) if fields else None


def state_of(pid: int, start: int) -> str:
    """The state of the process that was started at `start`."""
    fields = _stat(f"/proc/{pid}")
    return _STATES.get(fields[0], "running") if fields and int(fields[_START]) == start else GONE


def threads_of(pid: int) -> list[Thread]:
    """The threads of a process, watched for 0.3 seconds."""
    begin_s, before = time.monotonic(), _cpu_s(pid)
    time.sleep(_SAMPLE_S)
    after, elapsed_s = _cpu_s(pid), time.monotonic() - begin_s
    found: list[Thread] = []
    for tid, cpu_s in after.items():
        if fields := _stat(f"/proc/{pid}/task/{tid}"):
            cores = (cpu_s - before.get(tid, cpu_s)) / elapsed_s
            found.append(Thread(tid, _STATES.get(fields[0], "running"), _wait_channel(pid, tid), cores))
    return found


def catches(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal. Without one, most signals end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def connections_of(pid: int) -> Iterator[str]:
    """Remote ends of the TCP connections of a process and its children, such as `10.0.0.7:8000 (ESTABLISHED)`."""
    for process in _family(pid):
        try:
            found = process.net_connections(kind="tcp")
        except (psutil.Error, OSError):
            continue
        yield from (f"{one.raddr.ip}:{one.raddr.port} ({one.status})" for one in found if one.raddr)


def children_of(pid: int) -> Iterator[str]:
    """Child processes and theirs, such as `1234 python worker.py (sleeping)`."""
    for process in _family(pid)[1:]:
        try:
            yield f"{process.pid} {shlex.join(process.cmdline()) or process.name()} ({process.status()})"
        except (psutil.Error, OSError):
            continue


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except (psutil.Error, OSError):
        return []


def _stat(folder: str) -> list[str]:
    """The fields of the `stat` file of a process or thread, from the state on; empty if it is gone."""
    try:
        return Path(folder, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> dict[int, float]:
    """Seconds that each thread has computed for."""
    try:
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    except (psutil.Error, OSError):
        return {}


def _wait_channel(pid: int, tid: int) -> str:
    try:
        found = Path(f"/proc/{pid}/task/{tid}/wchan").read_text(encoding="utf-8")
    except OSError:
        return ""
    return "" if found == "0" else found
