"""Copies the `metrics.jsonl` of a run to a `runs.db` as it grows, so that the watch page shows runs of every trainer.

`metrics.jsonl` is authoritative: the database can be rebuilt from it. The copied position is written to a file beside
the database after the rows, so rows beyond it are copied again after a crash.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from tunesmith.base.core.errors import StoreError, TunesmithError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.runs.listing import object_in
from tunesmith.base.runs.lock import HOLDER_FILE, is_locked
from tunesmith.collect.store.content import MAX_NAME, is_storable
from tunesmith.collect.store.database import Closeable
from tunesmith.collect.store.runs import RunStore

POLL_S = 0.5
"""Seconds between polls of the file."""

METRICS_FILE = "metrics.jsonl"
POSITION_FILE = "position.json"
IDLE_S = 30.0
"""Seconds after the last question for a run until it is not followed any more."""

MAX_FOLLOWED = 64
"""Most runs that are followed at a time; each has a database open."""

WATCH_FOLDER = "watch"
"""Folder in a run's folder for the database of the watch page. It can be removed when nobody watches."""

_CHUNK_BYTES = 1 << 20
_HEARTBEAT_S = 2.0

MetricRow = tuple[int, float, str, float]
"""Step, time, name and value (NaN if not finite) of a metric."""


@dataclass(frozen=True, slots=True)
class Position:
    """Number of copied bytes, `offset`, with the last line's start and hash, which detect a file that was truncated and
    grew again. `step` and `time` are those of the last line.
    """

    offset: int = 0
    line_start: int = 0
    line_sha256: str = ""
    step: int = -1
    time: float = 0.0


class RunTail:
    """Copies new lines of a run's metrics to a database in `folder`, and writes a heartbeat with its state. For one
    thread at a time; `used_at` is when somebody last asked for the run.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        """`run` is the run's folder; the database is `runs.db` in `folder`.

        Raises StoreError if another process copies the run there, or the folder cannot be written.
        """
        self.folder = folder
        self.used_at = 0.0
        self._beat_at = -math.inf
        self._once = Once(get_logger(__name__))
        self._file = run / METRICS_FILE
        self._run = run
        self._position_file = folder / POSITION_FILE
        database = folder / "runs.db"
        known = _read_position(self._position_file) if database.exists() else Position()
        self._store = RunStore.open(database)
        self._store.truncate_metrics(known.step + 1)
        self._position = known

    def close(self) -> None:
        """Close the database."""
        self._store.close()

    def work(self) -> bool:
        """Copy what is new; True if there is more. An error is logged once, and the copy retried."""
        if not self._run.is_dir():
            return False  # it was deleted while somebody looked at it
        try:
            if time.monotonic() - self._beat_at > _HEARTBEAT_S:
                self.beat()
                self._beat_at = time.monotonic()
            return self.poll()
        except TunesmithError as error:
            self._once.warning(f"{error}; trying again")
            return False

    def beat(self) -> None:
        """Write the run's state as a heartbeat, as the trainer of a live loop does itself."""
        state = run_state(self._run)
        ended_at = _modified_at(self._file) or _started_at(self._run)
        self._store.beat(state, None if state == "running" else ended_at)

    def poll(self) -> bool:
        """Copy a chunk of whole new lines; True if there were any. A file that was truncated, as by a resumed run, is
        copied from its start.

        Raises StoreError if the database cannot be written.
        """
        try:
            with self._file.open("rb") as file:
                start = self._position if _is_unchanged(file, self._position) else self._restart()
                file.seek(start.offset)
                data = _whole_lines(file)
        except FileNotFoundError:
            if self._position.offset:
                self._restart()
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
            values = object_in(line)
            if values is None:
                continue
            step = int(_finite(values, "step", step + 1))
            when += _finite(values, "time/step_s", 0.0)
            rows += [(step, when, name, value) for name, value in _numbers(values)]
        self._store.add_metric_rows(rows)
        line_start = data.rfind(b"\n", 0, len(data) - 1) + 1
        self._save(
            Position(
                offset=start.offset + len(data),
                line_start=start.offset + line_start,
                line_sha256=hashlib.sha256(data[line_start:]).hexdigest(),
                step=step,
                time=when,
            )
        )

    def _restart(self) -> Position:
        self._store.truncate_metrics(0)
        self._save(Position())
        return self._position

    def _save(self, position: Position) -> None:
        aside = self._position_file.with_suffix(".new")
        try:
            aside.write_text(json.dumps(asdict(position)), encoding="utf-8")
            os.replace(aside, self._position_file)
        except OSError as error:
            raise StoreError(f"{self._position_file} cannot be written: {error.strerror or error}") from error
        self._position = position


class Follower(Closeable):
    """Copies the metrics of the runs that somebody watches, in one thread; the runs are never affected."""

    def __init__(self) -> None:
        self._followed: OrderedDict[Path, RunTail] = OrderedDict()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._aside: TemporaryDirectory[str] | None = None  # none is left behind by a killed server that needs none
        self._thread = threading.Thread(target=self._follow, name="run-tail", daemon=True)
        self._thread.start()

    def folder(self, run: Path) -> Path:
        """The folder of the `runs.db` of `run`, which is followed until nobody has asked for `IDLE_S`.

        It is `watch` in the run's folder, or a temporary one if that is in use or cannot be written.
        """
        with self._lock:
            found = self._followed.get(run)
            if found is None:
                found = self._followed[run] = self._open(run)
            found.used_at = time.monotonic()
            self._followed.move_to_end(run)
            return found.folder

    def close(self) -> None:
        """End the thread, and remove temporary databases."""
        self._ending.set()
        self._thread.join()
        while self._followed:
            self._followed.popitem()[1].close()
        if self._aside is not None:
            self._aside.cleanup()

    def _open(self, run: Path) -> RunTail:
        folder = run / WATCH_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            return RunTail(run, folder)
        except (OSError, StoreError) as error:
            get_logger(__name__).info("%s; the page's database goes to a temporary folder", error)
        self._aside = self._aside or TemporaryDirectory(prefix="tunesmith-watch-")
        folder = Path(self._aside.name, hashlib.sha256(os.fsencode(run)).hexdigest()[:16])
        folder.mkdir(exist_ok=True)
        return RunTail(run, folder)

    def _follow(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                self._drop()
                followed = list(self._followed.values())
            num_behind = sum(one.work() for one in followed)
            if not num_behind:
                self._ending.wait(POLL_S)

    def _drop(self) -> None:
        """End the following of runs that nobody watches any more, and of the oldest beyond `MAX_FOLLOWED`."""
        while self._followed:
            run, oldest = next(iter(self._followed.items()))
            if time.monotonic() - oldest.used_at < IDLE_S and len(self._followed) <= MAX_FOLLOWED:
                return
            self._followed.pop(run).close()


def run_state(run: Path) -> str:
    """`running` while a process holds its lock; then `finished`, `stopped`, or `died` if it left its lock file."""
    if is_locked(run):
        return "running"
    if (run / "result.json").exists():
        return "finished"
    return "died" if (run / HOLDER_FILE).exists() else "stopped"


def _is_unchanged(file: BinaryIO, position: Position) -> bool:
    file.seek(position.line_start)
    line = file.read(position.offset - position.line_start)
    return hashlib.sha256(line).hexdigest() == position.line_sha256 if position.offset else True


def _whole_lines(file: BinaryIO) -> bytes:
    """About `_CHUNK_BYTES` of whole lines, more if a single line is longer; empty if no line is complete."""
    data = b""
    while chunk := file.read(_CHUNK_BYTES):
        data += chunk
        if b"\n" in chunk:
            break
    return data[: data.rfind(b"\n") + 1]


def _finite(values: Mapping[str, object], name: str, default: float) -> float:
    value = values.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else default


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Names and values of a line's metrics; null is a value that is not finite."""
    for name, value in values.items():
        is_name = bool(name.strip()) and len(name) <= MAX_NAME and is_storable(name)
        if name == "step" or not is_name or isinstance(value, bool):
            continue
        if value is None:
            yield name, math.nan
        elif isinstance(value, int | float):
            yield name, float(value)


def _read_position(file: Path) -> Position:
    try:
        return Position(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Position()


def _started_at(run: Path) -> float:
    """Start time of the run, from its recipe, which is written first and only once."""
    return _modified_at(run / "recipe.yaml") or time.time()


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
