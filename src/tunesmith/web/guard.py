"""The middleware before every route, which denies what no rule allows.

It checks in this order: the Host header (DNS rebinding), the Origin header (CSRF), the table of routes, the login, the
rate limit, the role, the body (memory exhaustion, parser stack overflow). All responses carry the security headers
(XSS, clickjacking, MIME sniffing).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.web.access import RouteTable, Rule
from tunesmith.web.http import (
    Refusal,
    is_deeper,
    read_body,
    replay_body,
    send_redirect,
    send_refusal,
    too_large,
    too_many,
    with_security_headers,
)
from tunesmith.web.logins import Identity, Logins, RateLimits
from tunesmith.web.settings import Limits

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_IDENTITY = "tunesmith.identity"
_LOG_IN = ((b"www-authenticate", b"Bearer"),)


def identity_of(scope: Scope) -> Identity | None:
    """The identity of the request; None on public routes without a login."""
    return scope.get(_IDENTITY)


@dataclass(frozen=True, slots=True)
class _Client:
    """Headers of a request, and the network address of its sender."""

    headers: Mapping[str, str]
    address: str

    def cookie(self, name: str) -> str:
        try:
            found = SimpleCookie(self.headers.get("cookie", "")).get(name)
        except CookieError:
            return ""
        return found.value if found else ""

    @property
    def bearer(self) -> str:
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""


class Guard:
    """ASGI middleware with the checks listed above. `hosts` are further names of this server."""

    def __init__(
        self, app: ASGIApp, table: RouteTable, logins: Logins, limits: Limits, hosts: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._table = table
        self._logins = logins
        self._limits = limits
        self._hosts = frozenset(host.lower() for host in (*_LOCAL_NAMES, *hosts))
        self._rates = RateLimits(limits.rate_per_s, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        rule = self._table.find(scope["method"], scope["path"])
        send = with_security_headers(send, is_cacheable=rule is not None and rule.path.startswith("/static/"))
        try:
            receive = await self._admit(scope, receive, rule)
        except Refusal as refusal:
            if refusal.status == 401 and rule is not None and rule.is_page:
                await send_redirect("/login", send)
            else:
                await send_refusal(refusal, send)
            return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, rule: Rule | None) -> Receive:
        """A `receive` with the checked body for the route. Raises Refusal if the request is denied."""
        client = _client(scope)
        self._check_host(scope, client)
        _check_origin(scope["method"], client, self._logins.cookie)
        identity = None
        if rule is None or rule.access != "public":
            identity = await self._identify(client)
            scope[_IDENTITY] = identity
        wait_s = self._rates.take(str(identity.rater_id) if identity else client.address)
        if wait_s:
            raise too_many(wait_s)
        if rule is None:
            raise self._not_found(scope)
        if rule.access == "admin" and not (identity and identity.is_admin):
            raise Refusal(403, "only an admin may do this")
        return replay_body(await self._body(scope, receive, rule, client), receive)

    def _check_host(self, scope: Scope, client: _Client) -> None:
        """Reject unknown Host headers (DNS rebinding)."""
        name = _host_name(client.headers.get("host", ""))
        if name in self._hosts:
            return
        # The server's own address is allowed too: a rebinding page's Host is a domain name, never this address.
        own = (scope.get("server") or ("", 0))[0]
        if not name or name != str(own).lower():
            raise Refusal(400, "this server does not answer to that host name; name it with --allow-host")

    async def _identify(self, client: _Client) -> Identity:
        """The identity of the token or cookie. Raises Refusal 401 or, after many failures, 429."""
        cookie = client.cookie(self._logins.cookie)
        if not client.bearer and not cookie:
            raise Refusal(401, "log in first: send `Authorization: Bearer TOKEN`", _LOG_IN)
        identity = self._logins.recall(client.bearer, cookie)
        if identity is None:
            # Known logins are served even while somebody at the same address guesses tokens.
            is_known = self._logins.is_known(client.bearer, cookie)
            wait_s = 0 if is_known else self._logins.failures.wait_s(client.address)
            if wait_s:
                raise too_many(wait_s)
            identity = await self._logins.look_up(client.bearer, cookie)
        if identity is None:
            self._logins.failures.take(client.address)
            raise Refusal(401, "this login is unknown, has expired or was ended", _LOG_IN)
        return identity

    def _not_found(self, scope: Scope) -> Refusal:
        methods = sorted({method for rule in self._table.at(scope["path"]) for method in rule.methods})
        if methods:
            return Refusal(405, f"use {' or '.join(methods)} here", [(b"allow", ", ".join(methods).encode())])
        return Refusal(404, "there is nothing at this address")

    async def _body(self, scope: Scope, receive: Receive, rule: Rule, client: _Client) -> bytes:
        """The checked body. Raises Refusal if it is too large, too slow, not declared as JSON, or nested too deep."""
        length = client.headers.get("content-length", "0")
        if length.isdigit() and int(length) > rule.max_body:
            raise too_large(rule.max_body)
        body = await read_body(receive, rule.max_body, self._limits.body_timeout_s)
        if not body:
            return body
        if scope["method"] in _SAFE_METHODS:
            raise Refusal(400, "a request that reads has no body")
        # A cross-origin form cannot send this type without a CORS preflight (CSRF).
        if client.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body must be application/json")
        if is_deeper(body, self._limits.json_depth):
            raise Refusal(400, f"the body is nested deeper than {self._limits.json_depth} levels")
        return body


def _client(scope: Scope) -> _Client:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key == "host" and key in headers:
            raise Refusal(400, "the request has more than one Host header")
        headers[key] = f"{headers[key]}; {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
    return _Client(headers, str((scope.get("client") or ("unknown", 0))[0]))


def _host_name(host: str) -> str:
    """Name or address in a Host header, in lower case, without port and brackets; empty if invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _check_origin(method: str, client: _Client, cookie: str) -> None:
    """Reject requests from pages of other origins (CSRF), by Origin or, without it, by the Fetch Metadata headers."""
    origin = client.headers.get("origin")
    if origin is not None:
        if _netloc(origin) != client.headers.get("host", "").lower():
            raise Refusal(403, "this request comes from a page of another server")
        return
    site = client.headers.get("sec-fetch-site", "")
    is_navigation = client.headers.get("sec-fetch-mode") == "navigate" and method in _SAFE_METHODS
    if site in ("cross-site", "same-site") and not is_navigation:
        raise Refusal(403, "this request comes from a page of another server")
    if method not in _SAFE_METHODS and client.cookie(cookie) and not client.bearer and site != "same-origin":
        raise Refusal(403, "a request with a session cookie must say its Origin")


def _netloc(origin: str) -> str:
    """Host and port of an origin such as `http://127.0.0.1:8000`; empty if invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
