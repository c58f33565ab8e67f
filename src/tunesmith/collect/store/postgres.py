"""PostgreSQL as the database of votes: its address, the settings of a connection, its locks, and its errors."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import DataError as RefusedValueError

from tunesmith.base.core.errors import DataError, InputError, MissingDependencyError, StoreError
from tunesmith.base.core.extras import EXTRA_OF, naming_extras

FORM = "postgresql://USER@HOST:PORT/NAME"

WAIT_S = 10.0
"""Seconds that a lock of another process, or a server that is started again, is waited for."""

_DRIVERS = ("postgresql", "postgres", "postgresql+psycopg")
_SECRETS = ("password", "sslpassword")

_NOTICED: Mapping[str, str] = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""libpq's parameters by which a server that is gone is noticed in seconds; an address may set others."""

_LOCKS = 0x74756E65
"""The first number of all advisory locks of Tunesmith."""

ONE_WRITER = f"SELECT pg_advisory_xact_lock({_LOCKS}, 1)"
"""Waits for other writers. One transaction writes at a time, as in a file: ids are then committed in their order, which
readers rely on that keep one as a cursor, and no two servers count slots, quotas or revisions at once.
"""

_IN_USE = f"SELECT pg_advisory_lock_shared({_LOCKS}, 2)"
_IN_USE_BY_NOBODY = f"SELECT pg_try_advisory_xact_lock({_LOCKS}, 2)"

# A process that is stopped in a transaction would hold up all others.
_SETTINGS = f"SET lock_timeout = '{WAIT_S:g}s'; SET idle_in_transaction_session_timeout = '15s'; "
_WRITING = (
    # With a snapshot from before the lock, a transaction would not see what the writer before it has committed.
    f"{_SETTINGS} SET default_transaction_isolation = 'read committed'; "
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)
_READING = f"{_SETTINGS} SET default_transaction_isolation = 'repeatable read'; SET default_transaction_read_only = on"


def url_of(place: str) -> URL:
    """The address of a database. Raises StoreError for another one, and for one that may be read in several ways."""
    login, *after = place.partition("://")[2].split("@")
    # A part of the password would be taken for the host, or for the database's name.
    is_unclear = len(after) > 1 or (bool(after) and "/" in login)
    try:
        url = None if is_unclear else make_url(place)
    except (ArgumentError, ValueError):
        url = None
    if url is None:
        # Without its cause and without `place`: both may show the password.
        raise StoreError(
            f"the database's URL cannot be read; write it as {FORM}, and characters such as @ : / in a password as %40 "
            "%3A %2F"
        )
    if url.drivername not in _DRIVERS:
        raise StoreError(f"{url.drivername}://... is no database URL that is known; give a path, or {FORM}")
    if not url.database:
        raise StoreError(f"{shown(url)} names no database; write it as {FORM}")
    return url.set(drivername="postgresql+psycopg")


def shown(url: URL) -> str:
    """The address for people and logs, without passwords."""
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    # `set` takes no None, which would keep the password.
    public = URL.create("postgresql", url.username, None, url.host, url.port, url.database, query)
    return public.render_as_string()


def engine_of(url: URL, *, writes: bool) -> Engine:
    """An engine without connections yet. Raises MissingDependencyError without the driver."""
    try:
        with naming_extras():
            engine = create_engine(url.update_query_dict({**_NOTICED, **url.query}))
    except ImportError as error:  # the driver without libpq
        raise MissingDependencyError(
            f"psycopg cannot be used ({error}); run `pip install 'tunesmith[{EXTRA_OF['psycopg']}]'`"
        ) from error

    def check_encoding(raw: Any, _: object) -> None:
        encoding = raw.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(
                f"{shown(url)} has the encoding {encoding}, which cannot hold every text; create it with "
                "`createdb --encoding UTF8 --template template0`"
            )

    def prepare(raw: Any, _: object) -> None:
        raw.execute(_WRITING if writes else _READING)
        raw.commit()

    # The first of all: what SQLAlchemy asks of a new connection comes as bytes if there is no encoding (SQL_ASCII).
    event.listen(engine, "connect", check_encoding, insert=True)
    event.listen(engine, "connect", prepare)
    return engine


def note_use(connection: Connection) -> None:
    """Hold the lock that says, until the connection ends, that a process of this release writes the database."""
    connection.exec_driver_sql(_IN_USE)


def is_free(connection: Connection) -> bool:
    """True if no other process writes the database, and none can begin to before the transaction ends."""
    return bool(connection.exec_driver_sql(_IN_USE_BY_NOBODY).scalar())


def is_awaited(connection: Connection) -> bool:
    """True if another process waits to write."""
    waiting = (
        "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND "
        f"classid = {_LOCKS} AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
    )
    return bool(connection.exec_driver_sql(waiting).scalar())


def transaction_of(connection: Connection) -> str:
    """The number of the transaction; empty if it has changed nothing."""
    return connection.exec_driver_sql("SELECT pg_current_xact_id_if_assigned()::text").scalar() or ""


def was_committed(connection: Connection, transaction: str) -> bool:
    """True if the transaction of this number was committed, of which no answer came."""
    query = text("SELECT pg_xact_status(CAST(:number AS xid8))")
    return connection.execute(query, {"number": transaction}).scalar() == "committed"


def is_lost(error: DBAPIError) -> bool:
    """True if the server went away, or is not there."""
    return error.connection_invalidated or (isinstance(error, OperationalError) and not _state(error))


def is_conflict(error: DBAPIError) -> bool:
    """True if the server ended a transaction that would succeed if it were repeated."""
    return _state(error).startswith("40")


def failure(place: str, error: DBAPIError) -> InputError:
    """A database error that says what to do."""
    cause = " ".join(str(error.orig).split())
    if isinstance(error, RefusedValueError):
        return DataError(f"the database cannot hold a value: {cause}")
    state = _state(error)
    if state in _ADVICE:
        return StoreError(f"{place}: {_ADVICE[state]} ({cause})")
    if not is_lost(error):
        return StoreError(f"{place}: the database failed: {cause}")
    for words, advice in _REFUSALS.items():
        if words in cause:
            return StoreError(f"{place}: {advice} ({cause})")
    return StoreError(f"{place} cannot be reached; is the server running, are host and port right? ({cause})")


_ADVICE = {
    "55P03": f"the database is locked: another process has been writing for {WAIT_S:g} s; try again",
    "42501": "the user may not do this; make it the owner of the database",
    "53100": "the server's disk is full; free some space",
    "53300": "the server has no connection left; raise its max_connections",
    "25006": "the server is read-only, as a standby is; give the address of the primary",
}

_LOGIN = "the server refuses the login; check the user, and the password in PGPASSWORD or ~/.pgpass"
_REFUSALS = {
    "too many clients": _ADVICE["53300"],
    "password": _LOGIN,
    "authentication": _LOGIN,
    "pg_hba.conf": _LOGIN,
    'role "': _LOGIN,
    'database "': "there is no such database; create it with `createdb`",
}


def _state(error: DBAPIError) -> str:
    """The five characters by which SQL names an error; empty for none."""
    return getattr(error.orig, "sqlstate", None) or ""
