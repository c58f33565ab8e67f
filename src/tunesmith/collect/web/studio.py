"""The runs of a folder for the pages of admins: the list, and the facts of those that somebody looks at."""

import os
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

from fastapi.exceptions import HTTPException

from tunesmith.base.runs.labels import read_labels
from tunesmith.base.runs.listing import (
    Row,
    next_commands,
    number,
    object_in,
    plan_removal,
    read_object,
    read_recipe,
    read_rows,
    read_run,
    remove,
    run_status,
)
from tunesmith.collect.store.database import Closeable
from tunesmith.collect.store.metric_log import MetricLog, NewLines, heartbeat_of
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.web.run_index import RunIndex
from tunesmith.collect.web.watch_data import Cached, Json, WatchData
from tunesmith.observe.profiling.diagnosis import diagnose, verdict, yaml_value
from tunesmith.observe.profiling.facts import read_facts
from tunesmith.observe.reports.text import answer_text, cut, flatten
from tunesmith.observe.reports.views import cause_rows, token_parts

MAX_OPEN = 32
"""Runs whose facts and metrics are kept for the pages that show them; a million points take 15 MB."""

MAX_SAMPLES = 64
"""Most samples of a step that a page shows."""

_MAX_FINDINGS = 100
_MAX_FILES = 200
_DETAILS_S = 3.0


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that somebody looks at: its metrics, samples and other facts."""

    path: Path
    data: WatchData
    samples: "SampleLog"
    details: Cached[Json]


class Studio(Closeable):
    """The runs below `root`. Safe to call from any number of threads."""

    def __init__(self, root: Path) -> None:
        self.index = RunIndex(root)
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the thread."""
        self.index.close()

    def run(self, id: str) -> OpenRun:
        """The run with this id. Raises HTTPException 404 if there is none."""
        path = self.index.path(id)
        if path is None or not path.is_dir():
            raise HTTPException(404, "there is no such run; it may have been removed")
        with self._lock:
            if id not in self._open:
                self._open[id] = self._opened(path)
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(id)
            return self._open[id]

    def delete(self, id: str) -> None:
        """Delete the run with this id and all that is in its folder. Raises RunError if it is in use."""
        path = self.run(id).path
        remove(plan_removal([path], self.index.root, checkpoints_only=False))
        with self._lock:
            self._open.pop(id, None)
        self.index.forget(id)

    def _opened(self, path: Path) -> OpenRun:
        # The trainer of a live loop writes a database, and has votes beside it.
        is_live = (path / "versions").is_dir() and (path / "runs.db").is_file()
        runs, votes = RunReader(path / "runs.db"), VoteWatch(path / "votes.db")
        data = WatchData(MetricLog(path), runs, votes, runs.heartbeat if is_live else partial(heartbeat_of, path))
        return OpenRun(path, data, SampleLog(path / "samples.jsonl"), Cached(partial(details, path), _DETAILS_S))


def head(path: Path) -> Json:
    """The facts that change by the press of a button: the state of the run in `path`, and what people call it."""
    return {"status": run_status(path, read_recipe(path)), "labels": asdict(read_labels(path))}


def details(path: Path) -> Json:
    """Facts of the run in `path` beside its metrics, read from its files."""
    facts, diagnosis = read_run(path), diagnose(read_facts(path))
    origins = read_object(path / "provenance.json")
    findings = read_rows(path / "findings.jsonl")
    return {
        "name": facts.name,
        "num_bytes": facts.num_bytes,
        "steps": facts.total_steps,
        "num_steps": facts.num_steps,
        "minutes": facts.minutes,
        "commands": next_commands(facts, has_checkpoint=facts.status == "stopped"),
        "verdict": verdict(diagnosis),
        "causes": cause_rows(diagnosis),
        "advised": [[[key, yaml_value(value)] for key, value in one.settings.items()] for one in diagnosis.causes],
        "missing": [f"{rule}: {', '.join(names)}" for rule, names in diagnosis.missing.items()],
        "num_findings": len(findings),
        "findings": [
            [str(row.get(name, "")) for name in ("step", "severity", "name", "message")]
            for row in findings[-_MAX_FINDINGS:]
        ],
        "recipe": [[key, value, str(origins.get(key, ""))] for key, value in flatten(read_recipe(path))],
        "result": flatten(read_object(path / "result.json")),
        "environment": flatten(read_object(path / "environment.json")),
        "files": [[name, size] for name, size in files_of(path).items()],
    }


def files_of(path: Path) -> dict[str, int]:
    """Names and bytes of the plain files in the folder of a run, hidden ones and links left out."""
    try:
        with os.scandir(path) as entries:
            plain = [one for one in entries if one.is_file(follow_symlinks=False) and not one.name.startswith(".")]
            found = sorted((one.name, one.stat(follow_symlinks=False).st_size) for one in plain)
    except OSError:
        return {}
    return dict(found[:_MAX_FILES])


class SampleLog:
    """The samples of a run by step. Steps are found once; later calls read what was added."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines = NewLines(file)
        self._lock = threading.Lock()
        self._starts: dict[int, int] = {}  # step -> offset of its first line

    def steps(self) -> list[int]:
        """Steps that have samples, in order."""
        with self._lock:
            for start, line in self._lines.read(self._starts.clear):
                step = number((object_in(line) or {}).get("step"))
                if step is not None:
                    self._starts.setdefault(int(step), start)
            return sorted(self._starts)

    def at(self, step: int) -> list[Json]:
        """The first samples of `step`; texts are cut to what a page can show."""
        start = self._starts.get(step)
        if start is None:
            return []
        try:
            with self._file.open("rb") as file:
                file.seek(start)
                rows = [object_in(line) or {} for line in islice(file, MAX_SAMPLES)]
        except OSError:
            return []
        return [_shown(row) for row in takewhile(lambda row: number(row.get("step")) == step, rows)]


def _shown(row: Row) -> Json:
    parts = row.get("rewards")
    return {
        "prompt": cut(row.get("prompt")),
        "completion": cut(answer_text(row)),
        "reward": number(row.get("reward", row.get("score"))),
        "rewards": flatten(parts) if isinstance(parts, dict) and len(parts) > 1 else [],  # pyright: ignore[reportUnknownArgumentType]
        "tokens": [
            [part.title, part.is_drawn, [[one.text, one.shade, one.note] for one in part.tokens]]
            for part in token_parts(row)
        ],
        "finish_reason": str(row.get("finish_reason", "")),
        "num_tokens": number(row.get("num_tokens")),
    }
