"""Votes into files and back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.schema.records import Pair, Ranking
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.data.vote_files import (
    VoteFormat,
    demonstration_columns,
    format_of,
    ranking_columns,
    write_rows,
    write_votes,
)
from tunesmith.collect.data.vote_imports import read_given_votes, read_items
from tunesmith.collect.store.records import CampaignSettings, Candidate, ExportRow, NewItem, Verdict
from tunesmith.collect.store.votes import VoteStore

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
VERDICTS: tuple[Verdict, ...] = ("left", "right_much", "tie", "both_bad", "left_much")


@pytest.fixture(params=["text", "chat"])
def voted(tmp_path: Path, request: pytest.FixtureRequest) -> list[ExportRow]:
    """Votes of two raters on five pairs, with awkward texts."""
    chat = request.param == "chat"
    items = [
        NewItem(
            (*CHAT, {"role": "assistant", "content": f"{n}?"}, {"role": "user", "content": "Yes"})
            if chat
            else f"p {n}",
            (Candidate(f"\u202egood\u2028 {n} \U0001f600", weight_version=n), Candidate(f'poor\n{n}, "quoted"')),
        )
        for n in range(5)
    ]
    with VoteStore.open(tmp_path / "from.db", seed=3) as store:
        asked = store.set_campaign(CampaignSettings(overlap=2)).id
        store.add_items(asked, items)
        for name in ("ann", "bob \u05d0"):
            rater = store.add_rater(name).rater.id
            for number, (one, verdict) in enumerate(
                zip(store.next_presentations(rater, asked, 5), VERDICTS, strict=True)
            ):
                store.vote(one.token, rater, verdict, reason="so\nit is", dwell_ms=number, now=100.5 + number)
        return list(store.reader.export())


def imported(tmp_path: Path, source: Path) -> list[ExportRow]:
    with VoteStore.open(tmp_path / "to.db") as store:
        asked = store.set_campaign(CampaignSettings(overlap=2)).id
        given = read_given_votes(source)
        assert store.import_votes(asked, given).num_new == len(given)
        return list(store.reader.export())


def comparable(row: ExportRow) -> ExportRow:
    """Without the id; of a tie the order of the answers has no meaning."""
    if row.tie:
        (first, first_version), (second, second_version) = sorted(
            [(row.chosen, row.chosen_version), (row.rejected, row.rejected_version)], key=str
        )
        row = replace(row, chosen=first, chosen_version=first_version, rejected=second, rejected_version=second_version)
    return replace(row, vote_id=0)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "datasets", "argilla"])
def test_an_export_comes_back_as_the_same_votes(tmp_path: Path, voted: list[ExportRow], form: VoteFormat):
    if form in ("parquet", "datasets"):
        pytest.importorskip("datasets" if form == "datasets" else "pyarrow")
    dest = (
        tmp_path
        / {"jsonl": "v.jsonl", "csv": "v.csv", "parquet": "v.parquet", "datasets": "v", "argilla": "a.jsonl"}[form]
    )
    assert write_votes(dest, voted, form) == 10
    back = imported(tmp_path, dest)
    if form != "argilla":
        assert sorted(map(comparable, back), key=str) == sorted(map(comparable, voted), key=str)
        return
    # Argilla's records have no place for times, reasons and versions.
    facts = [
        sorted(
            (row.rater, str(row.prompt), row.verdict, "" if row.tie else str(row.chosen), row.heldout) for row in rows
        )
        for rows in (back, voted)
    ]
    assert facts[0] == facts[1]


def test_an_export_is_read_by_every_trainer_as_pairs(tmp_path: Path, voted: list[ExportRow]):
    write_votes(tmp_path / "v.jsonl", voted, "jsonl")
    pairs = load_preferences(tmp_path / "v.jsonl")
    assert all(isinstance(pair, Pair) for pair in pairs)
    assert [(pair.chosen, pair.margin, pair.tie) for pair in pairs if isinstance(pair, Pair)] == [
        (row.chosen, row.margin, row.tie) for row in voted
    ]


def test_argilla_records_have_the_shape_that_argilla_reads(tmp_path: Path, voted: list[ExportRow]):
    write_votes(tmp_path / "a.jsonl", voted, "argilla")
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")]
    assert len(records) == 5
    for record in records:
        assert set(record) == {"id", "fields", "metadata", "suggestions", "responses", "vectors"}
        assert set(record["fields"]) == {"prompt", "response_1", "response_2"}
        assert [set(response) for response in record["responses"]["preference"]] == [{"value", "user_id"}] * 2


def test_records_of_others_with_labels_and_rankings_are_read(tmp_path: Path):
    ranks = [{"value": "second", "rank": 1}, {"value": "first", "rank": 2}]
    records = [
        {
            "id": "1",
            "fields": {"instruction": "Say hi", "first": "hi", "second": "hello"},
            "responses": {"best": [{"value": "first", "user_id": "u1"}, {"value": ranks, "user_id": "u2"}]},
        },
        {"id": "2", "fields": {"instruction": "Say bye", "first": "bye", "second": "so long"}, "responses": {}},
    ]
    source = tmp_path / "records.json"
    source.write_text(json.dumps(records))
    assert [(vote.rater, vote.verdict, vote.better) for vote in read_given_votes(source)] == [
        ("u1", "better", 0),
        ("u2", "better", 1),
    ]
    assert {item.prompt for item in read_items(source)} == {"Say hi", "Say bye"}


def test_pairs_and_rankings_become_items_and_labels_become_gold(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "p", "chosen": "good", "rejected": "poor"},
        {"prompt": "q", "chosen": "a", "rejected": "b", "tie": True},
        {"prompt": "r", "completions": ["best", "mid", "low"]},
        {"prompt": "s", "chosen": "same", "rejected": "same", "tie": True},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    items = read_items(source, heldout=True)
    assert [(item.kind, len(item.candidates), item.gold, item.heldout) for item in items] == [
        ("pair", 2, None, True),
        ("pair", 2, None, True),
        ("ranking", 3, None, True),
    ]
    assert [(item.prompt, item.gold) for item in read_items(source, gold=True)] == [("p", 0), ("r", 0)]
    source.write_text("\n".join(json.dumps({**row, "heldout": row["prompt"] == "r"}) for row in rows))
    assert [(item.prompt, item.heldout) for item in read_items(source)] == [("p", False), ("q", False), ("r", True)]
    caplog.clear()
    assert len(read_given_votes(source)) == 5  # a ranking of three is three votes
    assert [record.args for record in caplog.records] == [(str(source), 1)]  # rows left out


def test_an_answer_of_several_turns_is_refused_with_its_line(tmp_path: Path):
    source = tmp_path / "rows.jsonl"
    turns = [{"role": role, "content": role} for role in ("assistant", "user", "assistant")]
    row = {"prompt": [{"role": "user", "content": "Hi"}], "chosen": turns, "rejected": turns[:1]}
    source.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*several turns"):
        read_items(source)


def test_rankings_and_written_answers_are_read_back_by_their_loaders(tmp_path: Path):
    answers = tuple(map(Candidate, ("one", "two", "three")))
    with VoteStore.open(tmp_path / "votes.db") as store:
        asked = store.set_campaign(CampaignSettings(kind="ranking")).id
        store.add_items(asked, [NewItem(CHAT, answers, kind="ranking")])
        ann = store.add_rater("ann").rater.id
        (shown,) = store.next_presentations(ann, asked, 1)
        store.rank(shown.token, ann, [("three", "two", "one").index(text) + 1 for text in shown.answers])
        store.demonstrate(shown.token, ann, "zero")
        write_rows(tmp_path / "r.jsonl", map(ranking_columns, store.reader.export_rankings()), "jsonl")
        write_rows(tmp_path / "d.jsonl", map(demonstration_columns, store.reader.export_demonstrations()), "jsonl")
    (ranking,) = load_preferences(tmp_path / "r.jsonl")
    assert isinstance(ranking, Ranking)
    assert ranking.ranks == (3, 2, 1)
    (demonstration,) = load_demonstrations(str(tmp_path / "d.jsonl"))
    assert (demonstration.prompt.content, demonstration.completion[-1]) == (
        CHAT,
        {"role": "assistant", "content": "zero"},
    )


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path, voted: list[ExportRow]):
    dest = tmp_path / "v.jsonl"
    dest.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        write_votes(dest, voted, "jsonl")
    with pytest.raises(DataError, match="nothing to export"):
        write_votes(tmp_path / "empty.jsonl", [], "jsonl")
    assert dest.read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or "empty" in path.name]


def test_a_table_cannot_hold_text_and_conversations_at_once(tmp_path: Path, voted: list[ExportRow]):
    mixed = [voted[0], replace(voted[1], prompt=CHAT if isinstance(voted[0].prompt, str) else "text")]
    with pytest.raises(DataError, match="export JSONL"):
        write_votes(tmp_path / "v.parquet", mixed, "parquet")


def test_the_name_says_the_format():
    named: Callable[[str], VoteFormat] = format_of
    assert [named(name) for name in ("a.jsonl", "a.PARQUET", "a.csv", "folder")] == [
        "jsonl",
        "parquet",
        "csv",
        "datasets",
    ]
    with pytest.raises(InputError, match="xlsx"):
        format_of("a.xlsx")
