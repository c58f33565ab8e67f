"""The trainer's file: what it writes is what the server reads."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError, StoreError
from tunesmith.collect.store.records import Candidate, NewOffer, PolicyVersion
from tunesmith.collect.store.runs import RunReader, RunStore


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def runs(place: Path) -> Iterator[RunStore]:
    with RunStore.open(place) as runs:
        yield runs


@pytest.fixture
def reader(place: Path) -> Iterator[RunReader]:
    with RunReader.open(place) as reader:
        yield reader


def test_a_missing_file_is_nothing_yet_and_is_read_once_it_is_there(place: Path, reader: RunReader):
    assert reader.offers_after(0) == []
    assert reader.heartbeat() is None
    place.touch()
    assert reader.versions() == []
    with RunStore.open(place) as runs:
        runs.beat("training", now=1.0)
        assert reader.heartbeat() is not None


def test_offers_come_back_whole_and_in_order(runs: RunStore, reader: RunReader):
    prompt = ({"role": "user", "content": "Hi"},)
    answers = (Candidate("a", (1, 2), (-0.5, -1.25)), Candidate("b", None, None, source_id="base"))
    ids = runs.add_offers([NewOffer(4, prompt, answers, heldout=True), NewOffer(4, "p", answers)], now=7.0)
    later = runs.add_offers([NewOffer(5, "q", answers)], retires_before=ids[1])
    first, second, third = reader.offers_after(0)
    assert [first.id, second.id, third.id] == ids + later
    assert (first.version, first.prompt, first.heldout, first.created_at) == (4, prompt, True, 7.0)
    assert [one.token_ids for one in first.candidates] == [(1, 2), None]
    assert [one.logps for one in first.candidates] == [(-0.5, -1.25), None]
    assert [one.weight_version for one in first.candidates] == [4, 4]
    assert [one.source_id for one in first.candidates] == ["policy-4", "base"]
    assert (first.retires_before, third.retires_before) == (0, ids[1])
    assert [one.id for one in reader.offers_after(ids[0], limit=1)] == [ids[1]]


def test_an_offer_that_nobody_could_judge_is_refused_whole(runs: RunStore, reader: RunReader):
    good = NewOffer(1, "p", (Candidate("a"), Candidate("b")))
    for bad in ((Candidate("a"), Candidate("a")), (Candidate("a"),), (Candidate("a\x00"), Candidate("b"))):
        with pytest.raises(DataError, match="offer 2"):
            runs.add_offers([good, NewOffer(1, "p", bad)])
    assert reader.offers_after(0) == []


def test_at_most_one_version_serves(runs: RunStore, reader: RunReader):
    runs.add_version(PolicyVersion(0, 1.0, serving=True))
    runs.add_version(PolicyVersion(1, 2.0, parent=0, path="versions/1", kl=0.5, serving=True))
    runs.add_version(PolicyVersion(2, 3.0, parent=1, accepted=False, note="worse on held-out votes"))
    assert [(one.version, one.serving) for one in reader.versions()] == [(0, False), (1, True), (2, False)]
    runs.add_version(PolicyVersion(1, 2.0, win_rate=0.7))
    assert reader.versions()[1].win_rate == 0.7


def test_jobs_and_heartbeat_say_what_the_trainer_does(place: Path, runs: RunStore, reader: RunReader):
    def stored_jobs() -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(place)) as connection:
            return connection.execute("SELECT id, kind, state, created_at, ended_at, detail_json FROM jobs").fetchall()

    job = runs.start_job("update", {"votes": 12}, now=1.0)
    assert (runs.num_jobs("update"), runs.num_jobs("train")) == (1, 0)
    assert stored_jobs() == [(job, "update", "running", 1.0, None, '{"votes":12}')]
    runs.end_job(job, "failed", {"why": "NaN"}, now=2.0)
    assert stored_jobs() == [(job, "update", "failed", 1.0, 2.0, '{"why":"NaN"}')]
    runs.beat("drawing", now=1.0)
    runs.beat("updating", now=2.0)
    beat = reader.heartbeat()
    assert beat is not None
    assert (beat.pid, beat.time, beat.state) == (os.getpid(), 2.0, "updating")


def test_a_file_made_anew_in_the_same_place_is_read_and_its_ids_go_on(place: Path, reader: RunReader):
    with RunStore.open(place) as runs:
        (first,) = runs.add_offers([NewOffer(1, "old", (Candidate("a"), Candidate("b")))])
    assert [one.prompt for one in reader.offers_after(0)] == ["old"]
    for file in place.parent.iterdir():
        file.unlink()
    assert reader.offers_after(first) == []
    with RunStore.open(place) as runs:
        runs.add_offers([NewOffer(1, "new", (Candidate("a"), Candidate("b")))])
        assert [one.prompt for one in reader.offers_after(first)] == ["new"]


def test_a_closed_store_says_so(place: Path):
    runs = RunStore.open(place)
    runs.close()
    runs.close()
    with pytest.raises(StoreError, match="closed"):
        runs.beat("gone")
