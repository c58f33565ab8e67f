"""Files of votes as people and other tools write them: what is not understood is an error with its line, never lost."""

import csv
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.config.sections import DemonstrationsSection, PairsSection, PromptsSection
from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.schema.records import Text
from tunesmith.collect.data.rows import RowError
from tunesmith.collect.data.sets import demonstration_sets, direct_sets, preference_sets, prompt_sets
from tunesmith.collect.data.vote_files import VoteFormat, write_votes
from tunesmith.collect.data.vote_imports import read_given_votes, read_items
from tunesmith.collect.data.vote_values import UNKNOWN_RATER, rater_of, time_of
from tunesmith.collect.store.records import CampaignSettings, Candidate, ExportRow, GivenVote, Imported, NewItem
from tunesmith.collect.store.votes import VoteStore, import_into
from tunesmith.engine.models.tiny import byte_tokenizer

PAIR: Mapping[str, object] = {"prompt": "P", "chosen": "a", "rejected": "b"}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("x.jsonl", rows)`: a file of the format that its name says."""

    def to(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
        path = tmp_path / name
        if path.suffix in (".csv", ".tsv"):
            with path.open("w", newline="") as file:
                names = list(dict.fromkeys(name for row in rows for name in row))
                writer = csv.DictWriter(file, names, delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        elif path.suffix == ".parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(list(rows)), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(list(rows)))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return to


def record(fields: Mapping[str, object], **questions: object) -> dict[str, object]:
    """A record of Argilla with one response to each question."""
    responses = {name: [{"value": value, "user_id": "u1"}] for name, value in questions.items()}
    return {"id": "1", "fields": fields, "metadata": {}, "suggestions": {}, "responses": responses, "vectors": {}}


ANSWERS = {"response_1": "aa", "response_2": "bb"}
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("column", "value", "field", "expected"),
    [
        ("rater", 7, "rater", "7"),
        ("rater", " ann ", "rater", "ann"),
        ("created_at", "2024-01-01T00:00:00Z", "created_at", 1704067200.0),
        ("created_at", "2024-01-01T02:00:00+02:00", "created_at", 1704067200.0),
        ("created_at", 1704067200, "created_at", 1704067200.0),
        ("created_at", 1704067200000, "created_at", 1704067200.0),
        ("dwell_ms", 1200, "dwell_ms", 1200),
        ("dwell_ms", 1200.0, "dwell_ms", 1200),
        ("verdict", "much_better", "verdict", "much_better"),
        ("chosen_side", "right", "left", 1),
        ("reason", "so it is", "reason", "so it is"),
    ],
)
def test_what_a_row_says_of_its_vote_is_kept(
    write: Write, form: str, column: str, value: object, field: str, expected: object
) -> None:
    """People write raters as numbers, times as ISO 8601 or in milliseconds, and all of it as CSV.
    Reported: issue 45.12."""
    (vote,) = read_given_votes(write(f"votes.{form}", [{**PAIR, column: value}]))
    assert getattr(vote, field) == expected


def test_times_in_parquet_are_times(write: Write) -> None:
    """People's times are a column of timestamps with a zone. Reported: issue 45.12."""
    from datetime import UTC, datetime

    (vote,) = read_given_votes(write("v.parquet", [{**PAIR, "created_at": datetime(2024, 1, 1, tzinfo=UTC)}]))
    assert vote.created_at == 1704067200.0


def test_numbered_raters_are_raters(write: Write, tmp_path: Path) -> None:
    """People number their raters: three of them are three votes. Reported: issue 45.12."""
    rows = [{**PAIR, "rater": 1}, {**PAIR, "rater": 2}, {"prompt": "P", "chosen": "b", "rejected": "a", "rater": 3}]
    with VoteStore.open(tmp_path / "votes.db") as store:
        asked = store.set_campaign(CampaignSettings()).id
        assert store.import_votes(asked, read_given_votes(write("v.jsonl", rows))).num_new == 3
        assert [one.name for one in store.reader.raters()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rater": ["ann"]}, "`rater` is a list"),
        ({"rater": {"name": "ann"}}, "`rater` is an object"),
        ({"rater": True}, "`rater` is true or false"),
        ({"rater": 1.5}, "`rater` is a number"),
        ({"rater": "x" * 201}, "`rater` has 201 characters"),
        ({"created_at": "yesterday"}, "`created_at` is 'yesterday'"),
        ({"created_at": "2024-01-01T00:00:00"}, "without its zone"),
        ({"created_at": "2024-01-01"}, "without its zone"),
        ({"created_at": True}, "`created_at` is true or false"),
        ({"created_at": -5}, "`created_at` is -5"),
        ({"created_at": 1.7e18}, "`created_at` is 1.7e"),
        ({"created_at": 9e9}, "in the future"),
        ({"dwell_ms": "long"}, "`dwell_ms` is 'long'"),
        ({"dwell_ms": -1}, "`dwell_ms` is -1"),
        ({"dwell_ms": [3]}, "`dwell_ms` is a list"),
        ({"verdict": "left"}, "`verdict` is 'left'; give much_better, better, tie, both_bad"),
        ({"verdict": 1}, "`verdict` is a number"),
        ({"verdict": "tie"}, "`verdict` is 'tie' but `tie` is false"),
        ({"verdict": "better", "tie": True}, "`verdict` is 'better' but `tie` is true"),
        ({"chosen_side": "top"}, "`chosen_side` is 'top'"),
        ({"reason": 5}, "`reason` is a number"),
        ({"heldout": "maybe"}, "`heldout` is 'maybe'"),
        ({"heldout": [True]}, "`heldout` is a list"),
        ({"chosen_version": "v1"}, "`chosen_version` is 'v1'"),
        ({"chosen_version": 1.5}, "`chosen_version` is 1.5"),
    ],
)
def test_a_wrong_type_is_an_error_with_its_line(write: Write, columns: Mapping[str, object], message: str) -> None:
    """People's columns hold other things than ours, and a vote without its rater is another vote.
    Reported: issue 45.12."""
    with pytest.raises(DataError, match="1 bad row of 2") as caught:
        read_given_votes(write("v.jsonl", [PAIR, {**PAIR, "prompt": "Q", **columns}]))
    assert "v.jsonl:2: `" in str(caught.value)
    assert message in str(caught.value)
    assert "skip_bad" not in str(caught.value)


def test_columns_without_a_place_are_named(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """People's exports call the rater `annotator`; that it is not read is said. Reported: issue 45.12."""
    with caplog.at_level(logging.WARNING):
        (vote,) = read_given_votes(write("v.jsonl", [{**PAIR, "annotator": "ann", "batch": 3}]))
    assert vote.rater == UNKNOWN_RATER
    assert "annotator, batch" in caplog.text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mark", ["true", "True", "yes", "1", 1, True])
def test_a_mark_of_held_out_rows_is_understood(write: Write, form: str, mark: object) -> None:
    """People's spreadsheets and scripts write true as a text or a number. Reported: issue 45.12."""
    source = write(f"votes.{form}", [{**PAIR, "heldout": mark}])
    assert read_given_votes(source)[0].item.heldout
    assert read_items(source)[0].heldout


def said_by_argilla(write: Write, rows: Sequence[Mapping[str, object]], question: str | None = None) -> list[GivenVote]:
    return read_given_votes(write("records.jsonl", rows), question=question)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"instruction": "Translate.", "input": "Good morning"}, "Translate.\n\nGood morning"),
        ({"prompt": "Who is king?", "context": "In 1500."}, "Who is king?\n\nIn 1500."),
        ({"context": "In 1500.", "question": "Who?", "input": None}, "In 1500.\n\nWho?"),
        (
            {"system": "Be brief.", "chat": [{"role": "user", "content": "Hi"}]},
            ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}),
        ),
    ],
)
def test_all_fields_before_the_answers_are_the_prompt(write: Write, fields: dict[str, object], prompt: Text) -> None:
    """People's records have an instruction and an input, or a context. Reported: issue 45.12."""
    (vote,) = said_by_argilla(write, [record({**fields, **ANSWERS}, preference="response_1")])
    assert vote.item.prompt == prompt


@pytest.mark.parametrize(
    ("value", "verdict", "better"),
    [
        (["response_2", "response_1"], "better", 1),
        ([{"value": "response_2", "rank": 1}, {"value": "response_1", "rank": 2}], "better", 1),
        ([{"value": "response_2", "rank": 1}, {"value": "response_1", "rank": 1}], "tie", 0),
        ("response_1_much", "much_better", 0),
        ("both_bad", "both_bad", 0),
    ],
)
def test_a_ranking_is_a_vote(write: Write, value: object, verdict: str, better: int) -> None:
    """Argilla's rankings are lists of names, or of names with ranks. Reported: issue 45.12."""
    (vote,) = said_by_argilla(write, [record({"prompt": "Q", **ANSWERS}, preference=value)])
    assert (vote.verdict, vote.better) == (verdict, better)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (record({"prompt": "Q", **ANSWERS}, preference="A"), "`preference` is 'A', which names none of the answers"),
        (record({"prompt": "Q", **ANSWERS}, preference=4), "`preference` is a number"),
        (record({"prompt": "Q", **ANSWERS}, preference=["response_1"]), "it must rank response_1 and response_2"),
        (record({"prompt": "Q", **ANSWERS}, preference=[{"value": "response_1", "rank": "1"}]), "has the rank '1'"),
        (record({"prompt": "Q", **ANSWERS, "category": "x"}, preference="response_1"), "3 answers"),
        (record({"prompt": "Q", **ANSWERS, "image": {"src": "x"}}, preference="tie"), "`fields.image` is an object"),
        (
            record({"chat": [{"role": "user", "content": "Hi"}], "context": "c", **ANSWERS}, preference="tie"),
            "beside other fields",
        ),
        (record({"prompt": "Q", **ANSWERS}) | {"responses": {"preference": "response_1"}}, "give a list of responses"),
        (record({"prompt": "Q", **ANSWERS}) | {"metadata": {"heldout": "perhaps"}}, "`metadata.heldout` is 'perhaps'"),
        (
            record({"prompt": "Q", **ANSWERS})
            | {"responses": {"preference": [{"value": "response_1", "user_id": ["u"]}]}},
            "`user_id` is a list",
        ),
    ],
)
def test_a_record_that_is_not_understood_is_an_error_with_its_line(
    write: Write, row: Mapping[str, object], message: str
) -> None:
    """People ask their own questions of their own fields. Reported: issue 45.12."""
    with pytest.raises(DataError, match=r"records\.jsonl:1: ") as caught:
        said_by_argilla(write, [row])
    assert message in str(caught.value)


def test_one_of_several_questions_is_asked_for(write: Write) -> None:
    """People ask for the most harmful answer and for the best one, and not in each record. Reported: issue 45.12."""
    rows = [
        record({"prompt": "Q", **ANSWERS}, most_harmful="response_2"),
        record({"prompt": "R", **ANSWERS}, most_harmful="response_2", preference="response_1") | {"id": "2"},
    ]
    with pytest.raises(DataError, match=r"2 questions: `most_harmful` \(.*:1\), `preference` \(.*:2\).*--question"):
        said_by_argilla(write, rows)
    with pytest.raises(DataError, match="no response to a question 'best'"):
        said_by_argilla(write, rows, "best")
    (vote,) = said_by_argilla(write, rows, "preference")
    assert (vote.item.prompt, vote.better) == ("R", 0)
    assert len(read_items(write("records.jsonl", rows))) == 2
    with pytest.raises(InputError, match="no records of Argilla"):
        read_items(write("pairs.jsonl", [PAIR]), question="preference")


def test_drafts_are_no_votes(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """People discard responses, or leave drafts. Reported: issue 45.12."""
    row = record({"prompt": "Q", **ANSWERS})
    given = [
        {"value": "response_1", "user_id": n, "status": s} for n, s in enumerate(("submitted", "draft", "discarded"))
    ]
    row["responses"] = {"preference": given}
    with caplog.at_level(logging.WARNING):
        assert [vote.rater for vote in said_by_argilla(write, [row])] == ["0"]
    assert "2 responses left out" in caplog.text


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "argilla"])
@pytest.mark.parametrize("prompt", ["text", ({"role": "user", "content": "Hi"},)])
def test_sides_and_marks_travel(write: Write, tmp_path: Path, form: VoteFormat, prompt: Text) -> None:
    """People move votes to another machine: a rater who always took the left still did. Reported: issue 45.12."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    with VoteStore.open(tmp_path / "a.db", seed=1) as store:
        asked, ann = store.set_campaign(CampaignSettings()).id, store.add_rater("ann").rater.id
        for number in range(20):
            at = f"{number}" if prompt == "text" else (*prompt, {"role": "user", "content": f"{number}"})
            answers = (Candidate("one"), Candidate('two, "quoted"\nand long'))
            store.add_items(asked, [NewItem(at, answers, heldout=number % 2 == 0)])
        for shown in store.next_presentations(ann, asked, 20):
            store.vote(shown.token, ann, "left")
        rows = list(store.reader.export())
    dest = tmp_path / {"jsonl": "v.jsonl", "csv": "v.csv", "parquet": "v.parquet", "argilla": "r.jsonl"}[form]
    write_votes(dest, rows, form)
    with VoteStore.open(tmp_path / "b.db") as store:
        asked = store.set_campaign(CampaignSettings()).id
        assert store.import_votes(asked, read_given_votes(dest)).num_new == 20
        (stats,) = store.reader.stats(asked).raters
        assert (stats.left.share, stats.left.num) == (1.0, 20)
        again = list(store.reader.export())
    assert sum(row.heldout for row in again) == 10
    assert sorted(map(str, map(judged, again))) == sorted(map(str, map(judged, rows)))


def judged(row: ExportRow) -> object:
    return row.prompt, row.chosen, row.chosen_side, row.heldout, row.rater


def test_no_side_is_invented(write: Write, tmp_path: Path) -> None:
    """People import votes of which nobody knows the sides: there is no bias to be seen. Reported: issue 45.12."""
    rows = [{**PAIR, "prompt": f"{number}", "rater": "ann"} for number in range(50)]
    with VoteStore.open(tmp_path / "votes.db") as store:
        asked = store.set_campaign(CampaignSettings()).id
        store.import_votes(asked, read_given_votes(write("v.jsonl", rows)))
        found = store.reader.stats(asked)
        assert (found.num_votes, found.left.num, found.left.share) == (50, 0, None)
        assert {row.chosen_side for row in store.reader.export()} == {None}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    code = main([str(word) for word in (*words, "--json")])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


@pytest.mark.usefixtures("own_logging")
def test_the_same_file_again_makes_its_pairs_gold_or_held_out(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People import a file, and then once more with `--labels gold` or `--heldout`. Reported: issue 45.12."""
    file = write("v.jsonl", [PAIR, {"prompt": "P2", "chosen": "b", "rejected": "a"}])
    command = ("votes", "import", file, "--dir", tmp_path)
    assert run(capsys, *command)["num_new"] == 2
    gold = run(capsys, *command, "--labels", "gold")
    assert (gold["num_new"], gold["num_there"], gold["num_changed"]) == (0, 2, 2)
    assert run(capsys, *command, "--labels", "gold")["num_changed"] == 0
    assert run(capsys, *command, "--heldout")["num_changed"] == 2
    assert run(capsys, *command)["num_changed"] == 0
    assert run(capsys, *command, "--labels", "votes")["num_new"] == 2
    with VoteStore.open(tmp_path / "votes.db") as store:
        found = store.reader.stats()
        assert (found.num_items, found.raters[0].num_gold, found.raters[0].gold_accuracy) == (0, 2, 1.0)
        assert all(vote.heldout for vote in store.reader.votes_after(0))
    turned = write("turned.jsonl", [{"prompt": "P", "chosen": "b", "rejected": "a"}])
    assert main(["votes", "import", str(turned), "--dir", str(tmp_path), "--labels", "gold"]) == 2
    assert "turned.jsonl:1/chosen: 'b' is said to be the best answer" in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
def test_a_vote_that_says_otherwise_is_counted(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People's files hold two votes of one rater on one pair. Reported: issue 45.12."""
    rows = [{**PAIR, "rater": "ann"}, {"prompt": "P", "chosen": "b", "rejected": "a", "rater": "Ann"}]
    done = run(capsys, "votes", "import", write("v.jsonl", rows), "--dir", tmp_path, "--labels", "votes")
    assert (done["num_new"], done["num_there"], done["num_other"]) == (1, 0, 1)


def test_another_spelling_is_the_same_rater(write: Write, tmp_path: Path) -> None:
    """People import votes of "Anna" and invite "anna ": she is one, and sees no pair twice. Reported: issue 45.20."""
    names = ["Anna", "anna ", "ANNA", "\uff21nna", "An\u200bna", "Zo\u00eb", "Zoe\u0308"]
    rows = [{**PAIR, "prompt": f"{number}", "rater": name} for number, name in enumerate(names)]
    with VoteStore.open(tmp_path / "votes.db") as store:
        asked = store.set_campaign(CampaignSettings(overlap=5)).id
        store.import_votes(asked, read_given_votes(write("v.jsonl", rows)))
        assert [one.name for one in store.reader.raters()] == ["Anna", "Zo\u00eb"]
        anna = store.add_rater(" anna").rater
        assert (anna.id, anna.name) == (store.reader.raters()[0].id, "Anna")
        assert len(store.next_presentations(anna.id, asked, 20)) == 2
        assert store.reader.stats(asked).raters[0].num_votes == 5


@pytest.mark.parametrize("form", FORMATS)
def test_held_out_rows_are_never_trained_on(write: Write, form: str) -> None:
    """People export votes, of which the server held some out, and train on the file. Reported: issue 45.12."""
    rows = [{**PAIR, "prompt": f"p{number}", "heldout": number % 2 == 0} for number in range(12)]
    rows.append({**PAIR, "prompt": "P0 ", "chosen": "c", "heldout": False})  # another row of a held-out prompt
    section = PairsSection(source=str(write(f"votes.{form}", rows)), heldout_fraction=0.0)
    found = preference_sets(section, byte_tokenizer(), 0)
    assert set(found.train_prompts.values()) == {"p1", "p3", "p5", "p7", "p9", "p11"}
    assert set(found.heldout_prompts.values()) == {"p0", "p2", "p4", "p6", "p8", "p10"}
    for loss in ("sigmoid", "kto"):
        units = direct_sets(section, byte_tokenizer(), DPOSection(loss=loss), 0)
        assert (len(units.train), len(units.heldout)) == ((6, 7) if loss == "sigmoid" else (12, 14))


def test_held_out_rows_are_kept_from_every_trainer(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """People train SFT on written answers and GRPO on prompts of an export, and evaluate elsewhere.
    Reported: issue 45.12."""
    rows = [{"prompt": f"p{number}", "completion": "a", "heldout": number < 2} for number in range(6)]
    source = str(write("answers.jsonl", rows))
    told = demonstration_sets(DemonstrationsSection(source=source, heldout_fraction=0.0), byte_tokenizer(), 0)
    assert (len(told.train), len(told.heldout)) == (4, 2)
    prompts = prompt_sets(PromptsSection(source=source, heldout_fraction=0.0), byte_tokenizer(), 0)
    assert [len(prompts.train), len(prompts.heldout)] == [4, 2]
    pairs = [{**PAIR, "prompt": f"p{number}", "heldout": number < 2} for number in range(6)]
    with caplog.at_level(logging.INFO):
        elsewhere = preference_sets(PairsSection(), byte_tokenizer(), 0, pairs, [{**PAIR, "prompt": "new"}])
    assert (len(elsewhere.train), len(elsewhere.heldout)) == (4, 1)
    assert "2 of 6 rows are marked as held out; they are left out" in caplog.text
    with pytest.raises(DataError, match="all rows of the list of pairs are marked as held out"):
        preference_sets(PairsSection(), byte_tokenizer(), 0, pairs[:2])
    with pytest.raises(DataError, match=r"pairs\[0\]: `heldout` is 'perhaps'"):
        preference_sets(PairsSection(), byte_tokenizer(), 0, [{**PAIR, "heldout": "perhaps"}])


def test_a_share_is_held_out_beside_the_marked_rows() -> None:
    """People mark some rows, and ask for a share besides. Reported: issue 45.12."""
    pairs = [{**PAIR, "prompt": f"p{number}", "heldout": number < 10} for number in range(200)]
    found = preference_sets(PairsSection(heldout_fraction=0.25), byte_tokenizer(), 0, pairs)
    assert 35 < len(found.heldout) < 80
    assert not {f"p{number}" for number in range(10)} & set(found.train_prompts.values())


@pytest.mark.usefixtures("own_logging")
def test_imports_while_another_process_has_the_votes(write: Write, tmp_path: Path) -> None:
    """People import and export while their server runs. Reported: issue 45.25."""
    rows = [{**PAIR, "prompt": f"{number}", "rater": "ann", "dwell_ms": 5} for number in range(30)]
    chat = [{"role": "user", "content": "Hi"}]
    turn = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    file = write("v.jsonl", [*rows, {"prompt": chat, **turn, "rater": "bob"}])
    command = [sys.executable, "-m", "tunesmith", "votes"]
    with VoteStore.open(tmp_path / "votes.db") as store:
        importing = [*command, "import", str(file), "--dir", str(tmp_path), "--labels", "votes", "--json"]
        processes = [subprocess.Popen(importing, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        done = [json.loads(process.communicate()[0]) for process in processes]
        assert sum(one["num_new"] for one in done) == 31
        assert sum(one["num_there"] for one in done) == 31
        assert [vote.rater for vote in store.reader.votes_after(0)].count("ann") == 30
        assert list(store.reader.export())[-1].prompt == tuple(chat)
        exported = [*command, "export", str(tmp_path / "out.csv"), "--dir", str(tmp_path)]
        assert subprocess.run(exported, check=False, capture_output=True).returncode == 0
        bad = write("bad.jsonl", [{"prompt": "0", "chosen": "b", "rejected": "a"}, {**PAIR, "prompt": "0"}])
        gold = subprocess.run(
            [*command, "import", str(bad), "--dir", str(tmp_path), "--labels", "gold"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert gold.returncode == 2
        assert "bad.jsonl:2/chosen: 'a' is said to be the best answer" in gold.stderr
    assert list((tmp_path / "votes.db.imports").iterdir()) == []


def test_an_import_outlives_the_process_that_has_the_votes(tmp_path: Path) -> None:
    """People stop the server while it takes an import: the importing process does the rest. Reported: issue 45.25."""
    path = tmp_path / "votes.db"
    items = [NewItem(f"{number}", (Candidate("a"), Candidate("b"))) for number in range(4_000)]
    done: list[Imported] = []
    with VoteStore.open(path):
        importing = threading.Thread(
            target=lambda: done.append(import_into(path, "default", items, lambda *_: None, lambda _: None))
        )
        importing.start()
        while not list(tmp_path.glob("votes.db.imports/*.progress")):
            time.sleep(0.01)
    importing.join()
    with VoteStore.open(path) as store:
        assert store.reader.stats().num_items == 4_000
    assert done[0].num_new + done[0].num_there == 4_000


def test_a_rater_in_a_column_with_gaps_is_the_same_rater() -> None:
    """People save votes by pandas, which writes whole numbers as 1.0 where others are missing. Reported: a tester."""
    assert rater_of("1.0") == rater_of(1.0) == rater_of(1) == rater_of("1") == "1"
    assert rater_of("v1.0") == "v1.0"


@pytest.mark.parametrize("value", ["20240101", "202401011200", "20240101120000"])
def test_a_date_without_dashes_is_a_date(value: str) -> None:
    """People write dates as 20240101, which was a second of 1970. Reported: a tester."""
    with pytest.raises(RowError, match=r"2024-01-01T.*a time without its zone"):
        time_of(value)


@pytest.mark.parametrize("value", ["45292.5", 45292, 2024, "2024", -5])
def test_numbers_that_are_no_seconds_of_a_vote_are_refused(value: object) -> None:
    """People save days of a spreadsheet and years, which were seconds of 1970. Reported: a tester."""
    with pytest.raises(RowError, match="give seconds since the epoch"):
        time_of(value)
    assert time_of(0) == 0.0 and time_of("1704067200") == time_of(1704067200000) == 1704067200.0
