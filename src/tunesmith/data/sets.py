"""What a trainer starts from: rows read, checked, split into training and held-out, measured in tokens, and what there
is to say about them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.algorithms.preference_loss import MAX_TIED
from tunesmith.batch.targets import LearntSequence
from tunesmith.config.algorithm_sections import DPOSection
from tunesmith.config.sections import DemonstrationsSection, PairsSection, PromptsSection
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
from tunesmith.schema.records import Demonstration, Finding, Judgement, Pair, Prompt, Ranking, plain_text

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run records about its data: tallies of its source and of the held-out source, and leaks between them.

    `heldout_tally` is None where held-out rows come from the same source.
    """

    tally: Tally
    heldout_tally: Tally | None
    leaks: tuple[Leak, ...]
    num_heldout: int

    @property
    def findings(self) -> list[Finding]:
        """Warnings about dropped rows and leaks, for step 0; empty if there is nothing to say."""
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
    """Prompts to train on and prompts kept away from training, and the mean length of all of them in tokens."""

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
    """Encoded pairs, or encoded rankings under `plackett_luce`, to train on and kept away from training.

    `sample` is the first row as text. `heldout_prompts` says of each held-out row, by its id, which prompt it is about.
    """

    train: Sequence[Encoded]
    heldout: Sequence[Encoded]
    sample: str
    facts: Facts
    heldout_prompts: Mapping[str, str]


def prompt_sets(
    section: PromptsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[PromptLike] | None = None,
    *,
    room: int | None = None,
) -> PromptSets:
    """The prompts that `section` names, or `given` in their place: split, cut to prefixes if wanted, and measured.

    `room` is the number of tokens that the model's context leaves for a prompt; None is no such bound.
    Raises DataError that names and counts bad rows, unless `section.skip_bad` drops them, or if none are left to train
    on. A leak is logged as a warning.
    """
    bad = BadRows(skip=section.skip_bad)
    rows = load_prompts(section.source if given is None else given, section, bad)
    heldout_bad = BadRows(skip=section.skip_bad) if section.heldout_source else None
    if heldout_bad:
        split = Split(rows, load_prompts(section.heldout_source, section, heldout_bad))
    else:
        column = section.split_column
        key = prompt_key if column is None else lambda prompt: str(prompt.columns.get(column, prompt.content))
        split = split_by_prompt(rows, section.heldout_fraction, seed, key)
    sides: list[list[Prompt]] = []
    lengths: list[int] = []
    for side, found in ((split.train, bad), (split.heldout, heldout_bad or bad)):
        if section.prefix_tokens:
            side = prefix_prompts(side, tokenizer, section.prefix_tokens, seed, found)
        measured = measure_prompts(side, tokenizer, _limit(section.max_tokens, room), found)
        sides.append(measured.prompts)
        lengths += measured.lengths
    train, heldout = sides
    facts = _facts(bad, heldout_bad, train, heldout)
    if not train:
        raise DataError("no prompts are left to train on; give more rows or lower prompts.heldout_fraction")
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
    """The preferences that `section` names, or those given in their place: split by prompt and encoded.

    `room` is the number of tokens that the model's context holds; None is no such bound.
    Rows are held out of the source only if no held-out rows are given or named. Raises DataError that names and counts
    bad rows, unless `section.skip_bad` drops them, or if none are left to train on; ModelError if messages meet a
    tokenizer without a chat template. A leak is logged as a warning.
    """
    bad = BadRows(skip=section.skip_bad)
    rows = _preferences(section.source if given is None else given, section, bad)
    heldout_source = section.heldout_source or None if given_heldout is None else given_heldout
    heldout_bad = None if heldout_source is None else BadRows(skip=section.skip_bad)
    if heldout_source is None or heldout_bad is None:
        split = split_by_prompt(rows, section.heldout_fraction, seed)
    else:
        split = Split(rows, _preferences(heldout_source, section, heldout_bad))
    if not split.train:
        raise DataError("no pairs are left to train on; give more rows or lower pairs.heldout_fraction")
    if section.rankings == "plackett_luce":
        split = Split(_without_wide_ties(split.train, bad), _without_wide_ties(split.heldout, heldout_bad or bad))
    limit = _limit(section.max_tokens, room)
    cuts = section.truncate == "left"
    train = encode_preferences(split.train, tokenizer, limit, bad, truncates=cuts)
    heldout = encode_preferences(split.heldout, tokenizer, limit, heldout_bad or bad, truncates=cuts)
    facts = _facts(bad, heldout_bad, split.train, split.heldout)
    if not train:
        raise DataError("no pairs are left to train on; give more rows or lower pairs.heldout_fraction")
    expanded = as_pairs if section.rankings == "pairs" else as_rankings
    prompts = {item.prompt.id: prompt_key(item) for item in split.heldout}
    return PreferenceSets(expanded(train), expanded(heldout), _sample(split.train[0]), facts, prompts)


Unit = AnswerPair | AnswerLabel
"""What a direct loss is made of."""


@dataclass(frozen=True, slots=True)
class DirectSets:
    """Pairs, or labels for `kto`, to train on and kept away from training, and the distinct answers they refer to.

    `num_ties` counts the pairs that are ties, kept or not; `sample` is the first row as text.
    """

    answers: Sequence[Answer]
    train: Sequence[Unit]
    heldout: Sequence[Unit]
    num_ties: int
    sample: str
    facts: Facts


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
    """The preferences that `section` names, or those given in their place: split by prompt and encoded.

    The loss `kto` takes labelled completions as well as pairs, all others take pairs; ties are left out where
    `settings` drop them. Arguments and errors are those of `preference_sets`.
    """
    bad = BadRows(skip=section.skip_bad)
    rows = _judged(section.source if given is None else given, section, settings, bad)
    heldout_source = section.heldout_source or None if given_heldout is None else given_heldout
    heldout_bad = None if heldout_source is None else BadRows(skip=section.skip_bad)
    if heldout_source is None or heldout_bad is None:
        split = split_by_prompt(rows, section.heldout_fraction, seed, lambda item: prompt_key(_as_item(item)))
    else:
        split = Split(rows, _judged(heldout_source, section, settings, heldout_bad))
    limit, table = TokenLimit(_limit(section.max_tokens, room), section.truncate == "left"), AnswerTable()
    train = _units(split.train, settings, tokenizer, limit, table, bad)
    heldout = _units(split.heldout, settings, tokenizer, limit, table, heldout_bad or bad)
    facts = _facts(bad, heldout_bad, [_as_item(row) for row in split.train], [_as_item(row) for row in split.heldout])
    if not train:
        raise DataError("no pairs are left to train on; give more rows or lower pairs.heldout_fraction")
    if settings.loss == "kto":
        train, heldout = (with_mismatched(side, table, limit.max_tokens, seed) for side in (train, heldout))
    return DirectSets(table.answers, train, heldout, sum(map(_num_ties, rows)), _sample(split.train[0]), facts)


@dataclass(frozen=True, slots=True)
class DemonstrationSets:
    """Encoded demonstrations to train on and kept away from training; `sample` is the first one as text."""

    train: Sequence[LearntSequence]
    heldout: Sequence[LearntSequence]
    sample: str
    facts: Facts


def demonstration_sets(
    section: DemonstrationsSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    given: Sequence[DemonstrationLike] | None = None,
    given_heldout: Sequence[DemonstrationLike] | None = None,
    *,
    room: int | None = None,
) -> DemonstrationSets:
    """The demonstrations that `section` names, or those given in their place: split by prompt and encoded.

    `room` is the number of tokens that the model's context holds; None is no such bound. Rows are held out of the
    source only if no held-out rows are given or named. Raises DataError that names and counts bad rows, unless
    `section.skip_bad` drops them, or if none are left to train on; ModelError if messages meet a tokenizer without a
    chat template. A leak is logged as a warning.
    """
    bad = BadRows(skip=section.skip_bad)
    rows = _demonstrations(section.source if given is None else given, bad)
    heldout_source = section.heldout_source or None if given_heldout is None else given_heldout
    heldout_bad = None if heldout_source is None else BadRows(skip=section.skip_bad)
    if heldout_source is None or heldout_bad is None:
        split = split_by_prompt(rows, section.heldout_fraction, seed)
    else:
        split = Split(rows, _demonstrations(heldout_source, heldout_bad))
    limit = _limit(section.max_tokens, room)
    train = encode_demonstrations(split.train, tokenizer, section, limit, bad)
    heldout = encode_demonstrations(split.heldout, tokenizer, section, limit, heldout_bad or bad)
    facts = _facts(bad, heldout_bad, split.train, split.heldout)
    if not train:
        raise DataError(
            "no demonstrations are left to train on; give more rows or lower demonstrations.heldout_fraction"
        )
    first = split.train[0]
    texts = {"prompt": plain_text(first.prompt.content), "completion": plain_text(first.completion)}
    sample = "\n".join(f"{name}: {text}" for name, text in texts.items() if text)
    return DemonstrationSets(train, heldout, sample, facts)


def _demonstrations(source: str | Sequence[DemonstrationLike], bad: BadRows) -> list[Demonstration]:
    """As `load_demonstrations`; an empty list in memory is no error here, the caller says what it means."""
    if not isinstance(source, str) and not source:
        return []
    return load_demonstrations(source, bad)


def _limit(max_tokens: int, room: int | None) -> int:
    return max_tokens if room is None else min(max_tokens, max(0, room))


def _preferences(source: str | Sequence[PreferenceLike], section: PairsSection, bad: BadRows) -> list[Pair | Ranking]:
    """As `load_preferences`; an empty list in memory is no error here, the caller says what it means."""
    if not isinstance(source, str) and not source:
        return []
    return load_preferences(source, section, bad)


def _judged(
    source: str | Sequence[JudgementLike], section: PairsSection, settings: DPOSection, bad: BadRows
) -> list[Judgement | Pair | Ranking]:
    """Rows that the loss of `settings` can learn from; an empty list in memory is no error here."""
    if not isinstance(source, str) and not source:
        return []
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


def _facts(bad: BadRows, heldout_bad: BadRows | None, train: Sequence[Item], heldout: Sequence[Item]) -> Facts:
    bad.check()
    if heldout_bad:
        heldout_bad.check()
    facts = Facts(
        bad.finish(), heldout_bad.finish() if heldout_bad else None, leaks(train, heldout), num_heldout=len(heldout)
    )
    leak = leak_finding(facts.leaks, facts.num_heldout)
    if leak:
        _log.warning("%s", leak.message)
    return facts


def _sample(item: Judgement | Pair | Ranking) -> str:
    if isinstance(item, Judgement):
        name = "wanted" if item.is_wanted else "not wanted"
        return f"prompt: {plain_text(item.prompt.content)}\n{name}: {plain_text(item.completion)}"
    if isinstance(item, Ranking):
        listed = [f"place {rank}: {plain_text(text)}" for rank, text in zip(item.ranks, item.completions, strict=True)]
        return "\n".join([f"prompt: {plain_text(item.prompt.content)}", *listed])
    texts = (plain_text(item.prompt.content), plain_text(item.chosen), plain_text(item.rejected))
    return "prompt: {}\nchosen: {}\nrejected: {}".format(*texts)
