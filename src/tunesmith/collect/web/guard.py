"""The middleware before every route, which denies what no rule allows.

It checks in this order: the Host header (DNS rebinding), the Origin header (CSRF), the table of routes, the login, the
rate limit, the role, the body (memory exhaustion, parser stack overflow). All responses carry the security headers
(XSS, clickjacking, MIME sniffing).
"""

import asyncio
import re
from contextlib import suppress
from functools import partial
from urllib.parse import SplitResult, quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunesmith.collect.store.records import Rater
from tunesmith.collect.web.access import RouteTable, Rule, is_api
from tunesmith.collect.web.logins import USER_PREFIX, KeyUser, Logins, RateLimits, bearer_of
from tunesmith.collect.web.proxies import forwarded_host, names_of, root_of
from tunesmith.collect.web.services import refusal, wants_page
from tunesmith.collect.web.settings import ServerSettings

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Against cross-site scripting (XSS) by generated text: only this server's files run, nothing else is loaded."""

SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_PLACE = re.compile(r"[\w.:\[\]-]{1,200}", re.ASCII)
_HOST_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_LOG_IN = {"www-authenticate": "Bearer"}
_CLOSE_CONNECTION = {"connection": "close"}
_LARGE = 64 * 1024
"""Bytes of a body that is checked in a thread, so that other requests go on."""

# Possessive quantifiers and an optional closing quote: linear time for every body.
_BRACKET_OR_TEXT = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class ApiOrigins:
    """ASGI middleware that tells browsers which pages of other servers may ask the API: those of `origins`, with a key
    or token in the request, never with a cookie. Other routes are left alone.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it if a browser asks beforehand whether it may be sent."""
        is_shared = scope["type"] == "http" and is_api(scope["path"])
        await (self._shared if is_shared else self._app)(scope, receive, send)


class Guard:
    """ASGI middleware with the checks listed above, by the limits, names and origins of `settings`."""

    def __init__(self, app: ASGIApp, table: RouteTable, logins: Logins, settings: ServerSettings) -> None:
        self._app = app
        self._origins = settings.origins
        self._table = table
        self._logins = logins
        self._limits = settings.limits
        self._places = frozenset(host.lower() for host in settings.hosts)
        self._hosts = frozenset({*_LOCAL_NAMES, *(_name(place) for place in self._places)})
        self._rates = RateLimits(self._limits.rate_per_s, self._limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it. The rater who sent it is `request.user`."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        rule = self._table.find(scope["method"], scope["path"])
        send = _with_security_headers(send, rule)
        try:
            body = await self._admit(Request(scope, receive), rule)
        except HTTPException as error:
            request = Request(scope)
            response = refusal(request, error.status_code, error.detail, error.headers)
            if error.status_code == 401 and rule is not None and rule.is_page:
                response = RedirectResponse(_login_address(request), 303)
            await response(scope, receive, send)
            return
        app = _head_of(self._app) if scope["method"] == "HEAD" else self._app
        if rule is not None and rule.is_file:
            receive_body = _limited_body(receive, rule.max_body, self._limits.body_timeout_s)
        else:
            receive_body = _replay_body(body, receive)
        await app(scope, receive_body, send)

    async def _admit(self, request: Request, rule: Rule | None) -> bytes:
        """The checked body for the route. Raises HTTPException if the request is denied."""
        self._check_host(request)
        is_shared = is_api(request.scope["path"]) and request.headers.get("origin") in self._origins
        if not is_shared or len(request.headers.getlist("origin")) > 1:
            _check_origin(request, self._logins.sessions.cookie, self._places)
        if rule is None and wants_page(request):
            raise self._not_found(request.scope["path"])
        caller: Rater | None = None
        if rule is None or rule.access != "public":
            caller = request.scope["user"] = await self._identify(request)
            # A user of a key does not take the turns of the others.
            wait_s = self._rates.take(f"{caller.id} {caller.user}" if isinstance(caller, KeyUser) else str(caller.id))
            if wait_s:
                raise _too_many(wait_s)
        if rule is None:
            raise self._not_found(request.scope["path"])
        if caller is not None:
            _check_access(rule, caller)
        return await self._body(request, rule)

    def _check_host(self, request: Request) -> None:
        """Reject unknown names of this server (DNS rebinding): in the Host header and, since any client can send it
        along, in that of a trusted proxy too.
        """
        if len(request.headers.getlist("host")) > 1:
            raise HTTPException(400, "the request has more than one Host header")
        # The server's own address is allowed too: a rebinding page's Host is a domain name, never this address.
        own = str((request.scope.get("server") or ("", 0))[0]).lower()
        given = (request.headers.get("host", ""), forwarded_host(request))
        for place in given[: 2 if given[1] else 1]:
            name = _name(place)
            if not name or (name not in self._hosts and name != own):
                shown = f"; start it with --allow-host {name}" if _HOST_NAME.fullmatch(name) else ""
                raise HTTPException(400, f"this server does not answer to that host name{shown}")

    async def _identify(self, request: Request) -> Rater:
        """The rater of the token or cookie. Raises HTTPException 401 or, after many failures, 429."""
        bearer, cookie = bearer_of(request), request.cookies.get(self._logins.sessions.cookie, "")
        if not bearer and not cookie:
            what = "give a key of the API" if is_api(request.scope["path"]) else "log in first"
            raise HTTPException(401, f"{what}: send `Authorization: Bearer TOKEN`", _LOG_IN)
        caller = await self._logins.identify(bearer, cookie)
        if caller is None:
            # Looked up first: a right token is let in even while somebody at the same address guesses.
            wait_s = self._logins.refuse(address_of(request))
            if wait_s:
                raise _too_many(wait_s)
            key = "token of a user" if bearer.startswith(USER_PREFIX) else "key of the API"
            what = key if is_api(request.scope["path"]) else "login"
            raise HTTPException(401, f"this {what} is unknown, has expired or was ended", _LOG_IN)
        return caller

    def _not_found(self, path: str) -> HTTPException:
        methods = sorted({method for rule in self._table.at(path) for method in rule.methods})
        methods += ["HEAD"] if "GET" in methods else []
        if methods:
            return HTTPException(405, f"use {' or '.join(methods)} here", {"allow": ", ".join(methods)})
        # Only a proxy that leaves its prefix in the path asks for a page below another one.
        parts = path.split("/")
        below = ("/" + "/".join(parts[place:]) for place in range(2, len(parts)))
        if any(
            rule.is_page or rule.path == "/login" for tail in below if len(tail) > 1 for rule in self._table.at(tail)
        ):
            prefixed = f"; behind a proxy that serves it below {'/'.join(parts[:2])}, start it with --root-path"
            return HTTPException(404, f"there is nothing at this address{prefixed}")
        return HTTPException(404, "there is nothing at this address")

    async def _body(self, request: Request, rule: Rule) -> bytes:
        """The checked body, empty for a file, which its route reads. Raises HTTPException if it is too large, too slow,
        not declared as JSON, nested too deep, or of too many values.
        """
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > rule.max_body:
            raise _too_large(rule.max_body)
        if rule.is_file:
            _check_type(request, "application/octet-stream")
            return b""
        timeout_s = self._limits.body_timeout_s
        try:
            body = await asyncio.wait_for(_read(request, rule.max_body), timeout_s)
        except TimeoutError:
            slow = f"the body did not arrive within {timeout_s:g} seconds"
            raise HTTPException(408, slow, _CLOSE_CONNECTION) from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away") from None
        if not body:
            return body
        if request.method in _SAFE_METHODS:
            raise HTTPException(400, "a request that reads has no body")
        _check_type(request, "application/json")
        limits = self._limits
        check = partial(_fault, body, limits.json_depth, limits.json_values)
        fault = check() if len(body) < _LARGE else await run_in_threadpool(check)
        if fault is not None:
            raise HTTPException(400, fault)
        return body


def _check_access(rule: Rule, caller: Rater) -> None:
    """Raise HTTPException 403 if the caller may not use this route."""
    if not is_api(rule.path):
        if caller.scopes is not None:
            what = "token of a user of a key" if isinstance(caller, KeyUser) else "key"
            raise HTTPException(403, f"this is a {what} of the API; pages want the login of a person")
        if rule.access == "admin" and not caller.is_admin:
            raise HTTPException(403, "only an admin may do this")
    elif rule.access == "key" and caller.scopes is not None:
        if isinstance(caller, KeyUser):
            raise HTTPException(403, "this needs a key of the API, and this is a token of a user of one")
    elif rule.access not in (caller.scopes or ()) and "admin" not in (caller.scopes or ()):
        what = "token of a user" if isinstance(caller, KeyUser) else "key"
        known = "the login of a person" if caller.scopes is None else f"a {what} for {', '.join(caller.scopes)}"
        raise HTTPException(403, f"this needs a key of the API with the scope {rule.access}, and this is {known}")


def address_of(request: HTTPConnection) -> str:
    """The network address of the sender."""
    return request.client.host if request.client else "unknown"


def is_deeper(body: bytes, limit: int) -> bool:
    """True if brackets outside of strings are nested deeper than `limit`, whether or not `body` is JSON."""
    return _fault(body, limit, len(body)) is not None


def _fault(body: bytes, max_depth: int, max_values: int) -> str | None:
    """The reason why `body` is not parsed, whether or not it is JSON; None if there is none."""
    depth = num_values = 0
    for match in _BRACKET_OR_TEXT.finditer(body):
        step = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
        depth += step
        num_values += step >= 0
        if depth > max_depth:
            return f"the body is nested deeper than {max_depth} levels"
        if num_values > max_values:
            return f"the body has more than {max_values:,} texts, objects and lists; send less at a time"
    return None


async def _read(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises HTTPException as soon as more than `max_bytes` were received."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _check_type(request: Request, wanted: str) -> None:
    """Reject other types. A cross-origin form cannot send these two without a CORS preflight (CSRF)."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
        raise HTTPException(415, f"the body must be {wanted}")


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {max_bytes:,} bytes", _CLOSE_CONNECTION)


def _too_many(wait_s: int) -> HTTPException:
    return HTTPException(429, f"too many requests; try again in {wait_s} s", {"retry-after": str(wait_s)})


def _with_security_headers(send: Send, rule: Rule | None) -> Send:
    """`send` that adds the security headers and, except for static files, `cache-control: no-store`."""
    is_cacheable = rule is not None and rule.path.startswith("/static/")
    policy = {"content-security-policy": rule.policy} if rule is not None and rule.policy else {}

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            headers.update({**SECURITY_HEADERS, **policy})
            headers["cache-control"] = "no-cache" if is_cacheable else "no-store"
            message = {**message, "headers": headers.raw}
        await send(message)

    return send_more


class _HeadSent(Exception):
    """Ends a route whose status and headers are all that was asked for."""


def _head_of(app: ASGIApp) -> ASGIApp:
    """The app that answers HEAD as `app` answers GET, without the body, which is not made: a stream would not end."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                await send({"type": "http.response.body", "body": b""})
                raise _HeadSent

        with suppress(_HeadSent):
            await app({**scope, "method": "GET"}, receive, send_head)

    return answer


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first, then the messages of the connection, such as its end."""
    waiting = [body]

    async def receive_body() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_body


def _limited_body(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    """`receive` that raises HTTPException after more than `max_bytes`, or if nothing comes for `timeout_s`."""
    num_bytes = 0
    is_whole = False

    async def receive_part() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), timeout_s)
        except TimeoutError:
            raise HTTPException(408, f"nothing arrived within {timeout_s:g} seconds", _CLOSE_CONNECTION) from None
        num_bytes += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    return receive_part


def _check_origin(request: Request, cookie: str, places: frozenset[str]) -> None:
    """Reject requests from pages of other origins (CSRF), by the Fetch Metadata headers of the browser or by Origin.

    `places` are further names of this server, a port included if it is not that of the scheme.
    """
    site, is_safe = request.headers.get("sec-fetch-site", ""), request.method in _SAFE_METHODS
    if site == "same-origin":
        return  # the browser compared the origins, and no page can set this header
    names = names_of(request)
    for origin in request.headers.getlist("origin"):
        place = _split(origin).netloc.lower()
        if place not in names and place not in places:
            raise HTTPException(403, _foreign(place, names[-1] if names else ""))
    if "origin" in request.headers:
        return
    is_navigation = request.headers.get("sec-fetch-mode") == "navigate" and is_safe
    if site in ("cross-site", "same-site") and not is_navigation:
        raise HTTPException(403, _foreign("", ""))
    if not is_safe and request.cookies.get(cookie) and not bearer_of(request):
        raise HTTPException(403, "a request with a session cookie must say its Origin")


def _foreign(place: str, host: str) -> str:
    """Why a request is refused that comes from a page at `place` and was sent to `host`, and the remedy."""
    refused = "this request comes from a page of another server"
    if not _PLACE.fullmatch(place) or not _PLACE.fullmatch(host):
        return refused
    return (
        f"{refused}: from {place}, to {host}. If {place} is a proxy before this one, let it pass on the Host header "
        f"(nginx: `proxy_set_header Host $http_host;`), or start this one with --allow-host {place}"
    )


def _login_address(request: Request) -> str:
    """The login page, which goes on to the address of the request."""
    path, query = request.scope["path"].lstrip("/"), request.scope.get("query_string", b"").decode("latin-1")
    target = f"{quote(path)}?{query}" if query else quote(path)
    return f"{root_of(request)}login" + (f"?next={quote(target, safe='')}" if target else "")


def _name(place: str) -> str:
    """The host name of a Host header, in lower case, without port and brackets; empty if it is invalid."""
    return _split(f"//{place}").hostname or ""


def _split(address: str) -> SplitResult:
    """The parts of an address such as `http://127.0.0.1:8000`; all are empty if it is invalid."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")
