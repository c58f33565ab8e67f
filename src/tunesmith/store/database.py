"""How a database is opened: by the one process that writes it, or read-only by everyone else.

A file has one writing connection, which alone checkpoints its write-ahead log: SQLite before 3.51.3 can damage a log
that two connections write and checkpoint.
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import QueuePool, StaticPool

from tunesmith.core.errors import MissingDependencyError, StoreError

DatabaseName = Literal["votes", "runs"]

REVISIONS: dict[DatabaseName, tuple[str, ...]] = {"votes": ("votes_0001",), "runs": ("runs_0001",)}
"""Revisions of the tables that this release knows, oldest first: the names of the scripts in `migrations/`."""

_VERSION_TABLE = "alembic_version"
_READ_BY_CURSOR = ("offers", "metrics", "jobs", "votes", "rankings", "demonstrations", "commands")


def bring_up_to_date(connection: Connection, name: DatabaseName, place: str) -> None:
    """Give a database the tables of this release, in one transaction.

    Raises StoreError if it is of a newer release, or holds something else.
    """
    with connection.begin():
        revision = _revision(connection, name, place)
        if revision == REVISIONS[name][-1]:
            return
        _upgrade(connection, name)
        if revision is None and connection.dialect.name == "sqlite":
            _begin_ids(connection)


def check_readable(connection: Connection, name: DatabaseName, place: str) -> bool:
    """True if the database has the tables of this release, False if it has none yet. Raises StoreError for others."""
    with connection.begin():
        revision = _revision(connection, name, place, may_hold_others=True)
    if revision is not None and revision != REVISIONS[name][-1]:
        raise StoreError(f"{place} was written by an older release; start the process that owns it with this one first")
    return revision is not None


def _revision(connection: Connection, name: DatabaseName, place: str, *, may_hold_others: bool = False) -> str | None:
    tables = inspect(connection).get_table_names()
    if _VERSION_TABLE not in tables:
        if tables and not may_hold_others:
            raise StoreError(
                f"{place} is a database of something else (tables {', '.join(tables[:5])}); choose another"
            )
        return None
    revision = connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar()
    if revision is None or revision in REVISIONS[name]:
        return None if revision is None else str(revision)
    other = str(revision).partition("_")[0]
    if other != name and other in REVISIONS:
        raise StoreError(f"{place} holds {other}, not {name}; was one file put in the place of the other?")
    raise StoreError(
        f"{place} was written by a newer release (tables {revision}, known are up to {REVISIONS[name][-1]}); "
        "update tunesmith, or choose another folder"
    )


def _upgrade(connection: Connection, name: DatabaseName) -> None:
    # Imported here because most starts find the tables up to date.
    from alembic import command
    from alembic.config import Config

    folder = Path(__file__).parent / "migrations"
    config = Config()
    config.set_main_option("path_separator", "newline")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("version_locations", str(folder / name).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _begin_ids(connection: Connection) -> None:
    """Let ids that readers keep as cursors begin at the microseconds since the epoch.

    So they also grow from one file to the next in its place, and a cursor of the old file stays good. They are exact in
    JavaScript until the year 2255.
    """
    start = int(time.time() * 1e6)
    for table in inspect(connection).get_table_names():
        if table in _READ_BY_CURSOR:
            connection.execute(
                text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"), {"name": table, "seq": start}
            )


T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 0.2


class OwnedDatabase:
    """The writing connection to a database whose tables are those of this release.

    It may be used by one thread at a time, whichever that is. `durable` syncs each commit to the disk; without it the
    last commits may be lost if the machine (not the process) dies.
    """

    def __init__(self, place: str | Path, name: DatabaseName, *, durable: bool) -> None:
        self.place = str(place)
        path = file_of(place)
        self._lock = None if path is None else _lock(path)
        try:
            engine = _url_engine(str(place)) if path is None else _file_engine(path, durable=durable)
            self._engine = engine
            try:
                self.connection = engine.connect()
                bring_up_to_date(self.connection, name, self.place)
            except DBAPIError as error:
                raise failure(self.place, error) from error
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection and let go of the file. Harmless if called twice."""
        for part in ("connection", "_engine"):
            held: Connection | Engine | None = getattr(self, part, None)
            if isinstance(held, Connection):
                held.close()
            elif held is not None:
                held.dispose()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class ReadOnlyDatabase:
    """Read-only connections to a database that another process writes. It may be missing, and may appear later.

    Safe to use from any number of threads.
    """

    def __init__(self, place: str | Path, name: DatabaseName) -> None:
        self.place = str(place)
        self._name: DatabaseName = name
        self._path = file_of(place)
        self._engine = _url_engine(str(place)) if self._path is None else _reading_engine(self._path)
        self._lock = threading.Lock()
        self._checked: object = None

    def read(self, query: Callable[[Connection], T], nothing: T) -> T:
        """What `query` gives for a connection that sees one moment of the database; `nothing` where there is none yet.

        Raises StoreError if the database is damaged or of another release.
        """
        if not self._is_there():
            return nothing
        try:
            with self._engine.connect() as connection, connection.begin():
                return query(connection)
        except DBAPIError as error:
            if self._path is not None and not self._path.exists():
                return nothing
            raise failure(self.place, error) from error

    def close(self) -> None:
        """Close all connections. Harmless if called twice."""
        self._engine.dispose()

    def _is_there(self) -> bool:
        """True if the database has its tables. A file that was made anew is looked at again."""
        identity: object = "url"
        if self._path is not None:
            try:
                facts = self._path.stat()
            except OSError:
                return False
            identity = (facts.st_dev, facts.st_ino)
        with self._lock:
            if self._checked == identity:
                return True
            self._engine.dispose()
            try:
                with self._engine.connect() as connection:
                    is_there = check_readable(connection, self._name, self.place)
            except DBAPIError as error:
                raise failure(self.place, error) from error
            if is_there:
                self._checked = identity
            return is_there


def file_of(place: str | Path) -> Path | None:
    """The path if `place` is a file, None if it is the URL of a database server."""
    if isinstance(place, Path) or "://" not in place:
        return Path(place).expanduser().absolute()
    if place.startswith("sqlite"):
        raise StoreError(f"{place} is the URL of a file; give its path")
    return None


def failure(place: str, error: DBAPIError) -> StoreError:
    """What went wrong with a database, in a reader's words."""
    text = str(error.orig)
    if "not a database" in text or "malformed" in text:
        return StoreError(f"{place} is damaged or no database ({text}); put a backup in its place, or move it away")
    if "readonly" in text or "unable to open" in text:
        return StoreError(f"{place} cannot be opened or written ({text}); check the folder and its permissions")
    if "full" in text:
        return StoreError(f"{place} cannot be written ({text}); free some space")
    return StoreError(f"{place}: the database failed: {text}")


def _lock(path: Path) -> FileLock:
    lock = FileLock(f"{path}.lock", thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=0.02)
    except Timeout:
        raise StoreError(f"{path} is in use by another process, which alone may write it; stop that one") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return lock


def _file_engine(path: Path, *, durable: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    # Immediate: a writer that begins by reading could otherwise fail when it comes to write.
    event.listen(engine, "begin", _begin_immediate)
    return engine


def _reading_engine(path: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "begin", _begin_reading)
    return engine


def _url_engine(url: str) -> Engine:
    try:
        return create_engine(make_url(url))
    except (ArgumentError, NoSuchModuleError) as error:
        raise StoreError(f"{url!r} is no database URL ({error}); give a path, or postgresql+psycopg://...") from error
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{url} needs the package {error.name!r}; install it") from error


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
