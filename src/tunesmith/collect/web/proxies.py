"""Requests that come through a proxy: who sent them, by which scheme, host name and path prefix.

Pages hold relative addresses alone, so they work below any prefix without being told of it. What a proxy says of a
request is believed if the proxy is trusted: by default one on this machine.
"""

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tunesmith.base.core.errors import InputError
from tunesmith.collect.web.settings import LOOPBACK

_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_HOST, _PATH_PREFIX = "tunesmith.forwarded_host", "tunesmith.path_prefix"


class BehindProxy:
    """ASGI middleware that completes a request by the headers of trusted proxies, and removes the path prefix.

    Client and scheme are those of X-Forwarded-For and X-Forwarded-Proto. The prefix is X-Forwarded-Prefix, or
    `root_path`, which is removed if the proxy left it in the path, unless one of the routes `paths` begins with it.
    """

    def __init__(
        self, app: ASGIApp, trusted: Sequence[str] = LOOPBACK, root_path: str = "", paths: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._forwarded = ProxyHeadersMiddleware(app, list(trusted))  # pyright: ignore[reportArgumentType]
        self._root_path = root_path
        self._removed = "" if any(f"{path}/".startswith(f"{root_path}/") for path in paths) else root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as the client sent it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ends = {name: _plain_address(scope.get(name)) for name in ("client", "server")}
        scope = {**scope, **ends, _PATH_PREFIX: self._root_path}
        peer = scope["client"]
        if peer is not None and peer[0] in self._forwarded.trusted_hosts:
            headers = Headers(scope=scope)
            scope[_HOST] = headers.get("x-forwarded-host", "").partition(",")[0].strip()
            given = (part.strip().rstrip("/") for part in headers.get("x-forwarded-prefix", "").split(","))
            scope[_PATH_PREFIX] = _checked("".join(given)) or self._root_path
        _remove_prefix(scope, self._removed)
        await self._forwarded(scope, receive, send)  # pyright: ignore[reportArgumentType]


def check_trusted(addresses: Sequence[str]) -> None:
    """Raise InputError for what is no address or network: it would match nothing, or (`*`) believe every client."""
    for address in addresses:
        try:
            ipaddress.ip_network(address, strict=False)
        except ValueError:
            raise InputError(
                f"--forwarded-allow-ips {address} is no address; give that of the proxy, or a network such as "
                "172.16.0.0/12"
            ) from None


def checked_root_path(given: str) -> str:
    """The path prefix without a slash at its end; empty for none. Raises InputError if it cannot be one."""
    prefix = f"/{given.strip('/')}" if given.strip("/") else ""
    if prefix and not _checked(prefix):
        raise InputError(
            f"--root-path {given} cannot be used; give a path such as /tunesmith of letters, digits, - _ . ~"
        )
    return prefix


def prefix_of(request: HTTPConnection) -> str:
    """The path prefix of the server as far as it is known, without a slash at its end."""
    return request.scope.get(_PATH_PREFIX, "")


def root_of(request: HTTPConnection) -> str:
    """The address of the server's root relative to that of the request: `./`, `../` and so on."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return "../" * (raw.count(b"/") - 1) or "./"


def names_of(request: HTTPConnection) -> list[str]:
    """The names, with their ports, by which the client may have reached the server."""
    return [name.lower() for name in (request.headers.get("host", ""), forwarded_host(request)) if name]


def forwarded_host(request: HTTPConnection) -> str:
    """The Host header that a trusted proxy received; empty if it does not say."""
    return request.scope.get(_HOST, "")


def _plain_address(end: tuple[str, int] | None) -> tuple[str, int] | None:
    """An end of a connection whose IPv4 address is not written as one of IPv6, as sockets that accept both do."""
    if end is None or not end[0].startswith("::ffff:"):
        return end
    try:
        mapped = ipaddress.IPv6Address(end[0]).ipv4_mapped
    except ValueError:
        return end
    return end if mapped is None else (str(mapped), end[1])


def _checked(prefix: str) -> str:
    """`prefix` if it is a plain path; it becomes part of headers."""
    return prefix if _PREFIX.fullmatch(prefix) and "/.." not in prefix else ""


def _remove_prefix(scope: Scope, prefix: str) -> None:
    """Take the prefix from the path, and all slashes but one from its beginning: nginx sends two for a location without
    a slash at its end.
    """
    if scope["path"] == prefix or scope["path"].startswith(f"{prefix}/"):
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        scope["path"] = "/" + scope["path"].removeprefix(prefix).lstrip("/")
        scope["raw_path"] = b"/" + raw.removeprefix(prefix.encode()).lstrip(b"/")
