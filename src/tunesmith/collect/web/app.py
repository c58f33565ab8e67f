"""The app: services, routes, the guard before them, error handlers, and the copying of the trainer's offers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.version import __version__
from tunesmith.collect.store.metric_log import MetricLog
from tunesmith.collect.store.records import PolicyVersion, Rater
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web import access, arena_routes, data_routes, job_routes, routes, studio_routes, watch
from tunesmith.collect.web.api import routes as api
from tunesmith.collect.web.api.endpoint import Endpoint
from tunesmith.collect.web.api.openai import RefusedError
from tunesmith.collect.web.arena import Arena
from tunesmith.collect.web.guard import SECURITY_HEADERS, ApiOrigins, Guard
from tunesmith.collect.web.jobs import Jobs
from tunesmith.collect.web.logins import ENDED_FILE, Ended, Logins, RateLimits, Sessions, read_key
from tunesmith.collect.web.proxies import BehindProxy
from tunesmith.collect.web.services import FAILED, STORE_FAILS, Services, is_set_within, refusal, status_of
from tunesmith.collect.web.settings import ServerSettings
from tunesmith.collect.web.studio import Studio
from tunesmith.collect.web.watch_data import Cached, WatchData
from tunesmith.observe.reports.chart import DARK, LIGHT

if TYPE_CHECKING:
    from tunesmith.collect.statistics.rater_report import CrowdReport

POLL_S = 0.5
"""Seconds between copies of the trainer's offers."""

PRUNE_S = 3600.0
"""Seconds between removals of what is older than the retention."""

NOTE_S = 60.0
"""Seconds between entries of the audit log on failed logins."""

_OFFERS_PER_BATCH = 200
_CROWD_S = 5.0  # for how long what is known of the raters is not computed again
_log = get_logger(__name__)


def create_app(
    settings: ServerSettings,
    votes: VoteStore,
    runs: RunReader,
    studio: Studio | None = None,
    jobs: Jobs | None = None,
    arena: Arena | None = None,
    endpoint: Endpoint | None = None,
) -> FastAPI:
    """The app. The caller owns all that it is given, and closes it after the server has ended."""
    failures = RateLimits(1 / settings.limits.failure_every_s, settings.limits.failures)
    ended = Ended(settings.folder / ENDED_FILE, time.time())
    logins = Logins(votes.reader, Sessions(read_key(settings.folder), ended), failures)
    crowd = Cached(partial(_crowd, votes.reader), max_age_s=_CROWD_S)
    services = Services(settings, votes, runs, logins, asyncio.Event(), _templates(), crowd, studio, jobs, arena)
    watched_votes = VoteWatch(settings.votes_place)
    watched = WatchData(MetricLog(settings.folder), runs, watched_votes)
    of_jobs = () if jobs is None else job_routes.RULES
    of_runs = () if studio is None else studio_routes.RULES
    of_arena = () if arena is None else arena_routes.RULES
    of_endpoint = () if endpoint is None else api.RULES
    of_all = (*access.RULES, *watch.rules(access.API, "rater"))
    table = access.RouteTable((*of_all, *of_arena, *of_endpoint, *of_jobs, *of_runs))
    app = FastAPI(
        title="Tunesmith",
        version=__version__,
        openapi_url=f"{access.API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[
            Middleware(BehindProxy, settings.proxies, settings.root_path, [rule.path for rule in table.rules]),
            Middleware(ApiOrigins, settings.origins),
            Middleware(ServerErrorMiddleware, handler=_explain_failure),
            Middleware(Guard, table=table, logins=logins, settings=settings),
        ],
    )
    app.state.services = services
    own = (routes.sessions(), routes.votes(), routes.presentations(), routes.administration(), routes.pages())
    for router in (*own, *data_routes.routers()):
        app.include_router(router)
    app.include_router(watch.router(access.API, lambda: watched))
    for router in () if endpoint is None else api.routers(endpoint):
        app.include_router(router)
    for router in () if arena is None else arena_routes.routers(arena, watched_votes, crowd):
        app.include_router(router)
    if studio is not None:
        # Before the pages of runs: `/runs/new` is none of a run.
        for router in (*(() if jobs is None else job_routes.routers(studio, jobs)), *studio_routes.routers(studio)):
            app.include_router(router)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    app.add_exception_handler(RequestValidationError, _explain_validation)
    app.add_exception_handler(InputError, _explain)
    app.add_exception_handler(HTTPException, _explain_refusal)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    services: Services = app.state.services
    tasks = [asyncio.create_task(work(services)) for work in (copy_offers, keep_tidy)]
    try:
        yield
    finally:
        services.shutdown.set()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def copy_offers(services: Services) -> None:
    """Copy new offers and versions from `runs.db` to `votes.db` every `POLL_S` until the server ends.

    Each error is logged once, and the copy retried.
    """
    once = Once(get_logger(__name__))
    versions: Sequence[PolicyVersion] = ()
    while not await is_set_within(services.shutdown, POLL_S):
        try:
            versions = await run_in_threadpool(_copy, services, versions)
        except TunesmithError as error:
            once.warning(f"the trainer's offers cannot be read: {error}")


def _copy(services: Services, copied: Sequence[PolicyVersion]) -> Sequence[PolicyVersion]:
    """Copy what is new; returns the versions, of which `copied` are those of the last call."""
    votes, runs = services.votes, services.runs
    campaign_id = services.campaign().id
    cursor = votes.reader.last_offer_id(campaign_id)
    while offers := runs.offers_after(cursor, _OFFERS_PER_BATCH):
        votes.ingest(campaign_id, offers)
        cursor = offers[-1].id
    versions = runs.versions()
    if versions != copied:
        votes.copy_versions(versions)
    return versions


async def keep_tidy(services: Services) -> None:
    """Note failed logins every `NOTE_S`, and remove what is older than the retention at the start and every `PRUNE_S`,
    until the server ends. Each error is logged once, and the work tried again.
    """
    once = Once(get_logger(__name__))
    days, next_s, is_over = services.settings.retention_days, 0.0, False
    while not is_over:
        try:
            if days is not None and time.monotonic() >= next_s:
                next_s = time.monotonic() + PRUNE_S
                await run_in_threadpool(services.votes.prune, days, is_over=services.shutdown.is_set)
            is_over = await is_set_within(services.shutdown, NOTE_S)
            if refused := services.logins.take_refused():
                await run_in_threadpool(services.votes.note, "refused", refused)
        except TunesmithError as error:
            once.warning(f"what is old cannot be removed, or failed logins not be noted: {error}")


def _crowd(reader: VoteReader) -> "CrowdReport":
    # Imported here because numpy takes 0.1 s to load.
    from tunesmith.collect.statistics.rater_report import crowd_report

    return crowd_report(reader.judged_pairs())


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunesmith.collect.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update({"light": LIGHT, "dark": DARK, "version": __version__})  # pyright: ignore[reportUnknownMemberType]
    return environment


async def _explain(request: Request, error: Exception) -> Response:
    """An InputError as its status and message; why the store fails is told on pages of admins alone."""
    assert isinstance(error, InputError), "registered for this error alone"
    status = status_of(error)
    caller: Rater | None = request.scope.get("user")
    is_admins = caller is not None and caller.is_admin and not access.is_api(request.scope["path"])
    if status == 503 and not is_admins:
        _log.warning("the store cannot be used: %s", error)
        return refusal(request, status, STORE_FAILS)
    return refusal(request, status, str(error))


async def _explain_refusal(request: Request, error: Exception) -> Response:
    """Answer what a route refuses, and files that there are not."""
    assert isinstance(error, HTTPException), "registered for this error alone"
    code, param = (error.code, error.param) if isinstance(error, RefusedError) else (None, None)
    return refusal(request, error.status_code, error.detail, error.headers, code, param)


async def _explain_failure(request: Request, error: Exception) -> Response:
    """Answer after an error that no route explains, which goes on to the log. The guard itself may fail: it looks for
    keys in the store.
    """
    if isinstance(error, InputError):
        return await _explain(request, error)
    headers = {**SECURITY_HEADERS, "cache-control": "no-store"}
    return refusal(request, 500, FAILED, headers)


async def _explain_validation(request: Request, error: Exception) -> Response:
    """A validation error without the invalid input, which may be large or not encodable as UTF-8."""
    assert isinstance(error, RequestValidationError), "registered for this error alone"
    errors = error.errors()
    places = [complaint["loc"] for complaint in errors]

    def follows(complaint: Any) -> bool:
        """True if a list is too short because a value in it is wrong, which is told already."""
        num, loc = len(complaint["loc"]), complaint["loc"]
        return complaint["type"] == "too_short" and any(len(place) > num and place[:num] == loc for place in places)

    complaints = [
        f"{'.'.join(str(part) for part in complaint['loc'])}: {complaint['msg']}"
        for complaint in errors
        if not follows(complaint)
    ][:8]
    return refusal(request, 400 if access.is_api(request.scope["path"]) else 422, "; ".join(complaints))
