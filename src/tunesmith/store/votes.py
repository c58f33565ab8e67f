"""`VoteStore`: the server's side of `votes.db`, its only writer."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from tunesmith.store import campaigns, imports, items
from tunesmith.store.answers import Answering
from tunesmith.store.database import OwnedDatabase
from tunesmith.store.queue import next_presentations
from tunesmith.store.records import (
    Campaign,
    CampaignSettings,
    CommandKind,
    ExportRow,
    GivenVote,
    Imported,
    NewItem,
    NewRater,
    Offer,
    PolicyVersion,
    Presentation,
    Progress,
    Rater,
    Role,
    StoredDemonstration,
    StoredRanking,
    Verdict,
    VoteReceipt,
)
from tunesmith.store.stat_records import VoteStats
from tunesmith.store.vote_reader import VoteReader
from tunesmith.store.writer import Writer

T = TypeVar("T")

_ADDED_AT_ONCE = 200
"""Items in one transaction: raters who vote meanwhile wait no longer than that takes."""


class VoteStore:
    """Campaigns, raters, items and votes. Safe to call from any number of threads; every call blocks until its change
    is on disk. One thread writes, and commits calls that come within 5 ms together.

    `now` is the time in seconds since the epoch; left out, it is the clock's.
    """

    @classmethod
    def open(cls, path_or_url: str | Path, *, seed: int | None = None) -> "VoteStore":
        """The store in a file, which is made if it is missing and brought up to date, or at a database URL.

        `seed` fixes the order of answers and the mixing of gold items, for tests. Raises StoreError if the file is
        damaged, of a newer release, or in use by another server.
        """
        return cls(path_or_url, seed)

    def __init__(self, place: str | Path, seed: int | None = None) -> None:
        self._writer = Writer(OwnedDatabase(place, "votes", durable=True))
        self._reader = VoteReader(place)
        # Used by the writing thread alone.
        self._draw = random.SystemRandom() if seed is None else random.Random(seed)

    def close(self) -> None:
        """Finish what was asked and let go of the file. Harmless if called twice."""
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> "VoteStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Campaigns

    def set_campaign(self, settings: CampaignSettings, now: float | None = None) -> Campaign:
        """The campaign of this name, made or changed to `settings`. Raises StoreError for values out of range."""
        return self._write(lambda connection: campaigns.set_campaign(connection, settings, _or_now(now)))

    def campaigns(self) -> list[Campaign]:
        """All campaigns, oldest first."""
        return self._reader.campaigns()

    def campaign(self, campaign_id: int) -> Campaign:
        """One campaign. Raises StoreError if there is none of this id."""
        return self._write(lambda connection: campaigns.campaign(connection, campaign_id))

    def close_campaign(self, campaign_id: int, now: float | None = None) -> None:
        """Ask for no more votes."""
        self._write(lambda connection: campaigns.close_campaign(connection, campaign_id, _or_now(now)))

    # Raters

    def add_rater(
        self,
        name: str,
        role: Role = "rater",
        *,
        invited_by: int | None = None,
        expires_at: float | None = None,
        now: float | None = None,
    ) -> NewRater:
        """A new rater and their token, which is shown this once. Raises StoreError if the name is taken or empty."""
        return self._write(
            lambda connection: campaigns.add_rater(connection, name, role, invited_by, expires_at, _or_now(now))
        )

    def rater_of(self, token: str, now: float | None = None) -> Rater | None:
        """Whom `token` lets in; None for a wrong, expired or disabled one."""
        return self._reader.rater_of(token, now)

    def redeem(
        self, token: str, *, expires_at: float | None = None, name: str | None = None, now: float | None = None
    ) -> NewRater | None:
        """The same rater with a fresh token in place of `token`, which is void from now on (a one-time link, an
        invite); None if it was not good. `name` renames the rater."""
        return self._write(lambda connection: campaigns.redeem(connection, token, name, expires_at, _or_now(now)))

    def raters(self) -> list[Rater]:
        """All raters, oldest first."""
        return self._reader.raters()

    def disable_rater(self, rater_id: int, now: float | None = None) -> None:
        """End a rater's access; their votes stay."""
        self._write(lambda connection: campaigns.disable_rater(connection, rater_id, _or_now(now)))

    # Items

    def add_items(self, campaign_id: int, new: Sequence[NewItem]) -> list[int]:
        """Ids of the items made of `new`, in its order.

        One that is there already, whatever the order of its answers, is not added again. Raises DataError for fewer
        than two or equal answers, or a text that cannot be stored; then nothing is added.
        """
        return self._add_items(campaign_id, new)[0]

    def import_items(self, campaign_id: int, new: Sequence[NewItem]) -> Imported:
        """As `add_items`: how many items were added, and how many were there already."""
        num_new = self._add_items(campaign_id, new)[1]
        return Imported(num_new, len(new) - num_new)

    def import_votes(self, campaign_id: int, given: Sequence[GivenVote], now: float | None = None) -> Imported:
        """How many votes made elsewhere were added, and how many were there already. Raters that are not known are made
        without access. Raises DataError as `add_items` does; then nothing is added."""
        for number, vote in enumerate(given, start=1):
            items.check_item(vote.item, f"vote {number}")
        num_new = 0
        for start in range(0, len(given), _ADDED_AT_ONCE):
            part = given[start : start + _ADDED_AT_ONCE]
            num_new += self._write(
                lambda c, part=part: imports.add_votes(c, self._draw, campaign_id, part, _or_now(now))
            )
        return Imported(num_new, len(given) - num_new)

    def ingest(self, campaign_id: int, offers: Sequence[Offer], now: float | None = None) -> int:
        """Number of items made of the trainer's offers; those that are here already are passed over, stale ones are
        retired."""
        return self._write(lambda connection: items.ingest(connection, campaign_id, offers, _or_now(now)))

    def last_offer_id(self, campaign_id: int) -> int:
        """The newest offer that was ingested, 0 if none: the cursor of `RunReader.offers_after`."""
        return self._write(lambda connection: items.last_offer_id(connection, campaign_id))

    def retire_items(self, item_ids: Sequence[int], now: float | None = None) -> int:
        """Number of items that were taken out of the queue. Votes on them stay."""
        return self._write(lambda connection: items.retire_items(connection, item_ids, _or_now(now)))

    # Votes

    def next_presentations(
        self, rater_id: int, campaign_id: int, count: int = 1, now: float | None = None
    ) -> list[Presentation]:
        """What the rater is to judge next, `count` at most: first what they hold already, then fresh items.

        Fewer come back where overlap, limit or items are used up. Each is written down before it is returned.
        """
        moment = _or_now(now)
        return self._write(
            lambda connection: next_presentations(
                connection, self._draw, rater_id, campaigns.campaign(connection, campaign_id), count, moment
            )
        )

    def vote(
        self,
        token: str,
        rater_id: int,
        verdict: Verdict,
        reason: str = "",
        dwell_ms: int | None = None,
        request_key: str | None = None,
        now: float | None = None,
    ) -> VoteReceipt:
        """The receipt of a vote that is on disk. The same `request_key`, or the same content once more, gives the first
        receipt again; another verdict is a new revision, which alone counts.

        Raises UnknownPresentationError for a token that is not this rater's, VoteConflictError if the lease ran out and
        others took the place, or the time to change is over, and VoteError for a verdict that does not fit.
        """
        return self._answer(token, rater_id, now, lambda one: one.vote(verdict, reason, dwell_ms, request_key))

    def withdraw(self, token: str, rater_id: int, now: float | None = None) -> VoteReceipt:
        """Undo the vote or ranking: the presentation is open again. Errors as in `vote`; VoteError if there is none."""
        return self._answer(token, rater_id, now, lambda one: one.withdraw())

    def rank(
        self,
        token: str,
        rater_id: int,
        ranks: Sequence[int],
        dwell_ms: int | None = None,
        request_key: str | None = None,
        now: float | None = None,
    ) -> VoteReceipt:
        """As `vote`, of a ranking: `ranks[i]` is the place (1 the best, ties allowed) of the i-th answer shown."""
        return self._answer(token, rater_id, now, lambda one: one.rank(ranks, dwell_ms, request_key))

    def demonstrate(
        self, token: str, rater_id: int, text: str, request_key: str | None = None, now: float | None = None
    ) -> VoteReceipt:
        """As `vote`, of an answer that the rater wrote. It stands beside the vote and does not take its place."""
        return self._answer(token, rater_id, now, lambda one: one.demonstrate(text, request_key))

    def progress(self, rater_id: int, campaign_id: int) -> Progress:
        """How far the rater and the campaign are."""
        return self._reader.progress(rater_id, campaign_id)

    # The trainer

    def command(self, kind: CommandKind, argument: str, rater_id: int, now: float | None = None) -> int:
        """Id of a command that the trainer will read and obey."""
        return self._write(lambda connection: campaigns.add_command(connection, kind, argument, rater_id, _or_now(now)))

    def copy_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Keep the trainer's versions here, for display."""
        self._write(lambda connection: campaigns.copy_versions(connection, versions))

    def versions(self) -> list[PolicyVersion]:
        """The copied versions, oldest first."""
        return self._reader.versions()

    # Reading

    def stats(self, campaign_id: int | None = None, now: float | None = None) -> VoteStats:
        """Counts, agreement, biases and gold accuracy of one campaign, or of all."""
        return self._reader.stats(campaign_id, now)

    def export(
        self, campaign_id: int | None = None, *, include_gold: bool = False, include_bad: bool = True
    ) -> Iterator[ExportRow]:
        """Effective votes in the order of their ids, skipped and withdrawn ones left out."""
        return self._reader.export(campaign_id, include_gold=include_gold, include_bad=include_bad)

    def export_rankings(self, campaign_id: int | None = None) -> Iterator[StoredRanking]:
        """Effective rankings in the order of their ids."""
        return self._reader.export_rankings(campaign_id)

    def export_demonstrations(self, campaign_id: int | None = None) -> Iterator[StoredDemonstration]:
        """Effective written answers in the order of their ids."""
        return self._reader.export_demonstrations(campaign_id)

    def _add_items(self, campaign_id: int, new: Sequence[NewItem]) -> tuple[list[int], int]:
        for number, item in enumerate(new, start=1):
            items.check_item(item, f"item {number}")
        ids: list[int] = []
        num_new = 0
        for start in range(0, len(new), _ADDED_AT_ONCE):
            part = new[start : start + _ADDED_AT_ONCE]
            added = self._write(lambda c, part=part: items.add_items(c, campaign_id, part))
            ids += added.item_ids
            num_new += added.num_new
        return ids, num_new

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self._writer.do(work)

    def _answer(
        self, token: str, rater_id: int, now: float | None, answer: Callable[[Answering], VoteReceipt]
    ) -> VoteReceipt:
        moment = _or_now(now)
        return self._write(lambda connection: answer(Answering(connection, token, rater_id, moment)))


def _or_now(now: float | None) -> float:
    return time.time() if now is None else now
