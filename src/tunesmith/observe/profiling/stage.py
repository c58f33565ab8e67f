"""The record of what a process trains now: `stage.bin` in the run folder, which any process can read at any time.

The file is mapped into memory. An update needs no system call, and the record can be read while the process hangs, is
stopped, or was killed. Each thread in which spans run has a slot; a slot begins and ends with its version, so that a
reader sees when it was read in the middle of an update.
"""

import mmap
import os
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.base.core.trace import Watcher
from tunesmith.observe.profiling.processes import start_of

STAGE_FILE = "stage.bin"

_HEAD = struct.Struct("<8sqqqqqq")  # magic, pid, start of the process, monotonic and wall time, signal, alive every
_ALIVE = struct.Struct("<q")
_BEAT = struct.Struct("<Qqq64sQ")  # version, step, time, state, version
_SLOT = struct.Struct("<QqQqq176sQ")  # version, thread id, identity, begin of the stage, last change, path, version
_ALIVE_AT, _BEAT_AT, _SLOTS_AT, _SLOT_BYTES, _NUM_SLOTS = 64, 128, 256, 256, 16
_SIZE = _SLOTS_AT + _NUM_SLOTS * _SLOT_BYTES
_MAGIC = b"stage-1\0"
_READS = 20


@dataclass(slots=True)
class _Thread:
    """The slot of a thread at `offset`, negative if there is none left; `open` holds path and begin of its spans."""

    offset: int
    tid: int
    identity: int
    open: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    version: int = 0


class Stage(Watcher):
    """Writes the record of this process. The thread that makes it is the one that trains.

    `last_ns` is the monotonic time at which a stage last began, went on or ended, in any thread. `signal` is the number
    of the signal at which the process writes its stacks, 0 if there is none; `alive_every_s` is how often `alive` is
    called. Without a folder the record is in memory alone.
    """

    def __init__(self, folder: Path | None, *, signal: int = 0, alive_every_s: float = 0.0) -> None:
        self._file = None if folder is None else folder / STAGE_FILE
        self._map = mmap.mmap(-1, _SIZE) if self._file is None else _mapped(self._file)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._beats = 0
        self.last_ns = time.monotonic_ns()
        pid, every_ns = os.getpid(), int(alive_every_s * 1e9)
        head = (_MAGIC, pid, start_of(pid) or 0, self.last_ns, time.time_ns(), signal, every_ns)
        self._write(self._thread(), self.last_ns)
        _HEAD.pack_into(self._map, 0, *head)  # last: whoever reads the record finds the thread that trains

    def enter(self, path: str) -> None:
        """The span `path` begins."""
        thread, now_ns = self._thread(), time.monotonic_ns()
        thread.open.append((path.encode(errors="replace"), now_ns))
        self._write(thread, now_ns)

    def leave(self, path: str) -> None:
        """The innermost span of this thread, `path`, ends."""
        thread = self._thread()
        if thread.open:
            thread.open.pop()
        self._write(thread, time.monotonic_ns())

    def went_on(self) -> None:
        """The innermost span of this thread goes on."""
        self._write(self._thread(), time.monotonic_ns())

    def beat(self, step: int, state: str) -> None:
        """The process is in `step`, and does `state` wherever no span is open."""
        self.last_ns = now_ns = time.monotonic_ns()
        self._beats += 1
        _BEAT.pack_into(self._map, _BEAT_AT, self._beats, step, now_ns, state.encode(errors="replace"), self._beats)

    def alive(self) -> None:
        """A thread of this process got the interpreter's lock just now."""
        _ALIVE.pack_into(self._map, _ALIVE_AT, time.monotonic_ns())

    def close(self) -> None:
        """Remove the file. Threads that were left behind may go on writing to the memory."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _thread(self) -> _Thread:
        try:
            return self._local.thread
        except AttributeError:
            with self._lock:
                number = self._num_threads
                self._num_threads += 1
        offset = _SLOTS_AT + number * _SLOT_BYTES if number < _NUM_SLOTS else -1
        self._local.thread = _Thread(offset, threading.get_native_id(), threading.get_ident())
        return self._local.thread

    def _write(self, thread: _Thread, now_ns: int) -> None:
        self.last_ns = now_ns
        if thread.offset < 0:
            return
        thread.version = version = thread.version + 1
        path, begin_ns = thread.open[-1] if thread.open else (b"", now_ns)
        _SLOT.pack_into(self._map, thread.offset, version, thread.tid, thread.identity, begin_ns, now_ns, path, version)


def _mapped(file: Path) -> mmap.mmap:
    """The new file `file` in memory.

    Its bytes are written first: where a disk is full, a write to a hole of a mapped file ends the process by SIGBUS.
    A file that a killed process left behind is replaced, not emptied, because children of it may still have it mapped.
    """
    file.unlink(missing_ok=True)
    file.write_bytes(bytes(_SIZE))
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), _SIZE)


@dataclass(frozen=True, slots=True)
class ThreadStage:
    """The stage of a thread: its path, empty between stages, and how long ago it began and last changed."""

    tid: int
    identity: int
    path: str
    begin_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. Times are monotonic, `wall_ns` is the wall time at `start_ns`.

    `threads` begins with the one that trains. `alive_ns` is 0 if nothing in the process looks after hangs.
    """

    pid: int
    process_start: int
    start_ns: int
    wall_ns: int
    signal: int
    alive_every_ns: int
    alive_ns: int
    step: int
    state: str
    beat_ns: int
    threads: tuple[ThreadStage, ...]

    @property
    def is_alive(self) -> bool:
        """True if the process that wrote the record is still there, be it stopped or a zombie."""
        return start_of(self.pid) == self.process_start

    @property
    def last_ns(self) -> int:
        """The time of the last progress: a stage began or ended, or a step began."""
        return max(self.beat_ns, *(thread.last_ns for thread in self.threads))

    @property
    def last_wall_s(self) -> float:
        """`last_ns` as seconds since 1970."""
        return (self.wall_ns + self.last_ns - self.start_ns) / 1e9


def read(folder: Path) -> Record | None:
    """The record in `folder`, None if there is none that this release can read."""
    record, is_whole = None, False
    for _ in range(_READS):
        if not is_whole:
            record, is_whole = _parsed(folder / STAGE_FILE)
    return record


def _parsed(file: Path) -> tuple[Record | None, bool]:
    """The record in `file`, and False if it was read in the middle of an update."""
    try:
        data = file.read_bytes()
    except OSError:
        return None, True
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        return None, True
    _, pid, process_start, start_ns, wall_ns, signal, every_ns = _HEAD.unpack_from(data)
    (alive_ns,) = _ALIVE.unpack_from(data, _ALIVE_AT)
    beat = _BEAT.unpack_from(data, _BEAT_AT)
    slots = [_SLOT.unpack_from(data, _SLOTS_AT + index * _SLOT_BYTES) for index in range(_NUM_SLOTS)]
    threads = [ThreadStage(tid, identity, _text(path), *times) for _, tid, identity, *times, path, _ in slots if tid]
    _, step, beat_ns, state, _ = beat
    times = (start_ns, wall_ns, signal, every_ns, alive_ns)
    record = Record(pid, process_start, *times, step, _text(state), beat_ns, tuple(threads))
    return record, all(fields[0] == fields[-1] for fields in (beat, *slots))


def _text(field_bytes: bytes) -> str:
    return field_bytes.rstrip(b"\0").decode(errors="ignore")
