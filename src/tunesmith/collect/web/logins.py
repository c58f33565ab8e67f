"""Logins: access tokens, signed session cookies and one-time links, and rate limits for failed attempts.

Sessions and links are signed, not stored, with a key in a file beside the database, so they survive a restart; what was
ended by a logout or by its use is noted in another file. The rater is looked up at each request, so a disabled one is
locked out at once.
"""

import base64
import hashlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection

from tunesmith.base.core.errors import StoreError
from tunesmith.base.core.system import fsync, name_file
from tunesmith.collect.store.records import Rater, Scope
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.web.access import is_api

MAX_KEYS = 10_000
"""Token buckets that are kept; the least recently used one is dropped, which is the same as a full one."""

KEY_FILE, ENDED_FILE = "session.key", "session.ended"
LINK_MINUTES = 24 * 60
"""Lifetime of a one-time link."""

USER_PREFIX = "ut-"
"""Begin of the tokens of users of a key."""

Kind = Literal["session", "link", "user"]

_KEY_BYTES = 32
_SIGNATURE_BYTES = 24
_CACHE_S = 2.0
_MAX_CACHED = 4096


@dataclass(frozen=True, slots=True)
class KeyUser(Rater):
    """A user of a key of the API, who sends a token that the key has signed for them: `id` is that of the key, and
    `rater_id` that of the rater who they are themselves.
    """

    user: str = ""
    rater_id: int = 0


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


class Ended:
    """Sessions that were ended and links that were used, in a file that outlives the server: one line for each, with
    the hash of its value and the time at which it would have expired. Several servers may share it.
    """

    def __init__(self, file: Path, now: float) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._digests: set[str] = set()
        self._num_bytes = 0
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        kept = [
            words for line in lines if len(words := line.split()) == 2 and words[1].isdigit() and int(words[1]) > now
        ]
        if len(kept) < len(lines):
            aside = file.with_suffix(".new")
            aside.write_text("".join(f"{digest} {expiry}\n" for digest, expiry in kept))
            os.replace(aside, file)
        self._digests.update(digest for digest, _ in kept)

    def __contains__(self, value: str) -> bool:
        with suppress(OSError):
            num_bytes = self._file.stat().st_size
            if num_bytes != self._num_bytes:  # another server has noted more
                self._digests.update(line.partition(" ")[0] for line in self._file.read_text().splitlines())
                self._num_bytes = num_bytes
        return _digest(value) in self._digests

    def add(self, value: str, expires_at: int) -> bool:
        """Note `value` on disk; False if it was there already. Raises StoreError if the file cannot be written."""
        with self._lock:
            if value in self:
                return False
            try:
                with self._file.open("a") as file:
                    file.write(f"{_digest(value)} {expires_at}\n")
                    file.flush()
                    fsync(file.fileno())
            except OSError as error:
                raise StoreError(f"{self._file} cannot be written: {error.strerror or error}") from error
            self._digests.add(_digest(value))
            return True


class Sessions:
    """Signed values that stand for a rater: session cookies and one-time links. `ended` are those that do no longer."""

    def __init__(self, key: bytes, ended: Ended) -> None:
        self._key = key
        self._ended = ended
        # Cookies are shared by all ports of a host, so another server there needs another name.
        self.cookie = f"tunesmith_{hashlib.sha256(key).hexdigest()[:8]}"

    def sign(self, rater_id: int, expires_at: float) -> str:
        """Cookie value for `rater_id`, valid until `expires_at`; no two are the same."""
        return signed(self._key, "session", rater_id, expires_at)

    def read(self, value: str, now: float, kind: Kind = "session") -> int | None:
        """Rater id of a value; None if its signature is wrong, or it has expired or was ended."""
        text, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_bytes(signature), _signature(self._key, kind, text).encode()):
            return None
        rater_id, expiry = text.split(".")[:2]
        return int(rater_id) if now < int(expiry) and value not in self._ended else None

    def sign_user(self, user: KeyUser, expires_at: float) -> str:
        """A token for a user of a key, valid until `expires_at`, or until the access of either ends."""
        content = json.dumps([user.id, user.rater_id, user.user, list(user.scopes or ()), int(expires_at)]).encode()
        text = base64.urlsafe_b64encode(content).decode()
        return f"{USER_PREFIX}{text}.{_signature(self._key, 'user', text)}"

    def read_user(self, token: str, now: float) -> tuple[int, int, str, tuple[Scope, ...]] | None:
        """Ids of key and rater, name and scopes of a token; None if its signature is wrong, or it has expired."""
        text, _, signature = token.removeprefix(USER_PREFIX).partition(".")
        if not hmac.compare_digest(_bytes(signature), _signature(self._key, "user", text).encode()):
            return None
        key_id, rater_id, user, scopes, expiry = json.loads(base64.urlsafe_b64decode(text))
        return (key_id, rater_id, user, tuple(scopes)) if now < expiry else None

    def end(self, value: str, kind: Kind = "session") -> bool:
        """Have a value that can be read stand for nobody from now on; False if it was ended meanwhile."""
        return self._ended.add(value, int(value.split(".")[1]))

    def use_link(self, token: str) -> int | None:
        """Rater id of a one-time link, which is void afterwards; None if it is unknown, expired or used."""
        rater_id = self.read(token, time.time(), "link")
        return rater_id if rater_id is not None and self.end(token, "link") else None


def new_link(folder: Path, rater_id: int) -> str:
    """The token of a new one-time link for the server of `folder`, which may be running."""
    return signed(read_key(folder), "link", rater_id, time.time() + 60 * LINK_MINUTES)


def signed(key: bytes, kind: Kind, rater_id: int, expires_at: float) -> str:
    """`rater.expiry.random.signature`."""
    text = f"{rater_id}.{int(expires_at)}.{secrets.token_urlsafe(9)}"
    return f"{text}.{_signature(key, kind, text)}"


def _signature(key: bytes, kind: Kind, text: str) -> str:
    digest = hmac.new(key, _bytes(f"{kind}:{text}"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).decode()


class Logins:
    """Raters of access tokens and session cookies, cached for a moment.

    `sessions` is for the routes that begin and end a session. `failures` limits failed logins per network address.
    """

    def __init__(self, votes: VoteReader, sessions: Sessions, failures: RateLimits) -> None:
        self.sessions = sessions
        self.failures = failures
        self._votes = votes
        self._cache: OrderedDict[str, tuple[Rater, float]] = OrderedDict()
        self._num_forgotten = 0
        self._refused: Counter[str] = Counter()
        self._counting = threading.Lock()

    async def identify(self, bearer: str, cookie: str) -> Rater | None:
        """The rater of this token or, without one, this cookie. A session may also be sent as a bearer token."""
        known, until = self._cache.get(_cache_key(bearer, cookie), (None, 0.0))
        if time.monotonic() < until:
            return known
        before = self._num_forgotten
        rater = await run_in_threadpool(self._find, bearer, cookie)
        if rater is not None and before == self._num_forgotten:
            key = _cache_key(bearer, cookie)
            self._cache[key] = (rater, time.monotonic() + _CACHE_S)
            self._cache.move_to_end(key)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return rater

    def refuse(self, address: str) -> int:
        """Count a failed login of a network address; 0, or the seconds until it may fail again."""
        with self._counting:
            self._refused[address if len(self._refused) < MAX_KEYS else ""] += 1
            return self.failures.take(address)

    def take_refused(self) -> dict[str, int]:
        """Numbers of failed logins and of their addresses since the last call; empty if there were none."""
        with self._counting:
            refused, self._refused = self._refused, Counter[str]()
        return {"num": refused.total(), "num_addresses": len(refused)} if refused else {}

    def log_out(self, bearer: str, cookie: str) -> None:
        """End the session of this cookie, or of this token if it is one; a personal token stays valid."""
        for value in (bearer, cookie):
            if self.sessions.read(value, time.time()) is not None:
                self.sessions.end(value)
        self.forget()

    def forget(self) -> None:
        """Clear the cache, after access of a rater or a session has ended."""
        self._num_forgotten += 1
        self._cache.clear()

    def rater(self, rater_id: int) -> Rater | None:
        """The rater of this id, if their access has not ended."""
        found = self._votes.rater(rater_id)
        return found if found is not None and found.has_access(time.time()) else None

    def _user(self, token: str) -> KeyUser | None:
        """The user of a key with this token, who may do no more than the key."""
        found = self.sessions.read_user(token, time.time())
        if found is None:
            return None
        key_id, rater_id, name, scopes = found
        key = self.rater(key_id)
        # When a person's data is deleted, the rater who they were remains without access: their tokens end with it.
        if key is None or key.scopes is None or self.rater(rater_id) is None:
            return None
        return user_of(key, name, rater_id, tuple(one for one in scopes if one in key.scopes or "admin" in key.scopes))

    def _find(self, bearer: str, cookie: str) -> Rater | None:
        if bearer.startswith(USER_PREFIX):
            return self._user(bearer)
        found = self._votes.rater_of(bearer) if bearer else None
        if found is not None:
            return found
        rater_id = self.sessions.read(bearer or cookie, time.time())
        return None if rater_id is None else self.rater(rater_id)


def user_of(key: Rater, name: str, rater_id: int, scopes: tuple[Scope, ...]) -> KeyUser:
    """The user of a key whom it calls `name`, with its limits."""
    facts: dict[str, Any] = {field.name: getattr(key, field.name) for field in fields(Rater)}
    facts["scopes"] = scopes
    return KeyUser(**facts, user=name, rater_id=rater_id)


def bearer_of(request: HTTPConnection) -> str:
    """The token of the Authorization header, on the API's routes also of `x-api-key`, Anthropic's name of it; empty if
    there is none.
    """
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        token = request.headers.get("x-api-key", "") if is_api(request.scope["path"]) else ""
    return token.strip()


def _cache_key(bearer: str, cookie: str) -> str:
    return _digest(f"bearer {bearer}" if bearer else f"cookie {cookie}")


def _digest(token: str) -> str:
    """Hash under which a token is kept: looking it up takes the same time for all wrong ones."""
    return hashlib.sha256(_bytes(token)).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
