"""The report of a training that makes no progress: where it hangs, for how long, and what it waits for.

It is made from outside: from `stage.bin`, which the training keeps up to date, from /proc, and from the stacks that the
process writes when it is asked to. `observe/profiling/watchdog.py` is the part that runs inside of the training.
"""

import faulthandler
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.listing import find_runs, read_rows
from tunesmith.base.runs.lock import holder_of, is_locked
from tunesmith.observe.profiling import stage
from tunesmith.observe.profiling.processes import (
    DEVICE,
    GONE,
    STOPPED,
    TRACED,
    ZOMBIE,
    Thread,
    catches,
    children_of,
    connections_of,
    state_of,
    threads_of,
)
from tunesmith.observe.profiling.stage import Record

STACKS_FILE = "stacks.txt"
"""File in the run folder to which the process adds the stacks of its threads."""

ANSWER_S = 3.0
"""Seconds that a process has to write its stacks."""

_CANNOT_ANSWER = (STOPPED, TRACED, ZOMBIE, GONE)

_QUIET_S = 10.0
"""Seconds without progress after which a training counts as hanging, unless its stage takes longer anyway."""

_POLL_S = 0.1
_RECENT_STEPS = 10
_SHOWN_FRAMES = 12
_BUSY_CORES = 0.05

_THREAD_LINE = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """A call on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class ThreadReport(Thread):
    """A thread with its stage, empty if none, the seconds in it, and its stack, innermost call first.

    `tid` is 0 for a stack whose thread is not known.
    """

    stage: str = ""
    stage_s: float | None = None
    stack: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        if not self.tid:
            return "a thread"
        waits = f", in {self.wait_channel}" if self.wait_channel else ""
        stage = f", {self.stage}" + ("" if self.stage_s is None else f" for {_duration(self.stage_s)}")
        return f"thread {self.tid}, {self.state}{waits}, {self.cores:.2f} cores" + (stage if self.stage else "")


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward that has not returned: its name, the user's function, and the innermost call; None if not known."""

    name: str
    function: Frame | None
    now: Frame | None


@dataclass(frozen=True, slots=True)
class HangReport:
    """State of the training in the folder `run`. `usual_s` is how long its stage took in recent steps.

    `is_hung` is true if it made no progress for long, or cannot. `silent_s` are the seconds since a stage or step last
    began or ended, at `last_change`; None if the process is gone. `holds_lock` is true if the watchdog of the process
    has not run for a while, though the process runs.
    """

    run: Path
    pid: int
    state: str
    is_hung: bool
    step: int
    stage: str
    silent_s: float | None
    last_change: str
    usual_s: float | None
    holds_lock: bool
    reward: RewardCall | None
    connections: tuple[str, ...]
    children: tuple[str, ...]
    threads: tuple[ThreadReport, ...]
    note: str

    def to_json(self) -> dict[str, object]:
        """All facts as JSON types."""
        return {**asdict(self), "run": str(self.run), "summary": self.summary, "advice": self.advice}

    @property
    def summary(self) -> str:
        """The state of the training in one sentence."""
        where = f"step {self.step}, stage {self.stage}"
        if self.state == GONE or self.silent_s is None:
            return f"process {self.pid} is gone: it ended in {where}, where it was last seen at {self.last_change}"
        where = f"{where}, and has made no progress for {_duration(self.silent_s)}"
        if self.state in _CANNOT_ANSWER:
            return f"process {self.pid} is {self.state}, in {where}"
        if not self.is_hung:
            return f"the training goes on: {where}"
        return f"the training hangs: {where}; {self._waits_for()}"

    def _waits_for(self) -> str:
        leader = self.threads[0]
        if self.reward is not None:
            function, now = self.reward.function, self.reward.now
            found = f"the reward `{self.reward.name}` has not returned"
            found += "" if function is None else f": {function}"
            found += "" if now is None or now == function else f", now in {now}"
        else:
            found = f"its innermost call is {leader.stack[0]}" if leader.stack else f"its thread is {leader.state}"
        if self.connections:
            found += f", connected to {', '.join(self.connections)}"
        if DEVICE in (self.state, leader.state):
            found += f"; the kernel waits for a device ({leader.wait_channel or 'a disk or a network file system'})"
        return found + ("; it holds the interpreter's lock, so no other thread runs" if self.holds_lock else "")

    @property
    def advice(self) -> str:
        """The next thing for the user to do."""
        folder = shlex.quote(str(self.run))
        command = f"live --dir {folder}" if (self.run / "runs.db").exists() else f"resume {folder}"
        again = f"`tunesmith {command}` goes on from its newest checkpoint"
        if self.state == STOPPED:
            return f"a signal (SIGSTOP, or Ctrl-Z on a terminal) stopped it; `kill -CONT {self.pid}` lets it go on"
        if self.state == TRACED:
            return "end the debugger, or let the process go on in it"
        if self.state in (GONE, ZOMBIE):
            return again
        if not self.is_hung:
            return "nothing to do"
        if self.state == DEVICE:
            return f"look at the disk or the network file system; a signal is not taken while it waits. Later, {again}"
        end = f"`kill -9 {self.pid}` ends it, and {again}"
        if self.reward is None:
            return f"the stacks below say where; {end}"
        computes = any(thread.cores > _BUSY_CORES for thread in self.threads)
        what = "it computes: look for a loop without end" if computes else "it waits: look at what it calls"
        return f"{what}; a time limit, `timeout_s` and `on_error` of the reward, lets a training go on. {end}"

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield self.summary
        yield self.advice
        yield f"\nprocess      {self.pid}, {self.state}"
        yield f"step         {self.step}, stage {self.stage}"
        if self.silent_s is not None:
            usual = "" if self.usual_s is None else f"; this stage took {_duration(self.usual_s)} in recent steps"
            yield f"progress     last {_duration(self.silent_s)} ago{usual}"
        for name, values in (("connection", self.connections), ("child", self.children)):
            yield from (f"{name:<12} {value}" for value in values)
        for thread in self.threads:
            if thread.stage or thread.stack:
                yield from ("", str(thread), *(f"  {frame}" for frame in thread.stack[:_SHOWN_FRAMES]))
        others = Counter(one.wait_channel or one.state for one in self.threads if not (one.stage or one.stack))
        if others:
            places = ", ".join(f"{count} in {place}" for place, count in others.most_common())
            yield f"\n{others.total()} other threads: {places}"
        if self.note:
            yield f"\n{self.note}"


def report(folder: Path, *, is_hung: bool = False) -> HangReport:
    """The report of the training in the run folder or live folder `folder`, or in a run inside of it as of a demo.

    With `is_hung` the training counts as hanging, however long it has made no progress. The stacks of one that goes on
    are not asked for.

    Raises:
        RunError: if nothing trains there, or on another machine.
    """
    folder = _folder_that_trains(folder)
    record = stage.read(folder)
    if record is None or (is_locked(folder) and not record.is_alive):
        raise RunError(_why_no_record(folder))
    now_ns, state = time.monotonic_ns(), state_of(record.pid, record.process_start)
    silent_s = (now_ns - record.last_ns) / 1e9 if record.is_alive else None
    leader = record.threads[0]
    usual_s = _usual_s(folder, leader.path)
    is_quiet = is_hung or (silent_s is not None and silent_s > max(_QUIET_S, 2 * (usual_s or 0.0)))
    stacks, note = _stacks(folder, record, state) if is_quiet else ({}, "")
    if state in _CANNOT_ANSWER:
        note = f"the process is {state}, so it cannot write its stacks"
    threads = tuple(_threads(record, stacks, now_ns))
    return HangReport(
        run=folder,
        pid=record.pid,
        state=state,
        is_hung=is_quiet or state in _CANNOT_ANSWER,
        step=record.step,
        stage=leader.path or record.state or "between stages",
        silent_s=silent_s,
        last_change=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.last_wall_s)),
        usual_s=usual_s,
        holds_lock=bool(record.alive_ns) and now_ns - record.alive_ns > 3 * record.alive_every_ns + 2e9,
        reward=_reward(record, threads),
        connections=tuple(connections_of(record.pid)),
        children=tuple(children_of(record.pid)),
        threads=threads,
        note=note,
    )


def _folder_that_trains(folder: Path) -> Path:
    """`folder`, or the run inside of it that has a record, that of a living process first."""
    found = {run: record for run in find_runs(folder) if (record := stage.read(run)) is not None}
    return max(found, key=lambda run: found[run].is_alive, default=folder)


def _why_no_record(folder: Path) -> str:
    holder = holder_of(folder)
    if not is_locked(folder) or holder is None:
        return f"nothing trains in {folder}, and no training was killed there; name the folder of one that does"
    if holder.host != os.uname().nodename:
        return f"{folder} is trained in by {holder}; ask on that machine"
    return f"{folder} is in use by {holder}, which has not begun its first step; try again later"


def _usual_s(folder: Path, path: str) -> float | None:
    """Median seconds of the stage `path` in the steps recorded last."""
    rows = read_rows(folder / "metrics.jsonl")[-_RECENT_STEPS:]
    times = [value for row in rows if isinstance(value := row.get(f"time/{path}_s"), int | float)]
    return median(times) if times else None


def _threads(record: Record, stacks: Mapping[int, tuple[Frame, ...]], now_ns: int) -> Iterator[ThreadReport]:
    """The threads of the process, first the one that trains; then the stacks whose threads are not known."""
    found = threads_of(record.pid) if record.is_alive else []
    known, left = {thread.tid: thread for thread in record.threads}, dict(stacks)
    leader = record.threads[0]
    if leader.tid not in [thread.tid for thread in found]:
        yield ThreadReport(leader.tid, GONE, "", 0.0, leader.path)
    for thread in sorted(found, key=lambda one: (one.tid != leader.tid, one.tid not in known, one.tid)):
        own, facts = known.get(thread.tid), (thread.tid, thread.state, thread.wait_channel, thread.cores)
        if own is None:
            yield ThreadReport(*facts)
        else:
            stage_s = (now_ns - own.begin_ns) / 1e9 if own.path else None
            yield ThreadReport(*facts, own.path, stage_s, left.pop(own.identity, ()))
    yield from (ThreadReport(0, "", "", 0.0, stack=stack) for stack in left.values())


def _stacks(folder: Path, record: Record, state: str) -> tuple[dict[int, tuple[Frame, ...]], str]:
    """The stack of each thread by its identity, and why there is none."""
    file = folder / STACKS_FILE
    try:
        size = file.stat().st_size
        if record.pid == os.getpid():
            with file.open("a", encoding="utf-8") as out:
                faulthandler.dump_traceback(out, all_threads=True)
        elif record.signal and catches(record.pid, record.signal):
            os.kill(record.pid, record.signal)
        else:
            return {}, "the training does not answer SIGUSR1, which its program uses itself; `py-spy dump` may help"
        text, end_s = "", time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            time.sleep(_POLL_S)
            new = _text_after(file, size)
            if new and new == text:
                return parse_stacks(new), ""
            text = new
    except OSError as error:
        return {}, f"the stacks cannot be read: {error}"
    return {}, f"the process, {state}, was asked for its stacks and did not answer within {ANSWER_S:g} seconds"


def _text_after(file: Path, size: int) -> str:
    with file.open("rb") as opened:
        opened.seek(size)
        return opened.read().decode(errors="replace")


def parse_stacks(text: str) -> dict[int, tuple[Frame, ...]]:
    """Frames, innermost first, by the identity of the thread, from `faulthandler`; the last of several counts."""
    stacks: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD_LINE.match(line):
            current = stacks[int(thread[1], 16)] = []
        elif frame := _FRAME_LINE.match(line):
            current.append(Frame(frame[1], int(frame[2]), frame[3]))
    return {identity: tuple(frames) for identity, frames in stacks.items()}


def _reward(record: Record, threads: Sequence[ThreadReport]) -> RewardCall | None:
    """The reward that the training thread waits for: by its stack where there is one, else by its stage."""
    leader, *others = threads
    paths = [thread.path for thread in record.threads if thread.path]
    name = next((path.rpartition("reward/")[2].removeprefix("async/") for path in paths if "reward/" in path), None)
    if name is None and leader.stage.startswith("reward") and len(paths) > 1:
        name = paths[1]  # a thread that scores while others are drawn has a trace of its own
    if leader.stack and not any("/tunesmith/learn/rewards/" in frame.file for frame in leader.stack):
        return None
    for thread in (leader, *others):
        for index, frame in enumerate(thread.stack):
            if frame.file.endswith("/rewards/calling.py") and frame.function.startswith("_invoke"):
                inner = [call for call in thread.stack[:index] if not call.file.endswith("/rewards/calling.py")]
                return RewardCall(name or "?", inner[-1] if inner else None, inner[0] if inner else None)
    return None if name is None else RewardCall(name, None, None)


def _duration(seconds: float) -> str:
    """Seconds as `0.4 s`, `75 s` or `12 min`."""
    if seconds < _QUIET_S:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
