"""Who is calling: session cookies, and links that log in once.

A session cookie is signed, not stored: `rater.expiry.signature`, with a key that lies beside the database, so sessions
outlive a restart. Whom a cookie names is looked up at each request, so a rater who is shut out is out at once.
"""

import base64
import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import StoreError
from tunesmith.store.records import Role

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
