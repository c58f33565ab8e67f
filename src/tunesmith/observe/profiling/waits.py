"""Kinds of waits of threads, judged by the call of the kernel that one is in and the innermost calls of its stack."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "computes",
    "gil",
    "lock",
    "queue",
    "threads",
    "sleep",
    "disk",
    "network",
    "name_lookup",
    "process",
    "pipe",
    "database",
    "file_lock",
    "memory",
    "gpu",
    "other",
]
"""`threads`: for other threads, of which it is not known what they do; `memory`: for pages to be read from disk."""

# What `sampler/cpu.cpp` finds.
UNKNOWN, RUNS, FUTEX, LOCK, SLEEPS, FILE, POLLS, CHILD, FILE_LOCK, SYNCS, FOLDER, FAULT, DEVICE, OTHER = range(14)
SUSPENDED = 14
"""A coroutine that waits for another one or for its event loop."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call on a stack: where it is, and its source text as far as that can be read."""

    file: str
    line: int
    function: str
    text: str = ""


_BY_FILE: tuple[tuple[str, Kind], ...] = (
    ("/filelock/", "file_lock"),
    ("/portalocker/", "file_lock"),
    ("/fasteners/", "file_lock"),
    ("/subprocess.py", "process"),
    ("/asyncio/subprocess.py", "process"),
    ("/multiprocessing/popen_", "process"),
    ("/multiprocessing/connection.py", "process"),
    ("/multiprocessing/process.py", "process"),
    ("/multiprocessing/synchronize.py", "lock"),
    ("/multiprocessing/queues.py", "queue"),
    ("/multiprocessing/pool.py", "process"),
    ("/asyncio/locks.py", "lock"),
    ("/asyncio/queues.py", "queue"),
    ("/asyncio/streams.py", "network"),
    *((f"/{name}", "network") for name in ("ssl.py", "http/client.py", "urllib/request.py", "smtplib.py", "ftplib.py")),
    *(
        (f"/{name}/", "network")
        for name in ("urllib3", "httpcore", "httpx", "aiohttp", "requests", "grpc", "websockets")
    ),
)
"""The kind of a wait if a library of that name is among the innermost calls."""

_SYNC_TEXT = re.compile(r"\b(fsync|fdatasync|sync)\(")

_BY_TEXT: tuple[tuple[str, Kind], ...] = (
    (r"\b(getaddrinfo|gethostby\w+|getnameinfo|getfqdn)\(", "name_lookup"),
    (_SYNC_TEXT.pattern, "disk"),
    (r"\b(flock|lockf)\(", "file_lock"),
    (r"\b(waitpid|wait4|waitid|os\.system|communicate|check_call|check_output)\(", "process"),
    (r"\b(recv\w*|sendall|sendto|connect|create_connection|accept|urlopen)\(", "network"),
    (r"\bsynchronize\(", "gpu"),
)
_LOCK_TEXT = re.compile(r"\bacquire\(|^(async )?with ")
_QUEUE_TEXT = re.compile(r"\b(get|put)\(")
_THREAD_TEXT = re.compile(r"\b(result|join|shutdown|map|wait|as_completed)\(")
_SLEEP_TEXT = re.compile(r"\bsleep\(")
_DATABASE_TEXT = re.compile(r"\b(execute|executemany|executescript|commit|rollback)\(")

_PARALLEL = ("/concurrent/futures/", "/threading.py", "/queue.py", "/multiprocessing/dummy/")


def kind_of(does: int, target: str, calls: Sequence[Call]) -> Kind:
    """The kind of wait of a thread that does `does`, with the file `target` behind its descriptor, empty if there is
    none. `calls` are its innermost calls, the innermost first.
    """
    text = calls[0].text if calls else ""
    if does == RUNS:  # of a call that has the kernel write, a fast disk takes a part only
        return "disk" if _SYNC_TEXT.search(text) else "computes"
    if does in (LOCK, FAULT):
        return "gil" if does == LOCK else "memory"
    if does in (FUTEX, UNKNOWN, SUSPENDED) and (found := _for_threads(calls, text, does)):
        return found
    for pattern, kind in _BY_TEXT:
        if re.search(pattern, text):
            return kind
    files = [call.file for call in calls[:-1]]  # those of libraries
    for part, kind in _BY_FILE if does not in (SYNCS, FOLDER) else ():
        if any(part in file for file in files):
            return kind
    return _by_call(does, target, text)


def _for_threads(calls: Sequence[Call], text: str, does: int) -> Kind | None:
    """The kind of wait of a thread that sleeps until another one wakes it."""
    files = [call.file for call in calls]
    if any(f"/multiprocessing/{name}.py" in file for file in files for name in ("connection", "pool")):
        return "process"
    if any(file.endswith("/queue.py") for file in files):
        return "queue"
    if any(call.function == "sleep" and call.file.endswith("/asyncio/tasks.py") for call in calls):
        return "sleep"
    if any(part in file for file in files[:-1] for part in _PARALLEL):
        return (
            "lock" if any("Semaphore" in call.function or "Barrier" in call.function for call in calls) else "threads"
        )
    if does == UNKNOWN and _SLEEP_TEXT.search(text):
        return "sleep"
    if _LOCK_TEXT.search(text):
        return "lock"
    if does != SUSPENDED and _QUEUE_TEXT.search(text):
        return "queue"
    return "threads" if does == FUTEX or _THREAD_TEXT.search(text) else None


def _by_call(does: int, target: str, text: str) -> Kind:
    """The kind of wait in a call of the kernel, by its kind and the file that it concerns."""
    if does == SLEEPS:
        is_database = "sqlite3" in sys.modules and _DATABASE_TEXT.search(text)
        return "database" if is_database else "sleep"
    if does in (FILE, POLLS, DEVICE):
        return _by_target(does, target)
    by_call: dict[int, Kind] = {CHILD: "process", FILE_LOCK: "file_lock", SYNCS: "disk", FOLDER: "disk"}
    by_call |= {UNKNOWN: "other", SUSPENDED: "network", OTHER: "other"}
    return by_call[does]


def _by_target(does: int, target: str) -> Kind:
    if target.startswith(("pipe:", "/dev/pts", "/dev/tty")) or "/fifo" in target:
        return "pipe"
    if any(name in target for name in ("nvidia", "/dev/kfd", "/dev/dri")):
        return "gpu"
    if target.startswith("/") and not target.startswith("/dev/"):
        return "disk"
    return "network" if does == POLLS or target.startswith("socket:") else "other"


PHRASES: dict[Kind, str] = {
    "computes": "computes",
    "gil": "waits for the interpreter's lock, which other Python code holds",
    "lock": "waits for a lock",
    "queue": "waits for a queue",
    "threads": "waits for other threads",
    "sleep": "sleeps",
    "disk": "waits for the disk",
    "network": "waits for the network",
    "name_lookup": "looks up a host name",
    "process": "waits for another process",
    "pipe": "waits for a pipe or a terminal",
    "database": "waits for a lock of a SQLite database",
    "file_lock": "waits for a lock on a file",
    "memory": "waits for memory that is read from disk",
    "gpu": "waits for a GPU",
    "other": "waits in the system",
}
"""Activities of a thread, as predicates of a sentence."""

ADVICE: dict[Kind, str] = {
    "computes": "compute less there: cache what recurs, work on all rows together, or use a library in C",
    "gil": "take the Python work of the other thread to another process",
    "lock": "hold the lock for a shorter time: compute and wait outside of it, or give each thread what it guards",
    "queue": "find out why the other side of the queue is late, and give the call a time limit",
    "threads": "find out what the other threads do, and give the call a time limit",
    "sleep": "take the sleep out",
    "disk": "write and sync less often: once for all rows, not for each, or to a local disk or memory (/dev/shm)",
    "network": "ask for all at once instead of one after the other, cache answers, and give the call a time limit",
    "name_lookup": "look the name up once and keep the connection, or repair the name server that does not answer",
    "process": "start the process once and keep it, or give it all rows in one call",
    "pipe": "let the reader of the pipe read, or write less to it (logs and prints to a file)",
    "database": "keep the other connection's transactions short, commit before waiting, or use journal_mode=WAL",
    "file_lock": "hold the lock of the file for a shorter time, or give each process a file of its own",
    "memory": "use less memory, so that nothing is written out: smaller micro-batches, a smaller cache; a data "
    "file that is mapped is read from a local disk or into memory once",
    "gpu": "compute on the GPU in larger pieces, and copy results back once",
    "other": "look at the call",
}
"""Advice on each."""
