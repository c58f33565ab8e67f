"""The part of a training that looks after hangs: it keeps `stage.bin`, reports a hang once, and answers for its stacks.

A thread compares the time of the last progress with `run.hang_after_s`. It cannot run while C code holds the
interpreter's lock. Therefore it also sets, again and again, a timer of `faulthandler`, whose thread is written in C and
adds the stacks to `stacks.txt` if it is not set again in time.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import watching
from tunesmith.base.schema.records import Finding
from tunesmith.observe.profiling.hang import ANSWER_S, STACKS_FILE, report
from tunesmith.observe.profiling.processes import catches
from tunesmith.observe.profiling.stage import Stage

_log = get_logger(__name__)

HANG_FILE = "hang.txt"
"""File in the run folder to which the reports of a training on itself are added."""

_SIGNAL = signal.SIGUSR1
_MAX_INTERVAL_S = 5.0
_INTERVALS = 4


@contextmanager
def watched(folder: Path, after_s: float, find: Callable[[Finding], None]) -> Iterator[Stage]:
    """Keep the record of the spans inside the block, and report to `find` once nothing happens for `after_s` seconds.

    With 0 the training does not report itself; its record and stacks can be read from outside all the same. If the
    folder cannot be written, there is a warning and no record.
    """
    with ExitStack() as stack:
        try:
            record = _begin(stack, folder, after_s, find)
        except OSError as error:
            _log.warning("a hang of this run could not be reported: %s", error)
            record = Stage(None)
        yield record


def _begin(stack: ExitStack, folder: Path, after_s: float, find: Callable[[Finding], None]) -> Stage:
    stacks = (folder / STACKS_FILE).open("a", encoding="utf-8")
    stack.callback(_close, stacks, folder / STACKS_FILE)
    # A handler of the user's stays, and so does that of another training in this process.
    is_free = signal.getsignal(_SIGNAL) is signal.SIG_DFL and not catches(os.getpid(), _SIGNAL)
    number = int(_SIGNAL) if is_free else 0
    if number:
        faulthandler.register(number, stacks, all_threads=True)
        stack.callback(faulthandler.unregister, number)
    interval_s = min(_MAX_INTERVAL_S, after_s / _INTERVALS)
    record = Stage(folder, signal=number, alive_every_s=interval_s)
    stack.callback(record.close)
    stack.enter_context(watching(record))
    if after_s > 0:
        ended = threading.Event()
        given = (record, folder, after_s, interval_s, find, stacks, ended)
        thread = threading.Thread(target=_watch, args=given, name="tunesmith-watchdog", daemon=True)
        thread.start()
        for end in (faulthandler.cancel_dump_traceback_later, thread.join, ended.set):  # called in reverse
            stack.callback(end)
    return record


def _close(stacks: IO[str], file: Path) -> None:
    """Close the file of stacks, and remove it if it is empty."""
    stacks.close()
    with suppress(OSError):
        if not file.stat().st_size:
            file.unlink()


def _watch(
    record: Stage,
    folder: Path,
    after_s: float,
    interval_s: float,
    find: Callable[[Finding], None],
    stacks: IO[str],
    ended: threading.Event,
) -> None:
    """Look after a hang until `ended`.

    A hang is reported once. Afterwards it takes twice as long until the next one is, so that a stage that always takes
    longer than `after_s` is reported a few times in the whole run.
    """
    allowed_s, limit_s, reported_ns, is_over = after_s + interval_s, after_s, 0, False
    begin_s = time.monotonic()
    while not is_over:
        faulthandler.dump_traceback_later(allowed_s, file=stacks)
        record.alive()
        is_over = ended.wait(interval_s)
        now_s, last_ns = time.monotonic(), record.last_ns
        pass_s, begin_s = now_s - begin_s, now_s
        if pass_s > allowed_s:
            past = f"no thread of Python ran for {pass_s:.0f} s: C code held the interpreter's lock, or the process "
            _report(folder, find, f"{past}was stopped; {STACKS_FILE} has the stacks of that time")
        elif not is_over and last_ns != reported_ns and now_s - last_ns / 1e9 > limit_s:
            # The lock can be held while the report is made, too. Its own time is not counted.
            faulthandler.dump_traceback_later(allowed_s + ANSWER_S, file=stacks)
            _report(folder, find)
            begin_s += min(ANSWER_S, time.monotonic() - now_s)
            reported_ns, limit_s = last_ns, 2 * limit_s


def _report(folder: Path, find: Callable[[Finding], None], past: str = "") -> None:
    """Report a hang that lasts, or one that is over and is described by `past`."""
    try:
        found = report(folder, is_hung=not past)
        with (folder / HANG_FILE).open("a", encoding="utf-8") as file:
            file.write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), past, *found.lines(), "\n"]))
        find(Finding(found.step, "hang", "warning", past or f"{found.summary}; more is in {HANG_FILE}"))
    except (OSError, TunesmithError) as error:
        _log.warning("a hang could not be reported: %s", error)
