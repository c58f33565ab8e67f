"""The middleware that stands before every route: what it does not allow does not happen.

In this order: the Host header, the Origin header, the table of routes, the login, the role, the rate, the body. The
answers it gives itself, and all others, leave with the safety headers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.web.access import RouteTable, Rule
from tunesmith.web.http import (
    Refusal,
    given_once,
    is_deeper,
    read_body,
    send_redirect,
    send_refusal,
    too_large,
    too_many,
    with_safety_headers,
)
from tunesmith.web.logins import Buckets, Identity, Logins
from tunesmith.web.settings import Limits

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_IDENTITY = "tunesmith.identity"


def identity_of(scope: Scope) -> Identity | None:
    """Who made this request; None on public routes without a login."""
    return scope.get(_IDENTITY)


@dataclass(frozen=True, slots=True)
class _Caller:
    """A request's headers, and the network address it came from."""

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
    """ASGI middleware: see the module. `hosts` are further names by which this server may be called."""

    def __init__(
        self, app: ASGIApp, table: RouteTable, logins: Logins, limits: Limits, hosts: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._table = table
        self._logins = logins
        self._limits = limits
        self._hosts = frozenset(host.lower() for host in (*_LOCAL_NAMES, *hosts))
        self._rates = Buckets(limits.rate_per_s, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        rule = self._table.find(scope["method"], scope["path"])
        send = with_safety_headers(send, is_storable=rule is not None and rule.path.startswith("/static/"))
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
        """What the route may read the body from; Refusal if the request is denied."""
        caller = _caller(scope)
        self._check_host(scope, caller)
        _check_origin(scope["method"], caller, self._logins.cookie)
        identity = None
        if rule is None or rule.access != "public":
            identity = await self._identify(caller)
            scope[_IDENTITY] = identity
        wait_s = self._rates.take(str(identity.rater_id) if identity else caller.address)
        if wait_s:
            raise too_many(wait_s)
        if rule is None:
            raise self._nothing_there(scope)
        if rule.access == "admin" and not (identity and identity.is_admin):
            raise Refusal(403, "only an admin may do this")
        body = await self._body(scope, receive, rule, caller)
        return given_once(body, receive)

    def _check_host(self, scope: Scope, caller: _Caller) -> None:
        """A page elsewhere whose name was pointed at this machine is told apart by the name it calls us by."""
        name = _host_name(caller.headers.get("host", ""))
        if name in self._hosts:
            return
        # The address that this connection was made to is as good as a name of ours: no foreign page can send it.
        own = (scope.get("server") or ("", 0))[0]
        if not name or name != str(own).lower():
            raise Refusal(400, "this server does not answer to that host name; name it with --allow-host")

    async def _identify(self, caller: _Caller) -> Identity:
        """Whom the token or the cookie stands for; Refusal 401 or, after many failures, 429."""
        cookie = caller.cookie(self._logins.cookie)
        if not caller.bearer and not cookie:
            raise Refusal(401, "log in first: send `Authorization: Bearer TOKEN`", [(b"www-authenticate", b"Bearer")])
        identity = self._logins.recall(caller.bearer, cookie)
        if identity is None:
            # Whoever was let in before goes on, even if somebody at the same address guesses tokens.
            is_known = self._logins.is_known(caller.bearer, cookie)
            wait_s = 0 if is_known else self._logins.failures.wait_s(caller.address)
            if wait_s:
                raise too_many(wait_s)
            identity = await self._logins.look_up(caller.bearer, cookie)
        if identity is None:
            self._logins.failures.take(caller.address)
            raise Refusal(401, "this login is unknown, has expired or was ended", [(b"www-authenticate", b"Bearer")])
        return identity

    def _nothing_there(self, scope: Scope) -> Refusal:
        methods = sorted({method for rule in self._table.at(scope["path"]) for method in rule.methods})
        if methods:
            return Refusal(405, f"use {' or '.join(methods)} here", [(b"allow", ", ".join(methods).encode())])
        return Refusal(404, "there is nothing at this address")

    async def _body(self, scope: Scope, receive: Receive, rule: Rule, caller: _Caller) -> bytes:
        """The checked body; Refusal if it is too large, too slow, no JSON by its header, or nested too deep."""
        length = caller.headers.get("content-length", "0")
        if length.isdigit() and int(length) > rule.max_body:
            raise too_large(rule.max_body)
        body = await read_body(receive, rule.max_body, self._limits.body_timeout_s)
        if not body:
            return body
        if scope["method"] in _SAFE_METHODS:
            raise Refusal(400, "a request that reads has no body")
        if caller.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body must be application/json")
        if is_deeper(body, self._limits.json_depth):
            raise Refusal(400, f"the body is nested deeper than {self._limits.json_depth} levels")
        return body


def _caller(scope: Scope) -> _Caller:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key == "host" and key in headers:
            raise Refusal(400, "the request has more than one Host header")
        headers[key] = f"{headers[key]}; {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
    return _Caller(headers, str((scope.get("client") or ("unknown", 0))[0]))


def _host_name(host: str) -> str:
    """The name or address in a Host header, in lower case, without port and brackets; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _check_origin(method: str, caller: _Caller, cookie: str) -> None:
    """A browser names the page that a request comes from: another server's page is refused, whatever it asks."""
    origin = caller.headers.get("origin")
    if origin is not None:
        if _netloc(origin) != caller.headers.get("host", "").lower():
            raise Refusal(403, "this request comes from a page of another server")
        return
    site = caller.headers.get("sec-fetch-site", "")
    is_navigation = caller.headers.get("sec-fetch-mode") == "navigate" and method in _SAFE_METHODS
    if site in ("cross-site", "same-site") and not is_navigation:
        raise Refusal(403, "this request comes from a page of another server")
    if method not in _SAFE_METHODS and caller.cookie(cookie) and not caller.bearer and site != "same-origin":
        raise Refusal(403, "a request with a session cookie must say its Origin")


def _netloc(origin: str) -> str:
    """Host and port of an origin such as `http://127.0.0.1:8000`; empty if it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
