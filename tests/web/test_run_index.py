"""The list of runs: what it finds, filters and notices, whatever the folders are called."""

import json
import shutil
import time

import pytest

from app_parts import make_run
from tunesmith.base.runs.lock import RunLock
from tunesmith.collect.web import run_index
from tunesmith.collect.web.run_index import RunIndex


@pytest.fixture
def root(tmp_path):
    make_run(
        tmp_path / "20260101-120000-first-0001", "algorithm: ppo\nmodel: {name: smollm2}\n", {"step": 3, "reward": 0.5}
    )
    make_run(tmp_path / "20260102-120000-second-0002", "algorithm: dpo\nmodel: {name: scratch}\n")
    make_run(tmp_path / "sweep" / "20260103-120000-third-0003", "algorithm: ppo\nmodel: {name: scratch}\n")
    return tmp_path


@pytest.fixture
def index(root, monkeypatch):
    monkeypatch.setattr(run_index, "MIN_PAUSE_S", 0.01)
    with RunIndex(root) as made:
        wait_for(lambda: found(made)["num_matching"] == 3)
        yield made


def found(index, text="", algorithm="", state="", limit=50):
    return index.page(text, algorithm, state, limit)


def names(index, **filters):
    return [row["name"] for row in found(index, **filters)["rows"]]


def wait_for(holds):
    for _ in range(400):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it does not come")


def test_the_newest_come_first_with_their_facts(index):
    assert names(index) == [
        "sweep/20260103-120000-third-0003",
        "20260102-120000-second-0002",
        "20260101-120000-first-0001",
    ]
    (row,) = found(index, text="first")["rows"]
    assert (row["algorithm"], row["model"], row["state"], row["step"]) == ("ppo", "smollm2", "failed", 3)
    assert (row["figure_name"], row["figure"]) == ("reward", 0.5)
    assert index.path(row["id"]).name == "20260101-120000-first-0001"
    assert index.path("0" * 12) is None


def test_filters_go_together_and_count_what_matches(index):
    assert names(index, algorithm="ppo", text="SCRATCH third") == ["sweep/20260103-120000-third-0003"]
    assert names(index, text="scratch smollm2") == []
    page = found(index, algorithm="ppo", limit=1)
    assert (len(page["rows"]), page["num_matching"], page["num_read"]) == (1, 2, 3)
    assert page["algorithms"] == ["dpo", "ppo"]
    assert names(index, state="finished") == []


def test_what_happens_to_a_shown_run_is_seen_at_once(index, root, monkeypatch):
    monkeypatch.setattr(index, "_scan", lambda: None)
    run = root / "20260101-120000-first-0001"

    def state():
        return found(index, text="first")["rows"][0]["state"]

    with RunLock(run):
        assert state() == "running"
    assert state() == "failed"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    assert state() == "stopped"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.75}) + "\n")
    assert found(index, text="first")["rows"][0]["figure"] == 0.75
    (run / "result.json").write_text("{}")
    assert state() == "finished"


def test_runs_come_and_go(index, root):
    make_run(root / "20260104-120000-fourth-0004")
    wait_for(lambda: len(names(index)) == 4)
    shutil.rmtree(root / "20260104-120000-fourth-0004")
    wait_for(lambda: len(names(index)) == 3)


def test_any_name_has_an_id_and_links_lead_nowhere(index, root, tmp_path_factory):
    outside = make_run(tmp_path_factory.mktemp("outside") / "20260105-120000-outside-0005")
    (root / "20260105-120000-link-0005").symlink_to(outside)
    hostile = [
        "<img src=x onerror=alert(1)>",
        "..%2f..",
        "a\nb\x1b[31m",
        b"bytes-\xff".decode("utf-8", "surrogateescape"),
    ]
    for name in hostile:
        make_run(root / name)
    wait_for(lambda: len(names(index)) == 7)
    assert set(hostile) < set(names(index))
    ids = [row["id"] for row in found(index)["rows"]]
    assert len(set(ids)) == 7 and all(set(one) <= set("0123456789abcdef") for one in ids)
