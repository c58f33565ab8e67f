"""Looks at Python's stacks in the process that trains: where each step's seconds went, and what was waited for.

`sampler/cpu.cpp` calls `look` while it has the interpreter's lock. A look only counts, by addresses; names, lines and
what a wait was for are made of that between the steps, for the few places that matter.
"""

import asyncio
import gc
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tunesmith.observe.profiling import waits
from tunesmith.observe.profiling.sampler.api import does
from tunesmith.observe.profiling.waits import Call, Kind, kind_of

_LIBRARY, _USER, _OWN = range(3)
_OWN_FOLDER = str(Path(__file__).parents[2]) + os.sep
_LIBRARY_FOLDERS = tuple(
    {
        path + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_NO_WORK = tuple(_OWN_FOLDER + name for name in ("observe/profiling/", "base/runs/lock.py"))
_MAX_CALLS = 30
_MAX_THREADS = 16
_MAX_PLACES = 6
_LEAST_SHARE, _LEAST_OWN_SHARE = 0.03, 0.15
"""Shares of the time from which on a place is kept; the second is for our own code that computes, which is no news."""

_MAX_TEXT = 80

_SERVES = re.compile(r"\b(accept|select|poll|serve_forever|epoll_wait)\(")
"""Calls in which a thread waits for somebody to ask for something: nobody waits for it."""

_FOR_OTHERS: tuple[Kind, ...] = ("gil", "lock", "queue", "threads")
"""Waits that end by what another thread does."""

Chain = tuple[tuple[int, int], ...]
"""Innermost calls of a stack as (address of the code, instruction), the innermost first; the last is no library's."""


@dataclass(slots=True)
class _Wait:
    """Nanoseconds at one place, and those of the other threads meanwhile by what they did."""

    ns: int = 0
    others: dict[tuple[int, str, Chain], int] = field(default_factory=dict)
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A line where seconds of a step went: in the stage `stage`, a thread did `kind`. `inner` is the innermost call if
    that is another one. `others` is what the thread with the lock did, or the threads that were waited for.
    """

    stage: str
    kind: Kind
    call: Call
    seconds: float
    inner: Call | None = None
    others: "Place | None" = None
    num_threads: int = 1

    @property
    def is_own_work(self) -> bool:
        """True if code of this package computes there."""
        return self.kind == "computes" and self.call.file.startswith(_OWN_FOLDER)

    def to_json(self) -> dict[str, object]:
        """As a row of `places.jsonl`."""
        row: dict[str, object] = {
            "stage": self.stage,
            "kind": self.kind,
            "file": self.call.file,
            "line": self.call.line,
            "function": self.call.function,
            "text": self.call.text or linecache.getline(self.call.file, self.call.line).strip()[:_MAX_TEXT],
            "s": round(self.seconds, 4),
        }
        if self.inner is not None:
            row["inner"] = f"{self.inner.function} ({self.inner.file}:{self.inner.line})"
        if self.others is not None:
            row |= {"others": self.others.to_json(), "threads": self.num_threads}
        return row


def current_frames() -> dict[int, FrameType]:
    """The frame of each other thread by its identity, without garbage collection meanwhile.

    `sys._current_frames` holds a lock of the interpreter while it makes the frames. A collection that begins there and
    frees a `threading.local` waits for the same lock, for ever (CPython 3.11 and earlier, gh-106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    del frames[threading.get_ident()]  # the caller's, a cycle that would keep all of them, and what they compute with
    return frames


class Stacks:
    """Counts where the thread that makes it is, in the stage `path`."""

    def __init__(self) -> None:
        self.path = ""
        self._trainer = threading.get_ident()
        self._waits: dict[tuple[str, int, str, Chain], _Wait] = {}
        self._codes: dict[int, tuple[CodeType, int]] = {}  # kept, so that no address is used again
        self._calls: dict[tuple[int, int], Call] = {}

    def look(self, what: int, descriptor: int, ns: int) -> None:
        """Count `ns` nanoseconds for what the thread does now; see `sampler.api.Look`."""
        frames = current_frames()
        frame = frames.get(self._trainer)
        if frame is None:
            return
        chain = self._chain(frame)
        key = (self.path, what, _target(descriptor), chain)
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = _Wait()
        wait.ns += ns
        if what in (waits.UNKNOWN, waits.FUTEX, waits.LOCK):
            others = list(self._threads(frames))
        elif what == waits.POLLS:
            others = list(self._tasks(frame))
        else:
            return
        wait.num_threads = max(wait.num_threads, len(others))
        for one in others:
            wait.others[one] = wait.others.get(one, 0) + ns // len(others)

    def take(self) -> list[dict[str, object]]:
        """The places of the time since the last call that took a noticeable share of it, the longest first. Where the
        thread computes, a place is a function, at its most frequent line.
        """
        taken, self._waits = self._waits, {}
        total = sum(wait.ns for wait in taken.values())
        places: dict[tuple[object, ...], Place] = {}
        for (path, what, target, chain), wait in sorted(taken.items(), key=lambda item: -item[1].ns):
            place = self._place(path, what, target, chain, wait)
            where = place.call.function if place.kind == "computes" else place.call.line
            key = (path, place.kind, place.call.file, where)
            known = places.get(key)
            places[key] = place if known is None else _joined(known, place)
        found = sorted(places.values(), key=lambda place: -place.seconds)
        least_s = {False: _LEAST_SHARE * total / 1e9, True: _LEAST_OWN_SHARE * total / 1e9}
        kept = [place for place in found if place.seconds >= least_s[place.is_own_work]]
        return [place.to_json() for place in kept[:_MAX_PLACES]]

    def _chain(self, frame: FrameType | None) -> Chain:
        calls: list[tuple[int, int]] = []
        while frame is not None and len(calls) < _MAX_CALLS:
            code = frame.f_code
            calls.append((id(code), frame.f_lasti))
            if self._owner(code) != _LIBRARY:
                break
            frame = frame.f_back
        return tuple(calls)

    def _owner(self, code: CodeType) -> int:
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = code, _owner_of(code.co_filename)
        return known[1]

    def _threads(self, frames: dict[int, FrameType]) -> Iterator[tuple[int, str, Chain]]:
        """The calls of other threads that run the user's code or ours, but for those that look after the process."""
        own, active = threading.get_ident(), threading._active  # pyright: ignore[reportAttributeAccessIssue]
        for identity in list(frames)[:_MAX_THREADS]:
            thread = active.get(identity)
            if identity in (own, self._trainer) or thread is None or thread.native_id is None:
                continue
            chain = self._chain(frames[identity])
            code, owner = self._codes[chain[-1][0]]
            if owner == _LIBRARY or (owner == _OWN and code.co_filename.startswith(_NO_WORK)):
                continue
            what, descriptor = does(thread.native_id)
            yield what, _target(descriptor), chain

    def _tasks(self, frame: FrameType | None) -> Iterator[tuple[int, str, Chain]]:
        """The coroutines that an event loop waits for, if the thread runs one."""
        while frame is not None and frame.f_code.co_name != "_run_once":
            frame = frame.f_back
        loop = None if frame is None else frame.f_locals.get("self")
        if not isinstance(loop, asyncio.AbstractEventLoop):
            return
        for task in list(asyncio.all_tasks(loop))[:_MAX_THREADS]:
            chain = self._suspended(task.get_coro())
            if chain and self._codes[chain[-1][0]][1] == _USER:
                yield waits.SUSPENDED, "", chain

    def _suspended(self, coroutine: Any) -> Chain:
        """Innermost calls of a coroutine that waits."""
        calls: list[tuple[int, int]] = []
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
            if frame is not None:
                self._owner(frame.f_code)
                calls.insert(0, (id(frame.f_code), frame.f_lasti))
            coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        end = next((index for index, call in enumerate(calls) if self._codes[call[0]][1] != _LIBRARY), len(calls) - 1)
        return tuple(calls[: end + 1])

    def _place(self, path: str, what: int, target: str, chain: Chain, wait: _Wait) -> Place:
        """Names for what was counted, and for a wait that other threads end, what those did."""
        is_own_work = what == waits.RUNS and self._codes[chain[-1][0]][1] == _OWN  # its source text is not needed
        calls = [self._call(*one) for one in chain] if not is_own_work else [_line_of(*self._coded(chain[-1]))]
        kind, seconds = kind_of(what, target, calls), wait.ns / 1e9
        place = Place(path, kind, self._own_line(chain, calls), seconds, _inner(calls))
        if not wait.others or (kind not in _FOR_OTHERS and what != waits.POLLS):
            return place
        behind: dict[Kind, list[tuple[int, Place]]] = {}
        for (other_what, other_target, other_chain), ns in list(wait.others.items()):
            other_calls = [self._call(*one) for one in other_chain]
            other_kind = kind_of(other_what, other_target, other_calls)
            other_kind = "computes" if other_kind == "gil" else other_kind  # it runs Python, in turns with others
            line = self._own_line(other_chain, other_calls)
            if _SERVES.search(other_calls[0].text):
                continue
            if not (line.file.startswith(_OWN_FOLDER) and other_kind in _FOR_OTHERS):  # a thread that waits for work
                behind.setdefault(other_kind, []).append(
                    (ns, Place(path, other_kind, line, ns / 1e9, _inner(other_calls)))
                )
        return _judged(place, behind, wait.num_threads)

    def _own_line(self, chain: Chain, calls: Sequence[Call]) -> Call:
        """The call that concerns the user: the innermost one that is no library's, or, if only our call of a reward is
        left, the library's function that it calls.
        """
        is_reward = (
            calls[-1].file.endswith("/tunesmith/learn/rewards/calling.py") and self._codes[chain[-1][0]][1] == _OWN
        )
        return calls[-2] if is_reward and len(calls) > 1 else calls[-1]

    def _coded(self, one: tuple[int, int]) -> tuple[CodeType, int]:
        return self._codes[one[0]][0], one[1]

    def _call(self, address: int, instruction: int) -> Call:
        known = self._calls.get((address, instruction))
        if known is None:
            known = self._calls[address, instruction] = _source_of(self._codes[address][0], instruction)
        return known


def _positions(code: CodeType, instruction: int) -> tuple[int, int | None, int | None, int | None]:
    """First and last line, and first and last column, of the source of an instruction."""
    index = max(0, instruction // 2)
    line, end, column, end_column = next(itertools.islice(code.co_positions(), index, None), (None, None, None, None))
    return line or code.co_firstlineno, end, column, end_column


def _line_of(code: CodeType, instruction: int) -> Call:
    """File and line of an instruction, without its text."""
    return Call(code.co_filename, _positions(code, instruction)[0], code.co_qualname)


def _source_of(code: CodeType, instruction: int) -> Call:
    """File, line and text of an instruction."""
    line, end_line, column, end_column = _positions(code, instruction)
    text = linecache.getline(code.co_filename, line)
    is_part = line == end_line and column is not None
    part = text.encode()[column:end_column].decode(errors="replace") if is_part else ""
    return Call(code.co_filename, line, code.co_qualname, (part if "(" in part else text.strip())[:_MAX_TEXT])


def _judged(place: Place, behind: dict[Kind, list[tuple[int, Place]]], num_threads: int) -> Place:
    """`place` with what the other threads did. A wait for threads is a wait for what most of them wait for; if that is
    a lock, the one that has it does something else.
    """
    weights: dict[Kind, int] = {kind: sum(ns for ns, _ in found) for kind, found in behind.items()}
    working: dict[Kind, int] = {kind: ns for kind, ns in weights.items() if kind not in _FOR_OTHERS}
    most = max(weights, key=lambda kind: weights[kind], default=None)
    holder = max(working, key=lambda kind: working[kind], default=None)
    if most is None:
        return place
    if place.kind == "gil":
        return _with(place, place, behind.get("computes"), num_threads)
    if place.kind == "lock":
        return _with(place, place, None if holder is None else _in_file(place, working, behind), num_threads)
    is_lock = most == "lock" and 2 * weights[most] > sum(weights.values())
    chosen = most if is_lock or holder is None else holder
    if chosen in ("queue", "threads"):
        return place
    line = _largest(behind[chosen])
    return _with(place, line, _in_file(line, working, behind) if is_lock and holder else None, num_threads)


def _in_file(
    line: Place, working: Iterable[Kind], behind: Mapping[Kind, list[tuple[int, Place]]]
) -> list[tuple[int, Place]]:
    """The calls of threads that wait for nothing of this process, those in the file of `line` if there are any."""
    found = [one for kind in working for one in behind[kind]]
    return [one for one in found if one[1].call.file == line.call.file] or found


def _with(place: Place, line: Place, others: Sequence[tuple[int, Place]] | None, num_threads: int) -> Place:
    """The seconds of `place` at another line, with what the other threads did."""
    behind = None if others is None else _largest(others)
    return Place(place.stage, line.kind, line.call, place.seconds, line.inner, behind, max(1, num_threads))


def _largest(found: Sequence[tuple[int, Place]]) -> Place:
    return max(found, key=lambda one: one[0])[1]


def _joined(first: Place, second: Place) -> Place:
    """Both at one place."""
    larger = first if first.seconds >= second.seconds else second
    others, number = first.others or second.others, max(first.num_threads, second.num_threads)
    return Place(larger.stage, larger.kind, larger.call, first.seconds + second.seconds, larger.inner, others, number)


def _inner(calls: Sequence[Call]) -> Call | None:
    return calls[0] if len(calls) > 1 else None


def _owner_of(file: str) -> int:
    if file.startswith(_OWN_FOLDER):
        return _OWN
    is_library = file.startswith((*_LIBRARY_FOLDERS, "<frozen ")) or "-packages/" in file
    return _LIBRARY if is_library else _USER


def _target(descriptor: int) -> str:
    """The file behind a descriptor of this process."""
    if descriptor < 0:
        return ""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
