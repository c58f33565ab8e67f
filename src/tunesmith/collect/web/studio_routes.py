"""Routes of the pages of runs, for admins alone: samples name the version that drew them, and votes are blind."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import FileResponse, HTMLResponse

from tunesmith.base.runs.labels import read_labels
from tunesmith.collect.web import watch
from tunesmith.collect.web.access import API, Rule
from tunesmith.collect.web.job_routes import Reply, Run, facts_of
from tunesmith.collect.web.services import ServicesOf, page
from tunesmith.collect.web.studio import Studio, files_of, head
from tunesmith.collect.web.watch_data import WatchData

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A report runs its own scripts in an origin of its own: whatever a run's folder holds, it has no session here."""

ONE = f"{API}/runs/{{run}}"

RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/runs", "admin", is_page=True),
    Rule(("GET",), "/compare", "admin", is_page=True),
    Rule(("GET",), "/runs/{run}", "admin", is_page=True),
    Rule(("GET",), "/runs/{run}/report", "admin", is_page=True, policy=REPORT_POLICY),
    Rule(("GET",), "/runs/{run}/files/{name}", "admin"),
    Rule(("GET",), f"{API}/runs", "admin"),
    Rule(("GET",), ONE, "admin"),
    Rule(("GET",), f"{ONE}/samples", "admin"),
    *watch.rules(ONE, "admin"),
)
"""Rules of this module's routes, for the guard's table."""

MAX_ROWS = 1_000
"""Most runs of one request."""

Word = Annotated[str, Query(max_length=200)]


def routers(studio: Studio) -> list[APIRouter]:
    """The routers of the pages, of the list and the facts of runs, and of their metrics."""

    def data_of(found: Run) -> WatchData:
        return found.data

    return [_pages(), _facts(studio), watch.router(ONE, data_of)]


def _pages() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/runs")
    def runs(request: Request, services: ServicesOf) -> HTMLResponse:
        return page(request, "runs.html", may_start=services.jobs is not None)

    @routes.get("/compare")
    def compare(request: Request) -> HTMLResponse:
        return page(request, "compare.html", here="/runs")

    @routes.get("/runs/{run}")
    def show(run: str, found: Run, request: Request, services: ServicesOf) -> HTMLResponse:
        name = read_labels(found.path).title or found.path.name.encode("utf-8", "replace").decode()
        files = files_of(found.path)
        return page(
            request,
            "run.html",
            here="/runs",
            base=f"runs/{run}/",
            run=run,
            name=name,
            folder=found.path.name.encode("utf-8", "replace").decode(),
            has_report="report.html" in files,
            may_roll_back=False,
            may_start=services.jobs is not None,
        )

    @routes.get("/runs/{run}/report")
    def report(found: Run) -> HTMLResponse:
        if "report.html" not in files_of(found.path):
            raise HTTPException(404, "this run has no report yet; it is written at the end")
        return HTMLResponse((found.path / "report.html").read_bytes())

    @routes.get("/runs/{run}/files/{name}")
    def file(found: Run, name: str) -> FileResponse:
        if name not in files_of(found.path):
            raise HTTPException(404, "this run has no such file")
        return FileResponse(found.path / name, media_type="application/octet-stream", filename=name)

    return routes


def _facts(studio: Studio) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/runs", tags=["runs"])

    @routes.get("")
    def runs(
        text: Word = "",
        algorithm: Word = "",
        state: Literal["", "running", "finished", "stopped", "failed"] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 50,
    ) -> Reply:
        """The newest runs, and how many match."""
        return Reply(studio.index.page(text, algorithm, state, limit))

    @routes.get("/{run}")
    def show(found: Run, services: ServicesOf) -> Reply:
        """Findings, diagnosis, recipe with the origin of each value, result, files, steps that have samples, and the
        job that was started for it last, if one was.
        """
        jobs = services.jobs
        job = None if jobs is None else jobs.of(found.path)
        facts = None if jobs is None or job is None else facts_of(job, jobs, studio)
        return Reply({**found.details(), **head(found.path), "sample_steps": found.samples.steps(), "job": facts})

    @routes.get("/{run}/samples")
    def samples(found: Run, step: Annotated[int, Query(ge=0, le=2**53)]) -> Reply:
        """The samples of a step."""
        return Reply({"step": step, "samples": found.samples.at(step)})

    return routes
