"""Logging in and out."""

import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import HTTPException

from tunesmith.store.records import NewRater, Rater
from tunesmith.web.access import API
from tunesmith.web.messages import JoinReply, JoinRequest, SessionReply, SessionRequest
from tunesmith.web.services import Caller, Services, ServicesOf

Found = TypeVar("Found")

_DAY_S = 24 * 3600
_UNKNOWN = "this token is unknown, has expired or was used"


def router() -> APIRouter:
    """Routes under `/api/v1`: `session` and `join`."""
    routes = APIRouter(prefix=API, tags=["session"])

    @routes.post("/session")
    def log_in(body: SessionRequest, request: Request, response: Response, services: ServicesOf) -> SessionReply:
        """Begin a session: sets a cookie, whose value is valid as a bearer token too."""

        def find() -> Rater | None:
            rater_id = services.logins.links.use(body.token)
            if rater_id is not None:
                return services.logins.rater(rater_id)
            return services.votes.reader.rater_of(body.token)

        rater = _limited(find, request, services)
        _set_cookie(rater.id, request, response, services)
        return SessionReply(name=rater.name, role=rater.role)

    @routes.post("/join")
    def join(body: JoinRequest, request: Request, response: Response, services: ServicesOf) -> JoinReply:
        """Accept an invitation: begins a session and returns a personal token, which replaces the invitation's."""
        name = body.name.strip() if body.name else None

        def find() -> NewRater | None:
            invited = services.votes.reader.rater_of(body.token)
            others = [rater.name for rater in services.votes.reader.raters() if invited and rater.id != invited.id]
            if name in others:
                raise HTTPException(409, f"the name {name!r} is taken; choose another")
            return services.votes.redeem(body.token, name=name or None)

        joined = _limited(find, request, services)
        services.logins.forget()
        _set_cookie(joined.rater.id, request, response, services)
        return JoinReply(name=joined.rater.name, role=joined.rater.role, token=joined.token)

    @routes.get("/session")
    def show(caller: Caller) -> SessionReply:
        """Who is logged in."""
        return SessionReply(name=caller.name, role=caller.role)

    @routes.delete("/session", status_code=204)
    def log_out(response: Response, services: ServicesOf) -> None:
        """End the session of this browser."""
        response.delete_cookie(services.logins.cookie, httponly=True, samesite="strict")

    return routes


def _limited(find: Callable[[], Found | None], request: Request, services: Services) -> Found:
    """The result of `find`, or 401. Addresses with too many failures get 429, even for a correct token."""
    address = request.client.host if request.client else "unknown"
    failures = services.logins.failures
    wait_s = failures.wait_s(address)
    if wait_s:
        raise HTTPException(429, f"too many wrong tokens; try again in {wait_s} s", {"retry-after": str(wait_s)})
    found = find()
    if found is None:
        failures.take(address)
        raise HTTPException(401, _UNKNOWN)
    return found


def _set_cookie(rater_id: int, request: Request, response: Response, services: Services) -> None:
    seconds = int(services.settings.session_days * _DAY_S)
    response.set_cookie(
        services.logins.cookie,
        services.logins.sessions.sign(rater_id, time.time() + seconds),
        max_age=seconds,
        httponly=True,
        samesite="strict",
        # Behind a TLS proxy the browser must never send the cookie in clear text.
        secure=request.headers.get("origin", "").startswith("https://"),
    )
