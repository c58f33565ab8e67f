"""Requests over HTTP with the standard library: one connection for each, an end to each, and all can be aborted.

With a connection of its own, a late or a second answer cannot be taken for that to another request.
"""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, cast
from urllib.parse import urlsplit

from tunesmith.base.core.errors import InputError

MAX_BYTES = 1 << 28
"""Of an answer, unless a client is made for others: more than any server of language models has to say."""

_PIECE = 1 << 16
_MIN_SECRET = 8
_SECRET = "(the key)"

_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL")
"""OpenSSL's words for an answer that is no TLS."""


class LostError(Exception):
    """A request got no whole answer: the server is away, closed the connection, or took too long.

    `was_sent` is False if there was no connection, so that the server saw nothing of it. `lasts`: the next request
    would end in the same way, because of a certificate or a protocol.
    """

    def __init__(self, message: str, *, was_sent: bool = True, lasts: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.lasts = lasts


@dataclass(frozen=True, slots=True)
class Response:
    """An answer: status, headers with names in lower case, and the body as text."""

    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        """The body as a JSON value. Raises ValueError for what is none, or is nested too deeply to be read."""
        try:
            return json.loads(self.text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def problem_of_address(url: str) -> str:
    """The fault of the address of a server, as the rest of a sentence on it; empty if nothing is.

    It repeats no password: addresses are stored with a run, and shown.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:  # no number in the place of a port
        is_one, parts = False, urlsplit("")
    if "@" in (parts.netloc or url):
        return "an address with a user or a password, which would be stored and shown; leave them out"
    if not is_one or not url.isprintable() or " " in url or not parts.path.isascii():
        return f"{url!r}; give one such as http://localhost:8000"
    if parts.query or parts.fragment:
        return f"{url.partition('?')[0].partition('#')[0]!r} with more behind it, which is not sent; leave it out"
    return ""


def checked_key(key: str, variable: str) -> str:
    """The key without spaces around it. Raises InputError, which does not show it, for one that no header can hold;
    `variable` is the environment variable that it is from.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            f"the key in the environment variable {variable} has a line break or another character that no request can "
            "carry; set it again, without anything around it"
        )
    return key


class HTTPClient:
    """Sends requests to the server at `url`; each must be answered within `timeout_s`, by `max_bytes` at most.

    Raises ValueError, with the rest of a sentence on the address, for what is none. Safe to call from any number of
    threads.
    """

    def __init__(self, url: str, timeout_s: float, max_bytes: int = MAX_BYTES) -> None:
        if problem := problem_of_address(url):
            raise ValueError(problem)
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self.path = parts.path.rstrip("/")
        self._open: set[socket.socket] = set()

    def send(self, method: str, path: str, body: object = None, key: str = "") -> Response:
        """The answer to a request with a JSON `body` and the bearer token `key`, which is taken out of the answer where
        a server repeats it. Raises LostError.
        """
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        held: socket.socket | None = None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            for one in (held, connection.sock):
                _cut(one)

        clock = threading.Timer(self._timeout_s, end)  # the timeout of a socket is one of each piece
        clock.daemon = True
        clock.start()
        try:
            connection.connect()
            # The connection gives its socket away once it has the headers.
            held = cast(socket.socket, connection.sock)
            self._open.add(held)
            if is_late.is_set():
                raise TimeoutError
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            text = self._whole(response).decode("utf-8", "replace")
            if is_late.is_set():  # what was cut may look like an end
                raise TimeoutError
            given = {name.lower(): _without(key, value) for name, value in response.getheaders()}
            return Response(response.status, given, _without(key, text))
        except (OSError, HTTPException, UnicodeError, LostError) as error:
            if is_late.is_set() or isinstance(error, TimeoutError):
                raise LostError(f"no answer in {self._timeout_s:g} s", was_sent=held is not None) from error
            if isinstance(error, LostError):
                raise
            if problem := _lasting_problem(error, is_connected=held is not None):
                raise LostError(problem, was_sent=False, lasts=True) from error
            raise LostError(str(error) or type(error).__name__, was_sent=held is not None) from error
        finally:
            clock.cancel()
            if held is not None:
                self._open.discard(held)
            connection.close()

    def abort(self) -> None:
        """End the requests that still run, in whatever thread."""
        for held in list(self._open):
            _cut(held)

    def _whole(self, response: HTTPResponse) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise LostError(f"the answer has more than {self._max_bytes} bytes")
        if response.length:
            raise LostError(f"the answer lacks its last {response.length} bytes")
        return b"".join(pieces)


def _lasting_problem(error: Exception, *, is_connected: bool) -> str:
    """The fault of a server with which there is no TLS, which no waiting mends; empty for what may pass."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted: {error.verify_message}; give the name that it was made for, or put the "
            "certificate of who signed it into a file that the environment variable SSL_CERT_FILE names"
        )
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ""
    if error.reason in _PLAIN:
        return "it speaks no TLS; give an address with http://"
    wants_certificate = "CERTIFICATE" in (error.reason or "")
    if (is_connected and not wants_certificate) or "INTERNAL_ERROR" in (error.reason or ""):
        return ""
    return f"there is no TLS with it: {error}"


def _without(key: str, text: str) -> str:
    return text.replace(key, _SECRET) if len(key) >= _MIN_SECRET else text


def _cut(held: socket.socket | None) -> None:
    """End what is sent and received, in whatever thread that is."""
    if held is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            # Not the method of a TLS socket, which takes its state away from a thread that is reading.
            socket.socket.shutdown(held, socket.SHUT_RDWR)
