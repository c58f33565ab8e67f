"""Requests over HTTP with the standard library: one connection for each, an end to each, and all can be aborted.

With a connection of its own, a late or a second answer cannot be taken for that to another request.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import cast
from urllib.parse import urlsplit

_PIECE = 1 << 16


class LostError(Exception):
    """A request got no whole answer: the server is away, closed the connection, or took too long.

    `was_sent` is False if there was no connection, so that the server saw nothing of it.
    """

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(frozen=True, slots=True)
class Response:
    """An answer: status, headers with names in lower case, and the body as text."""

    status: int
    headers: Mapping[str, str]
    text: str


class HTTPClient:
    """Sends requests to the server at `url`; each must be answered within `timeout_s`.

    Raises ValueError, with the rest of a sentence on the address, for what is none. Safe to call from any number of
    threads.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:  # no number in the place of a port
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r}; give one such as http://localhost:8000")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._timeout_s = timeout_s
        self.path = parts.path.rstrip("/")
        self._open: set[socket.socket] = set()

    def send(self, method: str, path: str, body: object = None, key: str = "") -> Response:
        """The answer to a request with a JSON `body` and the bearer token `key`. Raises LostError."""
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        held: socket.socket | None = None
        try:
            connection.connect()
            # The connection gives its socket away once it has the headers.
            held = cast(socket.socket, connection.sock)
            self._open.add(held)
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            raw = self._whole(response, held)
            return Response(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                raw.decode("utf-8", "replace"),
            )
        except TimeoutError as error:
            raise LostError(f"no answer in {self._timeout_s:g} s", was_sent=held is not None) from error
        except (OSError, HTTPException, UnicodeError) as error:
            raise LostError(str(error) or type(error).__name__, was_sent=held is not None) from error
        finally:
            if held is not None:
                self._open.discard(held)
            connection.close()

    def abort(self) -> None:
        """End the requests that still run, in whatever thread."""
        for held in list(self._open):
            with contextlib.suppress(OSError):  # closed meanwhile
                held.shutdown(socket.SHUT_RDWR)

    def _whole(self, response: HTTPResponse, held: socket.socket) -> bytes:
        """The body, in time: a timeout of a socket is one of each piece."""
        end_s = time.monotonic() + self._timeout_s
        pieces: list[bytes] = []
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            with contextlib.suppress(OSError):  # closed at the end of the body
                held.settimeout(left_s)
        if response.length:
            raise LostError(f"the answer lacks its last {response.length} bytes")
        return b"".join(pieces)
