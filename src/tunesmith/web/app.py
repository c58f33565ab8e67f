"""Puts the app together: services, routes, the guard before them, and what happens to errors."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from tunesmith import __version__
from tunesmith.core.errors import InputError, StoreError, TunesmithError, UnknownPresentationError, VoteConflictError
from tunesmith.core.log import Once, get_logger
from tunesmith.reports.chart import DARK, LIGHT
from tunesmith.store.records import PolicyVersion
from tunesmith.store.runs import RunReader
from tunesmith.store.votes import VoteStore
from tunesmith.web import access, admin, pages, session_routes, vote_routes, watch
from tunesmith.web.guard import Guard
from tunesmith.web.logins import Buckets, Links, Logins, Sessions, read_key
from tunesmith.web.services import Lifetime, Services
from tunesmith.web.settings import ServerSettings

POLL_S = 0.5
_BATCH = 200


class Copier:
    """Copies what is new since the last call. One call at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._versions: Sequence[PolicyVersion] = ()

    def copy(self) -> int:
        """Number of items that were made of new offers."""
        votes, runs = self._services.votes, self._services.runs
        campaign_id = self._services.campaign().id
        made, cursor = 0, votes.reader.last_offer_id(campaign_id)
        while offers := runs.offers_after(cursor, _BATCH):
            made += votes.ingest(campaign_id, offers)
            cursor = offers[-1].id
        versions = runs.versions()
        if versions != self._versions:
            votes.copy_versions(versions)
            self._versions = versions
        return made


async def keep_copying(services: Services) -> None:
    """Copy every `POLL_S` until the server ends. What goes wrong is said once and tried again."""
    once = Once(get_logger(__name__))
    copier = Copier(services)
    while not await services.lifetime.sleep(POLL_S):
        try:
            await run_in_threadpool(copier.copy)
        except TunesmithError as error:
            once.warning(f"the trainer's offers cannot be read: {error}")


_STATUS: tuple[tuple[type[InputError], int], ...] = (
    (UnknownPresentationError, 404),
    (VoteConflictError, 409),
    # The database is busy, full or broken: the client keeps what it has and tries again.
    (StoreError, 503),
    (InputError, 422),
)


def create_app(settings: ServerSettings, votes: VoteStore, runs: RunReader) -> FastAPI:
    """The app. `votes` and `runs` belong to the caller, who closes them after the server has ended."""
    lifetime = Lifetime()
    failures = Buckets(1 / settings.limits.failure_every_s, settings.limits.failures)
    logins = Logins(votes, Sessions(read_key(settings.folder)), Links(), failures)
    services = Services(settings, votes, runs, logins, lifetime, _templates())
    table = access.RouteTable((*access.RULES, *watch.RULES))
    app = FastAPI(
        title="Tunesmith",
        version=__version__,
        openapi_url=f"{access.API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[Middleware(Guard, table=table, logins=logins, limits=settings.limits, hosts=settings.hosts)],
    )
    app.state.services = services
    for router in (
        session_routes.router(),
        vote_routes.router(),
        admin.router(),
        pages.router(),
        watch.watch_router(),
    ):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    app.add_exception_handler(RequestValidationError, _explain_validation)
    app.add_exception_handler(InputError, _explain)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    services: Services = app.state.services
    copying = asyncio.create_task(keep_copying(services))
    try:
        yield
    finally:
        services.lifetime.end()
        with suppress(asyncio.CancelledError):
            await copying


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunesmith.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update({"light": LIGHT, "dark": DARK, "version": __version__})  # pyright: ignore[reportUnknownMemberType]
    return environment


async def _explain(request: Request, error: Exception) -> JSONResponse:
    """Bad input that a store refused, as its message and a status."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return _reply(status, str(error))


async def _explain_validation(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, without a copy of what was sent: that may be large, or have no UTF-8 form."""
    assert isinstance(error, RequestValidationError), "registered for this error alone"
    complaints = [
        f"{'.'.join(str(part) for part in complaint['loc'])}: {complaint['msg']}" for complaint in error.errors()[:8]
    ]
    return _reply(422, "; ".join(complaints))


def _reply(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail.encode("utf-8", "replace").decode()}, status)
