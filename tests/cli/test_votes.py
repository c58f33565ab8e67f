"""`tunesmith votes import | export | stats`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.collect.store.inferences import Speaker
from tunesmith.collect.store.records import (
    CampaignSettings,
    Candidate,
    Choice,
    Feedback,
    Inference,
    KeySettings,
    NewItem,
)
from tunesmith.collect.store.votes import VoteStore

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"p{n}", "chosen": "good", "rejected": "poor", "rater": "ann"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_pairs_are_put_before_raters_and_their_labels_dropped(
    tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "live"
    code, out, _ = run(capsys, "votes", "import", pairs, "--dir", folder, "--json")
    assert (code, json.loads(out)["num_new"]) == (0, 3)
    assert json.loads(run(capsys, "votes", "import", pairs, "--dir", folder, "--json")[1])["num_there"] == 3
    with VoteStore.open(folder / "votes.db") as store:
        rater = store.add_rater("bob").rater.id
        (campaign,) = store.reader.campaigns()
        assert len(store.next_presentations(rater, campaign.id, 5)) == 3
        assert store.reader.stats().num_votes == 0


def test_votes_are_taken_over_counted_and_written_out_again(
    tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
):
    folder, dest = tmp_path / "live", tmp_path / "out.jsonl"
    assert run(capsys, "votes", "import", pairs, "--dir", folder, "--labels", "votes")[0] == 0
    code, out, _ = run(capsys, "votes", "stats", "--dir", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["num_votes"], facts["raters"][0]["name"]) == (0, 3, "ann")
    assert facts["alpha"] == {"value": None, "num": 0, "reason": "no item was judged by two raters"}
    assert "ann: 3 votes" in run(capsys, "votes", "stats", "--dir", folder)[1]
    assert facts["leaderboard"] == []
    assert run(capsys, "votes", "export", dest, "--dir", folder, "--decided")[0] == 0
    assert [json.loads(line)["chosen"] for line in dest.read_text().splitlines()] == ["good"] * 3


def test_a_rater_of_one_side_is_told_without_pairs_that_others_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        {"prompt": f"Prompt {i}", "chosen": "a", "rejected": "b", "rater": "lee", "chosen_side": "left"}
        for i in range(40)
    ]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--dir", tmp_path / "live")
    assert run(capsys, "votes", "import", tmp_path / "votes.jsonl", "--labels", "votes", *given)[0] == 0
    told = run(capsys, "votes", "stats", *given)[1]
    assert "only 0 votes can be compared" in told and "the left answer in 40 of 40 votes" in told
    assert "reliability" not in told


def test_votes_are_read_and_imported_while_a_server_holds_them(
    tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "live"
    run(capsys, "votes", "import", pairs, "--dir", folder, "--labels", "votes")
    with VoteStore.open(folder / "votes.db"):
        assert run(capsys, "votes", "export", tmp_path / "out.jsonl", "--dir", folder)[0] == 0
        code, out, err = run(capsys, "votes", "import", pairs, "--dir", folder, "--labels", "gold")
        assert code == 0, err
        assert out.endswith("\n0 items added, 3 were there already\n3 items that were there are gold from now on\n")
        assert "in use; its process is asked" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("import",), "no file is named"),
        (("stats", "--dir", "nowhere"), "does not exist"),
        (("export", "x.xlsx", "--dir", "nowhere"), ".xlsx is no format"),
        (("export", "x.jsonl", "--dir", "nowhere", "--format", "argilla", "--kind", "rankings"), "Argilla"),
    ],
)
def test_what_cannot_be_done_is_explained(
    words: tuple[str, ...],
    part: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "votes", *words)
    assert code == 2
    assert part in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_campaign_is_named_with_those_that_are_there(
    tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "live"
    run(capsys, "votes", "import", pairs, "--dir", folder, "--campaign", "spring")
    code, _, err = run(capsys, "votes", "stats", "--dir", folder, "--campaign", "autumn")
    assert code == 2
    assert "there are spring" in err


def test_versions_and_models_that_votes_compare_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with VoteStore.open(tmp_path / "votes.db") as store:
        campaign, rater = store.set_campaign(CampaignSettings()).id, store.add_rater("ann").rater.id
        for number in range(8):
            sources = ("v0", "v1") if number % 2 else ("model a run", "v1")
            pair = NewItem(f"p{number}", tuple(Candidate(one, source_id=one) for one in sources))
            store.vote_on_pair(campaign, pair, rater, "right")
    board = json.loads(run(capsys, "votes", "stats", "--dir", tmp_path, "--json")[1])["leaderboard"]
    assert (board[0]["name"], board[0]["num_votes"]) == ("v1", 8)
    assert {one["name"] for one in board} == {"v0", "v1", "a run"}
    assert "against v0     v1: " in run(capsys, "votes", "stats", "--dir", tmp_path)[1]


def test_feedback_is_counted_and_exported_with_what_it_is_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with VoteStore.open(tmp_path / "votes.db") as store:
        campaign = store.set_campaign(CampaignSettings())
        key = store.add_rater("app", key=KeySettings(("generate", "feedback"))).rater.id
        choices = tuple(Choice(text, (1,), (-1.0,), (-1.0,), "stop", 2, "v2") for text in ("Red.", "Blue."))
        facts = {"rater_id": key, "model": "live", "prompt_ids": (1,), "options": {}}
        store.record(Inference(name="chatcmpl-1", prompt="A colour?", choices=choices, episode="chat 7", **facts))
        of_second = (("thumbs", False, 1), ("stars", 4.5, 1), ("comment", "dull", 1))
        said = (("thumbs", True, 0), *of_second, ("thumbs", None, 0))  # the first is withdrawn
        for metric, value, choice in said:
            given = Feedback(metric=metric, value=value, inference="chatcmpl-1", choice=choice)
            store.give_feedback(campaign.id, given, Speaker(key))
    told = run(capsys, "votes", "stats", "--dir", tmp_path)[1]
    lines = [line.split(maxsplit=1)[1] for line in told.splitlines() if line.startswith("feedback")]
    assert lines == ["comment on v2: 1", "stars on v2: 1, mean 4.5", "thumbs on v2: 1, 0% true"]
    assert "feedback" not in run(capsys, "votes", "stats", "--dir", tmp_path, "--campaign", "default")[1]
    counted = json.loads(run(capsys, "votes", "stats", "--dir", tmp_path, "--json")[1])["feedback"]
    assert [(one["metric"], one["source"], one["share_true"], one["mean"]) for one in counted] == [
        ("comment", "v2", None, None),
        ("stars", "v2", None, 4.5),
        ("thumbs", "v2", 0.0, None),
    ]
    with VoteStore.open(tmp_path / "votes.db") as store:
        for metric, value in (("solved", False), ("pages", 3), ("solved", True), ("pages", None)):
            store.give_feedback(campaign.id, Feedback(metric=metric, value=value, episode="chat 7"), Speaker(key))
    dest = tmp_path / "said.jsonl"
    assert main(["votes", "export", str(dest), "--dir", str(tmp_path), "--kind", "feedback"]) == 0
    rows = [json.loads(line) for line in dest.read_text().splitlines()]
    assert [(row["completion"], row["metric"], row["value"]) for row in rows] == [
        ("Blue.", "thumbs", False),
        ("Blue.", "stars", 4.5),
        ("Blue.", "comment", "dull"),
        (None, "solved", True),  # of the conversation, so it labels no answer
    ]
    assert [row["label"] for row in rows] == [False, None, None, None]
    assert {row["prompt"] for row in rows[:3]} == {"A colour?"} and rows[0]["source"] == "v2"
    assert {row["episode_id"] for row in rows} == {"chat 7"}
    assert rows[3]["prompt"] is rows[3]["inference_id"] is rows[3]["choice"] is None
    labels = tmp_path / "labels.jsonl"
    assert main(["votes", "export", str(labels), "--dir", str(tmp_path), "--kind", "feedback", "--decided"]) == 0
    assert [json.loads(line) for line in labels.read_text().splitlines()] == rows[:1]
    table = tmp_path / "said.csv"
    assert main(["votes", "export", str(table), "--dir", str(tmp_path), "--kind", "feedback"]) == 0
    cells = [[row[name] for name in ("label", "metric", "value")] for row in csv.DictReader(table.open())]
    assert cells == [
        ["false", "thumbs", "false"],
        ["", "stars", "4.5"],
        ["", "comment", "dull"],
        ["", "solved", "true"],
    ]
    code, _, err = run(capsys, "votes", "export", tmp_path / "said.parquet", "--dir", tmp_path, "--kind", "feedback")
    assert code == 2 and "`value` is a thumb, a number or a text, which parquet cannot hold together" in err


@pytest.mark.parametrize("words", [("stats",), ("audit",), ("export", "out.jsonl"), ("prune", "--days", 3)])
def test_a_database_of_something_else_is_refused_and_an_empty_one_has_no_votes_yet(
    postgres: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "votes.db").touch()
    for place in (("--dir", tmp_path), ("--database", postgres.new())):
        code, _, error = run(capsys, "votes", *words, *place)
        assert code == 2 and "holds no votes yet; name the one of a `tunesmith serve`" in error
    url = postgres.new()
    postgres.execute("CREATE TABLE recipes (id INTEGER)", url.partition("@/")[2].partition("?")[0])
    code, _, error = run(capsys, "votes", *words, "--database", url)
    assert code == 2 and "is a database of something else (tables recipes)" in error
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "votes.db").stat().st_size


def test_a_database_is_named_by_a_url_and_in_a_recipe_without_its_password(
    postgres: Any, tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
):
    url, dest = postgres.emptied(), tmp_path / "out.jsonl"
    given = ("--database", url, "--json")
    assert run(capsys, "votes", "import", pairs, "--labels", "votes", *given)[0] == 0
    assert json.loads(run(capsys, "votes", "stats", *given)[1])["num_votes"] == 3
    assert json.loads(run(capsys, "votes", "export", dest, *given)[1])["num_rows"] == 3
    code, _, error = run(capsys, "votes", "stats", "--database", tmp_path / "votes.db")
    assert code == 2 and "postgresql://USER@HOST:PORT/NAME" in error
    secret = url.replace("tunesmith@", "tunesmith:s3cret-word@")
    (tmp_path / "own.yaml").write_text(f"algorithm: live\nmodel: tiny:llama\nlive: {{database: '{secret}'}}\n")
    folder = ("--dir", tmp_path / "live")
    for words in (("--database", secret, "--model", "tiny:llama"), ("--config", tmp_path / "own.yaml")):
        code, _, error = run(capsys, "live", *folder, *words)
        assert code == 2 and "PGPASSWORD" in error and "s3cret-word" not in error
    code, _, error = run(capsys, "live", *folder, "--database", "mysql://ann:s3cret-word@host/votes")
    assert code == 2 and "no URL of PostgreSQL" in error and "s3cret-word" not in error
    code, _, error = run(capsys, "live", *folder, "--database", url, "--simulate", 2)
    assert code == 2 and "leave --database out" in error
    assert not (tmp_path / "live").exists()
