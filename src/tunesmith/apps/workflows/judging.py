"""A judge at work: it votes on stored pairs, as a machine, and is compared with what people preferred."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from tunesmith.base.config.sections import PairsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.seeds import permutation
from tunesmith.base.schema.records import Pair, plain_text
from tunesmith.collect.data.pairs import load_preferences, pairs_of
from tunesmith.collect.data.rows import BadRows
from tunesmith.collect.statistics.intervals import proportion_interval
from tunesmith.collect.store.content import prompt_sha256
from tunesmith.collect.store.inbox import Chore
from tunesmith.collect.store.machine_votes import MachineStats, PairToJudge
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import do_in
from tunesmith.learn.judges.answers import PeopleAgreement
from tunesmith.learn.judges.judge import Judge, PairText, PairVerdict, Unjudged, check_answered, said_of

PairsOf = Literal["all", "voted", "open"]

_PORTION = 200
"""Pairs whose votes are stored together."""

_MAX_REASON = 2000
_BETTER = {"a": "first", "b": "second", "tie": "tie"}


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a judge's round. `unjudged` says what it left out, and why; empty if it judged everything.

    `agreement` is with people; None if they have voted on none of its pairs. `order_decided` is the share of pairs that
    the order of the answers decided, `prefers_longer` the share of its decisions for the longer answer.
    """

    num_pairs: int
    num_judged: int
    num_ties: int
    agreement: PeopleAgreement | None
    order_decided: float | None
    prefers_longer: float | None
    unjudged: str


def pairs_for(
    judge: Judge, place: str | Path, campaign: str | None = None, *, which: PairsOf = "all", limit: int | None = None
) -> list[PairToJudge]:
    """At most `limit` stored pairs that the judge has not judged: first those that people have voted on, then those
    that nobody has. Raises StoreError for a campaign that is not there.
    """
    with VoteReader.open(place) as reader:
        campaign_id = None if campaign is None else reader.campaign_named(campaign).id
        stored = list(reader.pairs_to_judge(judge.rater_name, campaign_id))
    voted = [pair for pair in stored if pair.votes] if which != "open" else []
    fresh = [pair for pair in stored if pair.is_open] if which != "voted" else []
    return [pair for pair in (*voted, *fresh) if not pair.is_judged][:limit]


def vote_on_stored(
    judge: Judge,
    place: str | Path,
    wanted: Sequence[PairToJudge],
    *,
    waiting: Callable[[str], None],
    progress: Callable[[int], None],
) -> Judged:
    """Have the judge vote on stored pairs; its agreement with people is over all pairs that it has ever judged there.

    Votes are stored as they come, so a round that ends early keeps them, and the next one goes on. `waiting` is called
    with a message where a server must store them. Raises InputError for a judge that answers nothing at all.
    """
    name = judge.rater_name
    found: list[tuple[PairText, PairVerdict]] = []
    unjudged: list[Unjudged] = []
    for start in range(0, len(wanted), _PORTION):
        some = wanted[start : start + _PORTION]
        texts = [PairText(pair.prompt, *pair.answers, f"pair {pair.id}") for pair in some]
        verdicts = _judged(judge, texts, lambda num, start=start: progress(start + num))
        unjudged += [one for one in verdicts if isinstance(one, Unjudged)]
        if not found:
            check_answered(verdicts)
        votes = [_vote(pair, one) for pair, one in zip(some, verdicts, strict=True) if isinstance(one, PairVerdict)]
        found += [(text, one) for text, one in zip(texts, verdicts, strict=True) if isinstance(one, PairVerdict)]
        if votes:
            do_in(place, Chore("judge", {"name": name, "votes": votes}), waiting)
        progress(start + len(some))
        if any(one.kind in ("limit", "away", "fatal") for one in unjudged):
            break
    num_left = len(wanted) - len(found) - len(unjudged)
    with VoteReader.open(place) as reader:
        stats = {one.name: one for one in reader.machine_stats()}
    figures = _figures(judge, found)
    agreement = machine_agreement(stats.get(name), str(place), figures["order_decided"])
    if agreement is not None:
        judge.set_agreement(agreement)
    said = said_of(unjudged, len(wanted)) + (f"; {num_left} were not asked" if num_left else "")
    return Judged(len(wanted), len(found), _num_ties(found), agreement, unjudged=said, **figures)


def decided_pairs_of(source: str, *, limit: int | None = None, seed: int = 0, skip_bad: bool = False) -> list[Pair]:
    """The pairs of a file of which one answer is preferred; of more than `limit`, a random sample.

    Raises:
        DataError: there is none.
    """
    rows = load_preferences(source, PairsSection(source=source, skip_bad=skip_bad), BadRows(skip=skip_bad))
    pairs = [pair for row in rows for pair in pairs_of(row) if not pair.tie and pair.chosen != pair.rejected]
    if not pairs:
        raise DataError(f"{source} has no pair of which one answer is preferred; give pairs that are no ties")
    return [pairs[index] for index in permutation(seed, 0, len(pairs))[: limit or len(pairs)]]


def compare_with_people(
    judge: Judge, source: str, chosen: Sequence[Pair], *, progress: Callable[[int], None]
) -> Judged:
    """The judge's agreement with the preferences of pairs, which are `decided_pairs_of` the source.

    It is kept beside the judge's answers, and from then on stands beside the figures that the judge makes. Raises
    InputError for a judge that answers nothing at all.
    """
    texts = [
        PairText(pair.prompt.content, plain_text(pair.chosen), plain_text(pair.rejected), pair.prompt.id)
        for pair in chosen
    ]
    verdicts = _judged(judge, texts, progress)
    progress(len(texts))
    unjudged = [one for one in verdicts if isinstance(one, Unjudged)]
    check_answered(verdicts)
    found = [(text, one) for text, one in zip(texts, verdicts, strict=True) if isinstance(one, PairVerdict)]
    figures = _figures(judge, found)
    hits = [one.score_a for _, one in found]
    agreement = _agreement(hits, [prompt_sha256(text.prompt) for text, _ in found], source, figures["order_decided"])
    if agreement is not None:
        judge.set_agreement(agreement)
    return Judged(
        len(chosen), len(found), _num_ties(found), agreement, unjudged=said_of(unjudged, len(chosen)), **figures
    )


def _judged(judge: Judge, texts: Sequence[PairText], progress: Callable[[int], None]) -> list[PairVerdict | Unjudged]:
    """The verdicts. `progress` is called with the number of pairs whose two questions were answered, about: questions
    that are asked again count once more, and those that were answered before not at all.
    """
    num_answers = 0

    def answered(num: int) -> None:
        nonlocal num_answers
        num_answers += num
        progress(min(num_answers // 2, len(texts) - 1))

    before, judge.on_answers = judge.on_answers, answered
    try:
        return judge.preferences(texts)
    finally:
        judge.on_answers = before


def machine_agreement(
    stats: MachineStats | None, source: str, order_decided: float | None = None
) -> PeopleAgreement | None:
    """The agreement with people of a machine in the store; None if people voted on none of its pairs."""
    if stats is None:
        return None
    return _agreement(stats.hits, [str(prompt) for prompt in stats.prompts], source, order_decided)


def _agreement(
    hits: Sequence[float], prompts: Sequence[str], source: str, order_decided: float | None
) -> PeopleAgreement | None:
    """Votes on one prompt are one cluster of the interval: they depend on each other."""
    if not hits:
        return None
    low, high = proportion_interval(hits, prompts)
    return PeopleAgreement(fmean(hits), low, high, len(hits), len(set(prompts)), order_decided, source)


def _vote(pair: PairToJudge, verdict: PairVerdict) -> dict[str, object]:
    reason = verdict.reasons.replace("\0", "")[:_MAX_REASON]
    return {"item_id": pair.id, "better": _BETTER[verdict.preference], "reason": reason}


def _num_ties(found: Sequence[tuple[PairText, PairVerdict]]) -> int:
    return sum(verdict.preference == "tie" for _, verdict in found)


def _figures(judge: Judge, found: Sequence[tuple[PairText, PairVerdict]]) -> dict[str, float | None]:
    order = [verdict.order_decided for _, verdict in found if judge.settings.mode == "pairwise"]
    longer = [
        (len(text.a) > len(text.b)) == (verdict.preference == "a")
        for text, verdict in found
        if verdict.preference != "tie" and len(text.a) != len(text.b)
    ]
    return {"order_decided": fmean(order) if order else None, "prefers_longer": fmean(longer) if longer else None}
