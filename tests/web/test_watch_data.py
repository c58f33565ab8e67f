import json
import math
import os
import socket
from contextlib import closing

import pytest

from server_parts import Trainer
from tunesmith.collect.store.metric_log import MetricLog
from tunesmith.collect.store.records import CampaignSettings, Candidate, Heartbeat, NewItem, PolicyVersion
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web import watch_data
from tunesmith.collect.web.watch_data import MAX_LINES, SILENT_S, Cached, WatchData, kind_of, pictures

NOW = 1_800_000_000.0
DEAD_PID = 2**22 + 1


@pytest.fixture
def trainer(tmp_path):
    with Trainer.open(tmp_path / "runs.db") as store:
        yield store


@pytest.fixture
def data(tmp_path):
    with closing(RunReader.open(tmp_path / "runs.db")) as runs, closing(VoteWatch(tmp_path / "votes.db")) as votes:
        yield WatchData(MetricLog(tmp_path), runs, votes)


def beat(state="learning", ago_s=0.0, pid=None, host=None):
    return Heartbeat(os.getpid() if pid is None else pid, host or socket.gethostname(), NOW - ago_s, state)


@pytest.mark.parametrize(("cost_s", "kept_s"), [(0.0, 3.0), (0.2, 3.0), (2.0, 20.0)])
def test_a_value_that_is_slow_to_make_is_kept_longer(cost_s, kept_s, monkeypatch):
    now_s, made = 100.0, []
    monkeypatch.setattr(watch_data.time, "monotonic", lambda: now_s)

    def make():
        nonlocal now_s
        now_s += cost_s
        made.append(now_s)
        return len(made)

    value = Cached(make, max_age_s=3.0)
    assert value() == 1
    now_s = 100.0 + kept_s
    assert value() == 1
    now_s += 0.01
    assert value() == 2


@pytest.mark.parametrize(
    ("heartbeat", "expected"),
    [
        (None, "none"),
        (beat(), "running"),
        (beat(ago_s=SILENT_S + 1), "silent"),
        (beat(pid=DEAD_PID), "dead"),
        (beat(pid=DEAD_PID, host="elsewhere"), "running"),
        (beat(host="elsewhere", ago_s=SILENT_S + 1), "dead"),
        (beat("finished", pid=DEAD_PID, ago_s=9_999), "finished"),
        (beat("ended", pid=DEAD_PID), "stopped"),
        (beat("stopped", pid=DEAD_PID), "stopped"),
        (beat("died"), "dead"),
    ],
)
def test_a_heartbeat_says_whether_the_trainer_lives(heartbeat, expected):
    assert kind_of(heartbeat, NOW) == expected


def test_without_any_file_there_is_nothing_yet(data):
    assert data.names() == {"cursor": 0, "names": [], "pictures": [], "recent": {}}
    assert data.series(["reward"], 0, 100)["series"][0]["points"] == []
    assert data.versions() == {"base": 0, "versions": []}
    assert data.state() == {"kind": "none", "doing": "", "step": None, "beat": None, "age_s": None}
    assert data.votes_per_minute()["total"] == 0
    assert not data.news(0).rows


def test_news_are_what_came_after_the_cursor(trainer, data):
    trainer.add_metrics(1, {"reward": 0.5, "kl": math.nan})
    first = data.news(0)
    assert sorted((one.name, one.value) for one in first.rows) == [("kl", None), ("reward", 0.5)]
    trainer.add_metrics(2, {"reward": 0.75})
    assert [(one.step, one.value) for one in data.news(first.cursor).rows] == [(2, 0.75)]


def test_who_is_far_behind_is_told_to_fetch_thinned_series(trainer, data, monkeypatch):
    monkeypatch.setattr(watch_data, "MAX_ROWS", 10)
    monkeypatch.setattr(watch_data, "MAX_BEHIND", 30)
    trainer.files.append("metrics.jsonl", [{"step": step, "reward": 1.0} for step in range(100)])
    start = data.names()["cursor"] - 100
    news = data.news(start)
    assert (news.is_reset, list(news.rows), news.cursor) == (True, [], start + 100)
    near = data.news(start + 70)
    assert (near.is_reset, len(near.rows), near.cursor, near.is_behind) == (False, 10, start + 80, True)
    assert data.news(start + 95).is_behind is False
    beyond = data.news(start + 101)  # of a file that was longer once
    assert (beyond.is_reset, beyond.cursor) == (True, start + 100)


def test_answers_are_json_also_where_numbers_are_not_finite(trainer, data):
    trainer.add_metrics(1, {"reward": math.inf, "über/ü": 1.0})
    trainer.add_version(PolicyVersion(version=0, created_at=NOW, kl=None))
    for answer in (data.names(), data.series(["reward", "über/ü"], 0, 100), data.versions()):
        json.dumps(answer, allow_nan=False)
    assert data.series(["reward"], 0, 100)["series"][0]["points"][0][3] is None


def test_the_names_come_with_the_last_value_of_each_metric_of_late(trainer, data, monkeypatch):
    monkeypatch.setattr(watch_data, "MAX_ROWS", 3)
    for step in range(1, 4):
        trainer.add_metrics(step, {"reward": step / 2, "kl": math.nan} if step > 1 else {"old": 1.0})
    assert data.names()["names"] == ["kl", "old", "reward"]
    assert data.names()["recent"] == {"kl": [3, None], "reward": [3, 1.5]}


def test_a_version_shows_what_the_trainer_measured(trainer, data):
    trainer.add_version(PolicyVersion(version=0, created_at=NOW))
    trainer.add_version(
        PolicyVersion(
            version=1, created_at=NOW, path="secret", win_rate=0.6, win_rate_low=0.5, win_rate_high=0.7, serving=True
        )
    )
    base, first = data.versions()["versions"]
    assert base["measured"] is None
    assert first["measured"] == {"win_rate": 0.6, "low": 0.5, "high": 0.7}
    assert first["serving"] is True
    assert "path" not in first


def test_votes_between_versions_give_win_rates_against_the_base(trainer, data, tmp_path):
    for version in (0, 1):
        trainer.add_version(PolicyVersion(version=version, created_at=NOW))
    with VoteStore.open(tmp_path / "votes.db", seed=3) as votes:
        campaign = votes.set_campaign(CampaignSettings())
        rater = votes.add_rater("anna", "rater").rater
        pair = (Candidate("old", source_id="v0"), Candidate("new", source_id="v1"))
        votes.add_items(campaign.id, [NewItem(f"prompt {number}", pair) for number in range(12)])
        for number in range(12):
            (shown,) = votes.next_presentations(rater.id, campaign.id, 1)
            votes.vote(shown.token, rater.id, "left" if shown.answers[0] == "new" else "right", "", 9, f"key {number}")
        standing = {one["version"]: one["from_votes"] for one in data.versions()["versions"]}
        assert standing[0]["win_rate"] == 0.5
        assert standing[1]["win_rate"] > 0.8
        assert standing[1]["low"] > 0.5
        assert standing[1]["num_votes"] == 12
    assert data.votes_per_minute()["total"] == 12


def test_pictures_group_metrics_as_the_reports_do_and_add_the_stages():
    stages = ["time/rollout_s", "time/step_s", "time/update/forward_s"]
    names = ["kl", "reward", "rewards/helpful/mean", *stages, "grad_norm"]
    found = {one["id"]: [line["name"] for line in one["lines"]] for one in pictures(names)}
    assert found == {
        "reward": ["reward", "rewards/helpful/mean"],
        "kl": ["kl"],
        "gradient": ["grad_norm"],
        "stages": ["time/rollout_s"],
    }
    assert [one["id"] for one in pictures(names) if one["is_main"]] == ["reward", "kl", "stages"]


def test_a_picture_has_no_more_lines_than_colours():
    (found,) = pictures([f"rewards/{number}/mean" for number in range(50)])
    assert len(found["lines"]) == MAX_LINES


def test_of_many_stages_the_longest_are_shown(trainer, data):
    trainer.add_metrics(1, {f"time/stage{number}_s": float(number) for number in range(MAX_LINES + 3)})
    (found,) = data.names()["pictures"]
    assert [line["label"] for line in found["lines"]] == [f"stage{number}" for number in range(MAX_LINES + 2, 2, -1)]
