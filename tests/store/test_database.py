"""Files that are missing, damaged, in use, of another release, or of something else; and the schema itself."""

import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine, create_mock_engine

from tunesmith.base.core.errors import NameTakenError, StoreError
from tunesmith.collect.store import database, tables
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

_SCRIPT = '''"""One more column."""
import sqlalchemy as sa
from alembic import op
revision = "votes_0007"
down_revision = "votes_0006"
def upgrade() -> None:
    op.add_column("campaigns", sa.Column("colour", sa.String(16), nullable=True))
'''


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(("name", "metadata"), [("votes", tables.votes_metadata), ("runs", tables.runs_metadata)])
def test_a_new_file_and_one_of_the_first_release_have_the_tables_that_the_code_knows(
    tmp_path: Path, name: str, metadata: MetaData, is_new: bool
):
    path = tmp_path / "some.db"
    if not is_new:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript((Path(__file__).parent / f"{name}_0001.sql").read_text())
    (VoteStore if name == "votes" else RunStore).open(path).close()
    with create_engine(f"sqlite:///{path}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert MigrationContext.configure(connection).get_current_revision() == database.REVISIONS[name][-1]


@pytest.mark.parametrize("name", ["votes", "runs"])
def test_the_known_revisions_are_the_scripts_in_order(name: database.DatabaseName):
    folder = Path(database.__file__).parent / "migrations" / name
    assert tuple(sorted(path.stem for path in folder.glob("*.py"))) == database.REVISIONS[name]


@pytest.mark.parametrize("metadata", [tables.votes_metadata, tables.runs_metadata])
def test_the_tables_are_no_affair_of_sqlite_alone(metadata: MetaData):
    statements: list[str] = []
    engine = create_mock_engine(
        "postgresql://", lambda sql, *_, **__: statements.append(str(sql.compile(dialect=engine.dialect)))
    )
    metadata.create_all(engine, checkfirst=False)
    assert sum("CREATE TABLE" in statement for statement in statements) == len(metadata.tables)
    assert not any("AUTOINCREMENT" in statement for statement in statements)


def test_an_older_file_is_brought_up_to_date_and_a_newer_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "votes.db"
    with VoteStore.open(path) as store:
        kept = store.set_campaign(CampaignSettings(guidelines="Be kind."))
    package = Path(database.__file__).parent
    newer = tmp_path / "release with 100% and spaces"
    shutil.copytree(package / "migrations", newer / "migrations")
    (newer / "migrations" / "votes" / "votes_0007.py").write_text(_SCRIPT)
    with monkeypatch.context() as patch:
        patch.setattr(database, "__file__", str(newer / "database.py"))
        patch.setitem(database.REVISIONS, "votes", (*database.REVISIONS["votes"], "votes_0007"))
        with VoteReader.open(path) as reader:
            with database._lock(path), pytest.raises(StoreError, match="older release, which is using it"):
                reader.votes_after(0)
            assert reader.votes_after(0) == []
        with VoteStore.open(path) as store:
            assert store.reader.campaigns() == [kept]
    with pytest.raises(StoreError, match=r"newer release.*votes_0007.*update tunesmith"):
        VoteStore.open(path)
    with VoteReader.open(path) as reader, pytest.raises(StoreError, match="newer release"):
        reader.votes_after(0)


def test_raters_of_an_older_release_are_found_in_whatever_spelling(tmp_path: Path):
    path = tmp_path / "votes.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "votes_0001.sql").read_text())
        connection.execute("INSERT INTO raters (name, role, created_at) VALUES ('Ann  Lee', 'rater', 1)")
        connection.commit()
    with VoteStore.open(path) as store:
        (ann,) = store.reader.raters()
        assert store.add_rater("ANN lee").rater.id == ann.id  # who had no access yet
        with pytest.raises(NameTakenError):
            store.add_rater("ann lee")


def test_a_second_server_on_the_same_file_is_refused_and_a_dead_one_is_not_missed(tmp_path: Path):
    path = tmp_path / "votes.db"
    with VoteStore.open(path), pytest.raises(StoreError, match="in use"):
        VoteStore.open(path)
    VoteStore.open(path).close()


def test_one_file_in_the_place_of_the_other_is_refused(tmp_path: Path):
    path = tmp_path / "runs.db"
    RunStore.open(path).close()
    with pytest.raises(StoreError, match="holds runs, not votes"):
        VoteStore.open(path)
    with VoteReader.open(path) as reader, pytest.raises(StoreError, match="holds runs, not votes"):
        reader.votes_after(0)


def test_a_database_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / "votes.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (id INTEGER)")
    connection.close()
    with pytest.raises(StoreError, match=r"something else.*recipes"):
        VoteStore.open(path)
    with VoteReader.open(path) as reader, pytest.raises(StoreError, match=r"something else.*recipes"):
        reader.votes_after(0)


def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path):
    path = tmp_path / "votes.db"
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(StoreError, match=r"votes\.db is damaged.*backup"):
        VoteStore.open(path)
    with VoteReader.open(path) as reader, pytest.raises(StoreError, match="damaged"):
        reader.votes_after(0)
    assert path.read_bytes() == b"no database at all" * 1000


def test_a_url_that_cannot_be_used_is_explained():
    with pytest.raises(StoreError, match="give its path"):
        VoteStore.open("sqlite:///votes.db")
    with pytest.raises(StoreError, match="no database URL"):
        VoteStore.open("nonsense://host/name")


def test_votes_are_synced_and_only_the_owner_checkpoints(tmp_path: Path):
    path = tmp_path / "votes.db"
    with VoteStore.open(path) as store:
        raw = store._writer._database.connection
        assert raw.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert raw.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        raw.rollback()
        store.set_campaign(CampaignSettings())
        size = Path(f"{path}-wal").stat().st_size
        assert size > 0
        with VoteReader.open(path) as reader:
            assert len(reader.campaigns()) == 1
        assert Path(f"{path}-wal").stat().st_size == size


def test_a_reader_sees_one_moment_and_does_not_stop_the_writer(tmp_path: Path):
    path = tmp_path / "votes.db"
    with VoteStore.open(path) as store, VoteReader.open(path) as reader:
        asked = store.set_campaign(CampaignSettings()).id
        rater = store.add_rater("ann").rater.id
        for number in range(600):
            store.add_items(asked, [NewItem(f"p{number}", (Candidate("a"), Candidate("b")))])
            if number >= 590:
                (shown,) = store.next_presentations(rater, asked, 1)
                store.vote(shown.token, rater, "left")
        rows = reader.export()
        first = next(rows)
        (shown,) = store.next_presentations(rater, asked, 1)
        store.vote(shown.token, rater, "right")
        assert first.rater == "ann"
        assert len(list(rows)) in (9, 10)


def test_what_fails_in_a_group_of_changes_takes_no_other_with_it(tmp_path: Path):
    with VoteStore.open(tmp_path / "votes.db") as store:
        store.add_rater("taken")
        results: list[object] = []

        def add(name: str) -> None:
            try:
                results.append(store.add_rater(name).rater.name)
            except StoreError as error:
                results.append(type(error))

        threads = [threading.Thread(target=add, args=("taken" if n % 2 else f"new {n}",)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results.count(NameTakenError) == 10
        assert len(store.reader.raters()) == 11


def test_a_change_that_cannot_begin_is_an_error_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    with VoteStore.open(tmp_path / "votes.db") as store:
        with closing(sqlite3.connect(tmp_path / "votes.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                store.add_rater("ann")
        assert store.add_rater("ann").rater.name == "ann"


def test_a_closed_store_says_so_and_closes_twice(tmp_path: Path):
    store = VoteStore.open(tmp_path / "votes.db")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.add_rater("ann")
