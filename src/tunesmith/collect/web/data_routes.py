"""The page `/data`: export of votes, and import of a file, whose progress the page shows."""

import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse

from tunesmith.base.core.errors import InputError
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API
from tunesmith.collect.web.services import Caller, Services, ServicesOf, page

ExportKind = Literal["votes", "rankings", "demonstrations"]
ExportFormat = Literal["jsonl", "csv"]
Labels = Literal["drop", "votes", "gold"]

_MEDIA_TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv"}
_FOLDER = "uploads"
_NUM_KEPT = 20


@dataclass(slots=True)
class ImportState:
    """An import: `state` is `reading`, `storing`, `done` or `failed`, and `message` says what came of it."""

    number: int
    file: str
    state: Literal["reading", "storing", "done", "failed"] = "reading"
    num_done: int = 0
    num_rows: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class WantedImport:
    """A file that arrived, and what is to become of it."""

    path: Path
    labels: Labels | None
    heldout: bool
    question: str | None
    campaign: str
    by: int


@dataclass(slots=True)
class Imports:
    """Imports of this server, one at a time: the latest are remembered until it ends."""

    _numbers: Iterable[int] = field(default_factory=lambda: itertools.count(1))
    _states: dict[int, ImportState] = field(default_factory=dict[int, ImportState])
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def states(self) -> list[ImportState]:
        """The states of the latest imports, oldest first."""
        return list(self._states.values())

    def begin(self, votes: VoteStore, wanted: WantedImport) -> ImportState:
        """The state of a new import, which runs in a thread."""
        state = ImportState(next(iter(self._numbers)), wanted.path.name)
        self._states[state.number] = state
        for number in list(self._states)[:-_NUM_KEPT]:
            del self._states[number]
        threading.Thread(target=self._run, args=(votes, wanted, state), name="import", daemon=True).start()
        return state

    def _run(self, votes: VoteStore, wanted: WantedImport, state: ImportState) -> None:
        from tunesmith.collect.data.vote_imports import VoteFiles, import_notes

        def progress(num_done: int, num_rows: int) -> None:
            state.num_done, state.num_rows = num_done, num_rows

        try:
            with self._turn:
                files = VoteFiles([wanted.path], wanted.labels, heldout=wanted.heldout, question=wanted.question)
                state.num_rows, state.state = files.num_given, "storing"
                done = votes.import_rows(wanted.campaign, files.rows(), progress, files.num_given, by=wanted.by)
            what = "votes" if files.labels == "votes" else "items"
            first = f"{done.num_new} {what} added, {done.num_there} were there already"
            notes = import_notes(done, files.labels, heldout=wanted.heldout)
            (seen,) = files.understood
            if seen.num_bad:
                notes.append(f"{seen.num_bad} bad rows left out:\n{seen.bad}")
            read_as = "" if seen.format == "columns" else f"{seen.title}: "
            state.message = read_as + "; ".join([first, *notes])
            state.state = "done"
        except InputError as error:
            state.message = str(error).replace(f"{wanted.path.parent}/", "")
            state.state = "failed"
        finally:
            wanted.path.unlink(missing_ok=True)
            wanted.path.parent.rmdir()


def routers() -> tuple[APIRouter, ...]:
    """The page, and its routes under `/api/v1`: `export` and `imports`."""
    pages = APIRouter(include_in_schema=False)
    routes = APIRouter(prefix=API, tags=["admin"])
    imports = Imports()

    @pages.get("/data")
    def data(request: Request, services: ServicesOf) -> HTMLResponse:
        return page(request, "data.html", campaign=services.campaign().settings.name)

    @routes.get("/export")
    def export(
        services: ServicesOf,
        kind: ExportKind = "votes",
        file_format: Annotated[ExportFormat, Query(alias="format")] = "jsonl",
        decided: bool = False,
    ) -> StreamingResponse:
        """Effective votes, rankings or written answers, oldest first, as a file. `decided` leaves out ties."""
        lines = _lines(services, kind, file_format, decided=decided)
        name = f'attachment; filename="{kind}.{file_format}"'
        return StreamingResponse(lines, media_type=_MEDIA_TYPES[file_format], headers={"content-disposition": name})

    @routes.post("/imports", status_code=202)
    async def begin(
        request: Request,
        caller: Caller,
        services: ServicesOf,
        name: Annotated[str, Query(min_length=1, max_length=200)],
        labels: Labels | None = None,
        heldout: bool = False,
        question: Annotated[str | None, Query(max_length=200)] = None,
    ) -> ImportState:
        """Import a file, which is the body of the request. `name` is the file's, whose extension tells its format."""
        path = await _received(request, services.settings.folder / _FOLDER, name)
        campaign = services.campaign().settings.name
        return imports.begin(services.votes, WantedImport(path, labels, heldout, question or None, campaign, caller.id))

    @routes.get("/imports")
    def show() -> list[ImportState]:
        """The states of the latest imports, oldest first."""
        return imports.states()

    return routes, pages


async def _received(request: Request, folder: Path, name: str) -> Path:
    """The file that a request brings, in a folder of its own below `folder`."""
    import tempfile

    base = Path(name.replace("\\", "/")).name
    if base in ("", ".", "..") or "\x00" in base:
        raise HTTPException(422, f"{name!r} is no name of a file")
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=folder)) / base
    try:
        with path.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
    except BaseException:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
        raise
    return path


def _lines(services: Services, kind: ExportKind, file_format: ExportFormat, *, decided: bool) -> Iterable[str]:
    from tunesmith.collect.data.vote_files import csv_lines, jsonl_lines

    rows = _rows(services.votes.reader, services.campaign().id, kind, decided=decided)
    return csv_lines(rows) if file_format == "csv" else jsonl_lines(rows)


def _rows(reader: VoteReader, campaign_id: int, kind: ExportKind, *, decided: bool) -> Iterable[Mapping[str, object]]:
    from tunesmith.collect.data.vote_files import demonstration_columns, ranking_columns, vote_columns

    if kind == "rankings":
        return map(ranking_columns, reader.export_rankings(campaign_id))
    if kind == "demonstrations":
        return map(demonstration_columns, reader.export_demonstrations(campaign_id))
    return (vote_columns(row) for row in reader.export(campaign_id) if not (decided and row.tie))
