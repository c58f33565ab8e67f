"""Files of votes and feedback: which format each is in, what it holds, and its rows as the store takes them.

A first pass over all files checks every row, a second gives them to the store; neither holds more than one row. Rows
that cannot be used are left out and reported with file and line. Nothing is stored if a file has no row that can.
"""

import difflib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.core.log import get_logger, visible
from tunesmith.base.schema.records import Judgement, Pair, Ranking, Text
from tunesmith.collect.data.argilla import argilla_items, check_question, is_argilla, read_argilla, scan_argilla
from tunesmith.collect.data.foreign import FOREIGN
from tunesmith.collect.data.foreign_values import Facts, Format, Found, id_of
from tunesmith.collect.data.pairs import as_judgement, as_preference, is_judgement
from tunesmith.collect.data.readers import begins_with_object, object_rows
from tunesmith.collect.data.rows import HELDOUT, BadRows, Row, RowError, heldout_mark, is_heldout
from tunesmith.collect.data.rows import Candidate as Place
from tunesmith.collect.data.sources import source_rows
from tunesmith.collect.data.vote_values import (
    UNKNOWN_RATER,
    duration_of,
    rater_of,
    side_of,
    text_of,
    time_of,
    verdict_of,
    whole_number,
)
from tunesmith.collect.store.content import prompt_sha256
from tunesmith.collect.store.inferences import check_given
from tunesmith.collect.store.items import check_item
from tunesmith.collect.store.records import (
    Candidate,
    ExportRow,
    Given,
    GivenFeedback,
    GivenVote,
    Imported,
    NewItem,
)

_log = get_logger(__name__)

Labels = Literal["drop", "votes", "gold"]
"""Uses of the preference in a file: raters are asked, it is a vote, or it is the known answer of a check."""

_MUCH = 2.0
_COLUMNS = frozenset(one.name for one in fields(ExportRow)) | {
    "machine",
    "messages",
    "completion",
    "completions",
    "label",
    "ranks",
    "scores",
    "id",
}
"""Columns that an import knows."""

_NUM_LOOKED_AT = 50
_NUM_SHOWN = 100
_MAX_PROMPTS = 100_000
_SHORT = 60


@dataclass(slots=True)
class Understood:
    """Contents of a file: rows, those that were left out as bad, pairs, labels (thumbs, numbers, comments),
    demonstrations, and prompts, which are counted up to 100,000. `first` is its first row in short, `bad` lists the
    first bad rows.
    """

    file: str
    format: str
    title: str
    num_rows: int = 0
    num_bad: int = 0
    num_pairs: int = 0
    num_labels: int = 0
    num_demonstrations: int = 0
    num_prompts: int = 0
    first: str = ""
    bad: str = ""

    def lines(self) -> list[str]:
        """The preview as text."""
        parts = {"pair": self.num_pairs, "label": self.num_labels, "demonstration": self.num_demonstrations}
        listed = ", ".join(f"{num} {name}{'' if num == 1 else 's'}" for name, num in parts.items())
        over = "over " if self.num_prompts >= _MAX_PROMPTS else ""
        left = f"; {self.num_bad} bad rows left out" if self.num_bad else ""
        head = f"{self.file}: {self.title} ({self.format}), {self.num_rows} rows"
        first = [f"  first: {self.first}"] if self.first else []
        return [visible(line) for line in (f"{head}: {listed}, {over}{self.num_prompts} prompts{left}", *first)]


class VoteFiles:
    """The files of one import, after every row of them was checked.

    Without `labels` files of applications are votes, and files of pairs are put before raters. `form` is the name of a
    format, else it is recognised by the content. With `strict` a bad row is an error. `question` is that of Argilla's
    records which tells the better answer, if they have several.

    Raises DataError for a file of which no row can be used, InputError for an unknown format.
    """

    def __init__(
        self,
        sources: Sequence[str | Path],
        labels: Labels | None = None,
        *,
        heldout: bool = False,
        question: str | None = None,
        form: str | None = None,
        strict: bool = False,
    ) -> None:
        self._heldout = heldout
        self._strict = strict
        forced = None if form is None else _named(form)
        self._formats = [(str(source), forced or _recognised(str(source))) for source in sources]
        is_own = all(one in (ARGILLA, COLUMNS) for _, one in self._formats)
        self.labels: Labels = labels or ("drop" if is_own else "votes")
        self._found = {self._key(*one): Found(question=question) for one in self._formats}
        for source, one in self._formats:
            if question is not None and one is not ARGILLA:
                raise InputError(
                    f"--question {question}: {source} has no questions, because it has no records of Argilla"
                )
            self._scan(source, one)
        self.understood = [self._checked(source, one, is_forced=forced is not None) for source, one in self._formats]
        self.num_given = sum(map(_num_given, self.understood))

    def rows(self) -> Iterator[Given]:
        """The records of the files, in their order, without the bad rows."""
        for source, form in self._formats:
            for where, read in _rows(source):
                with suppress(RowError):
                    yield from self._given(form, source, where, read)

    @staticmethod
    def _key(source: str, form: Format) -> str:
        """Files of one format complete each other, such as scores and traces; Argilla's questions are of one file."""
        return source if form is ARGILLA else form.name

    def _scan(self, source: str, form: Format) -> None:
        if form.scan is None:
            return
        found = self._found[self._key(source, form)]
        for where, read in _rows(source):
            with suppress(RowError):  # which the check reports
                form.scan(Row(where, read()), found)
        if form is ARGILLA and self.labels != "drop":
            check_question(source, found)

    def _checked(self, source: str, form: Format, *, is_forced: bool) -> Understood:
        bad = BadRows(skip=not self._strict, can_skip=False, num_shown=_NUM_SHOWN)
        bad.opened(source)
        seen = Understood(source, form.name, form.title)
        found = self._found[self._key(source, form)]
        found.num_open = found.num_same = 0
        prompts: set[str] = set()
        for where, read in _rows(source):
            bad.num_rows += 1
            try:
                for one in self._given(form, source, where, read):
                    _count(one, seen, prompts)
            except RowError as error:
                bad.add(where, error)
        # Of rows that bring nothing, such as verdicts of models, no file is understood.
        bad.skip = bad.skip and _num_given(seen) > 0
        try:
            bad.check()
        except DataError as error:
            if is_forced or form is not COLUMNS:
                raise
            raise DataError(f"{error}\nread as columns, because it looks like no other format: {_listed()}") from error
        if not bad.num_rows:
            raise DataError(f"{source} has no rows; give at least one")
        tally = bad.finish()
        seen.num_rows, seen.num_bad, seen.num_prompts = tally.num_rows, tally.num_dropped, len(prompts)
        seen.bad = bad.shown()
        self._warn(source, found)
        return seen

    def _warn(self, source: str, found: Found) -> None:
        if found.unknown and self.labels == "votes":
            listed = ", ".join(found.unknown)
            _log.warning("%s: votes have no place for the columns %s, which are left out", source, listed)
        if found.num_open:
            _log.warning("%s: %d responses left out, because they are drafts or were discarded", source, found.num_open)
        if found.num_same:
            _log.warning(
                "%s: %d rows left out, because their answers are the same or are no check", source, found.num_same
            )

    def _given(self, form: Format, source: str, where: str, read: Callable[[], Facts]) -> list[Given]:
        """The records of a row. Raises RowError."""
        row, found = Row(where, read()), self._found[self._key(source, form)]
        if self.labels == "votes":
            given = list(form.read(row, found))
        elif form.items is not None:
            given = list(form.items(row, found, self.labels == "gold"))
        else:
            votes = [one for one in form.read(row, found) if isinstance(one, GivenVote)]
            given = [_asked(vote) for vote in votes] if self.labels == "drop" else [*filter(None, map(_known, votes))]
        given = [self._marked(one) for one in given if not (self._heldout and isinstance(one, GivenFeedback))]
        for one in given:
            try:
                check_given(one) if isinstance(one, GivenFeedback) else check_item(_item_of(one), "the row")
            except InputError as error:
                raise RowError(str(error)) from error
        return given

    def _marked(self, one: Given) -> Given:
        if not self._heldout or isinstance(one, GivenFeedback):
            return one
        item = replace(_item_of(one), heldout=True)
        return replace(one, item=item) if isinstance(one, GivenVote) else item


def _num_given(seen: Understood) -> int:
    return seen.num_pairs + seen.num_labels + seen.num_demonstrations


def _rows(source: str) -> Iterator[Place]:
    """The rows of a source; a file `.json` may also hold objects without a list, as logs and pages of APIs do."""
    path = Path(source)
    name = path.name.lower().removesuffix(".gz")
    is_json = name.endswith(".json") and path.is_file()
    return object_rows(path) if is_json and begins_with_object(path) else source_rows(source)


def _recognised(source: str) -> Format:
    """The format that one of the first rows looks like; pairs in columns if none."""
    looked: list[Facts] = []
    for _, read in itertools.islice(_rows(source), _NUM_LOOKED_AT):
        with suppress(RowError):
            looked.append(read())
    return next((one for one in FORMATS if any(map(one.looks_like, looked))), COLUMNS)


def _named(name: str) -> Format:
    found = next((one for one in FORMATS if one.name == name), None)
    if found is None:
        close = difflib.get_close_matches(name, [one.name for one in FORMATS], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"--format {name} is unknown; there are {_listed()}{hint}")
    return found


def _listed() -> str:
    return ", ".join(one.name for one in FORMATS)


def _item_of(one: NewItem | GivenVote) -> NewItem:
    return one.item if isinstance(one, GivenVote) else one


def _asked(vote: GivenVote) -> NewItem:
    return vote.item


def _known(vote: GivenVote) -> NewItem | None:
    """The vote as a check of raters; None if it decides nothing."""
    return replace(vote.item, gold=vote.better) if vote.verdict in ("much_better", "better") else None


def _count(one: Given, seen: Understood, prompts: set[str]) -> None:
    if not isinstance(one, GivenFeedback):
        prompt = _item_of(one).prompt
        seen.num_pairs += 1
    else:
        prompt = one.prompt
        is_written = one.metric == "demonstration"
        seen.num_demonstrations += is_written
        seen.num_labels += not is_written
    if len(prompts) < _MAX_PROMPTS:
        prompts.add(prompt_sha256(prompt)[:16])
    if not seen.first:
        seen.first = _in_short(one)


def _in_short(one: Given) -> str:
    if isinstance(one, GivenFeedback):
        said = f"{one.metric} {_cut(str(one.value))}"
        return f"{one.rater}: {_last(one.prompt)!r} -> {_cut(one.answer)!r}: {said}"
    texts = [repr(_cut(answer.text)) for answer in _item_of(one).candidates]
    if not isinstance(one, GivenVote):
        return f"{_last(one.prompt)!r} -> {' or '.join(texts)}"
    better = texts if one.better == 0 else texts[::-1]
    return f"{one.rater}: {_last(one.item.prompt)!r} -> {better[0]} {one.verdict.replace('_', ' ')}, {better[1]}"


def _last(prompt: Text) -> str:
    return _cut(prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else "")


def _cut(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def import_notes(done: Imported, labels: Labels, *, heldout: bool) -> list[str]:
    """The notes on an import, beside the numbers of new rows and of those that were there."""
    notes: list[str] = []
    if done.num_feedback or done.num_feedback_there:
        num, num_there = done.num_feedback, done.num_feedback_there
        notes.append(f"{num} labels and demonstrations added, {num_there} were there already")
    if done.num_changed:
        marks = " and ".join(name for name, is_on in (("gold", labels == "gold"), ("held out", heldout)) if is_on)
        notes.append(f"{done.num_changed} items that were there are {marks or 'held out'} from now on")
    if done.num_other:
        notes.append(
            f"{done.num_other} votes left out: their rater has said otherwise of the same answers, and that vote stays"
        )
    return notes


def read_items(
    source: str | Path, *, gold: bool = False, heldout: bool = False, question: str | None = None
) -> list[NewItem]:
    """The pairs and rankings of `source`, to be judged by raters; what the file says of their order is dropped.

    With `gold` the chosen answer is taken for known to be the best, which makes a silent check of raters; ties are left
    out then. Rows whose answers are the same cannot be judged and are left out. `question` is as in `VoteFiles`. Raises
    DataError that names bad rows.
    """
    files = VoteFiles([source], "gold" if gold else "drop", heldout=heldout, question=question, strict=True)
    return [one for one in files.rows() if isinstance(one, NewItem)]


def read_given_votes(source: str | Path, *, heldout: bool = False, question: str | None = None) -> list[GivenVote]:
    """The pairs of `source` as votes, by the rater that the row names, else by `import`.

    Columns of an export (`rater`, `verdict`, `created_at`, `dwell_ms`, `reason`, `chosen_side`, `heldout`) are
    honoured; otherwise a margin of 2 or more means much better. Rankings count as every two of their answers. `heldout`
    marks all of them, `question` is as in `VoteFiles`. Raises DataError that names bad rows.
    """
    files = VoteFiles([source], "votes", heldout=heldout, question=question, strict=True)
    return [one for one in files.rows() if isinstance(one, GivenVote)]


def _row_of(row: Row) -> Row:
    columns = row.columns
    if HELDOUT in columns:
        columns = {**columns, HELDOUT: heldout_mark(columns[HELDOUT])}
    return Row.of(row.where, columns)


def _read_columns(given: Row, found: Found) -> list[Given]:
    row = _row_of(given)
    if is_judgement(row):
        return [_judged(as_judgement(row))]
    record = as_preference(row, dialogues_as_text=True)
    found.unknown |= dict.fromkeys(name for name in record.prompt.columns if name not in _COLUMNS)
    pairs = record.pairs() if isinstance(record, Ranking) else [record]
    decidable = [pair for pair in pairs if pair.chosen != pair.rejected]
    found.num_same += len(pairs) - len(decidable)
    return [_given_vote(pair) for pair in decidable]


def _column_items(given: Row, found: Found, gold: bool) -> list[NewItem]:
    """The row as an item; none if its answers are the same, or if it is to be `gold` and the best is not known."""
    row = _row_of(given)
    if is_judgement(row):
        as_judgement(row)
        return []
    record = as_preference(row, dialogues_as_text=True)
    item = _as_item(record)
    place = _known_best(record) if gold else None
    texts = [candidate.text for candidate in item.candidates]
    if len(set(texts)) < len(texts) or (gold and place is None):
        found.num_same += 1
        return []
    return [replace(item, gold=place)]


def _as_item(record: Pair | Ranking) -> NewItem:
    where, columns = record.prompt.id, record.prompt.columns
    is_pair = isinstance(record, Pair)
    answers = {"chosen": record.chosen, "rejected": record.rejected} if is_pair else dict(enumerate(record.completions))
    candidates = tuple(
        Candidate(
            text=_answer_text(content),
            weight_version=whole_number(columns.get(f"{name}_version"), f"{name}_version") if is_pair else None,
            source_id=f"{where}/{name}",
        )
        for name, content in answers.items()
    )
    prompt = _prompt(record.prompt.content, next(iter(answers.values())))
    kind = "pair" if len(candidates) == 2 else "ranking"
    return NewItem(prompt, candidates, kind, heldout=is_heldout(record))


def _known_best(record: Pair | Ranking) -> int | None:
    if isinstance(record, Pair):
        return None if record.tie else 0
    return record.ranks.index(1) if record.ranks.count(1) == 1 else None


def _given_vote(pair: Pair) -> GivenVote:
    columns = pair.prompt.columns
    by_margin = "tie" if pair.tie else "much_better" if (pair.margin or 0.0) >= _MUCH else "better"
    side = side_of(columns.get("chosen_side"))
    chosen_by = columns.get("selection")
    return GivenVote(
        item=replace(_as_item(pair), selection=chosen_by if isinstance(chosen_by, str) else ""),
        verdict=verdict_of(columns.get("verdict"), is_tie=pair.tie) or by_margin,
        better=0,
        rater=rater_of(columns.get("rater")),
        created_at=time_of(columns.get("created_at")),
        dwell_ms=duration_of(columns.get("dwell_ms")),
        reason=text_of(columns.get("reason"), "reason"),
        left=None if side is None else 0 if side == "left" else 1,
        machine=columns.get("machine") in (True, 1, "true", "True", "1"),
    )


def _judged(judged: Judgement) -> GivenFeedback:
    columns, answer = judged.prompt.columns, _answer_text(judged.completion)
    prompt = _prompt(judged.prompt.content, judged.completion)
    id_ = id_of({"prompt": prompt, "answer": answer, "id": columns.get("id")}, "id")
    return GivenFeedback(
        id=id_,
        application=UNKNOWN_RATER,
        answer_id=id_,
        prompt=prompt,
        answer=answer,
        metric="thumbs",
        value=judged.is_wanted,
        rater=rater_of(columns.get("rater")),
        created_at=time_of(columns.get("created_at")),
    )


def _prompt(content: Text, answer: Text) -> Text:
    """The prompt, which is conversational whenever the answers are."""
    return () if not content and not isinstance(answer, str) else content


def _answer_text(content: Text) -> str:
    if isinstance(content, str):
        return content
    if len(content) != 1 or set(content[0]) != {"role", "content"}:
        raise RowError("an answer of several turns, or with tool calls, cannot be put to raters; cut it to one message")
    return content[0]["content"]


ARGILLA = Format("argilla", "records of Argilla", is_argilla, read_argilla, scan_argilla, argilla_items)
COLUMNS = Format("columns", "columns of pairs or labels", lambda _: False, _read_columns, items=_column_items)
"""Columns of TRL and of our own exports, which are assumed where nothing else is recognised."""

FORMATS = (ARGILLA, *FOREIGN, COLUMNS)
"""Every format that an import reads."""
