"""Vote statistics: counts, inter-rater agreement, rater bias. None is NaN: an undefined one is None with a reason."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Numeric,
    Table,
    Text,
    case,
    cast,
    exists,
    func,
    select,
    true,
)

from tunesmith.collect.store.asking import RANDOM
from tunesmith.collect.store.queue import by_people, knows_side
from tunesmith.collect.store.records import MODEL_SOURCE, Campaign, Progress
from tunesmith.collect.store.tables import (
    candidates,
    demonstrations,
    feedback,
    inference_choices,
    item_candidates,
    items,
    presentations,
    rankings,
    votes,
)
from tunesmith.collect.store.tables import raters as raters_table

MAX_RATER_PAIRS = 200
"""Number of rater pairs whose kappa is listed: those with the most items in common."""

MAX_FEEDBACK = 1000
"""Most rows of `feedback_stats`: names of metrics are any texts."""

FIRST, SECOND = "first", "second"
"""Judgements of a pair that prefer either answer of the item."""

_HOUR_S = 3600.0
_LEFT = ("left", "left_much")
_DECIDED = ("left", "left_much", "right", "right_much")


@dataclass(frozen=True, slots=True)
class BiasTest:
    """Share of votes for one side of an irrelevant feature, with the two-sided binomial p-value.

    `share` and `p_value` are None where `num` is 0.
    """

    num_hits: int
    num: int
    share: float | None
    p_value: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """A measure of agreement, or None with the reason why it is undefined. `num` items were judged by several."""

    value: float | None
    num: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RaterPair:
    """Cohen's kappa of two raters over the items that both judged."""

    a: str
    b: str
    kappa: Agreement


@dataclass(frozen=True, slots=True)
class RaterStats:
    """Statistics of one rater. `left` counts choices of the left answer, where the side is known (imported votes may
    come without), `longer` those of the longer one.
    """

    rater_id: int
    name: str
    num_votes: int
    num_ties: int
    num_both_bad: int
    num_skips: int
    left: BiasTest
    longer: BiasTest
    num_gold: int
    gold_accuracy: float | None
    median_dwell_ms: float | None


@dataclass(frozen=True, slots=True)
class AskedStats:
    """The votes on pairs that were asked for one reason. `method` is `random`, the name of the method that chose them,
    or empty where nothing was chosen. What a method chose is no sample of all pairs: its figures do not hold for all.
    """

    method: str
    num_votes: int
    alpha: Agreement
    longer: BiasTest


@dataclass(frozen=True, slots=True)
class VoteStats:
    """Counts of effective votes, agreement, biases and gold accuracy of one campaign, or of all. `asked` is empty if no
    method chose pairs.
    """

    num_items: int
    num_items_done: int
    num_votes: int
    num_ties: int
    num_both_bad: int
    num_skips: int
    num_rankings: int
    num_demonstrations: int
    num_votes_last_hour: int
    alpha: Agreement
    kappas: Sequence[RaterPair]
    left: BiasTest
    longer: BiasTest
    raters: Sequence[RaterStats]
    asked: Sequence[AskedStats]


@dataclass(frozen=True, slots=True)
class FeedbackStats:
    """Effective feedback of a `metric` on answers of one `source`, a version or a model; on conversations as a whole if
    that is empty. `num` of it, of which some are thumbs, some grades, and the rest texts.
    """

    metric: str
    source: str
    num: int
    num_thumbs: int
    share_true: float | None
    num_grades: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """An effective vote on a pair, without texts, skips left out. `prefers_first` is whether it takes the answer of the
    item that is listed first, None for a tie or two bad ones; `gold_is_first` whether that is known to be the better
    one, None for an item that is no gold item. `side` is that of the answer taken: 1 left, -1 right, 0 if there is none
    or it is not known. `sources` are the names of what wrote the first and the second answer, "" where it is not known.
    """

    vote_id: int
    item_id: int
    rater_id: int
    prefers_first: bool | None
    side: int
    gold_is_first: bool | None
    dwell_ms: int | None
    num_characters: int
    sources: tuple[str, str]


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> Agreement:
    """Krippendorff's alpha for nominal values: 1 is full agreement, 0 is chance level.

    `units` holds the values given to each item, one per rater who judged it. From the coincidence matrix o with margins
    n_c: alpha = 1 - (n - 1) * sum_{c != k} o_ck / sum_{c != k} n_c n_k (Krippendorff 2011, "Computing Krippendorff's
    Alpha-Reliability", part D).
    """
    shared = [unit for unit in units if len(unit) > 1]
    if not shared:
        return Agreement(None, 0, "no item was judged by two raters")
    margins: Counter[Hashable] = Counter()
    disagreement = 0.0
    for unit in shared:
        counts = Counter(unit)
        margins.update(counts)
        same = sum(count * (count - 1) for count in counts.values())
        disagreement += (len(unit) * (len(unit) - 1) - same) / (len(unit) - 1)
    num = sum(margins.values())
    expected = num * num - sum(count * count for count in margins.values())
    if expected == 0:
        return Agreement(None, len(shared), "all judgements are the same, so chance cannot be told from agreement")
    return Agreement(1.0 - (num - 1) * disagreement / expected, len(shared))


def cohen_kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> Agreement:
    """Cohen's kappa of two raters: (observed - chance agreement) / (1 - chance agreement) (Cohen 1960).

    `pairs` holds the two judgements of each item that both judged.
    """
    if not pairs:
        return Agreement(None, 0, "no item was judged by both")
    num = len(pairs)
    observed = sum(a == b for a, b in pairs) / num
    of_a, of_b = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    by_chance = sum(of_a[value] * of_b[value] for value in of_a) / (num * num)
    if by_chance == 1.0:
        return Agreement(None, num, "both gave one and the same judgement throughout")
    return Agreement((observed - by_chance) / (1.0 - by_chance), num)


def pair_alpha(units: Sequence[Sequence[Hashable]]) -> Agreement:
    """Krippendorff's alpha of judgements of pairs: `FIRST`, `SECOND`, or anything else, such as `tie`.

    Which answer of an item is called the first says nothing: a file may list the chosen one first, and then raters who
    agree would seem to agree by chance. So each item counts in both orders of its answers, as if it were there a second
    time with the two exchanged. By chance, then, a decided vote is for either answer half of the time, whatever the
    order. Without ties and with many items alpha is 2 P - 1, where P is how often two raters agree: the coefficient of
    agreement for paired comparisons (Kendall and Babington Smith 1940, "On the Method of Paired Comparisons").
    """
    found = krippendorff_alpha([*units, *([_exchanged(one) for one in unit] for unit in units)])
    return replace(found, num=found.num // 2)


def pair_kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> Agreement:
    """Cohen's kappa of judgements of pairs, of which each counts in both orders of the answers, as in `pair_alpha`."""
    found = cohen_kappa([*pairs, *((_exchanged(a), _exchanged(b)) for a, b in pairs)])
    return replace(found, num=found.num // 2)


def _exchanged(judgement: Hashable) -> Hashable:
    """The same judgement with the two answers in the other order."""
    return SECOND if judgement == FIRST else FIRST if judgement == SECOND else judgement


def bias_test(num_hits: int, num: int) -> BiasTest:
    """Exact two-sided binomial test of `num_hits` in `num` choices against a fair coin.

    The p-value is twice the smaller tail, at most 1 (the distribution is symmetric).
    """
    if num == 0:
        return BiasTest(0, 0, None, None)
    far = max(num_hits, num - num_hits)
    log_half = num * math.log(0.5)
    tail = math.fsum(
        math.exp(math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1) + log_half)
        for k in range(far, num + 1)
    )
    return BiasTest(num_hits, num, num_hits / num, min(1.0, 2.0 * tail))


NO_VOTES = VoteStats(0, 0, 0, 0, 0, 0, 0, 0, 0, krippendorff_alpha([]), (), bias_test(0, 0), bias_test(0, 0), (), ())
"""Statistics of a missing database."""


def vote_stats(connection: Connection, campaign_id: int | None, now: float) -> VoteStats:
    """All statistics of a campaign, or of all if None. Gold items count for the raters, not for agreement."""
    judged = _judged_pairs(connection, campaign_id)
    counted = [one for one in judged if one.verdict != "skip"]
    num_rankings, gold_of_rankings = _rankings(connection, campaign_id)
    # (rater, is correct) of each gold item that was judged.
    gold = [(one.rater_id, one.chosen_candidate_id == one.gold_candidate_id) for one in counted if one.is_gold]
    names = {row.id: row.name for row in connection.execute(select(raters_table.c.id, raters_table.c.name))}
    ungold = [one for one in counted if not one.is_gold]
    units = _units(ungold)
    num_items, num_done = _num_items(connection, campaign_id)
    num_demonstrations = connection.execute(_last_answers(demonstrations, campaign_id, func.count())).scalar_one()
    return VoteStats(
        num_items=num_items,
        num_items_done=num_done,
        num_rankings=num_rankings,
        num_demonstrations=int(num_demonstrations),
        num_votes_last_hour=sum(one.created_at > now - _HOUR_S for one in counted),
        alpha=_alpha(units),
        kappas=_kappas(units, names),
        raters=_rater_stats(judged, [*gold, *gold_of_rankings], names),
        asked=_asked(ungold),
        **_summary(judged),
    )


def _units(judged: Iterable[Any]) -> dict[int, dict[int, Hashable]]:
    """The judgement of each rater on each item: item -> rater -> judgement."""
    units: dict[int, dict[int, Hashable]] = {}
    for one in judged:
        units.setdefault(one.item_id, {})[one.rater_id] = _judgement(one)
    return units


def _alpha(units: Mapping[int, Mapping[int, Hashable]]) -> Agreement:
    return pair_alpha([list(unit.values()) for unit in units.values()])


def _asked(judged: Sequence[Any]) -> list[AskedStats]:
    """The votes by why their pairs were asked, the most frequent reason first; none if no method chose any."""
    of_method: dict[str, list[Any]] = {}
    for one in judged:
        of_method.setdefault(one.selection.partition(" ")[0], []).append(one)
    if of_method.keys() <= {"", RANDOM}:
        return []
    found = [AskedStats(name, len(own), _alpha(_units(own)), _longer(own)) for name, own in of_method.items()]
    return sorted(found, key=lambda one: (-one.num_votes, one.method))


def feedback_stats(connection: Connection) -> list[FeedbackStats]:
    """Effective feedback by metric and source, at most `MAX_FEEDBACK` rows: those of the metrics and sources with the
    most. What was withdrawn is none, and a preference is a vote.
    """
    later, choices, table = feedback.alias(), inference_choices, feedback
    said = cast(table.c.value_json, Text)
    is_thumb = said.in_(("true", "false"))
    is_grade = ~is_thumb & table.c.metric.not_in(("comment", "demonstration"))
    num = func.count().label("num")
    values = (
        num,
        func.count(case((is_thumb, 1))).label("num_thumbs"),
        func.avg(case((said == "true", 1.0), (said == "false", 0.0))).label("share_true"),
        func.count(case((is_grade, 1))).label("num_grades"),
        func.avg(case((is_grade, cast(said, Numeric(asdecimal=False))))).label("mean"),
    )
    is_said = table.c.metric != "preference", table.c.value_json.is_not(None)
    same = [getattr(later.c, name) == table.c[name] for name in ("choice", "rater_id", "metric")]

    def found(about: ColumnElement[bool], rows: FromClause, *by: ColumnElement[Any]) -> Any:
        is_last = ~exists().where(about, *same, later.c.revision > table.c.revision)
        query = select(*by, *values).select_from(rows).where(*is_said, is_last).group_by(*by)
        return query.order_by(num.desc(), *by).limit(MAX_FEEDBACK)

    is_choice = (choices.c.inference_id == table.c.inference_id) & (choices.c.position == table.c.choice)
    is_same_answer = later.c.inference_id == table.c.inference_id
    of_answers = found(is_same_answer, table.join(choices, is_choice), table.c.metric, choices.c.source_id)
    is_same_talk = later.c.inference_id.is_(None) & (later.c.episode == table.c.episode)
    of_talks = found(is_same_talk, table, table.c.metric).where(table.c.inference_id.is_(None))
    rows = [_feedback_of(row, row.source_id) for row in connection.execute(of_answers)]
    rows += [_feedback_of(row, "") for row in connection.execute(of_talks)]
    return sorted(rows, key=lambda one: (-one.num, one.metric, one.source))[:MAX_FEEDBACK]


def _feedback_of(row: Any, source_id: str) -> FeedbackStats:
    return FeedbackStats(
        metric=row.metric,
        source=source_id.removeprefix(MODEL_SOURCE),
        num=row.num,
        num_thumbs=row.num_thumbs,
        share_true=None if row.share_true is None else float(row.share_true),
        num_grades=row.num_grades,
        mean=None if row.mean is None else float(row.mean),
    )


def progress(connection: Connection, rater_id: int, campaign: Campaign) -> Progress:
    """Votes and open items of a rater in a campaign."""
    max_votes = campaign.settings.max_votes_per_rater
    mine = presentations.c.rater_id == rater_id
    of_campaign = items.c.campaign_id == campaign.id
    num_votes = connection.execute(
        select(func.count())
        .select_from(presentations.join(items))
        .where(mine, of_campaign, presentations.c.state == "done")
    ).scalar_one()
    answered = exists().where(
        presentations.c.item_id == items.c.id, mine, presentations.c.state.in_(("done", "skipped"))
    )
    is_left = of_campaign, items.c.is_open == true(), items.c.is_gold != true(), ~answered
    num_left = int(connection.execute(select(func.count()).select_from(items).where(*is_left)).scalar_one())
    if max_votes:
        num_left = min(num_left, max(0, max_votes - int(num_votes)))
    num_items, num_done = _num_items(connection, campaign.id)
    return Progress(int(num_votes), num_left, num_items, num_done, max_votes)


def _num_items(connection: Connection, campaign_id: int | None) -> tuple[int, int]:
    """Numbers of all items and of those with all their votes, without gold and retired ones."""
    query = select(items.c.is_open, func.count()).where(items.c.is_gold != true(), items.c.retired_at.is_(None))
    if campaign_id is not None:
        query = query.where(items.c.campaign_id == campaign_id)
    counts = {bool(is_open): int(count) for is_open, count in connection.execute(query.group_by(items.c.is_open))}
    return sum(counts.values()), counts.get(False, 0)


def _last_answers(table: Table, campaign_id: int | None, *columns: Any) -> Any:
    later = table.alias()
    is_last = ~exists().where(later.c.presentation_id == table.c.presentation_id, later.c.revision > table.c.revision)
    joined = table.join(presentations, presentations.c.id == table.c.presentation_id)
    joined = joined.join(items, items.c.id == presentations.c.item_id)
    query = select(*columns).select_from(joined).where(is_last, by_people())
    return query if campaign_id is None else query.where(items.c.campaign_id == campaign_id)


def _judged_pairs(connection: Connection, campaign_id: int | None) -> Sequence[Any]:
    """Effective votes, skips included, as rows without texts; lengths are in characters, None if nothing was chosen."""
    query = _last_answers(
        votes,
        campaign_id,
        presentations.c.item_id,
        presentations.c.rater_id,
        votes.c.verdict,
        votes.c.chosen_candidate_id,
        votes.c.rejected_candidate_id,
        votes.c.dwell_ms,
        votes.c.created_at,
        knows_side().label("knows_side"),
        items.c.is_gold,
        items.c.selection,
        items.c.gold_candidate_id,
        _length(votes.c.chosen_candidate_id).label("chosen_length"),
        _length(votes.c.rejected_candidate_id).label("rejected_length"),
    )
    return connection.execute(query.where(votes.c.verdict != "withdrawn")).all()


def judged_pairs(connection: Connection, campaign_id: int | None, limit: int) -> list[JudgedPair]:
    """The newest `limit` votes on pairs, in the order of their ids."""
    first, second = (_place(position) for position in (0, 1))
    query = _last_answers(
        votes,
        campaign_id,
        votes.c.id,
        presentations.c.item_id,
        presentations.c.rater_id,
        votes.c.verdict,
        votes.c.chosen_candidate_id,
        votes.c.dwell_ms,
        knows_side().label("knows_side"),
        items.c.gold_candidate_id,
        first.c.id.label("first_id"),
        first.c.source_id.label("first_source"),
        second.c.source_id.label("second_source"),
        (func.length(first.c.text) + func.length(second.c.text)).label("num_characters"),
    )
    query = query.where(
        votes.c.verdict.not_in(("skip", "withdrawn")),
        items.c.kind == "pair",
        first.c.item_id == items.c.id,
        second.c.item_id == items.c.id,
    )
    rows = connection.execute(query.order_by(votes.c.id.desc()).limit(limit)).all()
    return [_judged_pair(row) for row in reversed(rows)]


def _place(position: int) -> Any:
    """The candidates that are listed at this position of their items."""
    columns = item_candidates.c.item_id, candidates.c.id, candidates.c.text, candidates.c.source_id
    joined = item_candidates.join(candidates, candidates.c.id == item_candidates.c.candidate_id)
    return select(*columns).select_from(joined).where(item_candidates.c.position == position).subquery()


def _judged_pair(row: Any) -> JudgedPair:
    is_decided = row.verdict in _DECIDED
    side = (1 if row.verdict in _LEFT else -1) if is_decided and row.knows_side else 0
    return JudgedPair(
        vote_id=row.id,
        item_id=row.item_id,
        rater_id=row.rater_id,
        prefers_first=row.chosen_candidate_id == row.first_id if is_decided else None,
        side=side,
        gold_is_first=None if row.gold_candidate_id is None else row.gold_candidate_id == row.first_id,
        dwell_ms=row.dwell_ms,
        num_characters=row.num_characters,
        sources=(row.first_source, row.second_source),
    )


def _judgement(vote: Any) -> Hashable:
    """Which of the item's two answers a vote prefers, rather than its side, which differs from rater to rater; else the
    verdict.
    """
    if vote.verdict not in _DECIDED:
        return vote.verdict
    return FIRST if vote.chosen_candidate_id < vote.rejected_candidate_id else SECOND


def _length(candidate_id: Any) -> Any:
    answer = candidates.alias()
    return select(func.length(answer.c.text)).where(answer.c.id == candidate_id).scalar_subquery()


def _rankings(connection: Connection, campaign_id: int | None) -> tuple[int, list[tuple[int, bool]]]:
    """Number of rankings; for each gold one the rater, and whether the known best is ranked first without a tie."""
    gold_place = (
        select(item_candidates.c.position)
        .where(item_candidates.c.item_id == items.c.id, item_candidates.c.candidate_id == items.c.gold_candidate_id)
        .correlate(items)
        .scalar_subquery()
    )
    columns = presentations.c.rater_id, rankings.c.ranks_json, items.c.is_gold, gold_place.label("gold_place")
    query = _last_answers(rankings, campaign_id, *columns).where(rankings.c.verdict == "ranked")
    rows = connection.execute(query).all()
    checked: list[tuple[int, bool]] = []
    for row in rows:
        if row.is_gold:
            ranks: tuple[int, ...] = row.ranks_json
            position: int = row.gold_place
            checked.append((row.rater_id, ranks[position] == 1 and ranks.count(1) == 1))
    return len(rows), checked


def _kappas(units: Mapping[int, Mapping[int, Hashable]], names: Mapping[int, str]) -> list[RaterPair]:
    """Kappa of every two raters, those with the most items in common first. `units`: item -> rater -> judgement."""
    shared: dict[tuple[int, int], list[tuple[Hashable, Hashable]]] = {}
    for unit in units.values():
        for a, b in itertools.combinations(sorted(unit), 2):
            shared.setdefault((a, b), []).append((unit[a], unit[b]))
    found = sorted(shared.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:MAX_RATER_PAIRS]
    return [RaterPair(names[a], names[b], pair_kappa(judgements)) for (a, b), judgements in found]


def _rater_stats(judged: Sequence[Any], gold: Sequence[tuple[int, bool]], names: Mapping[int, str]) -> list[RaterStats]:
    by_rater: dict[int, list[Any]] = {}
    for one in judged:
        by_rater.setdefault(one.rater_id, []).append(one)
    num_gold = Counter(rater for rater, _ in gold)
    num_hits = Counter(rater for rater, is_hit in gold if is_hit)
    found: list[RaterStats] = []
    for rater_id in sorted({*by_rater, *num_gold}):
        own = by_rater.get(rater_id, [])
        times = [one.dwell_ms for one in own if one.verdict != "skip" and one.dwell_ms is not None]
        found.append(
            RaterStats(
                rater_id=rater_id,
                name=names[rater_id],
                num_gold=num_gold[rater_id],
                gold_accuracy=num_hits[rater_id] / num_gold[rater_id] if num_gold[rater_id] else None,
                median_dwell_ms=statistics.median(times) if times else None,
                **_summary(own),
            )
        )
    return found


def _summary(judged: Sequence[Any]) -> dict[str, Any]:
    """The fields that `VoteStats` and `RaterStats` share."""
    verdicts = Counter(one.verdict for one in judged)
    decided = [one for one in judged if one.verdict in _DECIDED]
    sided = [one for one in decided if one.knows_side]
    return {
        "num_votes": len(judged) - verdicts["skip"],
        "num_ties": verdicts["tie"],
        "num_both_bad": verdicts["both_bad"],
        "num_skips": verdicts["skip"],
        "left": bias_test(sum(one.verdict in _LEFT for one in sided), len(sided)),
        "longer": _longer(decided),
    }


def _longer(judged: Sequence[Any]) -> BiasTest:
    """How often the longer answer was preferred, of two that differ in length."""
    unequal = [one for one in judged if one.verdict in _DECIDED and one.chosen_length != one.rejected_length]
    return bias_test(sum(one.chosen_length > one.rejected_length for one in unequal), len(unequal))
