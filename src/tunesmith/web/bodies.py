"""Reads a request's body within bounds of size, time and depth, before any route sees it."""

import asyncio
import re

from starlette.types import Message, Receive

from tunesmith.web.replies import Refusal

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
