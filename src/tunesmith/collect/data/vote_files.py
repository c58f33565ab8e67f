"""Votes into files: JSONL, CSV, Parquet, folders of the datasets library, Argilla's records.

All but Argilla's have TRL's columns (`prompt`, `chosen`, `rejected`), so every trainer reads them.
"""

import csv
import io
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.core.system import name_file
from tunesmith.base.schema.records import Text, plain_text
from tunesmith.collect.data.argilla import argilla_records, plain_content
from tunesmith.collect.data.readers import library, messages_in
from tunesmith.collect.store.content import as_answer
from tunesmith.collect.store.records import ExportRow, RatedAnswer, StoredDemonstration, StoredRanking

VoteFormat = Literal[
    "jsonl", "csv", "parquet", "datasets", "argilla", "openai-preference", "openai-chat", "label-studio"
]


def write_votes(
    dest: str | Path, rows: Iterable[ExportRow], form: VoteFormat, machines: Collection[str] | None = None
) -> int:
    """Number of votes written to `dest`, a file, or a folder for `datasets`. It appears when it is whole. `machines` is
    as in `vote_columns`.

    Raises InputError if `dest` exists, DataError if there is nothing to write or the format cannot hold it,
    MissingDependencyError without pyarrow or datasets.
    """
    if form == "argilla":
        votes = list(rows)
        write_rows(dest, argilla_records(votes), "jsonl")
        return len(votes)
    if form == "openai-preference":
        return write_rows(dest, (openai_preference(row) for row in rows if not row.tie), "jsonl")
    if form == "label-studio":
        return write_rows(dest, map(label_studio_task, (row for row in rows if not row.tie)), "jsonl")
    return write_rows(dest, (vote_columns(row, machines) for row in rows), form)


def write_rows(dest: str | Path, rows: Iterable[Mapping[str, object]], form: VoteFormat) -> int:
    """Number of rows written, as `write_votes` does."""
    path = Path(dest).expanduser()
    if path.exists():
        raise InputError(f"{path} exists; give a name that is free")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as aside:
            part = Path(aside) / "part"
            if form in ("jsonl", "csv"):
                num_rows = _write_lines(part, (jsonl_lines if form == "jsonl" else csv_lines)(rows))
            else:
                num_rows = _write_table(part, list(rows), form)
            if num_rows:
                name_file(part, path)
    except FileExistsError as error:
        raise InputError(f"{path} exists; give a name that is free") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    if not num_rows:
        raise DataError("there is nothing to export yet")
    return num_rows


def openai_preference(row: ExportRow) -> dict[str, object]:
    """A vote as OpenAI's preference fine-tuning has it. A prompt that is text is what a user said."""
    return {
        "input": {"messages": _messages(row.prompt, "user"), "tools": [], "parallel_tool_calls": True},
        "preferred_output": _messages(row.chosen, "assistant"),
        "non_preferred_output": _messages(row.rejected, "assistant"),
    }


def openai_chat(prompt: Text, answer: str) -> dict[str, object]:
    """A written answer as OpenAI's chat fine-tuning has it."""
    return {"messages": [*_messages(prompt, "user"), {"role": "assistant", "content": answer}]}


def label_studio_task(row: ExportRow) -> dict[str, object]:
    """A vote as a task of Label Studio with one annotation; its raters have numbers there, so `data` has the name."""
    is_left = row.chosen_side != "right"
    sides = [plain_text(side) for side in ((row.chosen, row.rejected) if is_left else (row.rejected, row.chosen))]
    result = {
        "from_name": "preference",
        "to_name": "text1,text2",
        "type": "pairwise",
        "value": {"selected": "left" if is_left else "right"},
    }
    data = {"prompt": plain_content(row.prompt), "text1": sides[0], "text2": sides[1], "raters": {"1": row.rater}}
    return {"id": row.vote_id, "data": data, "annotations": [{"completed_by": 1, "result": [result]}]}


def _messages(content: Text, role: str) -> list[object]:
    return [{"role": role, "content": content}] if isinstance(content, str) else [dict(one) for one in content]


def vote_columns(row: ExportRow, machines: Collection[str] | None = None) -> dict[str, object]:
    """A vote as columns; texts stay as they are, conversations become lists of messages. With `machines`, names of
    raters, `machine` says whether the rater is one of them.
    """
    columns = {field.name: getattr(row, field.name) for field in fields(row)}
    columns |= {name: plain_content(columns[name]) for name in ("prompt", "chosen", "rejected")}
    return columns if machines is None else {**columns, "machine": row.rater in machines}


def ranking_columns(ranking: StoredRanking) -> dict[str, object]:
    """A ranking as columns that `load_preferences` reads."""
    return {
        "prompt": plain_content(ranking.prompt),
        "completions": [plain_content(as_answer(ranking.prompt, answer.text)) for answer in ranking.candidates],
        "ranks": list(ranking.ranks),
        "reason": ranking.reason,
        **_judged_by(ranking),
    }


def demonstration_columns(demonstration: StoredDemonstration) -> dict[str, object]:
    """A written answer as columns that `load_demonstrations` reads."""
    return {
        "prompt": plain_content(demonstration.prompt),
        "completion": plain_content(as_answer(demonstration.prompt, demonstration.text)),
        **_judged_by(demonstration),
    }


def feedback_columns(said: RatedAnswer) -> dict[str, object]:
    """Feedback as columns; a thumb on an answer is also the `label` of TRL's unpaired preferences."""
    answered: dict[str, object] = {"prompt": None, "completion": None, "label": None}
    if said.prompt is not None and said.answer is not None:
        completion = plain_content(as_answer(said.prompt, said.answer))
        label = said.value if isinstance(said.value, bool) else None
        answered = {"prompt": plain_content(said.prompt), "completion": completion, "label": label}
    return {
        **answered,
        "metric": said.metric,
        "value": said.value,
        "rater": said.rater,
        "source": said.source_id,
        "inference_id": said.inference,
        "choice": said.choice,
        "episode_id": said.episode,
        "created_at": said.created_at,
    }


def _judged_by(row: StoredRanking | StoredDemonstration) -> dict[str, object]:
    return {"rater": row.rater, "heldout": row.heldout, "created_at": row.created_at}


def format_of(dest: str | Path) -> VoteFormat:
    """The format that a name asks for: `.jsonl`, `.csv`, `.parquet`, else a folder of the datasets library."""
    suffix = Path(dest).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".parquet"):
        return "csv" if suffix == ".csv" else "parquet"
    if suffix:
        raise InputError(
            f"{dest}: {suffix} is no format of votes; name it .jsonl, .csv, .parquet or, for a folder, without"
        )
    return "datasets"


def jsonl_lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """A line of JSON for each row."""
    for row in rows:
        yield json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def csv_lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """A line of column names and a record for each row, as `readers.csv_rows` reads it: lists as JSON, none as an empty
    cell.

    Raises DataError for a text that would be read as messages.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow([_cell(name, value) for name, value in row.items()])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _cell(name: str, value: object) -> object:
    if isinstance(value, str):
        if messages_in(value) is not None:
            raise DataError(f"`{name}` is a text that CSV cannot tell from a list of messages; export JSONL")
        return value
    if isinstance(value, bool | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return value


def _write_lines(path: Path, lines: Iterable[str]) -> int:
    num_lines = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for line in lines:
            file.write(line)
            num_lines += 1
        file.flush()
        os.fsync(file.fileno())
    return num_lines


def _write_table(path: Path, rows: Sequence[Mapping[str, object]], form: VoteFormat) -> int:
    if not rows:
        return 0
    if len({isinstance(row["prompt"], str) for row in rows if row.get("prompt") is not None}) > 1:
        raise DataError(f"some prompts are text and others conversations, which {form} cannot hold; export JSONL")
    values = [row["value"] for row in rows if "value" in row]
    if len({(isinstance(one, bool), isinstance(one, str)) for one in values}) > 1:
        raise DataError(f"`value` is a thumb, a number or a text, which {form} cannot hold together; export JSONL")
    if form == "parquet":
        table = library("pyarrow", "this is Parquet").Table.from_pylist([dict(row) for row in rows])
        library("pyarrow.parquet", "this is Parquet").write_table(table, path)
    else:
        datasets = library("datasets", "this is a folder of the datasets library")
        datasets.Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))
    return len(rows)
