"""Preference rows in TRL's columns: pairs (`prompt`, `chosen`, `rejected`, optionally `margin` and `tie`), rankings
(`prompt`, `completions`, optionally `ranks` or `scores`), and judgements (`prompt`, `completion`, `label`).

Where `chosen` and `rejected` hold the whole exchange, the prompt is what they have in common. Texts of the HH-RLHF kind
(Bai et al. 2022, arXiv 2204.05862) write a dialogue as "\\n\\nHuman: ... \\n\\nAssistant: ...".
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tunesmith.base.config.sections import PairsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.runs.listing import number as finite_number
from tunesmith.base.schema.records import Judgement, Message, Pair, Ranking, Text
from tunesmith.collect.data.prompts import content_of, missing_column, prompt_column, prompt_record
from tunesmith.collect.data.rows import (
    BadRows,
    Row,
    RowError,
    as_completion,
    kind_of,
    number_shown,
    without_prompt,
)
from tunesmith.collect.data.sources import parse_rows

_MARK = re.compile(r"\n\n(Human|Assistant):")
_WORDS = re.compile(r".*\S(?=\s)", re.DOTALL)
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, empty where the two sides share nothing, and what each side answers."""

    prompt: Text
    chosen: Text
    rejected: Text


def is_dialogue(text: Text) -> bool:
    """True for a text that begins with a human's turn and has one of an assistant."""
    return isinstance(text, str) and text.startswith("\n\nHuman:") and "\n\nAssistant:" in text


def as_messages(dialogue: str) -> tuple[Message, ...]:
    """The turns of a dialogue as messages, without the white space around each."""
    parts = _MARK.split(dialogue)
    return tuple(
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(parts[1::2], parts[2::2], strict=True)
    )


def split_messages(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Exchange:
    """The leading messages that both have in common, and the messages that follow; each side keeps at least one."""
    common = _num_common(chosen, rejected)
    return Exchange(chosen[:common] or "", chosen[common:], rejected[common:])


def split_text(chosen: str, rejected: str) -> Exchange:
    """Two dialogues as text: the turns in common with the opening of the next one, and what follows it.

    Example: `"\\n\\nHuman: Hi\\n\\nAssistant: Yo"` against `"... No"` has the prompt
    `"\\n\\nHuman: Hi\\n\\nAssistant:"` and the answers `" Yo"` and `" No"`.
    """
    first, second = _turns(chosen), _turns(rejected)
    common = _num_common(first, second)
    length = sum(map(len, first[:common]))
    marks = [_MARK.match(turns[common]) for turns in (first, second)]
    if marks[0] and marks[1] and marks[0].group() == marks[1].group() and common:
        length += marks[0].end()
    return Exchange(chosen[:length], chosen[length:], rejected[length:])


def with_shared_opening(pair: Pair) -> Pair:
    """`pair`; if it is two texts without a prompt, the words that both begin with become the prompt.

    Example: "The sky is blue." and "The sky is green." have the prompt "The sky is".
    """
    chosen, rejected = pair.chosen, pair.rejected
    if pair.prompt.content or not isinstance(chosen, str) or not isinstance(rejected, str):
        return pair
    shorter = min(len(chosen), len(rejected))
    num_common = next((place for place in range(shorter) if chosen[place] != rejected[place]), shorter)
    words = _WORDS.match(chosen[:num_common])
    opening = words.group() if words else ""
    prompt, length = replace(pair.prompt, content=opening), len(opening)
    return replace(pair, prompt=prompt, chosen=chosen[length:], rejected=rejected[length:])


def _turns(dialogue: str) -> list[str]:
    starts = [match.start() for match in _MARK.finditer(dialogue)]
    return [dialogue[start:end] for start, end in zip(starts, [*starts[1:], len(dialogue)], strict=True)]


def _num_common(first: tuple[object, ...] | list[str], second: tuple[object, ...] | list[str]) -> int:
    limit = min(len(first), len(second)) - 1
    return next((i for i in range(limit) if first[i] != second[i]), limit)


COMPLETIONS = "completions"
"""Column that makes a row a ranking."""

LABEL = "label"
"""Column that makes a row a completion judged alone."""

_LARGEST_MARGIN = 1e18
"""As of a reward: sums of such numbers are finite in float32."""

_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def _as_ranking(row: Row) -> Ranking:
    columns = row.columns
    if "labels" in columns:
        raise RowError(
            "`labels` says which steps of `completions` are right, but there is no trainer for stepwise supervision; "
            "write a row for each step: `prompt` (with the steps before it), `completion` and `label`, for dpo.loss kto"
        )
    source = prompt_column(row)
    if source is None:
        raise missing_column("prompt", row)
    prompt = content_of(row, source)
    given = columns[COMPLETIONS]
    if not isinstance(given, list | tuple):
        raise RowError(f"`{COMPLETIONS}` is {kind_of(given)}; give a list of completions, best first", "wrong type")
    items = cast(Sequence[object], given)
    if len(items) < 2:
        raise RowError(f"`{COMPLETIONS}` has {len(items)}; a ranking needs two or more", "empty")
    named = {(name := f"{COMPLETIONS}[{index}]"): as_completion(item, name) for index, item in enumerate(items)}
    prompt, named = without_prompt(prompt, named)
    _check_one_form({source: prompt} | named)
    completions = tuple(named.values())
    ranks = _ranks(columns, len(completions))
    for index, text in enumerate(completions):
        first = completions.index(text)
        if ranks[first] != ranks[index]:
            raise RowError(
                f"`{COMPLETIONS}[{first}]` and `{COMPLETIONS}[{index}]` are the same, but not their places; remove one",
                "same completions",
            )
    return Ranking(prompt_record(row, prompt, named, source, COMPLETIONS, "ranks", "scores"), completions, ranks)


def _check_one_form(contents: Mapping[str, Text]) -> None:
    """Raise RowError if some of a row's contents are text and others lists of messages. An empty prompt is neither."""
    given = {name: content for name, content in contents.items() if content}
    texts = [name for name, content in given.items() if isinstance(content, str)]
    if 0 < len(texts) < len(given):
        lists = [name for name in given if name not in texts]
        raise RowError(
            f"`{texts[0]}` is text but `{lists[0]}` is a list of messages; give all columns in one form", "wrong type"
        )


def _ranks(columns: Mapping[str, object], num_completions: int) -> tuple[int, ...]:
    """Place of each completion, 1 the best, without gaps. Without numbers the completions are listed best first."""
    ranks, scores = columns.get("ranks"), columns.get("scores")
    if ranks is not None and scores is not None:
        raise RowError("both `ranks` and `scores` are given; keep one", "bad value")
    if ranks is None and scores is None:
        return tuple(range(1, num_completions + 1))
    name, values = ("ranks", ranks) if scores is None else ("scores", scores)
    numbers = _numbers(values, name, num_completions)
    places = sorted(set(numbers), reverse=name == "scores")
    return tuple(places.index(number) + 1 for number in numbers)


def _numbers(values: object, name: str, num_completions: int) -> list[float]:
    if not isinstance(values, list | tuple):
        raise RowError(f"`{name}` is {kind_of(values)}; give one number for each completion", "wrong type")
    numbers = cast(Sequence[object], values)
    if len(numbers) != num_completions:
        raise RowError(f"`{name}` has {len(numbers)} numbers for {num_completions} completions", "bad value")
    found = [finite_number(number) for number in numbers]
    if None in found:
        shown = number_shown(numbers[found.index(None)])
        raise RowError(f"`{name}` holds {shown}; give finite numbers", "wrong type")
    return [number for number in found if number is not None]


PreferenceLike = Mapping[str, object] | Pair | Ranking
"""Preferences as given in Python: a row, or a record."""

JudgementLike = PreferenceLike | Judgement
"""Judgements as given in Python: a row, or a record."""


def load_preferences(
    source: str | Path | Sequence[PreferenceLike], section: PairsSection | None = None, bad: BadRows | None = None
) -> list[Pair | Ranking]:
    """The pairs and rankings of `source`, in its order, one for each row.

    `source` is anything that `data.sources` reads, a list of rows or of records, or a table (`tables.as_rows`). Text or
    conversational, the same in all columns of a row. A row with `completions` is a ranking, any other a pair. Without a
    `prompt` column `chosen` and `rejected` hold the whole exchange: the messages that they have in common become the
    prompt, HH-RLHF dialogues are taken apart (`section.dialogues`), and other texts have no prompt. Columns that mean
    nothing here are kept in `prompt.columns`. Bad are a missing column, a wrong type, an empty completion, a margin
    below 0, equal completions without `tie`, and ranks that are not one for each completion; bad rows and errors as in
    `sources.parse_rows`. Lengths in tokens are checked by `collate.encode_preferences`.
    """
    if isinstance(source, str) and source == "":
        raise DataError("no pairs are given; name a JSONL file with `chosen` and `rejected` columns in `pairs.source`")
    as_text = (section or PairsSection()).dialogues == "text"
    return parse_rows(source, lambda row: as_preference(row, as_text), label="pairs", bad=bad, records=(Pair, Ranking))


def load_judgements(
    source: str | Path | Sequence[JudgementLike], section: PairsSection | None = None, bad: BadRows | None = None
) -> list[Judgement | Pair | Ranking]:
    """The judgements of `source`, in its order, one record for each row.

    A row with `label` holds one `completion` of its `prompt`, true if it was wanted; any other is read as
    `load_preferences` reads it, also in sources and errors.
    """
    if isinstance(source, str) and source == "":
        raise DataError(
            "no data are given; name a file with `prompt`, `completion` and `label`, or with pairs, in `pairs.source`"
        )
    as_text = (section or PairsSection()).dialogues == "text"

    def parse(row: Row) -> Judgement | Pair | Ranking:
        return as_judgement(row) if is_judgement(row) else as_preference(row, as_text)

    return parse_rows(source, parse, label="judgements", bad=bad, records=(Judgement, Pair, Ranking))


def is_judgement(row: Row) -> bool:
    """True for a row of one completion, with a label or without."""
    names = row.columns.keys()
    return LABEL in names or ("completion" in names and not names & {"chosen", "rejected", COMPLETIONS})


def pairs_of(item: Pair | Ranking) -> list[Pair]:
    """The item as pairs: itself, or every two completions of a ranking."""
    return item.pairs() if isinstance(item, Ranking) else [item]


def write_pairs(path: str | Path, pairs: Sequence[Pair]) -> None:
    """Write pairs as JSONL that `load_preferences` reads back; `margin` and `tie` are written only if set."""
    with Path(path).open("w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps(_as_row(pair), ensure_ascii=False) + "\n")


def _as_row(pair: Pair) -> dict[str, object]:
    row: dict[str, object] = dict(pair.prompt.columns)
    if pair.prompt.content:
        row["prompt"] = pair.prompt.content
    row |= {"chosen": pair.chosen, "rejected": pair.rejected}
    if pair.margin is not None:
        row["margin"] = pair.margin
    if pair.tie:
        row["tie"] = True
    return row


def as_preference(row: Row, dialogues_as_text: bool) -> Pair | Ranking:
    """The row as a pair or a ranking. Raises RowError."""
    columns = row.columns
    if COMPLETIONS in columns and "chosen" not in columns:
        return _as_ranking(row)
    for name in ("chosen", "rejected"):
        if name not in columns:
            raise missing_column(name, row)
    source = prompt_column(row)
    prompt: Text = content_of(row, source) if source else ""
    chosen, rejected = as_completion(columns["chosen"], "chosen"), as_completion(columns["rejected"], "rejected")
    tie = columns.get("tie", False)
    if not isinstance(tie, bool):
        raise RowError(f"`tie` is {kind_of(tie)}; give true or false", "wrong type")
    if chosen == rejected and not tie:
        raise RowError(
            '`chosen` and `rejected` are the same; remove the row, or mark it with "tie": true', "same completions"
        )
    exchange = _exchange(prompt, chosen, rejected, dialogues_as_text)
    sides = {"chosen": exchange.chosen, "rejected": exchange.rejected}
    _check_one_form({source or "prompt": exchange.prompt} | sides)
    record = prompt_record(row, exchange.prompt, sides, "margin", "tie", source)
    margin = _margin(columns.get("margin"), tie)
    return Pair(record, exchange.chosen, exchange.rejected, margin, tie)


def _exchange(prompt: Text, chosen: Text, rejected: Text, dialogues_as_text: bool) -> Exchange:
    """The prompt and the two answers, where the sides hold the whole exchange; else as they are."""
    if is_dialogue(chosen) and is_dialogue(rejected) and isinstance(prompt, str):
        texts = str(chosen), str(rejected)
        if not all(prompt.strip() in text for text in texts):
            raise RowError(
                "`chosen` and `rejected` are whole dialogues without the text of `prompt`; remove that column"
            )
        exchange = split_text(*texts) if dialogues_as_text else split_messages(*map(as_messages, texts))
        # Checked again: of a dialogue only the answer counts.
        as_completion(exchange.chosen, "chosen")
        as_completion(exchange.rejected, "rejected")
        return exchange
    if not prompt and isinstance(chosen, tuple) and isinstance(rejected, tuple):
        return split_messages(chosen, rejected)
    if (
        isinstance(prompt, str)
        and len(prompt.split()) > 1
        and all(isinstance(side, str) and side.startswith(prompt) for side in (chosen, rejected))
    ):
        raise RowError(
            "`chosen` and `rejected` repeat `prompt`; give what follows it, or leave out the column `prompt`"
        )
    found, sides = without_prompt(prompt, {"chosen": chosen, "rejected": rejected})
    if isinstance(prompt, str) and isinstance(found, tuple):  # all that both share is the prompt, also beyond its text
        return split_messages(cast(tuple[Message, ...], chosen), cast(tuple[Message, ...], rejected))
    return Exchange(found, sides["chosen"], sides["rejected"])


def _margin(value: object, tie: bool) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"`margin` is {kind_of(value)}; give a number, in units of reward, or null", "wrong type")
    number = finite_number(value)
    if number is None or not 0 <= number <= _LARGEST_MARGIN:
        raise RowError(
            f"`margin` is {number_shown(value) if number is None else value}; it must be from 0 to "
            f"{_LARGEST_MARGIN:g} (the better completion belongs in `chosen`)",
            "bad value",
        )
    if tie and value:
        raise RowError(f"`margin` is {value} but `tie` is true; a tie has no margin", "bad value")
    return number


def as_judgement(row: Row) -> Judgement:
    """The row as a completion judged alone. Raises RowError."""
    columns = row.columns
    if "completion" not in columns:
        raise missing_column("completion", row)
    source = prompt_column(row)
    if source is None:
        raise missing_column("prompt", row)
    prompt, named = without_prompt(
        content_of(row, source), {"completion": as_completion(columns["completion"], "completion")}
    )
    _check_one_form({source: prompt} | named)
    if LABEL not in columns:
        raise missing_column(LABEL, row)
    value = columns[LABEL]
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        found = repr(value)[:40] if isinstance(value, str | int | float) else kind_of(value)
        raise RowError(f"`{LABEL}` is {found}; give true for a wanted completion, or false", "wrong type")
    return Judgement(prompt_record(row, prompt, named, source, LABEL), named["completion"], label)
