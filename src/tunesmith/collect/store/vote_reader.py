"""`VoteReader`: read access to `votes.db` for every process, which never writes or checkpoints it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, exists, false, func, or_, select

from tunesmith.base.core.errors import StoreError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store import asking, audit, campaigns, inferences, machine_votes, removal, vote_stats
from tunesmith.collect.store.asking import WaitingItem
from tunesmith.collect.store.content import as_answer, prompt_sha256
from tunesmith.collect.store.database import ReadOnlyDatabase, or_now
from tunesmith.collect.store.items import candidates_of_items
from tunesmith.collect.store.machine_votes import MachineStats, PairToJudge
from tunesmith.collect.store.queue import SHOWN_ELSEWHERE, SIDES_UNKNOWN, knows_side, load_presentations
from tunesmith.collect.store.records import (
    MARGIN_BETTER,
    MARGIN_MUCH,
    Answered,
    AuditEntry,
    Campaign,
    Candidate,
    Command,
    ExportRow,
    Inference,
    Person,
    PreferenceName,
    Presentation,
    Progress,
    RatedAnswer,
    Rater,
    Stored,
    StoredDemonstration,
    StoredFeedback,
    StoredRanking,
    StoredVerdict,
    StoredVote,
)
from tunesmith.collect.store.tables import (
    commands,
    demonstrations,
    items,
    presentations,
    prompts,
    rankings,
    raters,
    votes,
)

Record = TypeVar("Record", StoredVote, StoredRanking, StoredDemonstration, RatedAnswer, PairToJudge, WaitingItem)

_PAGE = 500
_PREFERENCES: dict[StoredVerdict, PreferenceName] = {
    "left_much": "much_better",
    "right_much": "much_better",
    "left": "better",
    "right": "better",
    "tie": "tie",
    "both_bad": "both_bad",
}
_MARGINS = {"much_better": MARGIN_MUCH, "better": MARGIN_BETTER}
_PROMPT_ID_LENGTH = 16


class VoteReader(ReadOnlyDatabase):
    """Votes and commands by cursor."""

    name = "votes"

    def votes_after(
        self,
        cursor: int,
        limit: int = 1000,
        campaign_id: int | None = None,
        *,
        changes: bool = True,
        machines: bool = False,
    ) -> list[StoredVote]:
        """Effective votes with an id above `cursor`, in order; pass the last one's id as the next cursor.

        A changed vote is returned again with a higher `revision`, an undone one with the verdict `withdrawn`: each
        replaces the earlier one of the same `presentation_id`. Skips are returned only as such replacements. With
        `changes=False` skipped and withdrawn votes are left out. With `machines` votes of judges are returned too.
        """

        def read(connection: Connection) -> list[StoredVote]:
            rows = _effective(connection, votes, cursor, limit, campaign_id, changes=changes, machines=machines)
            answers = candidates_of_items(connection, [row.item_id for row in rows])
            return [_stored_vote(row, answers[row.item_id]) for row in rows]

        return self.read(read, [])

    def rankings_after(
        self, cursor: int, limit: int = 1000, campaign_id: int | None = None, *, changes: bool = True
    ) -> list[StoredRanking]:
        """As `votes_after`, for rankings; undone ones have no `ranks`."""

        def read(connection: Connection) -> list[StoredRanking]:
            rows = _effective(connection, rankings, cursor, limit, campaign_id, changes=changes)
            answers = candidates_of_items(connection, [row.item_id for row in rows])
            return [_stored_ranking(row, answers[row.item_id]) for row in rows]

        return self.read(read, [])

    def demonstrations_after(
        self, cursor: int, limit: int = 1000, campaign_id: int | None = None
    ) -> list[StoredDemonstration]:
        """As `votes_after`, for answers that raters wrote."""

        def read(connection: Connection) -> list[StoredDemonstration]:
            rows = _effective(connection, demonstrations, cursor, limit, campaign_id, changes=True)
            return [StoredDemonstration(text=row.text, **_common(row)) for row in rows]

        return self.read(read, [])

    def commands_after(self, cursor: int, limit: int = 100) -> list[Command]:
        """Commands with an id above `cursor`, in order."""
        query = select(commands).where(commands.c.id > cursor).order_by(commands.c.id).limit(limit)
        return self.read(lambda c: [Command(**row) for row in c.execute(query).mappings()], [])

    def campaigns(self) -> list[Campaign]:
        """All campaigns, oldest first."""
        return self.read(campaigns.all_campaigns, [])

    def campaign_named(self, name: str) -> Campaign:
        """The campaign of this name. Raises StoreError if there is none."""
        found = {campaign.settings.name: campaign for campaign in self.campaigns()}
        if name not in found:
            raise StoreError(f"there is no campaign {name!r}; there are {', '.join(found) or 'none'}")
        return found[name]

    def raters(self) -> list[Rater]:
        """All raters, oldest first."""
        return self.read(campaigns.all_raters, [])

    def rater(self, rater_id: int) -> Rater | None:
        """The rater of this id; None if there is none."""
        return self.read(lambda c: campaigns.rater_of_id(c, rater_id), None)

    def rater_of(self, token: str, now: float | None = None) -> Rater | None:
        """The rater with this access token; None for a wrong, expired or disabled one."""
        moment = or_now(now)
        return self.read(lambda c: campaigns.rater_of_token(c, token, moment), None)

    def is_deleted(self, rater_id: int) -> bool:
        """True if the data of this rater was deleted: nothing of theirs is stored any more."""
        return self.read(lambda c: campaigns.is_deleted(c, rater_id), False)

    def inference(self, name: str) -> Inference | None:
        """The request of the API whose client got this id, with its answers; None if there is none."""
        return self.inferences([name]).get(name)

    def tokens_of_day(self, now: float | None = None) -> dict[int, int]:
        """Tokens that each key has used on this day (UTC), by its id."""
        moment = or_now(now)
        return self.read(lambda c: inferences.tokens_of_day(c, moment), {})

    def inferences(self, names: Iterable[str]) -> dict[str, Inference]:
        """The requests of these names that there are, by name, each with its answers."""
        return {one.name: one for one in self.read(lambda c: inferences.load_all(c, names), [])}

    def inferences_after(self, cursor: int, limit: int = _PAGE) -> list[Inference]:
        """At most `limit` requests of the API with an id above `cursor`, in order, each with its answers."""
        return self.read(lambda c: inferences.requests_after(c, cursor, limit), [])

    def audit(self, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The last `limit` entries of the audit log, newest first; with `before` those with a smaller id."""
        return self.read(lambda c: audit.before(c, before, limit), [])

    def person(self, name: str, key: str = "") -> Person:
        """The rater or key of this name, or with `key` the one whom that key calls so. Raises StoreError for nobody."""
        found = self.read(lambda c: removal.person_named(c, name, key), None)
        if found is None:
            raise StoreError(f"{self.place} holds nothing yet, of nobody")
        return found

    def data_of(self, person: Person, now: float | None = None) -> Iterator[dict[str, Any]]:
        """What is stored of a person, a row at a time, with texts and times as people read them."""
        moment = or_now(now)
        yield from self.read(lambda c: removal.facts_of(c, person, moment), [])
        for page in removal.PAGES:
            cursor = 0
            while rows := self.read(lambda c, page=page, cursor=cursor: page(c, person, cursor), []):
                yield from (row for _, row in rows)
                cursor = rows[-1][0]

    def feedback_after(self, cursor: int, limit: int = _PAGE) -> list[StoredFeedback]:
        """At most `limit` revisions of feedback with an id above `cursor`, in order."""
        return self.read(lambda c: inferences.after(c, cursor, limit), [])

    def last_offer_id(self, campaign_id: int) -> int:
        """Id of the newest ingested offer, 0 if none: the cursor for `RunReader.offers_after`."""
        query = select(func.max(items.c.offer_id)).where(items.c.campaign_id == campaign_id)
        return self.read(lambda c: int(c.execute(query).scalar() or 0), 0)

    def progress(self, rater_id: int, campaign_id: int) -> Progress:
        """Votes and open items of a rater in a campaign. Raises StoreError if there is no such campaign."""
        return self.read(
            lambda c: vote_stats.progress(c, rater_id, campaigns.campaign(c, campaign_id)), Progress(0, 0, 0, 0, 0)
        )

    def answered(self, rater_id: int, campaign_id: int, count: int = 20, before: str = "") -> list[Answered]:
        """The last `count` presentations on which a rater has voted, which they ranked or skipped, newest first; with
        `before`, those shown before the presentation of that token. Conversations in the arena are not among them.
        """

        def read(connection: Connection) -> list[Answered]:
            campaign = campaigns.campaign(connection, campaign_id)
            theirs = (
                presentations.c.rater_id == rater_id,
                presentations.c.seed.not_in((SHOWN_ELSEWHERE, SIDES_UNKNOWN)),
            )
            is_answered = presentations.c.state.in_(("done", "skipped")), items.c.campaign_id == campaign_id
            query = select(presentations.c.id, presentations.c.order_json).select_from(presentations.join(items))
            query = query.where(*theirs, *is_answered).order_by(presentations.c.id.desc()).limit(count)
            if before:
                first = select(presentations.c.id).where(presentations.c.token == before, theirs[0]).scalar_subquery()
                query = query.where(presentations.c.id < first)
            rows = connection.execute(query).all()
            ids = [row.id for row in rows]
            shown = load_presentations(connection, ids, campaign)
            last = [_last_of(connection, table, ids) for table in (votes, rankings, demonstrations)]
            said = [[found.get(id) for found in last] for id in ids]
            return [_answered(one, row.order_json, *its) for one, row, its in zip(shown, rows, said, strict=True)]

        return self.read(read, [])

    def stats(self, campaign_id: int | None = None, now: float | None = None) -> vote_stats.VoteStats:
        """Counts, agreement, biases and gold accuracy of one campaign, or of all."""
        moment = or_now(now)
        return self.read(lambda c: vote_stats.vote_stats(c, campaign_id, moment), vote_stats.NO_VOTES)

    def judged_pairs(self, campaign_id: int | None = None, limit: int = 20_000) -> list[vote_stats.JudgedPair]:
        """The newest `limit` effective votes on pairs of one campaign, or of all, without texts, in the order of their
        ids.
        """
        return self.read(lambda c: vote_stats.judged_pairs(c, campaign_id, limit), [])

    def pairs_to_judge(self, judge: str, campaign_id: int | None = None) -> Iterator[PairToJudge]:
        """The stored pairs that people have voted on, or are asked for, in the order of their ids; `judge` is the name
        of the machine.
        """
        return _pages(lambda cursor: self.read(lambda c: machine_votes.pairs_after(c, cursor, judge, campaign_id), []))

    def waiting_items(self, campaign_id: int) -> Iterator[WaitingItem]:
        """The given items that wait for their first vote, and of which no rater was shown anything, in the order of
        their ids.
        """
        return _pages(lambda cursor: self.read(lambda c: asking.waiting_after(c, cursor, campaign_id), []))

    def machine_stats(self, campaign_id: int | None = None) -> list[MachineStats]:
        """What machines voted, and how far that agrees with people's votes."""
        return self.read(lambda c: machine_votes.stats(c, campaign_id), [])

    def feedback_stats(self) -> list[vote_stats.FeedbackStats]:
        """Effective feedback by metric, and by the version or model that answered; it belongs to no campaign."""
        return self.read(vote_stats.feedback_stats, [])

    def export(
        self,
        campaign_id: int | None = None,
        *,
        include_gold: bool = False,
        include_bad: bool = True,
        machines: bool = False,
    ) -> Iterator[ExportRow]:
        """Effective votes in the order of their ids, without skipped and withdrawn ones.

        With `machines` there are those of judges too. `include_bad=False` also leaves out votes that call both answers
        bad.
        """

        def page(cursor: int) -> list[StoredVote]:
            return self.votes_after(cursor, _PAGE, campaign_id, changes=False, machines=machines)

        for vote in _pages(page):
            if (include_gold or not vote.is_gold) and (include_bad or vote.verdict != "both_bad"):
                yield _export_row(vote)

    def export_rankings(self, campaign_id: int | None = None) -> Iterator[StoredRanking]:
        """Effective rankings in the order of their ids."""
        return _pages(lambda cursor: self.rankings_after(cursor, _PAGE, campaign_id, changes=False))

    def export_demonstrations(self, campaign_id: int | None = None) -> Iterator[StoredDemonstration]:
        """Effective written answers in the order of their ids."""
        return _pages(lambda cursor: self.demonstrations_after(cursor, _PAGE, campaign_id))

    def export_feedback(self) -> Iterator[RatedAnswer]:
        """Effective feedback on answers and conversations in the order of its ids; it belongs to no campaign."""
        return _pages(lambda cursor: self.read(lambda c: inferences.effective(c, cursor, _PAGE), []))

    def corrections(self) -> Iterator[tuple[Text, str]]:
        """The prompts and texts of demonstrations that feedback brought."""
        for one in self.export_feedback():
            if one.metric == "demonstration" and one.prompt is not None:
                yield one.prompt, str(one.value)


def _pages(read: Callable[[int], Sequence[Record]]) -> Iterator[Record]:
    """All records that `read(cursor)` returns, page by page."""
    cursor = 0
    while page := read(cursor):
        yield from page
        cursor = page[-1].id


def _effective(
    connection: Connection,
    table: Table,
    cursor: int,
    limit: int,
    campaign_id: int | None,
    *,
    changes: bool,
    machines: bool = False,
) -> Sequence[Any]:
    """Rows of `table` without a higher revision, joined with their item, prompt and rater: a person, unless `machines`
    are wanted too.

    A skip or withdrawal of the first revision replaces nothing, so it is left out.
    """
    later = table.alias()
    is_last = ~exists().where(later.c.presentation_id == table.c.presentation_id, later.c.revision > table.c.revision)
    joined = (
        table.join(presentations, presentations.c.id == table.c.presentation_id)
        .join(items, items.c.id == presentations.c.item_id)
        .join(prompts, prompts.c.id == items.c.prompt_id)
        .join(raters, raters.c.id == presentations.c.rater_id)
    )
    context = (
        presentations.c.item_id,
        presentations.c.order_json,
        knows_side().label("knows_side"),
        presentations.c.rater_id,
        items.c.campaign_id,
        items.c.heldout,
        items.c.is_gold,
        items.c.offer_id,
        items.c.selection,
        prompts.c.content_json.label("prompt"),
        raters.c.name.label("rater"),
    )
    own = [column for column in table.c if column.name not in ("rater_id", "prompt_id")]
    query = select(*own, *context).select_from(joined).where(table.c.id > cursor, is_last)
    if not machines:
        query = query.where(raters.c.is_machine == false())
    if "verdict" in table.c:
        counts = table.c.verdict.not_in(("skip", "withdrawn"))
        query = query.where(or_(counts, table.c.revision > 1) if changes else counts)
    if campaign_id is not None:
        query = query.where(items.c.campaign_id == campaign_id)
    return connection.execute(query.order_by(table.c.id).limit(limit)).all()


def _last_of(connection: Connection, table: Table, presentation_ids: Sequence[int]) -> dict[int, Any]:
    """The effective row of each of these presentations that has one."""
    query = select(table).where(table.c.presentation_id.in_(presentation_ids)).order_by(table.c.revision)
    return {row.presentation_id: row for row in connection.execute(query)}


def _answered(shown: Presentation, order: Sequence[int], vote: Any, ranking: Any, demonstration: Any) -> Answered:
    said = ranking if vote is None else vote
    ranks = getattr(said, "ranks_json", None) or ()
    return Answered(
        shown=shown,
        verdict=said.verdict,
        ranks=tuple(ranks[index] for index in order) if ranks else (),
        reason=said.reason,
        written="" if demonstration is None else demonstration.text,
        answered_at=said.created_at,
    )


def _common(row: Any) -> dict[str, Any]:
    """The fields that all records share."""
    return {field.name: getattr(row, field.name) for field in fields(Stored)}


def _stored_vote(row: Any, answers: Sequence[Candidate]) -> StoredVote:
    order: tuple[int, int] = row.order_json
    left, right = (answers[index] for index in order)
    is_right = row.verdict in ("right", "right_much")
    chosen, rejected = (right, left) if is_right else (left, right)
    return StoredVote(
        verdict=row.verdict,
        margin=_MARGINS.get(_PREFERENCES.get(row.verdict, ""), 0.0),
        chosen=chosen,
        rejected=rejected,
        is_gold=row.is_gold,
        offer_id=row.offer_id,
        dwell_ms=row.dwell_ms,
        reason=row.reason,
        chosen_side=None if not row.knows_side else "right" if is_right else "left",
        selection=row.selection,
        **_common(row),
    )


def _stored_ranking(row: Any, answers: Sequence[Candidate]) -> StoredRanking:
    ranks = row.ranks_json or ()
    return StoredRanking(candidates=tuple(answers), ranks=ranks, is_gold=row.is_gold, reason=row.reason, **_common(row))


def _export_row(vote: StoredVote) -> ExportRow:
    """A vote in TRL's columns. Skipped and withdrawn votes have none."""
    return ExportRow(
        prompt=vote.prompt,
        chosen=as_answer(vote.prompt, vote.chosen.text),
        rejected=as_answer(vote.prompt, vote.rejected.text),
        margin=vote.margin,
        tie=vote.verdict in ("tie", "both_bad"),
        verdict=_PREFERENCES[vote.verdict],
        rater=vote.rater,
        heldout=vote.heldout,
        created_at=vote.created_at,
        dwell_ms=vote.dwell_ms,
        reason=vote.reason,
        vote_id=vote.id,
        prompt_id=prompt_sha256(vote.prompt)[:_PROMPT_ID_LENGTH],
        chosen_version=vote.chosen.weight_version,
        rejected_version=vote.rejected.weight_version,
        chosen_side=vote.chosen_side,
        selection=vote.selection,
    )
