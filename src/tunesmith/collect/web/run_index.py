"""The list of the runs in a folder, read in the background and kept, so that a page of thousands answers at once."""

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunesmith.base.runs.labels import LABELS_FILE
from tunesmith.base.runs.listing import RunFacts, find_runs, read_run
from tunesmith.collect.store.database import Closeable

MIN_PAUSE_S = 2.0
"""Seconds between two searches of the folder, at least; a search that takes long is followed by a longer pause."""

_PAUSE_FACTOR = 10
_FIRST_WAIT_S = 0.5
_ENOUGH = 50
_CHANGING = ("recipe.yaml", "metrics.jsonl", "result.json", "checkpoints", "lock.json", LABELS_FILE)


@dataclass(frozen=True, slots=True)
class Known:
    """The facts of a run, and the times and sizes of the files that they were read from."""

    facts: RunFacts
    signature: tuple[int, ...]


class RunIndex(Closeable):
    """The runs below `root` by id. Safe to call from any number of threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, Known] = {}
        self._num_found = 0
        self._asked, self._scanned, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="run-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._asked.set()
        self._thread.join()

    def path(self, id: str) -> Path | None:
        """The folder of a run; None if there is no such run."""
        if id not in self._known:
            self._look()
        known = self._known.get(id)
        return None if known is None else known.facts.path

    def forget(self, id: str) -> None:
        """Leave a run out that was deleted."""
        self._known.pop(id, None)

    def facts(self) -> list[RunFacts]:
        """The runs that have been read, the newest first."""
        self._look()
        return sorted((one.facts for one in self._known.copy().values()), key=_started, reverse=True)

    def page(self, text: str, algorithm: str, state: str, limit: int) -> dict[str, Any]:
        """The newest runs with all words of `text` in their names, labels or model: `rows`, `num_matching`, the
        `algorithms` there are, and how many runs are read of those `num_found`.
        """
        self._look()
        known = dict(self._known)
        words = text.lower().split()
        matching = [
            (_started(one.facts), id)
            for id, one in known.items()
            if (not algorithm or one.facts.algorithm == algorithm)
            and (not state or one.facts.status == state)
            and all(word in _words(one.facts) for word in words)
        ]
        shown = [id for _, id in sorted(matching, reverse=True)[:limit]]
        return {
            "rows": [_row(id, self._refreshed(id, known[id])) for id in shown],
            "num_matching": len(matching),
            "algorithms": sorted({one.facts.algorithm for one in known.values()}),
            "num_read": len(known),
            "num_found": max(self._num_found, len(known)),
        }

    def _look(self) -> None:
        """Ask for a search, and wait a moment for the first runs, which are all of them in a small folder."""
        self._asked.set()
        self._scanned.wait(_FIRST_WAIT_S)

    def _work(self) -> None:
        while not self._ending.is_set():
            self._asked.wait()
            self._asked.clear()
            began = time.monotonic()
            self._scan()
            self._scanned.set()
            self._ending.wait(max(MIN_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))

    def _scan(self) -> None:
        paths = {id_of(path, self.root): path for path in find_runs(self.root)}
        self._num_found = len(paths)
        for id in set(self._known) - set(paths):
            self._known.pop(id, None)
        # The newest first, because names begin with the date: they are on the page while older ones are read.
        for id in sorted(paths, key=lambda id: paths[id].name, reverse=True):
            if self._ending.is_set():
                return
            if id in self._known:
                self._refreshed(id, self._known[id])
            else:
                self._read(id, paths[id])

    def _refreshed(self, id: str, known: Known) -> RunFacts:
        """The facts of a run, read again if its files changed or a process works in it, which may die unnoticed."""
        facts = known.facts
        is_open = facts.status == "running" or (facts.algorithm == "demo" and facts.status != "finished")
        return self._read(id, facts.path) if is_open or _signature(facts.path) != known.signature else facts

    def _read(self, id: str, path: Path) -> RunFacts:
        signature = _signature(path)  # before the files: a change while they are read is seen the next time
        facts = read_run(path, self.root)
        self._known[id] = Known(facts, signature)
        if len(self._known) == _ENOUGH:
            self._scanned.set()
        return facts


def _words(facts: RunFacts) -> str:
    """The text that a search looks in, in lower case."""
    labels = facts.labels
    return " ".join((facts.name, facts.model, labels.title, labels.note, *labels.tags)).lower()


def _started(facts: RunFacts) -> datetime:
    return facts.started or datetime.min


def id_of(path: Path, root: Path) -> str:
    """Id of a run in addresses: its name may hold any character."""
    return hashlib.sha256(os.fsencode(path.relative_to(root))).hexdigest()[:12]


def _signature(path: Path) -> tuple[int, ...]:
    found: list[int] = []
    for name in _CHANGING:
        try:
            facts = os.stat(f"{path}/{name}")
            found += (facts.st_mtime_ns, facts.st_size)
        except OSError:
            found += (0, 0)
    return tuple(found)


def _row(id: str, facts: RunFacts) -> dict[str, Any]:
    return {
        "id": id,
        "name": facts.name,
        "algorithm": facts.algorithm,
        "model": facts.model,
        "state": facts.status,
        "step": facts.num_steps,
        "steps": facts.total_steps,
        "figure_name": facts.figure_name,
        "figure": facts.figure,
        "minutes": facts.minutes,
        "title": facts.labels.title,
        "note": facts.labels.note,
        "tags": facts.labels.tags,
        "started": facts.started.timestamp() if facts.started else None,
    }
