"""Data of a trainer: rows read, checked, split into training and held-out, and encoded or measured in tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.config.sections import (
    DataSection,
    DemonstrationsSection,
    MixedPairsSection,
    PairsSection,
    PromptsSection,
)
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import MAX_TIED, Demonstration, Finding, Judgement, Pair, Prompt, Ranking, plain_text
from tunesmith.collect.data.answers import (
    Answer,
    AnswerLabel,
    AnswerPair,
    AnswerTable,
    encode_labels,
    encode_pairs,
    with_mismatched,
)
from tunesmith.collect.data.collate import (
    EncodedPreference,
    EncodePair,
    MeasuredPrompt,
    TokenLimit,
    as_pairs,
    encode_preferences,
    measure_prompts,
    prefix_prompts,
)
from tunesmith.collect.data.contexts import Context
from tunesmith.collect.data.demonstrations import DemonstrationLike, encode_demonstrations, load_demonstrations
from tunesmith.collect.data.mixing import Elsewhere, elsewhere, mixed, named_rows, source_of
from tunesmith.collect.data.pairs import JudgementLike, PreferenceLike, load_judgements, load_preferences, pairs_of
from tunesmith.collect.data.prompts import PromptLike, load_prompts
from tunesmith.collect.data.rows import BadRows, Item, RowError, Tally, is_heldout, usable
from tunesmith.collect.data.split import Leak, Split, leak_finding, leaks, prompt_key, split_by_prompt
from tunesmith.collect.data.tables import as_rows
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)
PreferenceT = TypeVar("PreferenceT", bound=Judgement | Pair | Ranking)

_NUM_FIRST = 8
"""Prompts that are looked at before a run."""

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
            "tally": asdict(self.tally),
            "heldout_tally": asdict(self.heldout_tally) if self.heldout_tally else None,
            "num_leaks": len(self.leaks),
            "leaks": [asdict(leak) for leak in self.leaks[:100]],
        }


@dataclass(frozen=True, slots=True)
class Sets(Generic[T]):
    """Training and held-out examples; `sample` is the first row as text, `prompts` those of the first rows."""

    train: Sequence[T]
    heldout: Sequence[T]
    sample: str
    prompts: Sequence[Prompt]
    facts: Facts

    @property
    def learnt(self) -> Iterable[LearntSequence]:
        """The training examples as token ids, with those that are learnt; none of prompts, which are only sampled."""
        return ()


@dataclass(frozen=True, slots=True)
class DemonstrationSets(Sets[LearntSequence]):
    """Encoded demonstrations."""

    @property
    def learnt(self) -> Iterable[LearntSequence]:
        """The demonstrations."""
        return self.train


@dataclass(frozen=True, slots=True)
class PromptSets(Sets[Prompt]):
    """Prompts, and the mean length of all of them in tokens."""

    mean_tokens: float


@dataclass(frozen=True, slots=True)
class PreferenceSets(Sets[EncodedPreference]):
    """Encoded pairs, or rankings under `plackett_luce`.

    `train_prompts` and `heldout_prompts` map the id of a row to the key of its prompt, which several rows may share.
    `is_mixed` is True where the rows of both sides are of several sources. `repeats` says of each training example
    which copy it is, and `elsewhere` has the pairs of sources that are only evaluated on.
    """

    train_prompts: Mapping[str, str]
    heldout_prompts: Mapping[str, str]
    is_mixed: bool = False
    repeats: Sequence[int] = ()
    elsewhere: Elsewhere = field(default_factory=Elsewhere)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The key of each training example, by which an order keeps them together: prompt and copy."""
        repeats = self.repeats or [0] * len(self.train)
        keys = [self.train_prompts[item.prompt_id] for item in self.train]
        return list(zip(keys, repeats, strict=True))

    def source_of(self, item: EncodedPreference) -> str:
        """The name of the source of an example; empty of a single source."""
        return source_of(item.prompt_id) if self.is_mixed else ""

    @property
    def heldout_by_source(self) -> dict[str, list[EncodedPreference]]:
        """The held-out examples by the name of their source; of a single source, which has no name, under ""."""
        return _grouped(self.heldout, self.source_of)

    @property
    def elsewhere_by_source(self) -> dict[str, list[EncodedPreference]]:
        """The pairs of sources that are only evaluated on, by their names."""
        return _grouped(self.elsewhere.items, lambda item: source_of(item.prompt_id))

    @property
    def learnt(self) -> Iterable[LearntSequence]:
        """The sequence that a reward model reads of each completion; its last token alone is learnt from."""
        for item in self.train:
            for ids in item.sequences:
                yield LearntSequence(item.prompt_id, ids, (range(len(ids) - 1, len(ids)),))


def _grouped(
    items: Sequence[EncodedPreference], name_of: Callable[[EncodedPreference], str]
) -> dict[str, list[EncodedPreference]]:
    """The items by their names, in their order."""
    found: dict[str, list[EncodedPreference]] = {}
    for item in items:
        found.setdefault(name_of(item), []).append(item)
    return found


class Weigh(Protocol):
    """Gives rows to train on a weight in the loss."""

    def __call__(self, rows: list[PreferenceT], /) -> list[PreferenceT]:
        """The rows in their order, perhaps with the two answers of a pair exchanged."""
        ...


Unit = AnswerPair | AnswerLabel
"""A training example of a direct loss."""


@dataclass(frozen=True, slots=True)
class DirectSets(Sets[Unit]):
    """Pairs, or labels for `kto`, and the distinct answers that they refer to by index.

    `num_ties` counts all ties, also where they are dropped.
    """

    answers: Sequence[Answer]
    num_ties: int

    @property
    def learnt(self) -> Iterable[LearntSequence]:
        """The answers of the units, each behind its prompt."""
        for unit in self.train:
            for one in (self.answers[place] for place in unit.answers):
                ids = one.prompt_ids + one.completion_ids
                yield LearntSequence(unit.prompt_id, ids, (range(len(one.prompt_ids), len(ids)),), one.is_cut)


@dataclass(frozen=True, slots=True)
class _Sides(Generic[ItemT]):
    """Rows of both sides, and the bad rows of their sources; `heldout_bad` is `bad` if there is one source."""

    rows: Split[ItemT]
    bad: BadRows
    heldout_bad: BadRows

    def encoded(self, encode: Callable[[list[ItemT], BadRows], Sequence[T]]) -> Split[T]:
        """The rows of both sides as training examples; bad ones are noted."""
        return Split(list(encode(self.rows.train, self.bad)), list(encode(self.rows.heldout, self.heldout_bad)))

    def facts(self, rows: Split[ItemT]) -> Facts:
        """Raise DataError for bad rows that are not skipped; log leaks between the two sides of `rows`."""
        self.bad.check()
        heldout_tally = None
        if self.heldout_bad is not self.bad:
            self.heldout_bad.check()
            heldout_tally = self.heldout_bad.finish()
        facts = Facts(self.bad.finish(), heldout_tally, leaks(rows.train, rows.heldout), len(rows.heldout))
        leak = leak_finding(facts.leaks, facts.num_heldout)
        if leak:
            _log.warning("%s", leak.message)
        return facts


def _read(
    section: DataSection,
    load: Callable[[Any, BadRows], list[ItemT]],
    given: tuple[object, object],
    seed: int,
    key: Callable[..., str] = prompt_key,
    named: Callable[[BadRows], list[ItemT]] | None = None,
) -> _Sides[ItemT]:
    """Rows for training and held-out rows, from the sources of `section` or from what is `given` for either; `named`
    reads the rows for training in place of `section.source`.

    Rows that their source marks by `heldout: true` are never trained on, nor are others with the same prompt. Further
    rows are held out of the training source only if no held-out rows are given or named. An empty list is allowed.
    """

    def read(source: object, bad: BadRows) -> list[ItemT]:
        rows = source if isinstance(source, str) else as_rows(source, "the data")
        return load(rows, bad) if rows or isinstance(rows, str) else []

    bad = BadRows(skip=section.skip_bad)
    if named is not None and given[0] is not None:
        raise DataError("pairs are given, and pairs.sources too; leave one of them out")
    rows = named(bad) if named is not None else read(section.source if given[0] is None else given[0], bad)
    heldout_source = section.heldout_source or None if given[1] is None else given[1]
    marked = {key(row) for row in rows if is_heldout(row)}
    split = split_by_prompt(rows, section.heldout_fraction if heldout_source is None else 0.0, seed, key, marked=marked)
    if marked:
        num_marked = sum(key(row) in marked for row in rows)
        where = "evaluated on" if heldout_source is None else "left out, because held-out rows come from elsewhere"
        _log.info("%s: %d of %d rows are marked as held out; they are %s", bad.source, num_marked, len(rows), where)
    if rows and not split.train and marked:
        raise DataError(f"all rows of {bad.source} are marked as held out (`heldout`), so there is nothing to train on")
    if heldout_source is None:
        return _Sides(split, bad, bad)
    heldout_bad = BadRows(skip=section.skip_bad)
    return _Sides(Split(split.train, read(heldout_source, heldout_bad)), bad, heldout_bad)


def prompt_sets(
    section: PromptsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[PromptLike] | None = None,
    *,
    max_length: int | None = None,
    context: Context | None = None,
) -> PromptSets:
    """The prompts of `section`, or `given` instead: split, cut to prefixes, and measured.

    `max_length` is the limit of a prompt that the model's context imposes, in tokens, also with the `context` that a
    teacher reads, which every prompt must have if it is given. A leak is logged as a warning.

    Raises:
        DataError: Bad rows, all named and counted, unless `section.skip_bad`; or no rows left to train on.
    """
    column, limit = section.split_column, _limit(section.max_tokens, max_length)

    def key(prompt: Prompt) -> str:
        return prompt_key(prompt) if column is None else str(prompt.columns.get(column, prompt.content))

    def load(source: str | Sequence[PromptLike], bad: BadRows) -> list[Prompt]:
        return load_prompts(source, section, bad)

    def measure(prompts: list[Prompt], bad: BadRows) -> list[MeasuredPrompt]:
        if section.prefix_tokens:
            prompts = prefix_prompts(prompts, tokenizer, section.prefix_tokens, seed, bad)
        if context is not None:
            prompts = context.usable(prompts, tokenizer, max_length, bad)
        return measure_prompts(prompts, tokenizer, limit, bad)

    sides = _read(section, load, (given, None), seed, key)
    sides = replace(sides, rows=_with_equal_columns(sides.rows))
    measured = sides.encoded(measure)
    rows = Split([one.prompt for one in measured.train], [one.prompt for one in measured.heldout])
    facts = sides.facts(rows)
    _check_not_empty(rows.train, "prompts", rows.heldout)
    lengths = [one.num_tokens for one in (*measured.train, *measured.heldout)]
    sample = f"prompt: {plain_text(rows.train[0].content)}"
    mean_tokens = sum(lengths) / len(lengths)
    return PromptSets(rows.train, rows.heldout, sample, rows.train[:_NUM_FIRST], facts, mean_tokens)


def preference_sets(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[PreferenceLike] | None = None,
    given_heldout: Sequence[PreferenceLike] | None = None,
    *,
    max_length: int | None = None,
    encode: EncodePair | None = None,
    weigh: Weigh | None = None,
) -> PreferenceSets:
    """The preferences of `section`, or those given instead: split by prompt and encoded, by default for a model that is
    trained here.

    `max_length` is the limit of a sequence that the model's context imposes, in tokens. Rows are held out of the source
    only if no held-out rows are given or named. `weigh` is called with the rows to train on. A leak is logged as a
    warning.

    Raises:
        DataError: Bad rows, all named and counted, unless `section.skip_bad`; or no rows left to train on.
        ModelError: Messages, but the tokenizer has no chat template.
    """
    limit, is_listwise = _limit(section.max_tokens, max_length), section.rankings == "plackett_luce"

    def encoded_rows(rows: list[Pair | Ranking], bad: BadRows) -> list[EncodedPreference]:
        return encode_preferences(rows, tokenizer, limit, bad, truncate=section.truncate, encode=encode)

    def load(source: str | Sequence[PreferenceLike], bad: BadRows) -> list[Pair | Ranking]:
        return load_preferences(source, section, bad)

    mix = section if isinstance(section, MixedPairsSection) else MixedPairsSection()
    named = partial(named_rows, mix.sources, load, seed=seed) if mix.sources else None
    sides = _read(section, load, (given, given_heldout), seed, named=named)
    _check_not_empty(sides.rows.train, "pairs", sides.rows.heldout)
    if weigh is not None:
        sides = replace(sides, rows=replace(sides.rows, train=weigh(sides.rows.train)))
    if is_listwise:
        sides = replace(sides, rows=sides.encoded(_without_wide_ties))
    encoded, rows = sides.encoded(encoded_rows), sides.rows
    facts = sides.facts(rows)
    _check_not_empty(encoded.train, "pairs", encoded.heldout)
    _check_decided(encoded.train, encoded.heldout)
    of_train, of_heldout = ({item.prompt.id: prompt_key(item) for item in side} for side in (rows.train, rows.heldout))
    train, heldout = (side if is_listwise else as_pairs(side) for side in (encoded.train, encoded.heldout))
    others = elsewhere(mix.heldout_sources, load, encoded_rows, rows.train, skips=section.skip_bad, seed=seed)
    is_mixed = bool(mix.sources) and not section.heldout_source and given_heldout is None
    sample, prompts = _sample(rows.train[0]), _first_prompts(rows.train)
    sets = PreferenceSets(train, heldout, sample, prompts, facts, of_train, of_heldout, is_mixed, elsewhere=others)
    return _drawn(sets, mix, seed)


def _drawn(sets: PreferenceSets, mix: MixedPairsSection, seed: int) -> PreferenceSets:
    """The sets, of which each training example comes as often as the weight of its source says."""
    if all(one.weight == 1 for one in mix.sources):
        return sets
    drawn = mixed(sets.train, mix.sources, sets.train_prompts, seed)
    _check_decided(drawn.items, sets.heldout)
    return replace(sets, train=drawn.items, repeats=drawn.repeats)


def direct_sets(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    settings: DPOSection,
    seed: int,
    given: Sequence[JudgementLike] | None = None,
    given_heldout: Sequence[JudgementLike] | None = None,
    *,
    max_length: int | None = None,
    weigh: Weigh | None = None,
) -> DirectSets:
    """The preferences of `section`, or those given instead, for the loss of `settings`: split by prompt and encoded.

    The loss `kto` takes labelled completions as well as pairs, all others take pairs; ties are left out where
    `settings` drop them. Arguments and errors as in `preference_sets`.
    """
    table, limit = AnswerTable(), TokenLimit(_limit(section.max_tokens, max_length), section.truncate)

    def encode(items: list[Judgement | Pair | Ranking], bad: BadRows) -> Sequence[Unit]:
        if settings.loss == "kto":
            return encode_labels(items, tokenizer, limit, table, bad)
        pairs = encode_pairs([item for item in items if not isinstance(item, Judgement)], tokenizer, limit, table, bad)
        return [pair for pair in pairs if settings.ties != "drop" or not pair.tie]

    sides = _read(section, partial(_load_for, settings, section), (given, given_heldout), seed)
    if weigh is not None:
        sides = replace(sides, rows=replace(sides.rows, train=weigh(sides.rows.train)))
    encoded, rows = sides.encoded(encode), sides.rows
    facts = sides.facts(rows)
    num_tied = sum(not isinstance(item, Judgement) and all(pair.tie for pair in pairs_of(item)) for item in rows.train)
    if num_tied and num_tied == len(rows.train) and not encoded.train:
        says = "which have no label for kto" if settings.loss == "kto" else "which dpo.ties: drop leaves out"
        remedy = "" if settings.loss == "kto" else ", or set dpo.ties: half"
        raise DataError(
            f"all {num_tied} rows to train on are ties, {says}; give rows of which one completion is better{remedy}"
            + _held_out(encoded.heldout, "pairs")
        )
    _check_not_empty(encoded.train, "pairs", encoded.heldout)
    train, heldout = encoded.train, encoded.heldout
    if settings.loss == "kto":
        train, heldout = (with_mismatched(side, table, limit.max_tokens, seed) for side in (train, heldout))
    counted = [*rows.train, *rows.heldout] if facts.heldout_tally is None else rows.train
    num_ties = sum(pair.tie for item in counted if not isinstance(item, Judgement) for pair in pairs_of(item))
    sample, prompts = _sample(rows.train[0]), _first_prompts(rows.train)
    return DirectSets(train, heldout, sample, prompts, facts, table.answers, num_ties)


def demonstration_sets(
    section: DemonstrationsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[DemonstrationLike] | None = None,
    given_heldout: Sequence[DemonstrationLike] | None = None,
    *,
    max_length: int | None = None,
) -> DemonstrationSets:
    """The demonstrations of `section`, or those given instead: split by prompt and encoded.

    Arguments and errors as in `preference_sets`.
    """
    limit = _limit(section.max_tokens, max_length)
    sides = _read(section, load_demonstrations, (given, given_heldout), seed)
    encoded = sides.encoded(lambda rows, bad: encode_demonstrations(rows, tokenizer, section, limit, bad))
    facts = sides.facts(sides.rows)
    _check_not_empty(encoded.train, "demonstrations", encoded.heldout)
    first = sides.rows.train[0]
    texts = {"prompt": plain_text(first.prompt.content), "completion": plain_text(first.completion)}
    sample = "\n".join(f"{name}: {text}" for name, text in texts.items() if text)
    prompts = _first_prompts(sides.rows.train)
    return DemonstrationSets(encoded.train, encoded.heldout, sample, prompts, facts)


def _with_equal_columns(rows: Split[Prompt]) -> Split[Prompt]:
    """The prompts, each with the columns of all: None where its row has none. A reward function gets the same columns
    whichever prompts a step has.
    """
    names = dict.fromkeys(name for prompt in (*rows.train, *rows.heldout) for name in prompt.columns)

    def filled(prompt: Prompt) -> Prompt:
        if len(prompt.columns) == len(names):
            return prompt
        return replace(prompt, columns={**dict.fromkeys(names), **prompt.columns})

    return Split([filled(one) for one in rows.train], [filled(one) for one in rows.heldout])


def _first_prompts(rows: Sequence[Judgement | Pair | Ranking | Demonstration]) -> list[Prompt]:
    return [row.prompt for row in rows[:_NUM_FIRST]]


def _check_not_empty(train: Sequence[object], name: str, heldout: Sequence[object] = ()) -> None:
    if not train:
        raise DataError(f"no {name} are left to train on; give more rows" + _held_out(heldout, name))


def _check_decided(train: Sequence[EncodedPreference], heldout: Sequence[EncodedPreference]) -> None:
    if not any(item.decided for item in train):
        raise DataError(
            f"all {len(train)} rows to train on are ties, from which a reward model learns that everything is equal; "
            "give rows of which one completion is better" + _held_out(heldout, "pairs")
        )


def _held_out(heldout: Sequence[object], name: str) -> str:
    """The end of a message: the rows that are held out, if there are some, could be trained on."""
    if not heldout:
        return ""
    return f" ({len(heldout)} are held out; {name}.heldout_fraction says how many)"


def _limit(max_tokens: int, max_length: int | None) -> int:
    return max_tokens if max_length is None else min(max_tokens, max(0, max_length))


def _load_for(
    settings: DPOSection, section: PairsSection, source: str | Sequence[JudgementLike], bad: BadRows
) -> list[Judgement | Pair | Ranking]:
    """Rows that the loss of `settings` can be trained on."""
    if settings.loss == "kto":
        return load_judgements(source, section, bad)
    if not isinstance(source, str) and any(isinstance(item, Judgement) for item in source):
        raise DataError(f"the loss {settings.loss} needs pairs; single judgements are for the loss kto")
    return [*load_preferences(cast(str | Sequence[PreferenceLike], source), section, bad)]


def _without_wide_ties(items: Sequence[Pair | Ranking], bad: BadRows) -> list[Pair | Ranking]:
    """The items whose loss can be computed: at most MAX_TIED completions share a place."""

    def checked(item: Pair | Ranking) -> Pair | Ranking:
        num_tied = max(map(item.ranks.count, item.ranks)) if isinstance(item, Ranking) else 0
        if num_tied > MAX_TIED:
            raise RowError(f"{num_tied} completions share a place, at most {MAX_TIED} may; set `pairs.rankings: pairs`")
        return item

    return usable(items, checked, bad, "pairs")


def _sample(item: Judgement | Pair | Ranking) -> str:
    if isinstance(item, Judgement):
        name = "wanted" if item.is_wanted else "not wanted"
        return f"prompt: {plain_text(item.prompt.content)}\n{name}: {plain_text(item.completion)}"
    if isinstance(item, Ranking):
        listed = [f"place {rank}: {plain_text(text)}" for rank, text in zip(item.ranks, item.completions, strict=True)]
        return "\n".join([f"prompt: {plain_text(item.prompt.content)}", *listed])
    texts = (plain_text(item.prompt.content), plain_text(item.chosen), plain_text(item.rejected))
    return "prompt: {}\nchosen: {}\nrejected: {}".format(*texts)
