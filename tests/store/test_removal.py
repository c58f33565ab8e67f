"""What is removed by age or by person, what stays whole, and the log that tells of it."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataDeletedError, StoreError, UnknownPresentationError
from tunesmith.collect.store.inbox import Chore
from tunesmith.collect.store.inferences import Speaker
from tunesmith.collect.store.records import (
    CampaignSettings,
    Candidate,
    Choice,
    Feedback,
    GivenFeedback,
    GivenVote,
    Inference,
    KeySettings,
    NewItem,
    Person,
)
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.store.votes import VoteStore, do_in

DAY_S = 24 * 3600.0
NOW = 1000 * DAY_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "votes.db"


@pytest.fixture
def store(path: Path) -> Iterator[VoteStore]:
    with VoteStore.open(path, seed=0) as opened:
        opened.set_campaign(CampaignSettings(overlap=2), now=NOW)
        yield opened
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.fixture
def key(store: VoteStore) -> int:
    return store.add_rater("app", key=KeySettings(("generate", "feedback")), now=NOW).rater.id


def answered(store: VoteStore, key: int, name: str, days: float, user: str = "olga", episode: str = "") -> None:
    """Store two answers that were given so many days ago."""
    choices = tuple(
        Choice(f"{colour} for {name}", (5, 6), (-0.5, -1.0), (-0.4, -0.9), "stop", version, f"v{version}")
        for version, colour in enumerate(("Red", "Blue"), start=3)
    )
    store.record(
        Inference(
            name=name,
            rater_id=key,
            model="live",
            prompt=({"role": "user", "content": f"What {user} asked in {name}"},),
            prompt_ids=(1, 2, 3),
            choices=choices,
            options={"temperature": 0.7},
            user=user,
            episode=episode,
            created_at=NOW - days * DAY_S,
        )
    )


def say(store: VoteStore, key: int, days: float, metric: str, value: object, **about: object) -> None:
    said = Feedback(metric=metric, value=value, **about)  # type: ignore[arg-type]
    store.give_feedback(1, said, Speaker(key), now=NOW - days * DAY_S)


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def words_in(path: Path) -> str:
    """All that the file holds, as text."""
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump())


def test_what_is_older_is_removed_unless_it_was_rated_since_and_votes_stay(store: VoteStore, key: int, path: Path):
    for number in range(250):
        answered(store, key, f"old-{number}", days=40)
    answered(store, key, "rated", days=40, episode="talk")
    answered(store, key, "young", days=10)
    say(store, key, 40, "preference", {"better": 0, "worse": 1}, inference="old-7")
    say(store, key, 40, "thumbs", True, inference="old-8")
    say(store, key, 40, "solved", True, episode="talk")
    say(store, key, 40, "stars", 1.0, episode="talk")
    say(store, key, 5, "stars", 2.0, episode="talk")
    say(store, key, 40, "thumbs", True, inference="rated")
    say(store, key, 5, "thumbs", False, inference="rated")
    store.charge(key, 5, now=NOW - 40 * DAY_S)
    store.charge(key, 7, now=NOW)
    assert store.prune(30, now=NOW) == {"answers": 250, "feedback": 3, "usage": 1}
    assert set(store.reader.inferences(["old-7", "rated", "young"])) == {"rated", "young"}
    assert [(one.metric, one.value) for one in store.reader.feedback_after(0)] == [
        ("stars", 1.0),
        ("stars", 2.0),
        ("thumbs", True),
        ("thumbs", False),
    ]
    (vote,) = store.reader.votes_after(0)  # trainers read it again
    assert (vote.chosen.text, vote.chosen.token_ids) == ("Red for old-7", (5, 6))
    assert store.reader.stats().num_votes == 1
    say(store, key, 0, "stars", 3.0, episode="talk")  # the revision goes on
    assert [one.revision for one in store.reader.feedback_after(0) if one.metric == "stars"] == [1, 2, 3]
    with pytest.raises(UnknownPresentationError):
        say(store, key, 0, "preference", {"better": 1, "worse": 0}, inference="old-7")
    assert store.prune(30, now=NOW) == {} and store.prune(1e9, now=NOW) == {}
    (entry,) = [one for one in store.reader.audit() if one.kind == "prune"]
    assert entry.detail == {"days": 30, "answers": 250, "feedback": 3, "usage": 1}


def test_the_log_is_pruned_too_and_never_changed(store: VoteStore, key: int):
    store.disable_rater(key, now=NOW)
    before = store.reader.audit()
    assert [(one.kind, one.about) for one in before] == [("key ended", "app"), ("key made", "app")]
    assert before[1].detail["scopes"] == ["generate", "feedback"]
    store.add_rater("boss", "admin", invited_by=key, now=NOW + 40 * DAY_S)
    assert [one.who for one in store.reader.audit()] == ["app", "server", "server"]
    assert store.reader.audit(before=store.reader.audit()[0].id) == before
    assert store.prune(30, now=NOW + 40 * DAY_S)["audit"] == 2
    assert [one.kind for one in store.reader.audit()] == ["prune", "rater invited"]


def test_the_log_tells_what_changed_and_holds_no_secret(store: VoteStore, path: Path):
    boss = store.add_rater("boss", "admin", now=NOW)
    made = store.add_rater("shop", key=KeySettings(("admin",)), invited_by=boss.rater.id, now=NOW)
    store.set_campaign(CampaignSettings(overlap=2))  # as it was
    store.set_campaign(CampaignSettings(overlap=3, guidelines="Be kind."))
    store.command("rollback", "7", boss.rater.id)
    store.import_rows("default", [NewItem("One", (Candidate("a"), Candidate("b")))], by=boss.rater.id)
    told = [(one.who, one.kind, one.about, dict(one.detail)) for one in store.reader.audit()]
    assert told[:4] == [
        ("boss", "import", "", {"campaign": "default", "num_new": 1}),
        ("boss", "rollback asked", "", {"version": "7"}),
        ("server", "settings changed", "", {"campaign": "default", "overlap": 3, "guidelines": "changed"}),
        ("boss", "key made", "shop", {"id": made.rater.id, "scopes": ["admin"]}),
    ]
    assert not any(token in words_in(path) for token in (boss.token, made.token))


def filled(store: VoteStore, key: int) -> dict[str, int]:
    """Raters, and users of a key, who said something of the same and of other things."""
    (shared,) = store.add_items(1, [NewItem("Shared prompt", (Candidate("good"), Candidate("poor")))])
    ids = {name: store.add_rater(name, now=NOW).rater.id for name in ("Ann Doe", "Bob Roe")}
    for name, rater_id in ids.items():
        (shown,) = store.next_presentations(rater_id, 1, now=NOW)
        store.vote(shown.token, rater_id, "left", reason=f"reason of {name}", now=NOW)
        store.demonstrate(shown.token, rater_id, f"text of {name}", now=NOW)
        pair = NewItem(f"Talk of {name}", (Candidate(f"first for {name}"), Candidate(f"second for {name}")))
        store.vote_on_pair(1, pair, rater_id, "right", now=NOW)
    for user in ("olga", "bob"):
        answered(store, key, f"{user}-1", 1, user, episode=f"talk of {user}")
        answered(store, key, f"{user}-2", 1, user)
        say(store, key, 0, "preference", {"better": 0, "worse": 1}, inference=f"{user}-1")
        say(store, key, 0, "thumbs", True, inference=f"{user}-1")
        say(store, key, 0, "demonstration", f"What {user} wrote", inference=f"{user}-1")
        say(store, key, 0, "solved", True, episode=f"talk of {user}")
    # Somebody else judges what came from olga's conversation.
    (shown,) = [
        one
        for one in store.next_presentations(ids["Bob Roe"], 1, 9, now=NOW)
        if "Red for olga-1" in one.answers and "What" not in one.answers[0] + one.answers[1]
    ]
    store.vote(shown.token, ids["Bob Roe"], "left", now=NOW)
    store.charge(key, 9, now=NOW)
    return ids | {"shared": shared}


def test_the_data_of_a_person_is_exported_as_they_would_read_it(store: VoteStore, key: int):
    filled(store, key)
    ann = list(store.reader.data_of(store.reader.person(" ann  doe"), now=NOW))
    assert [row["kind"] for row in ann] == ["export", "rater", "vote", "vote", "written answer"]
    (shared, own), (written,) = ann[2:4], ann[4:]
    assert {"good", "poor"} == set(shared["answers"]) and shared["reason"] == "reason of Ann Doe"
    assert own["prompt"] == "Talk of Ann Doe" and own["verdict"] == "right"
    assert own["answers"] == ["first for Ann Doe", "second for Ann Doe"] and written["text"] == "text of Ann Doe"
    olga = list(store.reader.data_of(store.reader.person("olga", "app"), now=NOW))
    kinds = [row["kind"] for row in olga]
    assert kinds == ["export", "key", "rater"] + 2 * ["answer"] + 4 * ["feedback"] + 2 * ["vote"]
    assert olga[3]["prompt"][0]["content"] == "What olga asked in olga-1" and olga[3]["conversation"] == "talk of olga"
    assert olga[3]["answers"] == ["Red for olga-1", "Blue for olga-1"] and olga[3]["num_tokens"] == 7
    assert not any("bob" in str(row) for row in olga)
    whole = list(store.reader.data_of(store.reader.person("app"), now=NOW))
    assert [row["kind"] for row in whole] == ["export", "key", "usage"] and whole[2]["num_tokens"] == 9
    # The rater of a user is known by the name that pages show, too.
    shown = next(one.name for one in store.reader.raters() if one.name == olga[2]["name"])
    assert store.reader.person(shown) == store.reader.person("olga", "app")


@pytest.mark.parametrize(
    ("name", "key_name", "said"),
    [
        ("nobody", "", "no rater and no key 'nobody'$"),
        ("olga", "", "of the 'app' there is a user of this name: add --key"),
        ("olga", "other", "no key 'other'; there are 'app'"),
        ("Ada", "app", "'app' has no user 'Ada'"),
    ],
)
def test_nobody_is_found_by_a_wrong_name(store: VoteStore, key: int, name: str, key_name: str, said: str):
    filled(store, key)
    with pytest.raises(StoreError, match=said):
        store.reader.person(name, key_name)


def test_a_deleted_user_of_a_key_leaves_nothing_and_others_keep_what_is_theirs(store: VoteStore, key: int, path: Path):
    filled(store, key)
    first = [vote for vote in store.reader.votes_after(0) if "olga" in str(vote.prompt)]
    assert len(first) == 3  # a preference, a demonstration, and Bob Roe's vote
    said = [one for one in store.reader.feedback_after(0) if one.user == "olga" and one.inference]
    with VoteWatch(path) as watch:
        contests = len(watch.contests()[1])
        done = store.delete_person(store.reader.person("olga", "app"), by=key, now=NOW)
        assert len(watch.contests()[1]) < contests
    assert done == {"id": done["id"], "answers": 2, "votes": 3, "feedback": 4}
    text = words_in(path)
    for word in ("olga", "What olga", "Red for olga-1"):
        assert word not in text
    assert "What bob wrote" in text and "reason of Ann Doe" in text
    assert {vote.rater for vote in store.reader.votes_after(0)} >= {"Ann Doe", "Bob Roe"}
    stats = store.reader.stats()
    assert (stats.num_votes, stats.num_demonstrations) == (6, 2) and stats.alpha.value is not None
    assert len(list(store.reader.export_feedback())) == 3  # a thumb, a demonstration, and a word on the conversation
    of_requests, command = store.reader.commands_after(0)
    assert of_requests.kind == "forget" and '"request_id":' in of_requests.argument
    assert command.kind == "forget" and command.rater_id == done["id"]
    assert (
        str(min(vote.id for vote in first)) in command.argument and str(min(one.id for one in said)) in command.argument
    )
    entry = store.reader.audit()[0]
    assert (entry.who, entry.kind, entry.about) == ("app", "data deleted", f"deleted {done['id']}")
    with pytest.raises(StoreError, match="no user"):
        store.reader.person("olga", "app")
    # Nobody is shown what is left of it, and they may come back as somebody new.
    carl = store.add_rater("carl", now=NOW).rater.id
    assert all(one.prompt and all(one.answers) for one in store.next_presentations(carl, 1, 20, now=NOW))
    answered(store, key, "olga-9", 0)
    say(store, key, 0, "preference", {"better": 0, "worse": 1}, inference="olga-9")
    assert store.reader.person("olga", "app").rater_id != done["id"]


def test_a_deleted_rater_has_no_access_and_their_items_are_asked_of_others_again(
    store: VoteStore, key: int, path: Path
):
    ids = filled(store, key)
    token = store.redeem(store.add_rater("eve", "admin", now=NOW).token, now=NOW)
    assert token is not None
    done = store.delete_person(store.reader.person("Ann Doe"), now=NOW)
    assert done == {"id": ids["Ann Doe"], "votes": 2, "written answers": 1}
    text = words_in(path)
    assert "Ann Doe" not in text and "reason of Bob Roe" in text and "Shared prompt" in text
    carl = store.add_rater("carl", now=NOW).rater.id
    assert "Shared prompt" in {one.prompt for one in store.next_presentations(carl, 1, 20, now=NOW)}
    assert store.reader.progress(ids["Bob Roe"], 1).num_votes == 3
    store.delete_person(Person(token.rater.id, token.rater.id), now=NOW)
    assert store.reader.rater_of(token.token, now=NOW) is None
    assert [one.name for one in store.reader.raters() if one.id == token.rater.id] == [f"deleted {token.rater.id}"]
    again = store.delete_person(Person(token.rater.id, token.rater.id), now=NOW)  # cut off before its answer came
    assert again == {"id": token.rater.id}


def test_a_deleted_key_leaves_the_data_of_its_users(store: VoteStore, key: int):
    filled(store, key)
    for number in range(250):
        answered(store, key, f"own-{number}", 1, user="")
    say(store, key, 0, "thumbs", True, inference="own-3")
    done = store.delete_person(store.reader.person("app"), now=NOW)
    assert done == {"id": key, "answers": 250, "feedback": 1, "usage": 1}
    assert len(store.reader.inferences(["olga-1", "olga-2", "bob-1", "own-3"])) == 3
    assert [one.name for one in store.reader.raters() if one.scopes] == [f"deleted {key}"]


def test_what_was_imported_of_a_person_goes_with_its_answers(store: VoteStore, path: Path):
    said = [
        GivenFeedback(
            id=f"{name}-{answer}",
            application="open-webui",
            answer_id=answer,
            prompt=f"prompt of {answer}",
            answer=f"text of {answer}",
            metric="thumbs",
            value=True,
            rater=f"open-webui:{name}",
        )
        for name, answer in (("ann", "one"), ("ann", "both"), ("bob", "both"))
    ]
    pairs = [
        GivenVote(NewItem(f"pair {name}", (Candidate("x"), Candidate("y"))), "better", 0, rater)
        for name, rater in (("one", "open-webui:ann"), ("both", "open-webui:ann"), ("both", "open-webui:bob"))
    ]
    store.import_rows("default", [*pairs, *said])
    person = store.reader.person("open-webui:ann")
    exported = [row for row in store.reader.data_of(person) if row["kind"] == "feedback"]
    assert [row["text"] for row in exported] == ["text of one", "text of both"]
    assert store.delete_person(person) == {"id": person.rater_id, "votes": 2, "feedback": 2, "answers": 1}
    text = words_in(path)
    assert "of one" not in text and "pair one" not in text and "ann" not in text
    assert [one.answer for one in store.reader.export_feedback()] == ["text of both"]
    assert [vote.rater for vote in store.reader.votes_after(0)] == ["open-webui:bob"]


def test_nothing_is_lost_while_others_write_and_they_do_not_wait_for_the_end(store: VoteStore, key: int, path: Path):
    for number in range(600):
        answered(store, key, f"old-{number}", days=40)
    order: list[str] = []

    def prune() -> None:
        store.prune(30, now=NOW)
        order.append("pruned")

    thread = threading.Thread(target=prune)
    thread.start()
    names = [f"young-{number}" for number in range(40)]
    for name in names:
        answered(store, key, name, days=0)
        say(store, key, 0, "preference", {"better": 0, "worse": 1}, inference=name)
    order.append("written")
    thread.join()
    assert rows(path, "inferences") == 40 and len(store.reader.inferences(names)) == 40
    assert len(store.reader.votes_after(0)) == len(store.reader.feedback_after(0)) == 40


_REMOVER = """
import sys
from tunesmith.collect.store.votes import VoteStore
store = VoteStore.open(sys.argv[1])
person = store.reader.person("Ann Doe")
print("ready", flush=True)
store.prune(30, now=float(sys.argv[2]))
store.delete_person(person)
"""


def test_a_kill_in_the_middle_leaves_a_person_whole_or_gone_and_a_repeat_does_the_rest(tmp_path: Path):
    path, dice = tmp_path / "votes.db", random.Random(3)
    with VoteStore.open(path, seed=0) as store:
        store.set_campaign(CampaignSettings(overlap=2), now=NOW)
        app = store.add_rater("app", key=KeySettings(("generate", "feedback")), now=NOW).rater.id
        filled(store, app)
        for number in range(500):
            answered(store, app, f"old-{number}", days=40)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _REMOVER, path, str(NOW)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        told = process.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.15))
        process.kill()
        process.wait()
        process.stdout.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            (num_votes,) = connection.execute("SELECT count(*) FROM votes").fetchone()
            (num_there,) = connection.execute("SELECT count(*) FROM raters WHERE name = 'Ann Doe'").fetchone()
            (num_told,) = connection.execute("SELECT count(*) FROM commands WHERE kind = 'forget'").fetchone()
        assert (num_votes, num_there, num_told) in ((9, 1, 0), (7, 0, 1))
        if not num_there:
            break
        assert told == b"ready\n"
    with VoteStore.open(path) as store:
        store.prune(30, now=NOW)
        if num_there:
            store.delete_person(store.reader.person("Ann Doe"))
        assert store.reader.stats().num_votes == 7 and rows(path, "inferences") == 4
    # No copy stays in free pages.
    assert not any(b"Ann Doe" in file.read_bytes() for file in tmp_path.glob("votes.db*"))


def test_a_command_has_the_owner_of_the_file_do_the_work(store: VoteStore, key: int, path: Path):
    answered(store, key, "old", days=40 + (time.time() - NOW) / -DAY_S)
    told: list[str] = []
    assert do_in(path, Chore("prune", {"days": 1e-9}), told.append)["answers"] == 1
    assert "its process is asked" in told[0]
    answered(store, key, "own", days=0)
    filled(store, key)
    person = store.reader.person("olga", "app")
    facts = {"rater_id": person.rater_id, "key_id": person.key_id, "user": person.user}
    assert do_in(path, Chore("delete", facts), told.append)["votes"] == 3
    do_in(path, Chore("note", {"kind": "data exported", "detail": {"id": key}}), told.append)
    assert [(one.kind, one.about) for one in store.reader.audit(limit=1)] == [("data exported", "app")]


def test_nothing_is_stored_for_those_whose_data_was_deleted_by_a_process_that_knows_them_still(store: VoteStore, key):
    ann = store.add_rater("ann", now=NOW).rater.id
    pair = NewItem("What ann asked", (Candidate("One"), Candidate("Two")))
    answered(store, key, "kept", days=1)
    other = store.add_rater("other app", key=KeySettings(("generate",)), now=NOW).rater.id
    eve = store.rater_of_user(other, "eve", NOW)
    assert store.rater_of_user(other, "eve", NOW) == eve != store.rater_of_user(other, "bob", NOW)
    choice = Choice("Red.", (5,), (-0.5,), (-0.5,), "stop")
    facts = {"rater_id": other, "user": "eve", "model": "m", "created_at": NOW}
    hers = Inference(name="late", prompt="What eve asked", prompt_ids=(1,), choices=(choice,), options={}, **facts)
    for person in (Person(ann, ann), Person(key, key), store.reader.person("eve", "other app")):
        store.delete_person(person, now=NOW)
    for late in (
        lambda: answered(store, key, "late", days=0, user=""),
        lambda: answered(store, key, "late", days=0, user="olga"),
        lambda: store.record(hers, by=eve),
        lambda: store.charge(key, 5, now=NOW),
        lambda: say(store, key, 0, "thumbs", True, inference="kept"),
        lambda: store.vote_on_pair(1, pair, ann, "left"),
        lambda: store.next_presentations(ann, 1),
    ):
        with pytest.raises(DataDeletedError, match="was deleted, and the access ended; nothing is stored"):
            late()
    assert store.reader.inferences(["late"]) == {} and store.reader.tokens_of_day(NOW) == {}
    assert store.reader.stats().num_items == 0
