"""Follows the `metrics.jsonl` of any run into a `runs.db`, so that the watch page shows runs of every trainer.

`metrics.jsonl` is the truth and the database can be made from it again at any time. What was copied so far stands in a
file beside the database, which is written after the rows: rows that it does not know of are copied once more.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from tunesmith.config.yaml_text import is_mapping
from tunesmith.core.errors import StoreError, TunesmithError
from tunesmith.core.log import get_logger
from tunesmith.runs.lock import HOLDER_FILE, is_locked
from tunesmith.store.content import MAX_NAME, is_storable
from tunesmith.store.runs import RunStore

POLL_S = 0.5
"""How often the file is looked at."""

METRICS_FILE = "metrics.jsonl"
POSITION_FILE = "position.json"
WATCH_FOLDER = "watch"
"""Folder in a run's folder for what the watch page needs. It can be removed when nobody watches."""

_PORTION = 1 << 20
_BEAT_S = 2.0

MetricRow = tuple[int, float, str, float]
"""Step, time, name and value (NaN where it was not finite) of a metric."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a file was copied: `offset` bytes, the last line of which began at `line_start` and has a hash, so that a
    file that was cut back and grew again is noticed. `step` and `time` are those of the last line.
    """

    offset: int = 0
    line_start: int = 0
    line_sha256: str = ""
    step: int = -1
    time: float = 0.0


class RunTail:
    """Copies new lines of a run's metrics, and says how the run is. To be used by one thread at a time."""

    def __init__(self, run: Path, folder: Path) -> None:
        """`run` is the run's folder; the database is `runs.db` in `folder`, which may be removed when nobody uses it.

        Raises StoreError if another process follows the run there, or the folder cannot be written.
        """
        self._file = run / METRICS_FILE
        self._run = run
        self._position_file = folder / POSITION_FILE
        database = folder / "runs.db"
        known = _read_position(self._position_file) if database.exists() else Position()
        self._store = RunStore.open(database)
        self._store.truncate_metrics(known.step + 1)
        self._position = known

    def close(self) -> None:
        """Let go of the database."""
        self._store.close()

    def beat(self) -> None:
        """Write how the run is, as a trainer does itself in a live loop."""
        state = run_state(self._run)
        ended_at = _modified_at(self._file) or _started_at(self._run)
        self._store.beat(state, None if state == "running" else ended_at)

    def poll(self) -> bool:
        """Copy a portion of what is new; True if there was any. A line without its end is left for later. A file that
        is not as it was, as after a resumed run has cut it back, is copied anew.

        Raises StoreError if the database cannot be written.
        """
        try:
            with self._file.open("rb") as file:
                start = self._position if _is_as_before(file, self._position) else self._begin_again()
                file.seek(start.offset)
                data = _whole_lines(file)
        except FileNotFoundError:
            if self._position.offset:
                self._begin_again()
            return False
        except OSError as error:
            raise StoreError(f"{self._file} cannot be read: {error.strerror or error}") from error
        if data:
            self._copy(start, data)
        return bool(data)

    def _copy(self, start: Position, data: bytes) -> None:
        rows: list[MetricRow] = []
        step, when = start.step, start.time or _started_at(self._run)
        for line in data.splitlines():
            values = _object(line)
            if values is None:
                continue
            step = _step(values, step)
            when += _seconds(values)
            rows += [(step, when, name, value) for name, value in _numbers(values)]
        self._store.add_metric_rows(rows)
        line_start = data.rfind(b"\n", 0, len(data) - 1) + 1
        self._keep(
            Position(
                offset=start.offset + len(data),
                line_start=start.offset + line_start,
                line_sha256=hashlib.sha256(data[line_start:]).hexdigest(),
                step=step,
                time=when,
            )
        )

    def _begin_again(self) -> Position:
        self._store.truncate_metrics(0)
        self._keep(Position())
        return self._position

    def _keep(self, position: Position) -> None:
        aside = self._position_file.with_suffix(".new")
        try:
            aside.write_text(json.dumps(asdict(position)), encoding="utf-8")
            os.replace(aside, self._position_file)
        except OSError as error:
            raise StoreError(f"{self._position_file} cannot be written: {error.strerror or error}") from error
        self._position = position


@contextmanager
def following(run: Path) -> Generator[Path]:
    """Follow `run` in a thread while the block runs; the folder that holds `runs.db` is given.

    It is `watch` in the run's folder, or a temporary one if that is in use or cannot be written. Failures are logged
    and tried again: what is watched goes on regardless.
    """
    with ExitStack() as stack:
        folder, tail = _open(run, stack)
        stack.callback(tail.close)
        ending = threading.Event()
        thread = threading.Thread(target=_follow, args=(tail, ending), name="run-tail", daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            ending.set()
            thread.join()


def _open(run: Path, stack: ExitStack) -> tuple[Path, RunTail]:
    folder = run / WATCH_FOLDER
    try:
        folder.mkdir(exist_ok=True)
        return folder, RunTail(run, folder)
    except (OSError, StoreError) as error:
        get_logger(__name__).info("%s; what the page needs goes to a temporary folder", error)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="tunesmith-watch-")))
    return folder, RunTail(run, folder)


def _follow(tail: RunTail, ending: threading.Event) -> None:
    last_beat, said = -math.inf, ""
    while not ending.is_set():
        has_more = False
        try:
            if time.monotonic() - last_beat > _BEAT_S:
                tail.beat()
                last_beat = time.monotonic()
            has_more = tail.poll()
        except TunesmithError as error:
            if str(error) != said:
                get_logger(__name__).warning("%s; trying again", error)
                said = str(error)
        if not has_more:
            ending.wait(POLL_S)


def run_state(run: Path) -> str:
    """`running` while a process trains in the run's folder; after that `finished`, `died` if it left its lock behind,
    or `stopped`.
    """
    if is_locked(run):
        return "running"
    if (run / "result.json").exists():
        return "finished"
    return "died" if (run / HOLDER_FILE).exists() else "stopped"


def _is_as_before(file: BinaryIO, position: Position) -> bool:
    file.seek(position.line_start)
    line = file.read(position.offset - position.line_start)
    return hashlib.sha256(line).hexdigest() == position.line_sha256 if position.offset else True


def _whole_lines(file: BinaryIO) -> bytes:
    """The next portion of the file up to a line's end, longer if a single line is; empty if no line is whole."""
    data = b""
    while portion := file.read(_PORTION):
        data += portion
        if b"\n" in portion:
            break
    return data[: data.rfind(b"\n") + 1]


def _object(line: bytes) -> Mapping[str, object] | None:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if is_mapping(value) else None


def _step(values: Mapping[str, object], before: int) -> int:
    step = values.get("step")
    return int(step) if isinstance(step, int | float) and math.isfinite(step) else before + 1


def _seconds(values: Mapping[str, object]) -> float:
    spent = values.get("time/step_s")
    return float(spent) if isinstance(spent, int | float) and math.isfinite(spent) else 0.0


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a line: null was a number that is not finite, anything else is no metric."""
    for name, value in values.items():
        if name == "step" or not _is_name(name) or isinstance(value, bool):
            continue
        if value is None:
            yield name, math.nan
        elif isinstance(value, int | float):
            yield name, float(value)


def _is_name(name: str) -> bool:
    """True if the store takes a metric of this name."""
    return bool(name.strip()) and len(name) <= MAX_NAME and is_storable(name)


def _read_position(file: Path) -> Position:
    try:
        return Position(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Position()


def _started_at(run: Path) -> float:
    """When the run began: its recipe is written first and never again."""
    return _modified_at(run / "recipe.yaml") or time.time()


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
