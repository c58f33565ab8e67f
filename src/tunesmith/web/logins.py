"""Turns a token or a cookie into an identity, and remembers the answer for a moment."""

import hashlib
import time
from collections import OrderedDict

from starlette.concurrency import run_in_threadpool

from tunesmith.store.records import Rater
from tunesmith.store.votes import VoteStore
from tunesmith.web.buckets import Buckets
from tunesmith.web.sessions import Identity, Links, Sessions

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
        for rater in self._store.raters():
            if rater.id == rater_id:
                is_over = rater.disabled_at is not None or (rater.expires_at is not None and rater.expires_at <= now)
                return None if is_over else rater
        return None

    def _find(self, bearer: str, cookie: str) -> Identity | None:
        found = self._store.rater_of(bearer) if bearer else None
        if found is None:
            rater_id = self.sessions.read(bearer or cookie, time.time())
            found = self.rater(rater_id) if rater_id is not None else None
        return None if found is None else Identity(found.id, found.name, found.role)


def _key(bearer: str, cookie: str) -> str:
    text = f"bearer {bearer}" if bearer else f"cookie {cookie}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
