"""Exports of other tools: what is recognised, what is stored, what is refused, and how much memory it takes."""

import copy
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from foreign_rows import FILES

from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import DataError, InputError
from tunesmith.collect.data.vote_imports import VoteFiles
from tunesmith.collect.store.records import Imported
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

PAIRS = {
    "open-webui": ("open-webui:u1", "m2", "m1"),
    "fastchat": ("fastchat:f5047344122f0dee", "m2", "m1"),
    "lmarena": ("lmarena:arena_user_1", "m2", "m1"),
    "lmarena-flat": ("lmarena:import", "m2", "m1"),
    "openai-preference": ("openai:import", "openai", "openai"),
    "label-studio": ("label-studio:3", "label-studio", "label-studio"),
    "tensorzero": ("tensorzero:u1", "edited by a person", "v"),
    "langfuse": ("langfuse:u1", "edited by a person", "langfuse"),
}
"""Rater, and the sources of `Blue.` and `Red.`, of the pair that a file has."""

LABELS = {
    "open-webui": [("thumbs", True), ("comment", "ok")],
    "fastchat": [("thumbs", True)],
    "librechat": [("thumbs", False), ("comment", "no")],
    "tensorzero": [("good", False), ("demonstration", "Blue.")],
    "langfuse": [("good", True), ("comment", "ok"), ("demonstration", "Blue.")],
    "portkey": [("thumbs", False)],
    "openai-chat": [("demonstration", "Blue.")],
    "columns": [("thumbs", False)],
}


ITEMS = [
    {"type": "message", "content": [{"type": "output_text", "text": "Red."}]},
    {"type": "message", "content": [{"type": "output_text", "text": "Or "}, {"type": "output_text", "text": "blue."}]},
]
"""What Open WebUI keeps of an answer in `output`."""


def written(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(folder: Path, *files: Path) -> Imported:
    seen = VoteFiles(files, "votes")
    with VoteStore.open(folder / "votes.db", seed=0) as store:
        return store.import_rows("default", seen.rows(), num_rows=seen.num_given)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"content": "", "output": [{"type": "reasoning", "content": [{"text": "Hm."}]}, *ITEMS]}, "Red.\nOr blue."),
        ({"content": "Red.", "output": ITEMS}, "Red."),
        (
            {"content": '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> Hm.\n</details>\nRed.'},
            "Red.",
        ),
        ({"content": "Red.", "output": [*ITEMS, {"type": "function_call", "name": "f"}]}, "has calls of tools"),
        ({"content": "", "error": {"content": "the prompt has 26190 tokens"}}, "is empty"),
    ],
)
def test_answers_of_open_webui_are_what_was_said(tmp_path: Path, node: dict[str, Any], text: str):
    row = copy.deepcopy(FILES["open-webui"][1])
    row["snapshot"]["chat"]["chat"]["history"]["messages"]["a"] |= node
    file = written(tmp_path / "export.jsonl", [row, FILES["open-webui"][1]])
    files = VoteFiles([file], "votes")
    if files.understood[0].num_bad:
        assert text in files.understood[0].bad
    else:
        assert next(files.rows()).answer == text


@pytest.mark.parametrize("name", FILES)
def test_the_content_tells_the_format_and_twice_is_once(tmp_path: Path, name: str):
    file = written(tmp_path / "export.jsonl", FILES[name])
    (seen,) = VoteFiles([file], "votes").understood
    assert seen.format == name.removesuffix("-flat" if name == "argilla-flat" else "")
    assert (seen.num_rows, seen.num_bad) == (len(FILES[name]), 0) and seen.first
    first = imported(tmp_path, file)
    assert first.num_new + first.num_feedback == seen.num_pairs + seen.num_labels + seen.num_demonstrations
    with VoteReader.open(tmp_path / "votes.db") as reader:
        before = list(reader.export()), reader.feedback_after(0)
    again = imported(tmp_path, file)
    assert (again.num_new, again.num_feedback, again.num_other) == (0, 0, 0)
    assert (again.num_there, again.num_feedback_there) == (first.num_new, first.num_feedback)
    with VoteReader.open(tmp_path / "votes.db") as reader:
        assert (list(reader.export()), reader.feedback_after(0)) == before
        assert not any(one.has_access(0.0) and one.scopes for one in reader.raters())


@pytest.mark.parametrize("name", PAIRS)
def test_a_comparison_is_a_vote_of_an_opaque_rater(tmp_path: Path, name: str):
    imported(tmp_path, written(tmp_path / "export.jsonl", FILES[name]))
    with VoteReader.open(tmp_path / "votes.db") as reader:
        (vote,) = reader.votes_after(0)
    assert (vote.chosen.text, vote.rejected.text) == ("Blue.", "Red.")
    sources = tuple(one.source_id.removeprefix("model ") for one in (vote.chosen, vote.rejected))
    assert (vote.rater, *sources) == PAIRS[name]
    last = vote.prompt if isinstance(vote.prompt, str) else vote.prompt[-1]["content"]
    assert last == "Name a colour."


@pytest.mark.parametrize("name", LABELS)
def test_a_label_is_feedback_on_the_answer_without_token_ids(tmp_path: Path, name: str):
    imported(tmp_path, written(tmp_path / "export.jsonl", FILES[name]))
    with VoteReader.open(tmp_path / "votes.db") as reader:
        said = reader.feedback_after(0)
        assert sorted((one.metric, str(one.value)) for one in said) == sorted(
            (metric, str(value)) for metric, value in LABELS[name]
        )
        answered = reader.inference(said[0].inference)
    assert answered is not None and answered.choices[0].token_ids == ()
    assert answered.choices[0].text == ("Blue." if name == "openai-chat" else "Red.")


def test_a_trace_of_mlflow_is_a_label_a_demonstration_and_a_pair(tmp_path: Path):
    imported(tmp_path, written(tmp_path / "traces.jsonl", FILES["mlflow"]))
    with VoteReader.open(tmp_path / "votes.db") as reader:
        (vote,) = reader.votes_after(0)
        said = [(one.metric, one.value) for one in reader.feedback_after(0)]
    assert (vote.chosen.text, vote.rejected.text) == ("Rayleigh scattering.", "It is blue because of Mie.")
    assert vote.rater == "mlflow:bob"
    assert said.count(("good", False)) == said.count(("good", True)) == 1
    assert ("demonstration", "Rayleigh scattering.") in said and "judge" not in dict(said)


def test_flat_records_of_argilla_are_the_same_votes(tmp_path: Path):
    votes = {
        name: [
            (one.rater, one.item.candidates[one.better].text)
            for one in VoteFiles([written(tmp_path / f"{name}.jsonl", FILES[name])], "votes").rows()
            if hasattr(one, "better")
        ]
        for name in ("argilla", "argilla-flat")
    }
    # A draft has its status in the flat form alone.
    assert votes["argilla-flat"] == votes["argilla"][:3] and len(votes["argilla"]) == 4


def test_scores_and_traces_may_be_in_two_files_and_a_json_list(tmp_path: Path):
    scores, traces = FILES["langfuse"][:3], FILES["langfuse"][3:]
    (tmp_path / "scores.json").write_text(json.dumps({"data": scores, "meta": {"page": 1}}, indent=1))
    (tmp_path / "traces.json").write_text(json.dumps(traces, indent=1))
    done = imported(tmp_path, tmp_path / "scores.json", tmp_path / "traces.json")
    assert (done.num_new, done.num_feedback) == (1, 3)
    with pytest.raises(DataError, match=r"no trace or observation 't' with an output"):
        VoteFiles([tmp_path / "scores.json"])


def _without(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(row: dict[str, Any]) -> object:
        inner: Any = row
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return row

    return change


def _with(value: object, *path: str | int) -> Callable[[dict[str, Any]], object]:
    def change(row: dict[str, Any]) -> object:
        inner: Any = row
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return row

    return change


MALFORMED: dict[str, tuple[int, list[tuple[Callable[[dict[str, Any]], object], str]]]] = {
    "open-webui": (0, [
        (_with(5, "data", "rating"), "Open WebUI writes 1 or -1"),
        (_with(None, "data", "rating"), "Open WebUI writes 1 or -1"),
        (_with({}, "meta"), "no message 'None'"),
        (_with("x", "meta"), "`meta` is text"),
        (_with("gone", "meta", "message_id"), "no message 'gone'"),
        (_without("snapshot"), "no `snapshot`"),
        (_with([], "snapshot"), "`snapshot` is a list"),
        (_with([1], "user_id"), "`rater` is a list"),
        (_with("x" * 9, "updated_at"), "write a time"),
        (_with("", "snapshot", "chat", "chat", "history", "messages", "a", "content"), "`content` is empty"),
        (_with("a", "snapshot", "chat", "chat", "history", "messages", "q", "parentId"), "comes before itself"),
    ]),
    "fastchat": (0, [
        (_with([], "states"), "two entries each"),
        (_with({}, "states"), "`states` is an object"),
        (_with(["m"], "models"), "two entries each"),
        (_with("x", "states", 0), "`states` is text"),
        (_with(7, "states", 0, "messages"), "no list of"),
        (_with("0", "states", 0, "offset"), "no list of"),
        (_with(["USER"], "states", 0, "messages", 0), "no list of"),
        (_with(None, "states", 0, "messages", 1, 1), "turn 2 is null"),
        (_with("Red\u258c", "states", 0, "messages", 1, 1), "not finished"),
        (_with("Blue.", "states", 0, "messages", 1, 1), "the same"),
        (_with("Name a dog.", "states", 0, "messages", 0, 1), "differ before the last answer"),
    ]),
    "lmarena": (0, [
        (_with("model_c", "winner"), "give one of"),
        (_with(None, "winner"), "give one of"),
        (_with(None, "conversation_a"), "`conversation_a` is null"),
        (_with([], "conversation_a"), "empty list"),
        (_with([1], "conversation_a"), "`conversation_a` is a number"),
        (_with("robot", "conversation_a", 0, "role"), "role 'robot' is unknown"),
        (_with("user", "conversation_a", 1, "role"), "does not end with an answer"),
        (_with(" ", "conversation_a", 1, "content"), "an answer is empty"),
        (_with("Blue.", "conversation_a", 1, "content"), "the same"),
        (_with("long ago", "tstamp"), "write a time"),
        (_with({"x": 1}, "judge"), "`rater` is an object"),
    ]),
    "lmarena-flat": (0, [
        (_with(1, "winner_model_a"), "2 of winner_model_a"),
        (_with(0, "winner_model_b"), "0 of winner_model_a"),
        (_with("won", "winner_tie"), "`winner_tie` is 'won'"),
        (_with([], "winner_tie"), "`winner_tie` is a list"),
        (_with('["a", "b"]', "prompt"), "different numbers of turns"),
        (_with('["a", "b"]', "response_a"), "different numbers of turns"),
        (_with("[null]", "response_a"), "`content` is null"),
        (_with('[""]', "response_a"), "an answer is empty"),
        (_with('["Blue."]', "response_a"), "the same"),
        (_with("[5]", "prompt"), "`content` is a number"),
    ]),
    "openai-preference": (0, [
        (_without("input"), "no `input`"),
        (_without("preferred_output"), "no `preferred_output`"),
        (_without("non_preferred_output"), "no `non_preferred_output`"),
        (_with([], "input"), "`input` is a list"),
        (_with({}, "input"), "`input.messages` is null"),
        (_with([], "input", "messages"), "empty list"),
        (_with([], "preferred_output"), "has 0 messages"),
        (_with({}, "preferred_output"), "`preferred_output` is an object"),
        (_with("user", "preferred_output", 0, "role"), "an answer is the assistant's"),
        (_with([{"id": "1"}], "preferred_output", 0, "tool_calls"), "calls of tools"),
        (_with("Red.", "preferred_output", 0, "content"), "the same"),
    ]),
    "openai-chat": (0, [
        (_with([], "messages"), "nothing to learn"),
        (_with([1], "messages"), "`messages` is a number"),
        (_with("user", "messages", 1, "role"), "nothing to learn"),
        (_with(0, "messages", 1, "weight"), "`weight` 0"),
        (_with([{"role": "assistant", "content": "x"}], "messages"), "nothing that it answers"),
        (_with("robot", "messages", 0, "role"), "role 'robot' is unknown"),
        (_with("", "messages", 1, "content"), "is empty"),
        (_with(7, "messages", 1, "content"), "is a number"),
        (_with([{"type": "image_url"}], "messages", 0, "content"), "a part of the kind 'image_url'"),
        (_with([{}], "messages", 1, "tool_calls"), "calls of tools"),
    ]),
    "label-studio": (0, [
        (_with([], "data"), "`data` is a list"),
        (_with({}, "data"), "0 texts"),
        (_with("x", "annotations"), "`annotations` is text"),
        (_with([3], "annotations"), "`annotations` is a number"),
        (_with("x", "annotations", 0, "result"), "is text"),
        (_with("up", "annotations", 0, "result", 0, "value", "selected"), "writes left or right"),
        (_with([], "annotations", 0, "result", 0, "value"), "`value` is a list"),
        (_without("data", "prompt"), "no prompt"),
        (_with("Red.", "data", "text2"), "the same"),
        (_with(" ", "data", "text2"), "`text2` is empty"),
        (_with([1], "annotations", 0, "completed_by"), "`rater` is a list"),
    ]),
    "librechat": (1, [
        (_with("up", "feedback", "rating"), "thumbsUp or thumbsDown"),
        (_with({"tag": "x"}, "feedback"), "thumbsUp or thumbsDown"),
        (_with("thumbsUp", "feedback"), "`feedback` is text"),
        (_with(5, "feedback", "text"), "`feedback.text` is a number"),
        (_with("gone", "parentMessageId"), "no message before it"),
        (_with(None, "parentMessageId"), "no message before it"),
        (_with("a", "parentMessageId"), "comes before itself"),
        (_with([], "content"), "`text` is a list"),
        (_with([{"type": "image_file"}], "content"), "the kind 'image_file'"),
        (_with(["x"], "user"), "`rater` is a list"),
    ]),
    "tensorzero": (1, [
        (_with("gone", "target_id"), "no inference 'gone'"),
        (_with(None, "target_id"), "no inference 'None'"),
        (_with("maybe", "value"), "give true, false or a number"),
        (_with(None, "value"), "`value` is null"),
        (_with([], "value"), "`value` is a list"),
        (_with("x", "tags"), "`tags` is text"),
        (_with({"user_id": [1]}, "tags"), "`rater` is a list"),
        (_with("comment", "metric_name"), "`value` is true or false"),
        (_with("demonstration", "metric_name"), "`value` is true or false"),
        (_with("soon", "timestamp"), "write a time"),
    ]),
    "langfuse": (0, [
        (_with("gone", "traceId"), "no trace or observation 'gone'"),
        (_with(None, "traceId"), "no trace or observation 'None'"),
        (_with("maybe", "value"), "give true, false or a number"),
        (_with(None, "value"), "`value` is null"),
        (_with([], "value"), "`value` is a list"),
        (_with(5, "comment"), "`comment` is a number"),
        (_with([1], "authorUserId"), "`rater` is a list"),
        (_with("soon", "timestamp"), "write a time"),
        (_with(5, "stringValue"), "`stringValue` is a number"),
        (_with("x", "subject"), "`subject` is text"),
    ]),
    "portkey": (0, [
        (_with("gone", "trace_id"), "no log with `trace_id` 'gone'"),
        (_with(11, "value"), "from -10 to 10"),
        (_with(-10.5, "value"), "from -10 to 10"),
        (_with(10**400, "value"), "`value` is an integer of too many digits; give true, false or a finite number"),
        (_with(10**400, "created_at"), "is an integer of too many digits"),
        (_with("good", "value"), "give true, false or a number"),
        (_with(None, "value"), "`value` is null"),
        (_with([], "value"), "`value` is a list"),
        (_with({}, "value"), "`value` is an object"),
        (_with([], "metadata"), "`metadata` is a list"),
        (_with({"_user": [1]}, "metadata"), "`rater` is a list"),
        (_with("soon", "created_at"), "write a time"),
    ]),
    "mlflow": (0, [
        (_with("x", "info", "assessments"), "`assessments` is text"),
        (_with([1], "info", "assessments"), "`assessments` is a number"),
        (_with("x", "info", "assessments", 2, "source"), "`source` is text"),
        (_with([1], "info", "assessments", 2, "source", "source_id"), "`rater` is a list"),
        (_with("soon", "info", "assessments", 2, "create_time"), "write a time"),
        (_with(None, "info", "assessments", 2, "feedback", "value"), "`feedback.value` is null"),
        (_with("so so", "info", "assessments", 2, "feedback", "value"), "give true, false or a number"),
        (_with([1], "info", "assessments", 1, "expectation", "value"), "`expectation.value` is no text"),
        (_with(3, "info", "assessments", 2, "rationale"), "`rationale` is a number"),
        (_with([], "data", "spans"), "`inputs` is null"),
        (_with("{}", "data", "spans", 0, "attributes", "mlflow.spanInputs"), "no messages"),
        (_with("[]", "data", "spans", 0, "attributes", "mlflow.spanOutputs"), "`outputs` is a list"),
    ]),
    "argilla": (0, [
        (_with({}, "fields"), "has 0 answers"),
        (_with([], "responses"), "`responses` is a list"),
        (_with("x", "responses", "preference"), "is text; give a list"),
        (_with([1], "responses", "preference"), "`responses.preference` is a number"),
        (_with("third", "responses", "preference", 0, "value"), "names none of the answers"),
        (_with(["response_1"], "responses", "preference", 0, "value"), "it must rank"),
        (_with([1], "responses", "preference", 0, "user_id"), "is a list"),
        (_with("x", "metadata"), "`metadata` is text"),
        (_with("Red.", "fields", "response_2"), "the same"),
        (_with([1], "fields", "response_2"), "an answer is text"),
    ]),
    "columns": (0, [
        (_with("good", "label"), "`label` is 'good'"),
        (_with(None, "label"), "`label`"),
        (_with(7, "label"), "`label` is 7"),
        (_without("completion"), "no column `completion`"),
        (_without("prompt"), "no column `prompt`"),
        (_with("", "completion"), "`completion` is empty"),
        (_with(5, "completion"), "`completion` is a number"),
        (_with(" ", "prompt"), "`prompt` is empty"),
        (_with([{"role": "user", "content": "x"}], "completion"), "ends with the assistant"),
        (_with([1], "rater"), "`rater` is a list"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, *one) for name, (_, variants) in MALFORMED.items() for one in variants],
)
def test_a_malformed_row_is_reported_with_file_line_and_reason(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[dict[str, Any]], object],
    message: str,
):
    """Ten variants of each format: the row is left out and named, the others are used."""
    rows = copy.deepcopy(FILES[name])
    place = MALFORMED[name][0]
    good = copy.deepcopy(rows[place])
    rows[place] = change(rows[place])  # type: ignore[call-overload]
    if name == "librechat":
        good["messageId"] = "another"
    seen = VoteFiles([written(tmp_path / "export.jsonl", [*rows, good])], "votes", form=name)
    (file,) = seen.understood
    assert file.num_bad == 1, file.bad
    assert file.bad.startswith(f"export.jsonl:{place + 1}: ") and message in file.bad
    assert sum(1 for _ in seen.rows()) == seen.num_given > 0


def test_a_file_of_which_nothing_is_understood_stores_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = written(tmp_path / "good.jsonl", FILES["lmarena"])
    bad = written(tmp_path / "bad.jsonl", [{"stars": 5}])
    assert main(["votes", "import", str(good), str(bad), "--dir", str(tmp_path / "live")]) == 2
    err = capsys.readouterr().err
    assert "bad.jsonl:1: no column `chosen`" in err and "looks like no other format" in err and "open-webui" in err
    assert not (tmp_path / "live").exists()
    with pytest.raises(InputError, match="did you mean langfuse"):
        VoteFiles([good], form="langfus")


def test_a_preview_says_what_was_understood_and_stores_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = written(tmp_path / "log.json", [*FILES["fastchat"], {"tstamp": 1, "type": "leftvote"}])
    command = ["votes", "import", str(file), "--dir", str(tmp_path / "live")]
    assert main([*command, "--preview"]) == 0
    out, err = capsys.readouterr()
    assert "logs of FastChat and LMArena (fastchat), 4 rows: 1 pair, 1 label, 0 demonstrations, 1 prompts" in out
    assert "'Name a colour.' -> 'Blue.' better, 'Red.'" in out and "1 bad rows left out" in out
    assert "log.json:4: `states` and `models`" in err
    assert not (tmp_path / "live").exists()
    assert main(command) == 0
    assert "1 votes added, 0 were there already\n1 labels and demonstrations added" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["openai-preference", "label-studio", "openai-chat"])
def test_an_export_for_another_tool_comes_back(tmp_path: Path, form: str):
    live, again = tmp_path / "live", tmp_path / "again"
    files = [str(written(tmp_path / f"{name}.jsonl", FILES[name])) for name in ("tensorzero", "lmarena")]
    assert main(["votes", "import", *files, "--dir", str(live)]) == 0
    kind = "demonstrations" if form == "openai-chat" else "votes"
    dest = tmp_path / "out.jsonl"
    assert main(["votes", "export", str(dest), "--dir", str(live), "--format", form, "--kind", kind]) == 0
    assert main(["votes", "import", str(dest), "--dir", str(again)]) == 0
    with VoteReader.open(again / "votes.db") as reader:
        votes = [(one.rater, one.chosen.text, one.rejected.text) for one in reader.votes_after(0)]
        said = [(one.metric, one.value) for one in reader.feedback_after(0)]
    if form == "openai-chat":
        assert (votes, said) == ([], [("demonstration", "Blue.")])
    elif form == "label-studio":
        assert sorted(votes) == [("lmarena:arena_user_1", "Blue.", "Red."), ("tensorzero:u1", "Blue.", "Red.")]
    else:
        assert votes == [("openai:import", "Blue.", "Red.")]  # both votes are of one pair


def _many(path: Path, num: int) -> Path:
    (row,) = FILES["lmarena"]
    with path.open("w") as file:
        for number in range(num):
            answer = [row["conversation_b"][0], {"role": "assistant", "content": f"Blue {number}."}]
            file.write(json.dumps({**row, "judge": f"u{number % 100}", "conversation_b": answer}) + "\n")
    return path


def _peak_of_check(path: Path) -> float:
    tracemalloc.start()
    try:
        files = VoteFiles([path], "votes")
        assert sum(1 for _ in files.rows()) == files.num_given
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows(tmp_path: Path):
    peaks = [_peak_of_check(_many(tmp_path / f"{num}.jsonl", num)) for num in (500, 5000)]
    assert peaks[1] < peaks[0] + 1.0, peaks


_IMPORT = """
import sys
from tunesmith.apps.cli.main import main
from tunesmith.base.runs.environment import peak_rss_since_reset_gb
assert main(["votes", "import", sys.argv[1], "--dir", sys.argv[2], "--json"]) == 0
print(1000 * peak_rss_since_reset_gb())
"""


@pytest.mark.parametrize("num", [2000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_an_import_of_any_size_takes_the_memory_of_one_portion(tmp_path: Path, num: int):
    """A million rows of 0.3 kB are held in no list: the peak of the process stays below 400 MB."""
    file = _many(tmp_path / "many.jsonl", num)
    command = [sys.executable, "-c", _IMPORT, str(file), str(tmp_path / "live")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts, peak = done.stdout.splitlines()
    assert json.loads(facts)["num_new"] == num
    assert float(peak) < 400
