"""`tunesmith judge vote` and `eval judge`, and what a judge's votes are in the store."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from judge_server import JudgeServer
from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows.judging import compare_with_people, decided_pairs_of
from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.core.errors import NameTakenError
from tunesmith.collect.store.machine_votes import MachineVote
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.store.votes import VoteStore
from tunesmith.learn.judges.judge import open_judge

pytestmark = pytest.mark.usefixtures("own_logging")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def items(count: int) -> list[NewItem]:
    """Pairs whose second answer is longer."""
    sources = ("v1", "v2")
    return [
        NewItem(
            f"prompt {i}",
            tuple(
                Candidate(text, source_id=one)
                for text, one in zip((f"short {i}", f"a longer one {i}"), sources, strict=True)
            ),
        )
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight pairs; on the first four ann has voted: three times for the longer answer, once for the shorter."""
    folder = tmp_path / "live"
    with VoteStore.open(folder / "votes.db", seed=1) as store:
        campaign = store.set_campaign(CampaignSettings())
        new = items(8)
        store.add_items(campaign.id, new)
        ann = store.add_rater("ann").rater.id
        for number, item in enumerate(new[:4]):
            store.vote_on_pair(campaign.id, item, ann, "left" if number == 3 else "right")
    return folder


def test_a_judge_votes_on_pairs_and_its_agreement_is_told(run: Run, folder: Path, server: JudgeServer):
    code, out, err = run("judge", "vote", server.url, "--dir", folder, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["num_pairs"], facts["num_judged"], facts["num_ties"], facts["num_requests"]) == (8, 8, 0, 16)
    agreement = facts["agreement"]
    assert (agreement["share"], agreement["num_votes"]) == (0.75, 4)
    assert 0 < agreement["low"] < 0.75 < agreement["high"] < 1
    assert facts["prefers_longer"] == 1 and facts["order_decided"] == 0 and facts["unjudged"] == ""
    again = json.loads(run("judge", "vote", server.url, "--dir", folder, "--json")[1])
    assert (again["num_pairs"], again["num_requests"], again["agreement"]["share"]) == (0, 16, 0.75)
    out = run("votes", "stats", "--dir", folder)[1]
    assert "a machine, 8 votes (ties 0), agrees with people on 75% of their votes, 95 % interval" in out
    assert out.startswith("votes          4 ")


def test_votes_of_a_judge_are_no_person_s(run: Run, folder: Path, server: JudgeServer, tmp_path: Path):
    assert run("judge", "vote", server.url, "--dir", folder)[0] == 0
    with VoteStore.open(folder / "votes.db") as store, VoteWatch(folder / "votes.db") as watch:
        stats, campaign = store.reader.stats(), store.reader.campaigns()[0]
        assert stats.num_votes == 4 and [one.name for one in stats.raters] == ["ann"]
        assert stats.num_items_done == 4 and stats.alpha.num == 0
        assert [one.rater for one in store.reader.export()] == ["ann"] * 4
        assert len(store.reader.votes_after(0)) == 4 and len(store.reader.votes_after(0, machines=True)) == 12
        assert len(watch.contests()[1]) == 4 and sum(watch.per_minute(time.time())) == 4
        (judge,) = [one for one in store.reader.raters() if one.is_machine]
        assert judge.name.startswith("judge rater-1 ") and not judge.is_admin
        # What it judged is still asked of people, and it got no access.
        bob = store.add_rater("bob").rater.id
        assert len(store.next_presentations(bob, campaign.id, 8)) == 4
        with pytest.raises(NameTakenError, match="taken"):
            store.add_rater(judge.name)
    out = tmp_path / "all.jsonl"
    assert run("votes", "export", out, "--dir", folder, "--machines")[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["machine"] for row in rows].count(True) == 8
    assert all(row["reason"].startswith("Because") and row["chosen_side"] is None for row in rows if row["machine"])
    other = tmp_path / "other"
    assert run("votes", "import", out, "--labels", "votes", "--dir", other)[0] == 0
    facts = json.loads(run("votes", "stats", "--dir", other, "--json")[1])
    assert facts["num_votes"] == 4 and facts["judges"][0]["num_votes"] == 8
    assert run("votes", "export", tmp_path / "o.jsonl", "--dir", folder, "--format", "argilla", "--machines")[0] == 2


def test_a_judge_that_may_not_cost_more_says_what_it_left_out(run: Run, folder: Path, server: JudgeServer):
    words = ("judge", "vote", server.url, "--dir", folder)
    code, out, _ = run(*words, "--most-requests", 5, "--json")
    facts = json.loads(out)
    assert code == 0 and server.num_requests == 5 and 1 <= facts["num_judged"] <= 2
    assert "5 of 5 requests (most_requests) are used up" in facts["unjudged"]
    out = run(*words, "--most-requests", 16)[1]
    assert server.num_requests == 16 and "left out" not in out
    with VoteStore.open(folder / "votes.db") as store:
        assert store.reader.machine_stats()[0].num_votes == 8


def test_a_server_stores_the_votes_of_a_judge(run: Run, folder: Path, server: JudgeServer):
    with VoteStore.open(folder / "votes.db") as store:
        code, out, err = run("judge", "vote", server.url, "--dir", folder, "--pairs", "voted", "--json")
        assert code == 0 and "in use; its process is asked to do it" in err
        assert json.loads(out)["num_judged"] == 4
        assert store.reader.machine_stats()[0].num_votes == 4
        assert any(entry.kind == "judged" for entry in store.reader.audit())
        open_ones = json.loads(run("judge", "vote", server.url, "--dir", folder, "--pairs", "open", "--json")[1])
        assert (open_ones["num_judged"], open_ones["agreement"]["num_votes"]) == (4, 4)


def test_progress_is_told_while_answers_come(server: JudgeServer, tmp_path: Path):
    rows = [{"prompt": f"p {i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = open_judge(JudgeSettings(model=server.url, answers=str(tmp_path / "a.db")))
    told: list[int] = []
    wanted = decided_pairs_of(str(tmp_path / "pairs.jsonl"), limit=10)
    compare_with_people(judge, "pairs.jsonl", wanted, progress=told.append)
    assert told == sorted(told) and told[-1] == 10
    assert {1, 5, 8} <= set(told)


@pytest.mark.parametrize("words", [("judge", "vote"), ("eval", "judge", "--pairs", "pairs.jsonl")])
def test_an_interrupt_says_what_is_kept(
    words: tuple[str, ...],
    run: Run,
    folder: Path,
    server: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(folder.parent)
    Path("pairs.jsonl").write_text('{"prompt": "p", "chosen": "yes", "rejected": "no"}\n')

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tunesmith.learn.judges.judge.Judge.preferences", interrupted)
    code, _, err = run(*words, server.url)
    assert code == 130
    assert "judge_answers.db; the same command goes on from there" in err and err.endswith("interrupted\n")


def test_pairs_of_a_file_measure_a_judge(run: Run, server: JudgeServer, tmp_path: Path):
    pairs, settings = tmp_path / "pairs.jsonl", tmp_path / "short.yaml"
    rows = [{"prompt": f"p {i}", "chosen": "x" * (2 if i else 9), "rejected": "y" * 5} for i in range(10)]
    rows.append({"prompt": "t", "chosen": "a", "rejected": "b", "tie": True})
    pairs.write_text("\n".join(map(json.dumps, rows)))
    settings.write_text(f"model: {server.url}\nrubric: Longer is better.\nanswers: {tmp_path}/a.db\n")
    code, out, err = run("eval", "judge", settings, "--pairs", pairs, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["num_pairs"], facts["agreement"]["share"], facts["agreement"]["num_prompts"]) == (10, 0.1, 10)
    out = run("eval", "judge", settings, "--pairs", pairs, "--limit", 4)[1]
    assert "4 of 4 pairs" in out and "agrees with people on" in out
    assert server.num_requests == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("judge", "vote"), "no judge is named"),
        (("judge", "vote", "smollm2", "--dir", "nowhere"), "does not exist"),
        (("eval", "judge", "smollm2"), "no pairs are named"),
        (("eval", "judge", "none.yaml", "--pairs", "x.jsonl"), "none.yaml does not exist"),
        (("eval", "judge", "http://127.0.0.1:9", "--pairs", "x.jsonl", "--most-requests", "0"), "at least 1"),
    ],
)
def test_what_cannot_be_done_is_explained(
    run: Run, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*words)
    assert code == 2 and message in err


def test_a_machine_has_no_person_s_name(tmp_path: Path):
    with VoteStore.open(tmp_path / "votes.db") as opened:
        campaign = opened.set_campaign(CampaignSettings())
        (item_id,) = opened.add_items(campaign.id, items(1))
        opened.add_rater("ann")
        with pytest.raises(NameTakenError, match="'ann' is a person here"):
            opened.judge("ann", [MachineVote(item_id, "first")])
        assert opened.judge("judge x", [MachineVote(item_id, "first"), MachineVote(99, "tie")]) == {
            "num_new": 1,
            "num_there": 1,
        }
        assert opened.judge("judge x", [MachineVote(item_id, "second")]) == {"num_new": 0, "num_there": 1}
