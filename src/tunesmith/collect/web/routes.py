"""Routes of sessions, voting, administration, and the pages that their scripts fill."""

import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, RedirectResponse

from tunesmith.collect.store.records import Progress, Rater, VoteReceipt
from tunesmith.collect.store.vote_stats import VoteStats
from tunesmith.collect.web.access import API
from tunesmith.collect.web.api.people import Before, Limit, entry_row
from tunesmith.collect.web.guard import address_of
from tunesmith.collect.web.logins import bearer_of
from tunesmith.collect.web.markdown import html_of
from tunesmith.collect.web.messages import (
    MAX_PREFETCH,
    AnsweredReply,
    CommandReply,
    CrowdReply,
    DemonstrationRequest,
    GuidelinesReply,
    InviteReply,
    JoinReply,
    JoinRequest,
    NextReply,
    OwnReply,
    PresentationReply,
    RankingRequest,
    RaterReply,
    RaterRequest,
    SessionReply,
    SessionRequest,
    VoteRequest,
)
from tunesmith.collect.web.proxies import prefix_of, root_of
from tunesmith.collect.web.services import Caller, Services, ServicesOf, page

Found = TypeVar("Found")
Id = Annotated[int, Path(ge=0, le=2**63 - 1)]
PresentationToken = Annotated[str, Path(min_length=1, max_length=200)]
RequestKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Identifies this request: a retry with the same key returns the first response.",
    ),
]

_DAY_S = 24 * 3600
_UNKNOWN = "this token is unknown, has expired or was used"


def pages() -> APIRouter:
    """The pages `/`, `/vote`, `/votes`, `/watch`, `/raters`, `/login` and `/join/{invite}`."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def start(request: Request, services: ServicesOf) -> RedirectResponse:
        # A known prefix, because below a bare `/prefix` a relative address would be one beside it.
        root = f"{prefix_of(request)}/" if prefix_of(request) else root_of(request)
        return RedirectResponse(f"{root}{'vote' if services.studio is None else 'runs'}", 303)

    @routes.get("/vote")
    def vote(request: Request, services: ServicesOf) -> HTMLResponse:
        return page(request, "vote.html", guidelines=html_of(services.campaign().settings.guidelines))

    @routes.get("/votes")
    def answered(request: Request) -> HTMLResponse:
        return page(request, "votes.html")

    @routes.get("/watch")
    def watch(request: Request, caller: Caller) -> HTMLResponse:
        return page(request, "watch.html", base="", may_roll_back=caller.is_admin)

    @routes.get("/raters")
    def raters(request: Request) -> HTMLResponse:
        return page(request, "raters.html")

    @routes.get("/login")
    def log_in(request: Request) -> HTMLResponse:
        return page(request, "login.html")

    @routes.get("/join/{invite}")
    def join(invite: str, request: Request) -> HTMLResponse:
        return page(request, "join.html")

    return routes


def sessions() -> APIRouter:
    """Logging in and out: `session` and `join` under `/api/v1`."""
    routes = APIRouter(prefix=API, tags=["session"])

    @routes.post("/session")
    def log_in(body: SessionRequest, request: Request, response: Response, services: ServicesOf) -> SessionReply:
        """Begin a session: sets a cookie, whose value is valid as a bearer token too."""

        def find() -> Rater | None:
            rater_id = services.logins.sessions.use_link(body.token)
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

        joined = _limited(lambda: services.votes.redeem(body.token, name=name or None), request, services)
        services.logins.forget()
        _set_cookie(joined.rater.id, request, response, services)
        return JoinReply(name=joined.rater.name, role=joined.rater.role, token=joined.token)

    @routes.get("/session")
    def show(caller: Caller) -> SessionReply:
        """Who is logged in."""
        return SessionReply(name=caller.name, role=caller.role)

    @routes.delete("/session", status_code=204)
    def log_out(request: Request, response: Response, services: ServicesOf) -> None:
        """End the session: its cookie, or the same as a bearer token, is worth nothing afterwards."""
        cookie = services.logins.sessions.cookie
        services.logins.log_out(bearer_of(request), request.cookies.get(cookie, ""))
        for path in {"/", prefix_of(request) or "/"}:  # logged in directly, or through the proxy
            response.delete_cookie(cookie, path, httponly=True, samesite="strict")

    return routes


def votes() -> APIRouter:
    """The questions and answers of a rater: `next`, `votes`, `raters/me`, `progress`, `guidelines` under `/api/v1`."""
    routes = APIRouter(prefix=API, tags=["votes"])

    @routes.get("/next")
    def show_next(
        caller: Caller, services: ServicesOf, count: Annotated[int, Query(ge=1, le=MAX_PREFETCH)] = 2
    ) -> NextReply:
        """Presentations to judge next: those that this rater holds, then fresh ones; none if nothing is left."""
        campaign_id = services.campaign().id
        shown = services.votes.next_presentations(caller.id, campaign_id, count)
        progress = services.votes.reader.progress(caller.id, campaign_id)
        return NextReply(presentations=[PresentationReply.of(one) for one in shown], progress=progress)

    @routes.get("/votes")
    def answered(
        caller: Caller,
        services: ServicesOf,
        count: Annotated[int, Query(ge=1, le=MAX_PREFETCH)] = MAX_PREFETCH,
        before: Annotated[str, Query(max_length=200)] = "",
    ) -> list[AnsweredReply]:
        """The caller's answers, newest first: votes, rankings and skips, which the routes of their presentation change.
        `before` is the token of the last presentation of the page before.
        """
        said = services.votes.reader.answered(caller.id, services.campaign().id, count, before)
        return [AnsweredReply.of(one) for one in said]

    @routes.get("/raters/me")
    def own(caller: Caller, services: ServicesOf) -> OwnReply:
        """What the votes say of the caller, and of nobody else, as of some seconds ago."""
        return OwnReply.of(services.crowd().raters.get(caller.id))

    @routes.get("/progress")
    def progress(caller: Caller, services: ServicesOf) -> Progress:
        """Counts of this rater and the campaign."""
        return services.votes.reader.progress(caller.id, services.campaign().id)

    @routes.get("/guidelines")
    def guidelines(services: ServicesOf) -> GuidelinesReply:
        """The campaign's guidelines for raters."""
        text = services.campaign().settings.guidelines
        return GuidelinesReply(text=text, html=html_of(text))

    return routes


def presentations() -> APIRouter:
    """The answers to one presentation, and their changes: `presentations/{token}/...` under `/api/v1`."""
    routes = APIRouter(prefix=f"{API}/presentations/{{token}}", tags=["votes"])

    @routes.put("/vote")
    def vote(
        token: PresentationToken, body: VoteRequest, caller: Caller, services: ServicesOf, key: RequestKey = None
    ) -> VoteReceipt:
        """Vote, or change the vote. The response is sent when the vote is on disk; a retry changes nothing."""
        return services.votes.vote(token, caller.id, body.verdict, body.reason, body.dwell_ms, key)

    @routes.delete("/vote")
    def withdraw(token: PresentationToken, caller: Caller, services: ServicesOf, key: RequestKey = None) -> VoteReceipt:
        """Undo a vote or a ranking: the presentation is open again. A retry changes nothing."""
        return services.votes.withdraw(token, caller.id, request_key=key)

    @routes.put("/ranking")
    def rank(
        token: PresentationToken, body: RankingRequest, caller: Caller, services: ServicesOf, key: RequestKey = None
    ) -> VoteReceipt:
        """Rank the answers, or change the ranking."""
        return services.votes.rank(token, caller.id, body.ranks, body.dwell_ms, key, reason=body.reason)

    @routes.put("/demonstration")
    def demonstrate(
        token: PresentationToken,
        body: DemonstrationRequest,
        caller: Caller,
        services: ServicesOf,
        key: RequestKey = None,
    ) -> VoteReceipt:
        """Write a better answer, in addition to the vote."""
        return services.votes.demonstrate(token, caller.id, body.text, key)

    return routes


def administration() -> APIRouter:
    """Routes for admins under `/api/v1`: raters and their estimates, rollbacks, the audit log, statistics."""
    routes = APIRouter(prefix=API, tags=["admin"])

    @routes.get("/raters")
    def raters(services: ServicesOf) -> list[RaterReply]:
        """All raters, oldest first."""
        return _replies(services)

    @routes.post("/raters", status_code=201)
    def invite(body: RaterRequest, request: Request, caller: Caller, services: ServicesOf) -> InviteReply:
        """Create a rater and an invitation for them. A rater whom imported votes brought keeps their votes.

        The link begins with the path prefix, if it is known.
        """
        expires_at = time.time() + body.invite_days * _DAY_S
        new = services.votes.add_rater(body.name, body.role, invited_by=caller.id, expires_at=expires_at)
        link = f"{prefix_of(request)}/join/{new.token}"
        return InviteReply(rater=RaterReply.model_validate(new.rater), token=new.token, link=link)

    @routes.delete("/raters/{rater_id}", status_code=204)
    def shut_out(rater_id: Id, caller: Caller, services: ServicesOf) -> None:
        """End a rater's access; their votes stay."""
        if rater_id == caller.id:
            raise HTTPException(409, "this is your own access; ask another admin to end it")
        found = next((rater for rater in _replies(services) if rater.id == rater_id), None)
        if found is None:
            raise HTTPException(404, f"there is no rater {rater_id}")
        if found.user_of is not None:
            raise HTTPException(409, "users of a key have no access of their own; end that of the key")
        services.votes.disable_rater(rater_id, by=caller.id)
        services.logins.forget()

    @routes.post("/versions/{version}/rollback", status_code=202)
    def roll_back(version: Id, caller: Caller, services: ServicesOf) -> CommandReply:
        """Ask the trainer to serve this version again."""
        known = [one.version for one in services.runs.versions()]
        if version not in known:
            raise HTTPException(404, f"there is no version {version}")
        return CommandReply(id=services.votes.command("rollback", str(version), caller.id))

    @routes.get("/audit")
    def audit(services: ServicesOf, before: Before = None, limit: Limit = 20) -> list[dict[str, Any]]:
        """The newest entries of the audit log, or those before an entry."""
        return [entry_row(one) for one in services.votes.reader.audit(before, limit)]

    @routes.get("/raters/estimates")
    def estimates(services: ServicesOf) -> CrowdReply:
        """How far each rater's votes can be relied on, and what all are worth, as of some seconds ago."""
        return CrowdReply.of(services.crowd())

    @routes.get("/stats")
    def stats(services: ServicesOf) -> VoteStats:
        """Counts, agreement, biases and the raters' accuracy on known answers."""
        return services.votes.reader.stats(services.campaign().id)

    return routes


def _replies(services: Services) -> list[RaterReply]:
    """All raters, oldest first; whom a key has brought is a user of it, since keys cannot invite."""
    known = services.votes.reader.raters()
    keys = {one.id for one in known if one.scopes is not None}
    return [
        RaterReply.model_validate(one).model_copy(
            update={"user_of": one.invited_by if one.scopes is None and one.invited_by in keys else None}
        )
        for one in known
    ]


def _limited(find: Callable[[], Found | None], request: Request, services: Services) -> Found:
    """The result of `find`, or 401; for addresses with too many failures 429, which a right token never gets."""
    found = find()
    if found is None:
        wait_s = services.logins.refuse(address_of(request))
        if wait_s:
            raise HTTPException(429, f"too many wrong tokens; try again in {wait_s} s", {"retry-after": str(wait_s)})
        raise HTTPException(401, _UNKNOWN)
    return found


def _set_cookie(rater_id: int, request: Request, response: Response, services: Services) -> None:
    seconds = int(services.settings.session_days * _DAY_S)
    response.set_cookie(
        services.logins.sessions.cookie,
        services.logins.sessions.sign(rater_id, time.time() + seconds),
        max_age=seconds,
        path=prefix_of(request) or "/",
        httponly=True,
        samesite="strict",
        # Behind a TLS proxy the browser must never send the cookie in clear text.
        secure=request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://"),
    )
