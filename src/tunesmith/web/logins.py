"""Turns a token or a cookie into an identity, and remembers the answer for a moment."""

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
from tunesmith.store.records import Rater, Role
from tunesmith.store.votes import VoteStore

MAX_KEYS = 10_000
"""Buckets that are kept; the one that was used longest ago makes room. A bucket that is gone is a full one."""


@dataclass(slots=True)
class _Bucket:
    left: float
    time: float


class Buckets:
    """`burst` at once, `rate_per_s` on average, for each key."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> int:
        """0 if `key` may go on, which uses up one; else after how many whole seconds it may try again."""
        bucket = self._filled(key)
        if bucket.left >= 1:
            bucket.left -= 1
            return 0
        return self._wait_s(bucket)

    def wait_s(self, key: str) -> int:
        """As `take`, but nothing is used up."""
        bucket = self._filled(key)
        return 0 if bucket.left >= 1 else self._wait_s(bucket)

    def _wait_s(self, bucket: _Bucket) -> int:
        return max(1, math.ceil((1 - bucket.left) / self._rate_per_s))

    def _filled(self, key: str) -> _Bucket:
        now = time.monotonic()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._burst, now)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.left = min(self._burst, bucket.left + (now - bucket.time) * self._rate_per_s)
        bucket.time = now
        return bucket


KEY_FILE = "session.key"
_KEY_BYTES = 32
_SIGNATURE_BYTES = 24
LINK_MINUTES = 24 * 60
"""How long the link that is printed at start can be used, once."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is calling, as the guard found out. Routes read it by `services.identity`."""

    rater_id: int
    name: str
    role: Role

    @property
    def is_admin(self) -> bool:
        """True for those who may invite raters and roll versions back."""
        return self.role == "admin"


def read_key(folder: Path) -> bytes:
    """The secret that signs sessions, made at the first call; only its owner can read the file.

    Raises:
        StoreError: if the file is there but too short to be a key.
    """
    path = folder / KEY_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != _KEY_BYTES:
            raise StoreError(
                f"{path} holds {len(key)} bytes, not the {_KEY_BYTES} of a key; remove it and everybody logs in again"
            ) from None
        return key
    with os.fdopen(handle, "wb") as file:
        key = secrets.token_bytes(_KEY_BYTES)
        file.write(key)
    return key


class Sessions:
    """Signs and reads session cookies."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Cookies of one host are shared by all its ports, so another server there must have another name.
        self.cookie = f"tunesmith_{hashlib.sha256(key).hexdigest()[:8]}"

    def sign(self, rater_id: int, expires_at: float) -> str:
        """A cookie's value that stands for `rater_id` until `expires_at`."""
        text = f"{rater_id}.{int(expires_at)}"
        return f"{text}.{self._signature(text)}"

    def read(self, value: str, now: float) -> int | None:
        """Id of the rater that a cookie stands for; None if its signature is not ours or it has expired."""
        text, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_bytes(signature), self._signature(text).encode()):
            return None
        rater_id, _, expiry = text.partition(".")
        return int(rater_id) if now < int(expiry) else None

    def _signature(self, text: str) -> str:
        digest = hmac.new(self._key, b"session:" + _bytes(text), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).decode()


class Links:
    """Links that log a rater in once. They are kept in memory, so they end with the server."""

    def __init__(self) -> None:
        self._raters: dict[str, tuple[int, float]] = {}

    def make(self, rater_id: int) -> str:
        """The token of a new link."""
        token = secrets.token_urlsafe(24)
        self._raters[_digest(token)] = (rater_id, time.monotonic() + 60 * LINK_MINUTES)
        return token

    def use(self, token: str) -> int | None:
        """Whom the link logs in; None if it is unknown, too old or was used."""
        rater_id, expiry = self._raters.pop(_digest(token), (None, 0.0))
        return rater_id if time.monotonic() < expiry else None


def _digest(token: str) -> str:
    """What is kept of a token, so that comparing takes the same time for all wrong ones."""
    return hashlib.sha256(_bytes(token)).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_REMEMBER_S = 2.0
_MAX_REMEMBERED = 4096


class Logins:
    """Who may come in: personal tokens by the store, session cookies by their signature, links that work once.

    `sessions` and `links` are for the routes that begin and end a session. `failures` counts, for each network address,
    the logins that were wrong.
    """

    def __init__(self, store: VoteStore, sessions: Sessions, links: Links, failures: Buckets) -> None:
        self.sessions = sessions
        self.links = links
        self.failures = failures
        self._store = store
        self._remembered: OrderedDict[str, tuple[Identity, float]] = OrderedDict()

    @property
    def cookie(self) -> str:
        """Name of the session cookie."""
        return self.sessions.cookie

    def recall(self, bearer: str, cookie: str) -> Identity | None:
        """Who was let in with this token or cookie a moment ago; None if it must be looked up."""
        identity, until = self._remembered.get(_key(bearer, cookie), (None, 0.0))
        return identity if time.monotonic() < until else None

    def is_known(self, bearer: str, cookie: str) -> bool:
        """True for what nobody guesses: a session that is signed, or a token that was good before."""
        if self.sessions.read(bearer or cookie, time.time()) is not None:
            return True
        return _key(bearer, cookie) in self._remembered

    async def look_up(self, bearer: str, cookie: str) -> Identity | None:
        """Whom this token or, without one, this cookie lets in. A session may also be sent as a bearer token."""
        identity = await run_in_threadpool(self._find, bearer, cookie)
        if identity is not None:
            key = _key(bearer, cookie)
            self._remembered[key] = (identity, time.monotonic() + _REMEMBER_S)
            self._remembered.move_to_end(key)
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return identity

    def forget(self) -> None:
        """Look everybody up again: somebody was shut out."""
        self._remembered.clear()

    def rater(self, rater_id: int) -> Rater | None:
        """The rater of this id, if their access has not ended."""
        now = time.time()
        for rater in self._store.reader.raters():
            if rater.id == rater_id:
                is_over = rater.disabled_at is not None or (rater.expires_at is not None and rater.expires_at <= now)
                return None if is_over else rater
        return None

    def _find(self, bearer: str, cookie: str) -> Identity | None:
        found = self._store.reader.rater_of(bearer) if bearer else None
        if found is None:
            rater_id = self.sessions.read(bearer or cookie, time.time())
            found = self.rater(rater_id) if rater_id is not None else None
        return None if found is None else Identity(found.id, found.name, found.role)


def _key(bearer: str, cookie: str) -> str:
    text = f"bearer {bearer}" if bearer else f"cookie {cookie}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
