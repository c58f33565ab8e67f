"""The trainer's file: what it writes is what the server reads."""

import math
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    assert reader.series("loss").points == ()
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


def test_numbers_that_are_not_finite_become_gaps(runs: RunStore, reader: RunReader):
    runs.add_metrics(1, {"kl": math.nan, "loss": math.inf, "entropy": 1e-300, "läng\u202ee": -1.5}, now=3.0)
    found = {one.name: one.value for one in reader.metrics_after(0)}
    assert found == {"kl": None, "loss": None, "entropy": 1e-300, "läng\u202ee": -1.5}
    assert reader.metric_names() == sorted(found)
    assert reader.last_metric_id() == max(one.id for one in reader.metrics_after(0))


def test_metrics_are_cut_back_as_on_resume(runs: RunStore, reader: RunReader):
    for step in range(5):
        runs.add_metrics(step, {"loss": float(step)})
    last = reader.last_metric_id()
    assert runs.truncate_metrics(3) == 2
    runs.add_metrics(3, {"loss": 30.0})
    points = reader.series("loss").points
    assert [(one.step, one.value) for one in points] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert points[-1].id > last


def test_a_short_series_is_whole_and_goes_on_where_it_ended(runs: RunStore, reader: RunReader):
    for step in range(10):
        runs.add_metrics(step, {"loss": float(step), "kl": 0.0})
    first = reader.series("loss", points=10)
    assert (len(first.points), first.is_sampled, first.num_points) == (10, False, 10)
    assert reader.series("loss", after_id=first.last_id).points == ()
    runs.add_metrics(10, {"loss": 10.0})
    assert [one.step for one in reader.series("loss", after_id=first.last_id).points] == [10]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.one_of(st.none(), st.integers(-5, 5).map(float)), min_size=30, max_size=200),
    points=st.integers(2, 20),
)
def test_a_thinned_series_keeps_ends_extremes_and_gaps(
    runs: RunStore, reader: RunReader, values: list[float | None], points: int
):
    runs.truncate_metrics(0)
    runs.add_metric_rows([(step, float(step), "loss", value) for step, value in enumerate(values)])
    found = reader.series("loss", points=points)
    steps = [one.step for one in found.points]
    assert found.is_sampled
    assert found.num_points == len(values)
    assert steps == sorted(set(steps))
    assert all(one.value == values[one.step] for one in found.points)
    assert {0, len(values) - 1} <= set(steps)
    assert len(steps) <= 3 * max(1, points // 2) + 2
    known = [value for value in values if value is not None]
    kept = [one.value for one in found.points if one.value is not None]
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))
    assert (None in values) == any(one.value is None for one in found.points)


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
