"""Votes in PostgreSQL: several writers, a server that goes away, and what it refuses."""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import NullPool, create_engine

from postgres_parts import Postgres, Proxy, wait_until
from tunesmith.base.core.errors import DataError, InputError, MissingDependencyError, StoreError, StoreInUseError
from tunesmith.collect.store import database, tables, writer
from tunesmith.collect.store import postgres as driver
from tunesmith.collect.store.inferences import Speaker
from tunesmith.collect.store.records import CampaignSettings, Choice, Feedback, Inference, KeySettings, NewItem
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

SECRET = "s3cret-word"


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.emptied()


@pytest.fixture
def stores(url: str) -> Iterator[tuple[VoteStore, VoteStore]]:
    """Two stores of one database, as two servers have them."""
    with VoteStore.open(url, seed=1) as first, VoteStore.open(url, seed=2) as second:
        yield first, second


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[tuple[Proxy, str]]:
    """A proxy, and the URL by which it is reached."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # names of sockets are short
        url = postgres.emptied().replace(str(postgres.folder), folder)
        yield Proxy(postgres, Path(folder)), url


def together(*works: Callable[[], object]) -> list[object]:
    """The values of functions that run at the same time; an exception is one too."""
    found: list[object] = [None] * len(works)

    def run(place: int) -> None:
        try:
            found[place] = works[place]()
        except InputError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answered(rater_id: int, name: str = "chatcmpl-1") -> Inference:
    choice = Choice("Red.", (5, 6), (-0.5, -1.0), (-0.4, -0.9), "stop", 3, "v3")
    prompt = ({"role": "user", "content": "Name a colour."},)
    return Inference(
        name=name, rater_id=rater_id, model="live", prompt=prompt, prompt_ids=(1,), choices=(choice,), options={},
        created_at=1.0,
    )  # fmt: skip


def new_key(store: VoteStore) -> int:
    return store.add_rater("app", key=KeySettings(("generate", "feedback"))).rater.id


def test_a_new_database_has_the_tables_that_the_code_knows_though_two_servers_begin_at_once(postgres: Postgres):
    url = postgres.new()
    code = "import sys; from tunesmith.collect.store.votes import VoteStore; VoteStore.open(sys.argv[1]).close()"
    servers = [subprocess.Popen([sys.executable, "-c", code, url]) for _ in range(2)]
    assert [server.wait(60) for server in servers] == [0, 0]
    check_tables(postgres, url)


def check_tables(postgres: Postgres, url: str) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, tables.votes_metadata) == []
        assert context.get_current_revision() == database.REVISIONS["votes"][-1]


def as_first_release(postgres: Postgres) -> str:
    """The URL of a database as the first release made it: the script of the file in PostgreSQL's words."""
    script = (Path(__file__).parent / "votes_0001.sql").read_text()
    for ours, theirs in (
        ("INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", "BIGSERIAL PRIMARY KEY"),
        (" DOUBLE", " DOUBLE PRECISION"),
        ("_id INTEGER", "_id BIGINT"),
        ("seed INTEGER", "seed BIGINT"),
        ("invited_by INTEGER", "invited_by BIGINT"),
    ):
        script = script.replace(ours, theirs)
    url = postgres.new()
    statements = "\n".join(line for line in script.splitlines() if not line.startswith("--"))
    for statement in statements.split(";"):
        if statement.strip():
            postgres.execute(statement, database_of(url))
    return url


def database_of(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


def test_a_database_of_the_first_release_is_brought_up_to_date_once_nobody_uses_it(postgres: Postgres):
    url = as_first_release(postgres)
    name = database_of(url)
    postgres.execute("INSERT INTO raters (name, role, created_at) VALUES ('ann', 'rater', 1)", name)
    older = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with older.connect() as connection:
        driver.note_use(connection)  # as a server of that release would
        with pytest.raises(StoreInUseError, match="older release; stop that one"):
            VoteStore.open(url)
        with VoteReader.open(url) as reader, pytest.raises(StoreError, match="older release, which is using it"):
            reader.votes_after(0)
    older.dispose()
    with VoteReader.open(url) as reader:
        assert [one.name for one in reader.raters()] == ["ann"]
    check_tables(postgres, url)
    names = "SELECT conname FROM pg_constraint WHERE contype = 'u' ORDER BY 1"
    assert postgres.execute(names, name) == postgres.execute(names, database_of(postgres.emptied()))


def test_a_database_of_a_newer_release_or_of_something_else_is_left_alone(postgres: Postgres):
    url = postgres.new()
    postgres.execute("CREATE TABLE recipes (id INTEGER)", database_of(url))
    with pytest.raises(StoreError, match=r"something else.*recipes"):
        VoteStore.open(url)
    with VoteReader.open(url) as reader, pytest.raises(StoreError, match=r"something else.*recipes"):
        reader.votes_after(0)
    postgres.execute("DROP TABLE recipes", database_of(url))
    VoteStore.open(url).close()
    postgres.execute("UPDATE alembic_version SET version_num = 'votes_9999'", database_of(url))
    with pytest.raises(StoreError, match=r"newer release.*votes_9999.*update tunesmith"):
        VoteStore.open(url)
    with VoteReader.open(url) as reader, pytest.raises(StoreError, match="newer release"):
        reader.votes_after(0)


def test_what_a_database_refuses_is_explained_without_the_password(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    postgres.execute(f"CREATE ROLE guarded LOGIN PASSWORD '{SECRET}'")
    url = postgres.new()
    guarded = url.replace("tunesmith@", f"guarded:{SECRET}@")
    for name, encoding in (("latin", "LATIN1"), ("ascii", "SQL_ASCII")):
        postgres.new(name, f"ENCODING '{encoding}' TEMPLATE template0")
    cases = {
        url.replace("tunesmith@", "guarded:wrong-word@"): "refuses the login.*PGPASSWORD",
        url.replace("tunesmith@", "nobody@"): "refuses the login",
        postgres.url("missing"): "no such database; create it",
        postgres.url("latin"): "encoding LATIN1.*--encoding UTF8",
        postgres.url("ascii"): "encoding SQL_ASCII.*--encoding UTF8",
        guarded: "may not do this; make it the owner",
        f"postgresql://ann:{SECRET}@/votes?host={tmp_path}": "cannot be reached; is the server running",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/votes": r"postgresql://ann@127\.0\.0\.1:1/votes cannot be reached",
        f"postgresql://ann:{SECRET}/x@host:port/votes": "cannot be read; write it as",
        f"postgresql://ann:top@{SECRET}@host/votes": "cannot be read.*%40",
        f"postgresql://ann:a@x{SECRET}/more@host/votes": "cannot be read.*%40",
        f"postgresql://ann:a@b?{SECRET}@host/votes": "cannot be read.*%40",
        f"postgresql://ann/{SECRET}@host/votes": "cannot be read.*%40",
        f"postgresql://ann@host/votes?password=a@{SECRET}": "cannot be read.*%40",
        f"postgresql://ann:{SECRET}@host": "names no database",
        f"mysql://ann:{SECRET}@host/votes": r"mysql://\.\.\. is no database URL",
        f"postgresql://ann@127.0.0.1:1/votes?password={SECRET}": "cannot be reached",
    }
    for given, reason in cases.items():
        with pytest.raises(StoreError, match=reason) as caught:
            VoteStore.open(given)
        assert SECRET not in str(caught.value) and "wrong-word" not in str(caught.value)
    with VoteReader.open(postgres.url("ascii")) as reader, pytest.raises(StoreError, match="encoding SQL_ASCII"):
        reader.votes_after(0)
    escaped = driver.url_of("postgresql://ann:a%40b%2Fc@host/votes")
    assert (escaped.password, driver.shown(escaped)) == ("a@b/c", "postgresql://ann@host/votes")
    postgres.execute(f"ALTER DATABASE {database_of(url)} OWNER TO guarded")
    postgres.execute("GRANT ALL ON SCHEMA public TO guarded", database_of(url))
    with VoteStore.open(guarded) as store:
        assert SECRET not in store.reader.place
    monkeypatch.setenv("PGPASSWORD", SECRET)
    VoteStore.open(guarded.replace(f":{SECRET}", "")).close()


def test_a_missing_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependencyError, match=r"psycopg.*pip install 'tunesmith\[postgresql\]'"):
        VoteStore.open("postgresql://ann@host/votes")


def test_ids_are_committed_in_order_so_that_a_cursor_misses_nothing_of_two_writers(
    stores: tuple[VoteStore, VoteStore], pairs: Callable[..., list[NewItem]]
):
    campaign = stores[0].set_campaign(CampaignSettings(overlap=2)).id
    stores[0].add_items(campaign, pairs(60))
    raters = [store.add_rater(f"rater {place}").rater.id for place, store in enumerate(stores)]
    seen: list[int] = []
    over = threading.Event()

    def work(store: VoteStore, rater: int) -> list[int]:
        shown = (one for _ in range(20) for one in store.next_presentations(rater, campaign, 3))
        return [store.vote(one.token, rater, "left").id for one in shown]

    def read() -> None:
        while True:
            was_over = over.is_set()
            page = stores[0].reader.votes_after(seen[-1] if seen else 0)
            seen.extend(vote.id for vote in page)
            if was_over and not page:
                return

    reader = threading.Thread(target=read)
    reader.start()
    given = together(*(lambda s=s, r=r: work(s, r) for s, r in zip(stores, raters, strict=True)))
    over.set()
    reader.join()
    assert seen == sorted(id for ids in given for id in ids)  # type: ignore[attr-defined]
    assert len(seen) == 120


def test_two_writers_keep_the_overlap_charge_each_token_and_take_a_name_once(
    stores: tuple[VoteStore, VoteStore], pairs: Callable[..., list[NewItem]]
):
    campaign = stores[0].set_campaign(CampaignSettings(overlap=1)).id
    stores[0].add_items(campaign, pairs(1))
    key = new_key(stores[0])
    raters = [stores[0].add_rater(f"rater {number}").rater.id for number in range(8)]
    shown = together(*(lambda r=r: stores[r % 2].next_presentations(r, campaign, 1) for r in raters))
    assert sorted(map(len, shown)) == [0] * 7 + [1]  # type: ignore[arg-type]
    together(*(lambda n=n: stores[n % 2].charge(key, 7, now=100.0) for n in range(40)))
    assert stores[1].reader.tokens_of_day(100.0) == {key: 280}
    names = together(*(lambda n=n: stores[n % 2].add_rater("same name") for n in range(6)))
    assert sum(isinstance(one, StoreError) and "taken" in str(one) for one in names) == 5
    stores[0].record(answered(key))
    thumb = Feedback(metric="thumbs", value=True, inference="chatcmpl-1")
    said = together(*(lambda n=n: stores[n % 2].give_feedback(campaign, thumb, Speaker(key)) for n in range(6)))
    assert len({one.name for one in said}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_whose_answer_did_not_come_is_done_exactly_once(proxy: tuple[Proxy, str], cut: str):
    server, url = proxy
    with VoteStore.open(url) as store:
        key = new_key(store)
        server.cut = cut
        store.charge(key, 7, now=100.0)
        assert server.num_cut == 1
        server.cut = cut
        store.record(answered(key))
        assert server.num_cut == 2
        assert store.reader.tokens_of_day(100.0) == {key: 7}
        assert store.reader.inference("chatcmpl-1") == answered(key)


def test_sessions_that_the_server_ends_are_made_again(postgres: Postgres, stores: tuple[VoteStore, VoteStore]):
    for store in stores:
        store.add_rater(f"before {id(store)}")
        store.reader.raters()
    assert postgres.end_sessions("emptied") >= 4
    assert len(stores[0].reader.raters()) == 2
    for store in stores:
        store.add_rater(f"after {id(store)}")
    assert len(stores[1].reader.raters()) == 4


def test_a_server_that_is_started_again_meanwhile_is_waited_for_and_one_that_stays_away_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    own = Postgres().make()
    try:
        with VoteStore.open(own.new()) as store:
            store.add_rater("ann")
            own.stop("immediate")
            waits = threading.Thread(target=store.add_rater, args=("bob",))
            waits.start()
            own.start()
            waits.join()
            assert [one.name for one in store.reader.raters()] == ["ann", "bob"]
            own.stop("immediate")
            for module in (driver, writer):
                monkeypatch.setattr(module, "WAIT_S", 0.3)
            with pytest.raises(StoreError, match="cannot be reached; is the server running"):
                store.add_rater("cid")
            with pytest.raises(StoreError, match="cannot be reached"):
                store.reader.raters()
            own.start()
            store.add_rater("cid")
            assert len(store.reader.raters()) == 3
    finally:
        own.close()


def test_a_writer_that_holds_up_the_others_is_named(postgres: Postgres, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "_WRITING", driver._WRITING.replace("'10s'", "'50ms'"))
    other = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with VoteStore.open(url) as store:
        with other.begin() as connection:
            connection.exec_driver_sql(driver.ONE_WRITER)
            with pytest.raises(StoreError, match="is locked: another process"):
                store.add_rater("ann")
        assert store.add_rater("ann").rater.name == "ann"


def test_an_import_notices_that_another_server_waits_to_write(postgres: Postgres, stores: tuple[VoteStore, VoteStore]):
    first, second = stores
    waiting: list[threading.Thread] = []

    def work(connection: object) -> list[bool]:
        before = first._writer.is_awaited()
        waiting.append(threading.Thread(target=second.add_rater, args=("ann",)))
        waiting[0].start()
        wait_until(lambda: postgres.num_waiting("emptied") == 1)
        return [before, first._writer.is_awaited()]

    assert first._writer.do(work) == [False, True]
    waiting[0].join()
    assert [one.name for one in first.reader.raters()] == ["ann"]


def test_a_value_that_the_database_cannot_hold_costs_nothing_else(stores: tuple[VoteStore, VoteStore]):
    store = stores[0]
    results = together(
        *(lambda n=n: store.add_rater(f"rater {n}") for n in range(4)),
        lambda: store.set_campaign(CampaignSettings(max_votes_per_rater=2**40)),
        lambda: store.reader.inference("a\0b"),
    )
    assert all(isinstance(one, DataError) and "cannot hold a value" in str(one) for one in results[4:])
    assert "NUL" in str(results[5])
    assert len(store.reader.raters()) == 4
    assert store.set_campaign(CampaignSettings(guidelines="Straße 🙂 ", name="Ärger")).settings.name == "Ärger"
    assert store.reader.campaign_named("Ärger").settings.guidelines == "Straße 🙂 "
