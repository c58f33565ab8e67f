"""HTTP messages of the guard: refusals, security headers, and request bodies within limits of size, time and depth."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Message, Receive, Send

Header = tuple[bytes, bytes]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Against cross-site scripting (XSS) by generated text: only this server's files run, nothing else is loaded."""

SECURITY_HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)

_CLOSE_CONNECTION: tuple[Header, ...] = ((b"connection", b"close"),)
_OPEN, _CLOSE = frozenset(b"[{"), frozenset(b"]}")
# Possessive quantifiers and an optional closing quote: linear time for every body.
_BRACKET_OR_TEXT = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """A denied request: status, a sentence for the client, and extra headers."""

    status: int
    detail: str
    headers: Sequence[Header] = ()


def too_many(wait_s: int) -> Refusal:
    """The refusal of a client over its rate limit."""
    return Refusal(429, f"too many requests; try again in {wait_s} s", [(b"retry-after", str(wait_s).encode())])


def too_large(max_bytes: int) -> Refusal:
    """The refusal of a body of more than `max_bytes`."""
    return Refusal(413, f"the body is larger than {max_bytes:,} bytes", _CLOSE_CONNECTION)


async def send_refusal(refusal: Refusal, send: Send) -> None:
    """Send the refusal as JSON: `{"detail": sentence}`."""
    body = json.dumps({"detail": refusal.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *refusal.headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_redirect(location: str, send: Send) -> None:
    """Redirect a browser to another page of this server."""
    headers = [(b"location", location.encode("ascii")), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def with_security_headers(send: Send, *, is_cacheable: bool) -> Send:
    """`send` that adds the security headers and, unless `is_cacheable`, `cache-control: no-store`."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            caching: Header = (b"cache-control", b"no-cache" if is_cacheable else b"no-store")
            given = [header for header in message.get("headers", ()) if header[0].lower() != b"cache-control"]
            message = {**message, "headers": [*given, *SECURITY_HEADERS, caching]}
        await send(message)

    return send_more


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        Refusal: 413 as soon as more than `max_bytes` were received, 408 after `timeout_s`, 400 if the client
            disconnected.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {timeout_s:g} seconds", _CLOSE_CONNECTION) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the client went away")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first, then the messages of the connection, such as its end."""
    waiting = [body]

    async def receive_body() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_body


def is_deeper(body: bytes, limit: int) -> bool:
    """True if brackets outside of strings are nested deeper than `limit`, whether or not `body` is JSON."""
    depth = 0
    for match in _BRACKET_OR_TEXT.finditer(body):
        first = match[0][0]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
        if depth > limit:
            return True
    return False
