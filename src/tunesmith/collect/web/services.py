"""Dependencies of routes: the stores, the logins, the shutdown event, and the caller."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import jinja2
from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import HTTPConnection
from starlette.responses import Response

from tunesmith.base.core.errors import (
    DataDeletedError,
    InputError,
    NameTakenError,
    RunError,
    StoreError,
    UnknownPresentationError,
    VoteConflictError,
)
from tunesmith.collect.store.records import Campaign, CampaignSettings, Rater
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API, is_anthropics, is_api
from tunesmith.collect.web.arena import Arena
from tunesmith.collect.web.jobs import Jobs
from tunesmith.collect.web.logins import Logins
from tunesmith.collect.web.proxies import root_of
from tunesmith.collect.web.settings import ServerSettings
from tunesmith.collect.web.studio import Studio

if TYPE_CHECKING:
    from tunesmith.collect.statistics.rater_report import CrowdReport

STORE_FAILS = "what is stored cannot be used at the moment; try again in a moment"
"""Message in place of the reason, which names files, addresses and users of the database: it is in the log."""

FAILED = "the server failed at this request; its log says why"
"""Message in place of an error that nothing explains."""

_STATUS: tuple[tuple[type[InputError], int], ...] = (
    (UnknownPresentationError, 404),
    (VoteConflictError, 409),
    (NameTakenError, 409),
    (DataDeletedError, 401),
    (RunError, 409),
    # The database is busy, full or damaged: the client keeps the request and retries.
    (StoreError, 503),
    (InputError, 422),
)


def status_of(error: InputError) -> int:
    """The status of a response to a request that ends with this error."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """True as soon as `event` is set; False after `seconds`."""
    try:
        return await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one app. `votes` is written here; `runs` is read, and its file may not exist yet. `shutdown` is set
    when the server ends, so that streams return. `crowd` is what the votes say of their raters, computed now and then.
    `studio` has the runs that admins see, if there are any, and `jobs`
    those that they start. In the `arena` people talk with models. `num_streams` has each rater's open streams.
    """

    settings: ServerSettings
    votes: VoteStore
    runs: RunReader
    logins: Logins
    shutdown: asyncio.Event
    templates: jinja2.Environment
    crowd: "Callable[[], CrowdReport]"
    studio: Studio | None = None
    jobs: Jobs | None = None
    arena: Arena | None = None
    num_streams: Counter[int] = field(default_factory=Counter[int])

    def campaign(self) -> Campaign:
        """The newest open campaign; if there is none, a new one with the default settings."""
        for campaign in reversed(self.votes.reader.campaigns()):
            if campaign.closed_at is None:
                return campaign
        return self.votes.set_campaign(CampaignSettings())


def services_of(request: Request) -> Services:
    """The services of the request's app."""
    return request.app.state.services


def caller_of(request: Request) -> Rater:
    """The rater who sent the request, which the guard sets on every route that is not public."""
    return request.user


def page(request: HTTPConnection, template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """A rendered template for the one who asks, with addresses relative to that of the request.

    The caller decides which links the navigation bar has; `here` is the current one, by default the request's path.
    """
    services: Services = request.app.state.services
    caller: Rater | None = request.scope.get("user")
    pages = [("/vote", "Vote"), ("/votes", "My votes"), ("/watch", "Watch")] if services.studio is None else []
    if services.arena is not None:
        pages += [("/arena", "Arena"), ("/leaderboard", "Leaderboard")]
    if caller is not None and caller.is_admin:
        pages += [] if services.studio is None else [("/runs", "Runs")]
        pages += [("/raters", "Raters"), ("/data", "Data")]
    # What a browser keeps is for this rater of this server.
    who = "" if caller is None else f"{services.logins.sessions.cookie}.{caller.id}"
    given = {
        "who": who,
        "caller": caller,
        "pages": pages,
        "here": request.scope["path"],
        "root": root_of(request),
        **context,
    }
    return HTMLResponse(services.templates.get_template(template).render(given), status)


def refusal(
    request: HTTPConnection,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
    param: str | None = None,
) -> Response:
    """Why a request is not answered: a page for people who look at an address in a browser, else JSON; to a client of
    the API in OpenAI's form, with `code` and `param`, or in Anthropic's.
    """
    detail = detail.encode("utf-8", "replace").decode()
    if is_anthropics(request.scope["path"]):
        return JSONResponse(anthropic_error(status, detail), status, dict(headers or {}))
    if is_api(request.scope["path"]):
        return JSONResponse(error_body(status, detail, code, param), status, dict(headers or {}))
    if wants_page(request):
        response = page(request, "refused.html", status=status, detail=detail, code=status)
        response.headers.update(headers or {})
        return response
    return JSONResponse({"detail": detail}, status, dict(headers or {}))


def error_body(status: int, detail: str, code: str | None = None, param: str | None = None) -> dict[str, object]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    code = code or {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, detail: str) -> dict[str, object]:
    """An error in Anthropic's form."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": detail}}


def wants_page(request: HTTPConnection) -> bool:
    """True if a browser asks for a page, to be shown as such."""
    is_read = request.scope["method"] in ("GET", "HEAD")
    accepted = request.headers.get("accept", "")
    return is_read and "text/html" in accepted and not request.scope["path"].startswith(f"{API}/")


ServicesOf = Annotated[Services, Depends(services_of)]
"""Type of a route's parameter that receives the services."""

Caller = Annotated[Rater, Depends(caller_of)]
"""Type of a route's parameter that receives the rater who sent the request."""
