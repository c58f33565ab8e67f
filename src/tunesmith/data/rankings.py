"""Rows with several completions of one prompt, ranked: `completions` best first, or with `ranks` or `scores`."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from tunesmith.data.content import as_completion, as_content
from tunesmith.data.prompts import missing_column
from tunesmith.data.rows import Row
from tunesmith.data.tally import RowError
from tunesmith.data.values import kind_of
from tunesmith.schema.records import Prompt, Ranking, Text

COMPLETIONS = "completions"
"""Column that makes a row a ranking."""

_RANKING_COLUMNS = ("prompt", COMPLETIONS, "ranks", "scores")


def as_ranking(row: Row) -> Ranking:
    """The ranking in `row`. Raises RowError for fewer than two completions, a missing or empty text, both of `ranks`
    and `scores`, numbers that are not one for each completion, or equal completions of different places.
    """
    columns = row.columns
    if "prompt" not in columns:
        raise RowError(missing_column("prompt", columns), "missing column")
    prompt = as_content(columns["prompt"], "prompt")
    completions = _completions(columns[COMPLETIONS])
    check_one_form({"prompt": prompt} | {f"{COMPLETIONS}[{i}]": text for i, text in enumerate(completions)})
    ranks = _ranks(columns, len(completions))
    for index, text in enumerate(completions):
        first = completions.index(text)
        if ranks[first] != ranks[index]:
            raise RowError(
                f"`{COMPLETIONS}[{first}]` and `{COMPLETIONS}[{index}]` are the same, but not their places; remove one",
                "same completions",
            )
    others = {name: value for name, value in columns.items() if name not in _RANKING_COLUMNS}
    return Ranking(Prompt(id=row.where, content=prompt, columns=others), completions, ranks)


def check_one_form(contents: Mapping[str, Text]) -> None:
    """Raise RowError if some of a row's contents are text and others lists of messages. An empty prompt is neither."""
    given = {name: content for name, content in contents.items() if content}
    texts = [name for name, content in given.items() if isinstance(content, str)]
    if 0 < len(texts) < len(given):
        lists = [name for name in given if name not in texts]
        raise RowError(
            f"`{texts[0]}` is text but `{lists[0]}` is a list of messages; give all columns in one form", "wrong type"
        )


def _completions(value: object) -> tuple[Text, ...]:
    if not isinstance(value, list | tuple):
        raise RowError(f"`{COMPLETIONS}` is {kind_of(value)}; give a list of completions, best first", "wrong type")
    items = cast(Sequence[object], value)
    if len(items) < 2:
        raise RowError(f"`{COMPLETIONS}` has {len(items)}; a ranking needs two or more", "empty")
    return tuple(as_completion(item, f"{COMPLETIONS}[{index}]") for index, item in enumerate(items))


def _ranks(columns: Mapping[str, object], num_completions: int) -> tuple[int, ...]:
    """Place of each completion, 1 the best, without gaps. Without numbers the completions stand best first."""
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
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            found = number if isinstance(number, float) else kind_of(number)
            raise RowError(f"`{name}` holds {found}; give finite numbers", "wrong type")
    return [float(cast(float, number)) for number in numbers]
