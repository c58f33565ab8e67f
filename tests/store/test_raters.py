"""Raters, their tokens, and commands."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError, StoreError
from tunesmith.collect.store.campaigns import user_name
from tunesmith.collect.store.records import Candidate, GivenVote, KeySettings, NewItem, PolicyVersion
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore


def test_a_token_lets_its_rater_in_until_it_expires_or_is_disabled(store: VoteStore):
    ann = store.add_rater("ann", "admin", expires_at=100.0, now=0.0)
    assert store.reader.rater_of(ann.token, now=99.0) == ann.rater
    assert store.reader.rater_of(ann.token, now=100.0) is None
    assert store.reader.rater_of("", now=1.0) is None
    assert store.reader.rater_of(ann.token + "x", now=1.0) is None
    store.disable_rater(ann.rater.id, now=2.0)
    assert store.reader.rater_of(ann.token, now=3.0) is None
    assert [rater.name for rater in store.reader.raters()] == ["ann"]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_tokens_are_stored_as_hashes_only(store: VoteStore, path: Path):
    token = store.add_rater("ann").token
    store.close()
    assert token.encode() not in path.read_bytes()


def test_a_redeemed_token_is_void_and_the_fresh_one_is_not(store: VoteStore):
    invited = store.add_rater("invite 1", expires_at=10.0, now=0.0)
    redeemed = store.redeem(invited.token, name="bob", now=1.0)
    assert redeemed is not None
    assert (redeemed.rater.id, redeemed.rater.name) == (invited.rater.id, "bob")
    assert store.reader.rater_of(redeemed.token, now=1e9) == redeemed.rater
    assert store.reader.rater_of(invited.token, now=2.0) is None
    assert store.redeem(invited.token, now=2.0) is None


def test_a_name_can_be_taken_once(store: VoteStore):
    store.add_rater("ann")
    invited = store.add_rater("invite 1")
    assert store.redeem(invited.token, name="Bob").rater.name == "Bob"
    for name in (" ann ", "ANN", "bob"):
        with pytest.raises(StoreError, match="taken"):
            store.add_rater(name)
    assert store.add_rater("invite 1").rater.id != invited.rater.id


@pytest.mark.parametrize("name", [user_name(1, "ada"), user_name(1, "ada").upper(), "deleted 7", " Deleted  7'"])
def test_nobody_gets_a_name_under_which_a_user_or_a_deleted_person_is_found(store: VoteStore, campaign, name: str):
    invited = store.add_rater("invite 1")
    given = GivenVote(NewItem("prompt", (Candidate("good"), Candidate("poor"))), "better", 0, name)
    for way in (
        lambda: store.add_rater(name),
        lambda: store.add_rater(name, key=KeySettings(("generate",))),
        lambda: store.redeem(invited.token, name=name),
        # Exports hold the names of users of keys, which are imported elsewhere.
        *([lambda: store.import_votes(campaign(), [given])] if "eleted" in name else ()),
    ):
        with pytest.raises(DataError, match=r"of the form that users of keys .* get; choose another"):
            way()
    assert [one.name for one in store.reader.raters()] == ["invite 1"]
    assert store.add_rater("user friendly").rater.name == "user friendly"


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_commands_and_versions_reach_the_other_side(store: VoteStore, path: Path):
    admin = store.add_rater("ann", "admin").rater.id
    with VoteReader.open(path) as reader:
        assert reader.commands_after(0) == []
        first = store.command("rollback", "3", admin, now=5.0)
        (command,) = reader.commands_after(0)
        assert (command.id, command.kind, command.argument, command.rater_id) == (first, "rollback", "3", admin)
        assert reader.commands_after(first) == []
        with pytest.raises(StoreError, match="unknown"):
            store.command("explode", "", admin)  # pyright: ignore[reportArgumentType]
        versions = [PolicyVersion(0, 1.0), PolicyVersion(1, 2.0, parent=0, win_rate=0.6, serving=True)]
        store.copy_versions(versions)
        store.copy_versions([PolicyVersion(1, 2.0, parent=0, win_rate=0.7, serving=True)])
    with closing(sqlite3.connect(path)) as connection:
        copied = connection.execute("SELECT version, win_rate, serving FROM policy_versions").fetchall()
    assert copied == [(0, None, 0), (1, 0.7, 1)]
