"""Imports and other work that one process hands to another, which alone may write `votes.db`: files in a folder beside
it.

The process that imports writes `ID.rows`: a line with the campaign, then one row per line. Of a `Chore` there is one
line. The owner of the database says by `ID.progress` that it has taken it and how far it is, and by `ID.result` what
came of it; then it removes the rows. An owner that dies leaves them to the next one: rows that are there already are
not added again.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tunesmith.base.core.errors import DataError, InputError, StoreError
from tunesmith.base.core.log import get_logger
from tunesmith.collect.store.content import encode_json
from tunesmith.collect.store.records import Candidate, Given, GivenFeedback, GivenVote, NewItem

_log = get_logger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with the number of rows done, and of all."""

TAKEN_WITHIN_S = 30.0
"""An owner of this release takes an import sooner, also while it is busy."""

_POLL_S = 0.2
_KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Request:
    """Rows for a campaign, which is made if there is none of this name."""

    campaign: str
    rows: Sequence[Given]


@dataclass(frozen=True, slots=True)
class Chore:
    """Work that is no import: `prune`, `delete`, `judge` or `select`, as the methods of `VoteStore` with these
    arguments, or `note` of what was done elsewhere.
    """

    work: Literal["prune", "delete", "judge", "select", "note"]
    facts: Mapping[str, Any]


def folder_of(path: Path) -> Path:
    """The folder with the imports for the database at `path`."""
    return path.with_name(f"{path.name}.imports")


class Inbox:
    """Watches the folder of imports, and calls `handle` for each, in a thread of its own."""

    def __init__(self, folder: Path, handle: Callable[[Request | Chore, OnProgress], Mapping[str, Any]]) -> None:
        self._folder = folder
        self._handle = handle
        self._stopping = threading.Event()
        self._taken: dict[str, threading.Thread] = {}
        self._thread = threading.Thread(target=self._watch, name="tunesmith-imports", daemon=True)
        self._thread.start()

    def close(self, wait: Callable[[], None] = lambda: None) -> None:
        """Take no more. Imports that are not done yet stay for the next owner; `wait` ends what they wait for."""
        self._stopping.set()
        self._thread.join()
        wait()
        for thread in self._taken.values():
            thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            if not self._folder.is_dir():
                continue
            with suppress(OSError):
                self._clear()
            for path in sorted(self._folder.glob("*.rows")):
                thread = self._taken.get(path.stem)
                if thread is None:
                    thread = threading.Thread(target=self._take, args=(path,), name=path.stem, daemon=True)
                    self._taken[path.stem] = thread
                    thread.start()

    def _clear(self) -> None:
        """Remove what was left by processes that did not wait for the result."""
        for path in (*self._folder.glob("*.result"), *self._folder.glob("*.progress")):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink(missing_ok=True)

    def _take(self, path: Path) -> None:
        told_s = 0.0

        def progress(num_done: int, num_all: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s > _POLL_S:
                told_s = time.monotonic()
                _put(path.with_suffix(".progress"), {"num_done": num_done, "num_all": num_all})

        try:
            progress(0, 0)
            try:
                answer: dict[str, object] = {**self._handle(_read(path), progress)}
            except InputError as error:
                if self._stopping.is_set():
                    return
                answer = {"error": str(error)}
            except (KeyError, StopIteration, TypeError, ValueError) as error:
                # Whoever handed it over waits for an answer.
                answer = {"error": f"{path} is damaged or of another release, and cannot be done ({error!r})"}
            _put(path.with_suffix(".result"), answer)
            path.unlink(missing_ok=True)
            path.with_suffix(".progress").unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the import %s cannot be taken: %s", path, error.strerror or error)


class HandedOver:
    """An import in the folder for the owner of the database, until its result is there."""

    def __init__(self, folder: Path, request: Request | Chore) -> None:
        self._path = folder / f"{uuid.uuid4().hex}.rows"
        try:
            folder.mkdir(exist_ok=True)
            aside = self._path.with_suffix(".part")
            with aside.open("w", encoding="utf-8") as file:
                is_chore = isinstance(request, Chore)
                file.write(encode_json(asdict(request) if is_chore else {"campaign": request.campaign}) + "\n")
                rows = () if is_chore else request.rows
                file.writelines(encode_json([type(row).__name__, asdict(row)]) + "\n" for row in rows)
            aside.rename(self._path)
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error

    def result(self, progress: OnProgress) -> Mapping[str, Any] | None:
        """The outcome, None while it is not done. Raises DataError with what the owner refused."""
        told = _get(self._path.with_suffix(".progress"))
        if told:
            progress(int(told["num_done"]), int(told["num_all"]))
        answer = _get(self._path.with_suffix(".result"))
        if answer is None:
            return None
        if "error" in answer:
            raise DataError(str(answer["error"]))
        return answer

    @property
    def is_taken(self) -> bool:
        """True if a process has begun with it."""
        return any(self._path.with_suffix(suffix).exists() for suffix in (".progress", ".result"))

    def remove(self) -> None:
        """Remove its files. An owner that has begun goes on with the rows that it has read."""
        for suffix in (".rows", ".progress", ".result"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


def _put(path: Path, facts: Mapping[str, object]) -> None:
    """Write a small file at once."""
    aside = path.with_suffix(path.suffix + ".part")
    aside.write_text(json.dumps(facts), encoding="utf-8")
    aside.replace(path)


def _get(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _read(path: Path) -> Request | Chore:
    with path.open(encoding="utf-8") as file:
        first = json.loads(next(file))
        if "work" in first:
            return Chore(**first)
        campaign = first["campaign"]
        rows = ((_MAKERS[kind], facts) for kind, facts in map(json.loads, file))
        return Request(campaign, [make(facts) for make, facts in rows])


def _item(facts: Mapping[str, Any]) -> NewItem:
    values: dict[str, Any] = {**facts, "prompt": _frozen(facts["prompt"])}
    values["candidates"] = tuple(
        Candidate(**{name: _frozen(value) for name, value in one.items()}) for one in facts["candidates"]
    )
    return NewItem(**values)


def _vote(facts: Mapping[str, Any]) -> GivenVote:
    values: dict[str, Any] = {**facts, "item": _item(facts["item"])}
    return GivenVote(**values)


def _feedback(facts: Mapping[str, Any]) -> GivenFeedback:
    return GivenFeedback(**{**facts, "prompt": _frozen(facts["prompt"])})


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Given]] = {
    kind.__name__: make for kind, make in ((NewItem, _item), (GivenVote, _vote), (GivenFeedback, _feedback))
}


def _frozen(value: object) -> Any:
    return tuple(cast(list[object], value)) if isinstance(value, list) else value
