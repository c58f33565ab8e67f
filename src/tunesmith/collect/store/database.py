"""Database connections: one writing process, which owns and migrates the file, and read-only access for all others.

A file has one writing connection, which alone checkpoints its write-ahead log: SQLite before 3.51.3 can corrupt a log
that two connections write and checkpoint. A database of PostgreSQL may have several writing processes, of which one
writes at a time (`postgres.py`).
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar
from urllib.parse import quote

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from tunesmith.base.core.errors import InputError, StoreError, StoreInUseError
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import NETWORK_FILE_SYSTEMS, file_system
from tunesmith.collect.store import postgres
from tunesmith.collect.store.tables import runs_metadata, votes_metadata

if TYPE_CHECKING:
    from alembic.config import Config

_log = get_logger(__name__)

DatabaseName = Literal["votes", "runs"]
T = TypeVar("T")

REVISIONS: dict[DatabaseName, tuple[str, ...]] = {
    "votes": ("votes_0001", "votes_0002", "votes_0003", "votes_0004", "votes_0005", "votes_0006"),
    "runs": ("runs_0001", "runs_0002", "runs_0003"),
}
"""Schema revisions that this release knows, oldest first: the names of the scripts in `migrations/`."""

_METADATA = {"votes": votes_metadata, "runs": runs_metadata}

BUSY_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 0.2
_RETRY_S = 0.1
_CACHE_KB = 64 * 1024
_VERSION_TABLE = "alembic_version"
_READ_BY_CURSOR = ("offers", "jobs", "votes", "rankings", "demonstrations", "commands", "feedback", "inferences")


class Closeable:
    """Base of objects that are closed at the end of a `with` block."""

    def close(self) -> None:
        """Release the file and all connections. Harmless if called twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OwnedDatabase(Closeable):
    """The writing connection to a database, migrated to the tables of this release.

    For one thread at a time. `durable` syncs each commit to the disk; without it the last commits may be lost if the
    machine (not the process) crashes.
    """

    def __init__(self, place: str | Path, name: DatabaseName, *, durable: bool) -> None:
        self.place = shown(place)
        self._name: DatabaseName = name
        path = file_of(place)
        self._is_file = path is not None
        with ExitStack() as stack:
            if path is not None:
                stack.callback(_lock(path).release)
            engine = _server_engine(str(place)) if path is None else _writing_engine(path, durable=durable)
            stack.callback(engine.dispose)
            try:
                self.connection = stack.enter_context(engine.connect())
                self.prepare()
            except DBAPIError as error:
                raise failure(self.place, error) from error
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close the connection and release the lock. What was deleted is no longer in the log of a file."""
        raw = None if self.connection.closed else self.connection.connection.dbapi_connection
        if isinstance(raw, sqlite3.Connection) and not raw.in_transaction:
            with suppress(sqlite3.Error):  # in use by a reader, or a full disk: the next close empties it
                raw.execute(f"PRAGMA busy_timeout={int(1000 * _LOCK_TIMEOUT_S)}")
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._resources.close()

    def prepare(self) -> None:
        """Migrate the database, and say that it is in use, unless this was done since the connection was made.

        Raises StoreError if it is of a newer release, or not one of ours.
        """
        if self.connection.info.get("is_prepared"):
            return
        with self.connection.begin():
            _migrate(self.connection, self._name, self.place)
            if not self._is_file:
                postgres.note_use(self.connection)
        self.connection.info["is_prepared"] = True

    def is_awaited(self) -> bool:
        """True if another process waits for the transaction that is open."""
        return not self._is_file and postgres.is_awaited(self.connection)

    def transaction(self) -> str:
        """The number of the open transaction for `settle`; empty if it has none."""
        return "" if self._is_file else postgres.transaction_of(self.connection)

    def settle(self, error: BaseException, transaction: str, until_s: float) -> Literal["stored", "undone", "failed"]:
        """What became of a transaction that ended with `error`: it was committed before the server went away, or it was
        undone and can be repeated. A server that is away is waited for until `until_s` of the monotonic clock.

        `transaction` is its number if it had come to its end, else empty.
        """
        if self._is_file or not isinstance(error, DBAPIError):
            return "failed"
        if postgres.is_conflict(error):
            return "undone" if time.monotonic() < until_s else "failed"
        if not postgres.is_lost(error):
            return "failed"
        while time.monotonic() < until_s:
            try:
                self.prepare()
                # The lock of `begin` waits for a transaction that its server still works on.
                with self.connection.begin():
                    is_stored = bool(transaction) and postgres.was_committed(self.connection, transaction)
            except DBAPIError:
                time.sleep(_RETRY_S)
            except StoreError:
                break
            else:
                return "stored" if is_stored else "undone"
        return "failed"


class ReadOnlyDatabase(Closeable):
    """Read-only connections to a database that another process writes. A missing file or table reads as empty. One of
    an older release is brought up to date first, if no process has it.

    Safe to use from any number of threads.
    """

    name: DatabaseName

    @classmethod
    def open(cls, path_or_url: str | Path) -> Self:
        """A reader of the file, which may appear later. Its calls raise StoreError if a newer release wrote it."""
        return cls(path_or_url)

    def __init__(self, place: str | Path) -> None:
        self.place = shown(place)
        self._given = place
        self._path = file_of(place)
        if self._path is None:
            self._engine = postgres.engine_of(postgres.url_of(str(place)), writes=False)
        else:
            self._engine = _reading_engine(self._path)
        self._lock = threading.Lock()
        self._checked: object = None

    def read(self, query: Callable[[Connection], T], nothing: T) -> T:
        """The result of `query` on a snapshot of the database, or `nothing` if there is no database yet. A server that
        goes away is waited for.

        Raises StoreError if the database is damaged or of another release.
        """
        if not self.is_there():
            return nothing
        until_s = time.monotonic() + postgres.WAIT_S
        while True:
            try:
                with self._engine.connect() as connection, connection.begin():
                    return query(connection)
            except DBAPIError as error:
                if self._path is not None and not self._path.exists():
                    return nothing
                if self._path is not None or not postgres.is_lost(error) or time.monotonic() > until_s:
                    raise failure(self.place, error) from error
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def is_there(self) -> bool:
        """True if the database has its tables. A file that was replaced (another inode) is checked again.

        Raises StoreError if it is one of something else, or of a newer release.
        """
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
                with self._engine.connect() as connection, connection.begin():
                    revision = _revision(connection, self.name, self.place)
            except DBAPIError as error:
                raise failure(self.place, error) from error
            if revision is None:
                return False
            if revision != REVISIONS[self.name][-1]:
                self._engine.dispose()
                try:
                    OwnedDatabase(self._given, self.name, durable=True).close()
                except StoreInUseError:
                    raise StoreError(
                        f"{self.place} was written by an older release, which is using it; start that process with "
                        "this release first"
                    ) from None
            self._checked = identity
            return True


def or_now(now: float | None) -> float:
    """`now`, or the clock's seconds since the epoch."""
    return time.time() if now is None else now


def failure(place: str, error: DBAPIError) -> InputError:
    """A database error as a StoreError that says what to do; a value that no database holds is a DataError."""
    if hasattr(error.orig, "sqlstate"):  # of psycopg
        return postgres.failure(place, error)
    cause = str(error.orig)
    if "not a database" in cause or "malformed" in cause:
        return StoreError(f"{place} is damaged or no database ({cause}); put a backup in its place, or move it away")
    if "readonly" in cause or "unable to open" in cause:
        return StoreError(f"{place} cannot be opened or written ({cause}); check the folder and its permissions")
    if "locking protocol" in cause:
        return StoreError(f"{place} cannot be locked ({cause}); keep it on a local disk")
    if "full" in cause:
        return StoreError(f"{place} cannot be written ({cause}); free some space")
    return StoreError(f"{place}: the database failed: {cause}")


def file_of(place: str | Path) -> Path | None:
    """The path of a file, None for the URL of a database server."""
    if isinstance(place, Path) or "://" not in place:
        return Path(place).expanduser().absolute()
    if place.startswith("sqlite"):
        raise StoreError(f"{place} is the URL of a file; give its path")
    return None


def shown(place: str | Path) -> str:
    """The path, or the URL without its password. Raises StoreError for a URL that cannot be used."""
    return str(place) if file_of(place) is not None else postgres.shown(postgres.url_of(str(place)))


def _lock(path: Path) -> FileLock:
    lock = FileLock(f"{path}.lock", thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=0.02)
    except Timeout:
        raise StoreInUseError(f"{path} is in use by another process, which alone may write it; stop that one") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return lock


def _writing_engine(path: Path, *, durable: bool) -> Engine:
    # A write-ahead log has its index in memory that all readers share, which a network's file systems cannot give them.
    kind = file_system(path.parent)
    is_remote = kind.startswith(NETWORK_FILE_SYSTEMS)
    if is_remote:
        _log.warning(f"{path} is on {kind}, where SQLite depends on the server's locks; prefer a local disk")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA journal_mode={'DELETE' if is_remote else 'WAL'}")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        # What was deleted is overwritten: somebody's data does not stay in free pages.
        connection.execute("PRAGMA secure_delete=ON")
        # An import touches most pages of an index whose keys are random; pages that do not fit are written twice.
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KB}")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    # Immediate: upgrading a read lock later could fail with SQLITE_BUSY.
    _begin_with(engine, "BEGIN IMMEDIATE")
    return engine


def _reading_engine(path: Path) -> Engine:
    url = f"file:{quote(str(path))}?mode=ro"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(url, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    _begin_with(engine, "BEGIN")
    return engine


def _begin_with(engine: Engine, statement: str) -> None:
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(statement)

    event.listen(engine, "begin", begin)


def _server_engine(url: str) -> Engine:
    engine = postgres.engine_of(postgres.url_of(url), writes=True)
    _begin_with(engine, postgres.ONE_WRITER)
    return engine


def _migrate(connection: Connection, name: DatabaseName, place: str) -> None:
    """Give a database the tables of this release, in the transaction: a new one from `tables.py`, an older one by the
    scripts that its revision lacks (the Alembic cookbook's "Building an Up to Date Database from Scratch").

    Raises StoreError if it is of a newer release, or not one of ours.
    """
    revision = _revision(connection, name, place)
    if revision == REVISIONS[name][-1]:
        return
    # Imported here because most starts find the tables up to date.
    from alembic import command

    if revision is not None:
        if connection.dialect.name != "sqlite" and not postgres.is_free(connection):
            raise StoreInUseError(f"{place} is in use by a process of an older release; stop that one first")
        command.upgrade(_alembic_config(connection, name), "head")
        return
    _METADATA[name].create_all(connection)
    command.stamp(_alembic_config(connection, name), "head")
    _start_ids_at_now(connection)


def _revision(connection: Connection, name: DatabaseName, place: str) -> str | None:
    tables = inspect(connection).get_table_names()
    if _VERSION_TABLE not in tables:
        if tables:
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


def _alembic_config(connection: Connection, name: DatabaseName) -> "Config":
    from alembic.config import Config

    folder = Path(__file__).parent / "migrations"
    config = Config()
    config.set_main_option("path_separator", "newline")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("version_locations", str(folder / name).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _start_ids_at_now(connection: Connection) -> None:
    """Start ids that readers keep as cursors at the microseconds since the epoch.

    Then ids also grow from one file to its replacement, so cursors stay valid. They are exact in JavaScript until the
    year 2255.
    """
    start = int(time.time() * 1e6)
    sql = "INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :start)"
    if connection.dialect.name != "sqlite":
        sql = "SELECT setval(pg_get_serial_sequence(:name, 'id'), :start)"
    for table in inspect(connection).get_table_names():
        if table in _READ_BY_CURSOR:
            connection.execute(text(sql), {"name": table, "start": start})
