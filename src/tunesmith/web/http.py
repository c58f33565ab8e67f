"""What the guard answers by itself, and the headers that every answer carries."""

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
"""Scripts come from this server's files alone; text that a model wrote can neither run nor load anything."""

SAFETY_HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """The guard denies a request: a status, a sentence for the client, and headers that belong to them."""

    status: int
    detail: str
    headers: Sequence[Header] = ()


def too_many(wait_s: int) -> Refusal:
    """The refusal of a client that asks too often."""
    return Refusal(429, f"too many requests; try again in {wait_s} s", [(b"retry-after", str(wait_s).encode())])


async def send_refusal(refusal: Refusal, send: Send) -> None:
    """Answer with the refusal as JSON: `{"detail": sentence}`."""
    body = json.dumps({"detail": refusal.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *refusal.headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_redirect(location: str, send: Send) -> None:
    """Send a browser to another page of this server."""
    headers = [(b"location", location.encode("ascii")), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def with_safety_headers(send: Send, *, is_storable: bool) -> Send:
    """`send`, but each answer carries the safety headers and, unless `is_storable`, may not be stored by a cache."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            caching: Header = (b"cache-control", b"no-cache" if is_storable else b"no-store")
            given = [header for header in message.get("headers", ()) if header[0].lower() != b"cache-control"]
            message = {**message, "headers": [*given, *SAFETY_HEADERS, caching]}
        await send(message)

    return send_more


_OPEN, _CLOSE = frozenset(b"[{"), frozenset(b"]}")
# Possessive, and the closing quote may be missing: one pass over the body, whatever it holds.
_BRACKET_OR_TEXT = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        Refusal: 413 as soon as more than `max_bytes` have come, 408 after `timeout_s`, 400 if the client went away.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {timeout_s:g} seconds", [(b"connection", b"close")]
        ) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def too_large(max_bytes: int) -> Refusal:
    """The refusal of a body of more than `max_bytes`."""
    return Refusal(413, f"the body is larger than {max_bytes:,} bytes", [(b"connection", b"close")])


def given_once(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out `body` first, and then what the connection does, such as its end."""
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
