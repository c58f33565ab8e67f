"""Routes that start, stop and resume runs, for admins alone; a recipe from a page is checked before anything begins."""

import asyncio
import json
import re
import shlex
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path
from fastapi import Request as HttpRequest
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import AfterValidator, Field, StringConstraints
from starlette.concurrency import run_in_threadpool

from tunesmith.base.config.levels import LEVELS, shown_keys
from tunesmith.base.config.load import read_algorithm, shipped_names, shipped_text
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.config.sections import BUILTIN_REWARDS
from tunesmith.base.config.yaml_text import is_mapping, parse
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.runs.folder import finite
from tunesmith.base.runs.labels import (
    MAX_NOTE,
    MAX_TAG,
    MAX_TAGS,
    MAX_TITLE,
    Labels,
    clean_tags,
    read_labels,
    write_labels,
)
from tunesmith.collect.web.access import API, Rule
from tunesmith.collect.web.jobs import Job, Jobs
from tunesmith.collect.web.messages import Request
from tunesmith.collect.web.run_index import id_of
from tunesmith.collect.web.services import Caller, ServicesOf, page
from tunesmith.collect.web.studio import OpenRun, Studio
from tunesmith.collect.web.wanted import ALGORITHMS, STARTED, Wanted, check, command, presets, wanted_like

RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/runs/new", "admin", is_page=True),
    Rule(("GET",), f"{API}/recipes/keys", "admin"),
    Rule(("POST",), f"{API}/recipes/check", "admin"),
    Rule(("POST",), f"{API}/recipes/estimate", "admin"),
    Rule(("GET", "POST"), f"{API}/jobs", "admin"),
    Rule(("GET", "DELETE"), f"{API}/jobs/{{job}}", "admin"),
    Rule(("POST",), f"{API}/jobs/{{job}}/stop", "admin"),
    Rule(("GET",), f"{API}/runs/{{run}}/settings", "admin"),
    Rule(("POST",), f"{API}/runs/{{run}}/resume", "admin"),
    Rule(("PUT",), f"{API}/runs/{{run}}/labels", "admin"),
    Rule(("DELETE",), f"{API}/runs/{{run}}", "admin"),
)
"""Rules of this module's routes, for the guard's table."""

MAX_SETTINGS = 300
"""Most keys of one recipe."""

ESTIMATE_S = 300.0
"""Seconds after which an estimate, which loads model and data, is given up."""


def _storable(text: str) -> str:
    """`text`, if it can be an argument of a process."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode") from None
    if "\0" in text:
        raise ValueError("must not hold the character NUL")
    return text


def _one_of(names: tuple[str, ...]) -> AfterValidator:
    """The check that a text is one of `names`."""

    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return name

    return AfterValidator(known)


AlgorithmName = Annotated[str, _one_of(ALGORITHMS), Field(json_schema_extra={"enum": [*ALGORITHMS]})]
StartedName = Annotated[str, _one_of(STARTED), Field(json_schema_extra={"enum": [*STARTED]})]
Key = Annotated[str, StringConstraints(pattern=r"^[^\s=]+$", max_length=200), AfterValidator(_storable)]
Value = Annotated[str, StringConstraints(max_length=10_000), AfterValidator(_storable)]
Storable = Annotated[str, AfterValidator(_storable)]
JobKey = Annotated[str, Header(alias="Idempotency-Key", min_length=1, max_length=200)]


def run_of(run: Annotated[str, Path(min_length=1, max_length=40)], services: ServicesOf) -> OpenRun:
    """The run that the path names. Raises HTTPException 404 if there is none."""
    assert services.studio is not None, "only a server with a studio has routes of runs"
    return services.studio.run(run)


Run = Annotated[OpenRun, Depends(run_of)]
"""Type of a route's parameter that receives the run of its path."""


class RunRequest(Request):
    """A recipe as a page gives it: a shipped one or none, and keys with their values as text."""

    algorithm: StartedName
    recipe: Annotated[str, StringConstraints(max_length=100)] = ""
    settings: Annotated[tuple[tuple[Key, Value], ...], Field(max_length=MAX_SETTINGS)] = ()

    def wanted(self) -> Wanted:
        """The run that is asked for."""
        return Wanted(self.algorithm, self.recipe, self.settings)


class ResumeRequest(Request):
    """Changes to a run that goes on: the steps of the whole run, those done included; None changes nothing."""

    steps: Annotated[int, Field(ge=1, le=2**53)] | None = None


class LabelsRequest(Request):
    """The names that people give a run; empty values take a label away."""

    title: Annotated[Storable, StringConstraints(max_length=MAX_TITLE, strip_whitespace=True)] = ""
    note: Annotated[Storable, StringConstraints(max_length=MAX_NOTE)] = ""
    tags: Annotated[
        tuple[Annotated[Storable, StringConstraints(max_length=MAX_TAG)], ...], Field(max_length=MAX_TAGS)
    ] = ()


class Reply(JSONResponse):
    """JSON of what files hold: numbers that are not finite become null, and lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode()


def facts_of(job: Job, jobs: Jobs, studio: Studio) -> dict[str, Any]:
    """A job as pages show it; `run` is the id of its run, once that has a page."""
    state, path = jobs.state(job), jobs.path(job)
    run = None if path is None else id_of(path, jobs.root)
    names = dict(job.wanted.settings)
    return {
        "id": job.id,
        "name": job.wanted.resume or names.get("run.name") or job.wanted.recipe or job.wanted.algorithm,
        "state": state,
        "num_before": jobs.num_before(job) if state == "queued" else 0,
        "run": run if run is not None and studio.index.path(run) is not None else None,
        "wanted": {"algorithm": job.wanted.algorithm, "recipe": job.wanted.recipe, "settings": job.wanted.settings},
        "command": shown_command(job.wanted, jobs),
        "output": jobs.output(job),
    }


def shown_command(wanted: Wanted, jobs: Jobs) -> str:
    """The command that does the same in a shell."""
    return shlex.join(["tunesmith", *wanted.words(jobs.root)])


def routers(studio: Studio, jobs: Jobs) -> list[APIRouter]:
    """The routers of the page with the form, of recipes, and of jobs."""
    return [_page(jobs), _recipes(jobs), _jobs(studio, jobs), _runs(studio, jobs)]


def _page(jobs: Jobs) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/runs/new")
    def new(request: HttpRequest) -> HTMLResponse:
        return page(
            request,
            "new.html",
            here="/runs",
            algorithms={name: str(RECIPES[name].__doc__) for name in ALGORITHMS},
            recipes=recipes(),
            levels=LEVELS,
            rewards=list(BUILTIN_REWARDS),
            allowed=sorted(jobs.allowed.words),
        )

    return routes


@cache
def recipes() -> list[tuple[str, str, str]]:
    """Name, algorithm and description of the shipped recipes that can be started here."""
    rows: list[tuple[str, str, str]] = []
    for name in shipped_names():
        data = parse(shipped_text(name), name).data
        if is_mapping(data) and read_algorithm(name) in ALGORITHMS:
            rows.append((name, read_algorithm(name), str(data.get("description", ""))))
    return rows


def _recipes(jobs: Jobs) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/recipes", tags=["jobs"])
    estimates = Estimates()

    @routes.get("/keys")
    def keys(algorithm: AlgorithmName = "grpo") -> list[tuple[str, str, str, str]]:
        """Path, type, default and description of each key of a recipe."""
        return [(key.path, key.type, key.default, key.description) for key in shown_keys(RECIPES[algorithm])]

    @routes.post("/check")
    def check_recipe(body: RunRequest) -> Reply:
        """Problems of a recipe, as pairs of a key (or nothing) and a message, the command of the run, and what the keys
        have that are not given.
        """
        problems: list[tuple[str, str]] = []
        try:
            check(body.wanted(), jobs.allowed)
        except ConfigError as error:
            problems = [_placed(problem) for problem in error.problems]
        empty = presets(body.wanted()) if body.algorithm in ALGORITHMS else {}
        return Reply({"problems": problems, "command": shown_command(body.wanted(), jobs), "presets": empty})

    # Not in the schema: it takes a process and seconds, which clients that try all routes should not ask for.
    @routes.post("/estimate", include_in_schema=False)
    async def estimate(body: RunRequest) -> Reply:
        await run_in_threadpool(check, body.wanted(), jobs.allowed)
        facts = await estimates.estimate(body.wanted().words(jobs.root))
        names = (
            "num_parameters",
            "memory_gb",
            "stage_gb",
            "num_items",
            "num_heldout",
            "sample",
            "num_steps",
            "seconds",
        )
        return Reply({name: facts.get(name) for name in names})

    return routes


def _placed(problem: str) -> tuple[str, str]:
    """The key that a problem is about, if any, and what is wrong; a page has no command line to point to."""
    found = re.fullmatch(r"([\w.]+): (.*?)(?: \(command line --\S+\))?", problem, re.DOTALL)
    return (found[1], found[2]) if found else ("", problem)


class Estimates:
    """Estimates by `--dry-run`, one at a time: a new one ends the one before it, whose form has changed."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def estimate(self, words: list[str]) -> dict[str, Any]:
        """The JSON object of the dry run. Raises HTTPException 422 if it fails, 409 if a newer one took its place."""
        _end(self._process)
        process = await asyncio.create_subprocess_exec(
            *command([*words, "--dry-run", "--json"]), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        self._process = process
        try:
            output, complaints = await asyncio.wait_for(process.communicate(), ESTIMATE_S)
        except TimeoutError:
            raise HTTPException(422, f"the estimate took more than {ESTIMATE_S:g} s; it was ended") from None
        finally:
            _end(process)
        if process.returncode == 0:
            return json.loads(output.decode().splitlines()[-1])
        if self._process is not process:
            raise HTTPException(409, "a newer estimate took the place of this one")
        text = complaints.decode("utf-8", "replace")
        raise HTTPException(422, text[max(0, text.rfind("error: ")) :][-2_000:].strip() or "the estimate failed")


def _end(process: Process | None) -> None:
    if process is not None and process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


def _jobs(studio: Studio, jobs: Jobs) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/jobs", tags=["jobs"])

    def job_of(job: Annotated[str, Path(min_length=1, max_length=40)]) -> Job:
        found = jobs.get(job)
        if found is None:
            raise HTTPException(404, "there is no such job")
        return found

    @routes.get("")
    def show_all() -> Reply:
        """The runs that wait or start, the newest first, and those that failed before they had a folder."""
        return Reply({"jobs": [facts_of(job, jobs, studio) for job in jobs.shown()], "max_runs": jobs.max_runs})

    @routes.post("", status_code=202)
    def start(body: RunRequest, caller: Caller, key: JobKey) -> Reply:
        """Have a run started. The answer is sent when the request is on disk; a retry with the same key is the same
        run.
        """
        job = jobs.add(body.wanted(), f"{caller.id}:{key}")
        return Reply(facts_of(job, jobs, studio), 202)

    @routes.get("/{job}")
    def show(found: Annotated[Job, Depends(job_of)]) -> Reply:
        """State, command and output of a job."""
        return Reply(facts_of(found, jobs, studio))

    @routes.delete("/{job}", status_code=204)
    def dismiss(found: Annotated[Job, Depends(job_of)]) -> None:
        """Leave a job out of the list that has failed, or was stopped before it began."""
        jobs.forget(found)

    @routes.post("/{job}/stop", status_code=202)
    def stop(found: Annotated[Job, Depends(job_of)]) -> Reply:
        """Have a run finish its step, save and end, or never start."""
        jobs.stop(found)
        return Reply(facts_of(found, jobs, studio), 202)

    return routes


def _runs(studio: Studio, jobs: Jobs) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/runs/{{run}}", tags=["jobs"])

    @routes.get("/settings")
    def settings(found: Run) -> Reply:
        """The algorithm of a run, and its keys beyond defaults and level as text: what starts it once more."""
        wanted = wanted_like(found.path)
        return Reply({"algorithm": wanted.algorithm, "settings": wanted.settings})

    @routes.put("/labels")
    def label(found: Run, body: LabelsRequest) -> Reply:
        """Name, note and tag a run; its folder keeps its name."""
        write_labels(found.path, Labels(body.title, body.note, clean_tags(body.tags)))
        return Reply(asdict(read_labels(found.path)))

    @routes.delete("", status_code=204)
    def delete(run: str, found: Run) -> None:
        """Delete a run with all that is in its folder, unless it is in use or waits for its turn."""
        jobs.check_unused(found.path)
        studio.delete(run)
        jobs.forget_run(found.path)

    @routes.post("/resume", status_code=202)
    def resume(found: Run, body: ResumeRequest, caller: Caller, key: JobKey) -> Reply:
        """Have a run that has stopped go on from its newest checkpoint; a retry with the same key is the same."""
        algorithm = wanted_like(found.path).algorithm
        if algorithm not in STARTED:
            raise HTTPException(409, "this is no run of a trainer; it cannot go on from here")
        steps = () if body.steps is None else (("run.steps", str(body.steps)),)
        wanted = Wanted(algorithm, settings=steps, resume=str(found.path.relative_to(jobs.root)))
        return Reply(facts_of(jobs.add(wanted, f"{caller.id}:{key}"), jobs, studio), 202)

    return routes
