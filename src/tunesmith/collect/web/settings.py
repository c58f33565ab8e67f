"""Settings of the server, and the limits that protect it."""

from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.base.schema.weights import Weights

LOOPBACK = ("127.0.0.1", "::1")
"""Proxies that are trusted unless others are named."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per client.

    A rater may send `rate_per_s` requests a second on average and `burst` at once. A network address may fail to log in
    `failures` times at once, and once more every `failure_every_s`. A body must arrive within `body_timeout_s`, and a
    request's head within `head_timeout_s`. JSON may be nested `json_depth` deep, and have
    `json_values` texts, objects and lists.
    """

    rate_per_s: float = 50.0
    burst: int = 200
    failures: int = 20
    failure_every_s: float = 3.0
    body_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    json_depth: int = 32
    json_values: int = 65_536
    num_connections: int = 512
    streams_per_rater: int = 16


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Files, address and host names of the server.

    `folder` holds `votes.db` (written here) and `runs.db` (the trainer's, read); with `database`, the URL of one of
    PostgreSQL, votes are there instead. `hosts` are Host headers that are
    accepted in addition to this machine's. `proxies` are the addresses whose X-Forwarded headers are believed, and
    `root_path` is the path prefix below which a proxy serves the pages, if it does not say so itself. A session ends
    after `session_days`. `runs` is the folder of the runs that admins see; without one there are no pages of runs.
    `max_runs` of those that are started from the pages run at a
    time, with 0 none can be started; `allow` are the files and names that they may use beside what is built in.
    With `has_arena` people talk with the versions of the live loop, or with the runs. `openai` is what the API serves:
    the live loop of `folder`, a run, or a model; empty for no API. Whatever is drawn is drawn with `weights`.
    `origins` are those of pages of other servers that may ask the API. Stored answers, feedback, usage and the audit
    log are removed after `retention_days`; None keeps them.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    root_path: str = ""
    proxies: tuple[str, ...] = LOOPBACK
    session_days: float = 30.0
    runs: Path | None = None
    max_runs: int = 0
    allow: tuple[str, ...] = ()
    has_arena: bool = False
    openai: str = ""
    weights: Weights = "model"
    origins: tuple[str, ...] = ()
    retention_days: float | None = None
    database: str = field(default="", repr=False)  # it may hold a password
    limits: Limits = field(default_factory=Limits)

    @property
    def votes_place(self) -> str | Path:
        """The file that the server writes, or the URL of its database."""
        return self.database or self.folder / "votes.db"

    @property
    def runs_path(self) -> Path:
        """The file that the trainer writes; it may not exist yet."""
        return self.folder / "runs.db"
