"""Which tables a database has. The owner brings them up to date when it opens; others refuse what they do not know."""

import time
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, inspect, text

from tunesmith.core.errors import StoreError

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


def _revision(
    connection: Connection, name: DatabaseName, place: str, *, may_hold_others: bool = False
) -> str | None:
    tables = inspect(connection).get_table_names()
    if _VERSION_TABLE not in tables:
        if tables and not may_hold_others:
            raise StoreError(f"{place} is a database of something else (tables {', '.join(tables[:5])}); choose another")
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
