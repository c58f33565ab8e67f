"""Logins: access tokens, signed session cookies and one-time links, and rate limits for failed attempts.

A session cookie is signed, not stored: `rater.expiry.signature`, with a key in a file beside the database, so sessions
survive a restart. The rater of a cookie is looked up at each request, so a disabled rater is locked out at once.
"""

import base64
import hashlib
import hmac
import math
import os
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from tunesmith.core.errors import StoreError
from tunesmith.core.system import name_file
from tunesmith.store.records import Rater
from tunesmith.store.vote_reader import VoteReader

MAX_KEYS = 10_000
"""Token buckets that are kept; the least recently used one is dropped, which is the same as a full one."""

KEY_FILE = "session.key"
LINK_MINUTES = 24 * 60
"""Lifetime of the one-time link that is printed at start."""

_KEY_BYTES = 32
_SIGNATURE_BYTES = 24
_CACHE_S = 2.0
_MAX_CACHED = 4096


@dataclass(slots=True)
class _Bucket:
    tokens: float
    time: float


class RateLimits:
    """A token bucket for each key, a rater or network address: `burst` at once, `rate_per_s` on average."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> int:
        """0 if `key` has a token, which is taken; else the whole seconds until it has one."""
        wait_s = self.wait_s(key)
        if not wait_s:
            self._buckets[key].tokens -= 1
        return wait_s

    def wait_s(self, key: str) -> int:
        """As `take`, but takes nothing."""
        now = time.monotonic()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._burst, now)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.time) * self._rate_per_s)
        bucket.time = now
        return 0 if bucket.tokens >= 1 else max(1, math.ceil((1 - bucket.tokens) / self._rate_per_s))


def read_key(folder: Path) -> bytes:
    """The secret that signs sessions, created at the first call, in a file that only its owner can read.

    Raises:
        StoreError: if the file exists but is no key.
    """
    path, aside = folder / KEY_FILE, folder / f".{KEY_FILE}-{secrets.token_hex(4)}"
    if not path.exists():
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            name_file(aside, path)  # whole or not at all: another server may begin now, and this one may be killed
        except FileExistsError:
            aside.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StoreError(
            f"{path} holds {len(key)} bytes, not the {_KEY_BYTES} of a key; remove it and everybody logs in again"
        )
    return key


class Sessions:
    """Signs and verifies session cookies."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Cookies are shared by all ports of a host, so another server there needs another name.
        self.cookie = f"tunesmith_{hashlib.sha256(key).hexdigest()[:8]}"

    def sign(self, rater_id: int, expires_at: float) -> str:
        """Cookie value for `rater_id`, valid until `expires_at`."""
        text = f"{rater_id}.{int(expires_at)}"
        return f"{text}.{self._signature(text)}"

    def read(self, value: str, now: float) -> int | None:
        """Rater id of a cookie value; None if its signature is wrong or it has expired."""
        text, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_bytes(signature), self._signature(text).encode()):
            return None
        rater_id, _, expiry = text.partition(".")
        return int(rater_id) if now < int(expiry) else None

    def _signature(self, text: str) -> str:
        digest = hmac.new(self._key, b"session:" + _bytes(text), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).decode()


class Links:
    """One-time login links. They are kept in memory, so they end with the server."""

    def __init__(self) -> None:
        self._raters: dict[str, tuple[int, float]] = {}

    def make(self, rater_id: int) -> str:
        """The token of a new link."""
        token = secrets.token_urlsafe(24)
        self._raters[_digest(token)] = (rater_id, time.monotonic() + 60 * LINK_MINUTES)
        return token

    def use(self, token: str) -> int | None:
        """Rater id of a link, which is void afterwards; None if it is unknown, expired or used."""
        rater_id, expiry = self._raters.pop(_digest(token), (None, 0.0))
        return rater_id if time.monotonic() < expiry else None


class Logins:
    """Raters of access tokens and session cookies, cached for a moment.

    `sessions` and `links` are for the routes that begin and end a session. `failures` limits failed logins per network
    address.
    """

    def __init__(self, votes: VoteReader, sessions: Sessions, links: Links, failures: RateLimits) -> None:
        self.sessions = sessions
        self.links = links
        self.failures = failures
        self._votes = votes
        self._cache: OrderedDict[str, tuple[Rater, float]] = OrderedDict()

    def recall(self, bearer: str, cookie: str) -> Rater | None:
        """The cached rater of this token or cookie; None if it must be looked up."""
        rater, until = self._cache.get(_cache_key(bearer, cookie), (None, 0.0))
        return rater if time.monotonic() < until else None

    def is_known(self, bearer: str, cookie: str) -> bool:
        """True for what cannot be guessed: a signed session, or a token that was valid before."""
        if self.sessions.read(bearer or cookie, time.time()) is not None:
            return True
        return _cache_key(bearer, cookie) in self._cache

    async def look_up(self, bearer: str, cookie: str) -> Rater | None:
        """The rater of this token or, without one, this cookie. A session may also be sent as a bearer token."""
        rater = await run_in_threadpool(self._find, bearer, cookie)
        if rater is not None:
            key = _cache_key(bearer, cookie)
            self._cache[key] = (rater, time.monotonic() + _CACHE_S)
            self._cache.move_to_end(key)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return rater

    def forget(self) -> None:
        """Clear the cache, after access of a rater has ended."""
        self._cache.clear()

    def rater(self, rater_id: int) -> Rater | None:
        """The rater of this id, if their access has not ended."""
        now = time.time()
        return next((rater for rater in self._votes.raters() if rater.id == rater_id and rater.has_access(now)), None)

    def _find(self, bearer: str, cookie: str) -> Rater | None:
        found = self._votes.rater_of(bearer) if bearer else None
        if found is not None:
            return found
        rater_id = self.sessions.read(bearer or cookie, time.time())
        return None if rater_id is None else self.rater(rater_id)


def _cache_key(bearer: str, cookie: str) -> str:
    return _digest(f"bearer {bearer}" if bearer else f"cookie {cookie}")


def _digest(token: str) -> str:
    """Hash under which a token is kept: looking it up takes the same time for all wrong ones."""
    return hashlib.sha256(_bytes(token)).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
