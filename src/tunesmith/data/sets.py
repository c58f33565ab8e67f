"""Data of a trainer: rows read, checked, split into training and held-out, and encoded or measured in tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from tunesmith.algorithms.preference_loss import MAX_TIED
from tunesmith.batch.targets import LearntSequence
from tunesmith.config.algorithm_sections import DPOSection
from tunesmith.config.sections import DataSection, DemonstrationsSection, PairsSection, PromptsSection
from tunesmith.core.errors import DataError
from tunesmith.core.log import get_logger
from tunesmith.data.answers import (
    Answer,
    AnswerLabel,
    AnswerPair,
    AnswerTable,
    TokenLimit,
    encode_labels,
    encode_pairs,
    with_mismatched,
)
from tunesmith.data.collate import (
    Encoded,
    as_pairs,
    as_rankings,
    encode_preferences,
    measure_prompts,
    prefix_prompts,
)
from tunesmith.data.demonstrations import DemonstrationLike, encode_demonstrations, load_demonstrations
from tunesmith.data.judgements import JudgementLike, load_judgements, pairs_of
from tunesmith.data.pairs import PreferenceLike, load_preferences
from tunesmith.data.prompts import PromptLike, load_prompts
from tunesmith.data.rows import BadRows, RowError, Tally
from tunesmith.data.split import Item, Leak, Split, leak_finding, leaks, prompt_key, split_by_prompt
from tunesmith.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.schema.records import Finding, Judgement, Pair, Prompt, Ranking, plain_text

T = TypeVar("T")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a run about its data: tallies of its source and of the held-out source, and leaks between them.

    `heldout_tally` is None where held-out rows come from the same source.
    """

    tally: Tally
    heldout_tally: Tally | None
    leaks: tuple[Leak, ...]
    num_heldout: int

    @property
    def findings(self) -> list[Finding]:
        """Warnings about dropped rows and leaks, for step 0."""
        dropped = [tally for tally in (self.tally, self.heldout_tally) if tally and tally.num_dropped]
        found = [Finding(step=0, name="bad_rows", severity="warning", message=str(tally)) for tally in dropped]
        leak = leak_finding(self.leaks, self.num_heldout)
        return [*found, leak] if leak else found

    def to_json(self) -> dict[str, object]:
        """The facts as JSON types."""
        return {
            "tally": self.tally.to_json(),
            "heldout_tally": self.heldout_tally.to_json() if self.heldout_tally else None,
            "num_leaks": len(self.leaks),
            "leaks": [{"heldout": leak.heldout, "train": leak.train} for leak in self.leaks[:100]],
        }


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Training and held-out prompts, and the mean length of all of them in tokens."""

    train: list[Prompt]
    heldout: list[Prompt]
    mean_tokens: float
    facts: Facts

    @property
    def sample(self) -> str:
        """The first prompt as text."""
        return f"prompt: {plain_text(self.train[0].content)}"


@dataclass(frozen=True, slots=True)
class PreferenceSets:
    """Encoded training and held-out pairs, or rankings under `plackett_luce`.

    `sample` is the first row as text. `heldout_prompts` maps the id of a held-out row to the key of its prompt.
    """

    train: Sequence[Encoded]
    heldout: Sequence[Encoded]
    sample: str
    facts: Facts
    heldout_prompts: Mapping[str, str]


Unit = AnswerPair | AnswerLabel
"""A training example of a direct loss."""


@dataclass(frozen=True, slots=True)
class DirectSets:
    """Training and held-out pairs, or labels for `kto`, and the distinct answers that they refer to by index.

    `num_ties` counts all ties, also where they are dropped; `sample` is the first row as text.
    """

    answers: Sequence[Answer]
    train: Sequence[Unit]
    heldout: Sequence[Unit]
    num_ties: int
    sample: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class DemonstrationSets:
    """Encoded training and held-out demonstrations; `sample` is the first one as text."""

    train: Sequence[LearntSequence]
    heldout: Sequence[LearntSequence]
    sample: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class _Sides(Generic[T]):
    """Rows of both sides, and the bad rows of their sources; `heldout_bad` is `bad` if there is one source."""

    rows: Split[T]
    bad: BadRows
    heldout_bad: BadRows

    def facts(self, train: Sequence[Item], heldout: Sequence[Item]) -> Facts:
        """Raise DataError for bad rows that are not skipped; log leaks between the sides."""
        self.bad.check()
        has_two_sources = self.heldout_bad is not self.bad
        if has_two_sources:
            self.heldout_bad.check()
        heldout_tally = self.heldout_bad.finish() if has_two_sources else None
        facts = Facts(self.bad.finish(), heldout_tally, leaks(train, heldout), num_heldout=len(heldout))
        leak = leak_finding(facts.leaks, facts.num_heldout)
        if leak:
            _log.warning("%s", leak.message)
        return facts


def _read(
    section: DataSection,
    load: Callable[[Any, BadRows], list[T]],
    given: tuple[Sequence[object] | None, Sequence[object] | None],
    seed: int,
    key: Callable[..., str] = prompt_key,
) -> _Sides[T]:
    """Rows for training and held-out rows, from the sources of `section` or from what is `given` for either.

    Rows are held out of the training source only if no held-out rows are given or named. An empty list is allowed.
    """

    def read(source: str | Sequence[object], bad: BadRows) -> list[T]:
        return load(source, bad) if isinstance(source, str) or source else []

    bad = BadRows(skip=section.skip_bad)
    rows = read(section.source if given[0] is None else given[0], bad)
    heldout_source = section.heldout_source or None if given[1] is None else given[1]
    if heldout_source is None:
        return _Sides(split_by_prompt(rows, section.heldout_fraction, seed, key), bad, bad)
    heldout_bad = BadRows(skip=section.skip_bad)
    return _Sides(Split(rows, read(heldout_source, heldout_bad)), bad, heldout_bad)


def prompt_sets(
    section: PromptsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[PromptLike] | None = None,
    *,
    room: int | None = None,
) -> PromptSets:
    """The prompts of `section`, or `given` instead: split, cut to prefixes, and measured.

    `room` is the limit of a prompt that the model's context imposes, in tokens. A leak is logged as a warning.

    Raises:
        DataError: Bad rows, all named and counted, unless `section.skip_bad`; or no rows left to train on.
    """
    column = section.split_column

    def key(prompt: Prompt) -> str:
        return prompt_key(prompt) if column is None else str(prompt.columns.get(column, prompt.content))

    def load(source: str | Sequence[PromptLike], bad: BadRows) -> list[Prompt]:
        return load_prompts(source, section, bad)

    sides = _read(section, load, (given, None), seed, key)
    encoded: list[list[Prompt]] = []
    lengths: list[int] = []
    for rows, bad in ((sides.rows.train, sides.bad), (sides.rows.heldout, sides.heldout_bad)):
        if section.prefix_tokens:
            rows = prefix_prompts(rows, tokenizer, section.prefix_tokens, seed, bad)
        measured = measure_prompts(rows, tokenizer, _limit(section.max_tokens, room), bad)
        encoded.append(measured.prompts)
        lengths += measured.lengths
    train, heldout = encoded
    facts = sides.facts(train, heldout)
    _check_not_empty(train, "prompts")
    return PromptSets(train, heldout, sum(lengths) / len(lengths), facts)


def preference_sets(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[PreferenceLike] | None = None,
    given_heldout: Sequence[PreferenceLike] | None = None,
    *,
    room: int | None = None,
) -> PreferenceSets:
    """The preferences of `section`, or those given instead: split by prompt and encoded.

    `room` is the limit of a sequence that the model's context imposes, in tokens. Rows are held out of the source only
    if no held-out rows are given or named. A leak is logged as a warning.

    Raises:
        DataError: Bad rows, all named and counted, unless `section.skip_bad`; or no rows left to train on.
        ModelError: Messages, but the tokenizer has no chat template.
    """
    sides = _read(section, lambda s, bad: load_preferences(s, section, bad), (given, given_heldout), seed)
    rows = sides.rows
    _check_not_empty(rows.train, "pairs")
    if section.rankings == "plackett_luce":
        rows = Split(_without_wide_ties(rows.train, sides.bad), _without_wide_ties(rows.heldout, sides.heldout_bad))
    limit, cuts = _limit(section.max_tokens, room), section.truncate == "left"
    train = encode_preferences(rows.train, tokenizer, limit, sides.bad, truncates=cuts)
    heldout = encode_preferences(rows.heldout, tokenizer, limit, sides.heldout_bad, truncates=cuts)
    facts = sides.facts(rows.train, rows.heldout)
    _check_not_empty(train, "pairs")
    expanded = as_pairs if section.rankings == "pairs" else as_rankings
    prompts = {item.prompt.id: prompt_key(item) for item in rows.heldout}
    return PreferenceSets(expanded(train), expanded(heldout), _sample(rows.train[0]), facts, prompts)


def direct_sets(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    settings: DPOSection,
    seed: int,
    given: Sequence[JudgementLike] | None = None,
    given_heldout: Sequence[JudgementLike] | None = None,
    *,
    room: int | None = None,
) -> DirectSets:
    """The preferences of `section`, or those given instead, for the loss of `settings`: split by prompt and encoded.

    The loss `kto` takes labelled completions as well as pairs, all others take pairs; ties are left out where
    `settings` drop them. Arguments and errors as in `preference_sets`.
    """
    load = partial(_load_for, settings, section)
    sides = _read(section, load, (given, given_heldout), seed, lambda item: prompt_key(_as_item(item)))
    rows, limit, table = sides.rows, _limit(section.max_tokens, room), AnswerTable()
    token_limit = TokenLimit(limit, section.truncate == "left")
    train = _units(rows.train, settings, tokenizer, token_limit, table, sides.bad)
    heldout = _units(rows.heldout, settings, tokenizer, token_limit, table, sides.heldout_bad)
    facts = sides.facts([_as_item(row) for row in rows.train], [_as_item(row) for row in rows.heldout])
    _check_not_empty(train, "pairs")
    if settings.loss == "kto":
        train, heldout = (with_mismatched(side, table, limit, seed) for side in (train, heldout))
    counted = [*rows.train, *rows.heldout] if sides.heldout_bad is sides.bad else rows.train
    num_ties = sum(map(_num_ties, counted))
    return DirectSets(table.answers, train, heldout, num_ties, _sample(rows.train[0]), facts)


def demonstration_sets(
    section: DemonstrationsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[DemonstrationLike] | None = None,
    given_heldout: Sequence[DemonstrationLike] | None = None,
    *,
    room: int | None = None,
) -> DemonstrationSets:
    """The demonstrations of `section`, or those given instead: split by prompt and encoded.

    Arguments and errors as in `preference_sets`.
    """
    sides = _read(section, load_demonstrations, (given, given_heldout), seed)
    rows, limit = sides.rows, _limit(section.max_tokens, room)
    train = encode_demonstrations(rows.train, tokenizer, section, limit, sides.bad)
    heldout = encode_demonstrations(rows.heldout, tokenizer, section, limit, sides.heldout_bad)
    facts = sides.facts(rows.train, rows.heldout)
    _check_not_empty(train, "demonstrations")
    first = rows.train[0]
    texts = {"prompt": plain_text(first.prompt.content), "completion": plain_text(first.completion)}
    sample = "\n".join(f"{name}: {text}" for name, text in texts.items() if text)
    return DemonstrationSets(train, heldout, sample, facts)


def _check_not_empty(train: Sequence[object], name: str) -> None:
    if not train:
        raise DataError(f"no {name} are left to train on; give more rows or lower {name}.heldout_fraction")


def _limit(max_tokens: int, room: int | None) -> int:
    return max_tokens if room is None else min(max_tokens, max(0, room))


def _load_for(
    settings: DPOSection, section: PairsSection, source: str | Sequence[JudgementLike], bad: BadRows
) -> list[Judgement | Pair | Ranking]:
    """Rows that the loss of `settings` can be trained on."""
    if settings.loss == "kto":
        return load_judgements(source, section, bad)
    if isinstance(source, str):
        return [*load_preferences(source, section, bad)]
    if any(isinstance(item, Judgement) for item in source):
        raise DataError(f"the loss {settings.loss} needs pairs; single judgements are for the loss kto")
    return [*load_preferences([item for item in source if not isinstance(item, Judgement)], section, bad)]


def _units(
    items: Sequence[Judgement | Pair | Ranking],
    settings: DPOSection,
    tokenizer: PreTrainedTokenizerBase,
    limit: TokenLimit,
    table: AnswerTable,
    bad: BadRows,
) -> Sequence[Unit]:
    """The items as the loss of `settings` takes them."""
    if settings.loss == "kto":
        return encode_labels(items, tokenizer, limit, table, bad)
    pairs = encode_pairs([item for item in items if not isinstance(item, Judgement)], tokenizer, limit, table, bad)
    return [pair for pair in pairs if settings.ties != "drop" or not pair.tie]


def _num_ties(item: Judgement | Pair | Ranking) -> int:
    return 0 if isinstance(item, Judgement) else sum(pair.tie for pair in pairs_of(item))


def _as_item(item: Judgement | Pair | Ranking) -> Item:
    return item.prompt if isinstance(item, Judgement) else item


def _without_wide_ties(items: Sequence[Pair | Ranking], bad: BadRows) -> list[Pair | Ranking]:
    """The items whose loss can be computed: at most MAX_TIED completions share a place."""
    usable: list[Pair | Ranking] = []
    for item in items:
        num_tied = max(map(item.ranks.count, item.ranks)) if isinstance(item, Ranking) else 0
        if num_tied <= MAX_TIED:
            usable.append(item)
            continue
        reason = f"{num_tied} completions share a place, at most {MAX_TIED} may; set `pairs.rankings: pairs`"
        bad.add(item.prompt.id, RowError(reason, "bad value"))
    return usable


def _sample(item: Judgement | Pair | Ranking) -> str:
    if isinstance(item, Judgement):
        name = "wanted" if item.is_wanted else "not wanted"
        return f"prompt: {plain_text(item.prompt.content)}\n{name}: {plain_text(item.completion)}"
    if isinstance(item, Ranking):
        listed = [f"place {rank}: {plain_text(text)}" for rank, text in zip(item.ranks, item.completions, strict=True)]
        return "\n".join([f"prompt: {plain_text(item.prompt.content)}", *listed])
    texts = (plain_text(item.prompt.content), plain_text(item.chosen), plain_text(item.rejected))
    return "prompt: {}\nchosen: {}\nrejected: {}".format(*texts)
