"""`VoteReader`: how everyone but the server reads `votes.db`, without ever writing or checkpointing it."""

import time
from collections.abc import Iterator
from pathlib import Path

from tunesmith.core.errors import StoreError
from tunesmith.store import campaigns, reading, vote_stats
from tunesmith.store.database import ReadOnlyDatabase
from tunesmith.store.records import (
    Campaign,
    Command,
    ExportRow,
    PolicyVersion,
    Progress,
    Rater,
    StoredDemonstration,
    StoredRanking,
    StoredVote,
)
from tunesmith.store.rows import export_row
from tunesmith.store.stat_records import VoteStats


class VoteReader:
    """Votes and commands by cursor. A file or table that is not there yet is "nothing yet".

    Safe to call from any number of threads.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = ReadOnlyDatabase(place, "votes")

    @classmethod
    def open(cls, path_or_url: str | Path) -> "VoteReader":
        """A reader of the file, which may appear later. Its calls raise StoreError if it is of another release."""
        return cls(path_or_url)

    def close(self) -> None:
        """Let go of the file. Harmless if called twice."""
        self._database.close()

    def __enter__(self) -> "VoteReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def votes_after(self, cursor: int, limit: int = 1000, campaign_id: int | None = None) -> list[StoredVote]:
        """Effective votes with an id above `cursor`, in order; pass the last one's id as the next cursor.

        A vote that was changed comes again with a higher `revision`, one that was undone with the verdict `withdrawn`:
        both take the place of what came before with the same `presentation_id`. Skips come only in such a place.
        """
        return self._database.read(lambda c: reading.votes_after(c, cursor, limit, campaign_id), [])

    def rankings_after(self, cursor: int, limit: int = 1000, campaign_id: int | None = None) -> list[StoredRanking]:
        """As `votes_after`, of rankings; those that were undone have no `ranks`."""
        return self._database.read(lambda c: reading.rankings_after(c, cursor, limit, campaign_id), [])

    def demonstrations_after(
        self, cursor: int, limit: int = 1000, campaign_id: int | None = None
    ) -> list[StoredDemonstration]:
        """As `votes_after`, of answers that raters wrote."""
        return self._database.read(lambda c: reading.demonstrations_after(c, cursor, limit, campaign_id), [])

    def commands_after(self, cursor: int, limit: int = 100) -> list[Command]:
        """Commands with an id above `cursor`, in order."""
        return self._database.read(lambda c: reading.commands_after(c, cursor, limit), [])

    def campaigns(self) -> list[Campaign]:
        """All campaigns, oldest first."""
        return self._database.read(campaigns.all_campaigns, [])

    def campaign_named(self, name: str) -> Campaign:
        """The campaign of this name. Raises StoreError if there is none."""
        found = {campaign.settings.name: campaign for campaign in self.campaigns()}
        if name not in found:
            raise StoreError(f"there is no campaign {name!r}; there are {', '.join(found) or 'none'}")
        return found[name]

    def raters(self) -> list[Rater]:
        """All raters, oldest first."""
        return self._database.read(campaigns.all_raters, [])

    def rater_of(self, token: str, now: float | None = None) -> Rater | None:
        """Whom `token` lets in; None for a wrong, expired or disabled one."""
        moment = time.time() if now is None else now
        return self._database.read(lambda c: campaigns.rater_of_token(c, token, moment), None)

    def versions(self) -> list[PolicyVersion]:
        """The server's copy of the trainer's versions, oldest first."""
        return self._database.read(campaigns.shown_versions, [])

    def progress(self, rater_id: int, campaign_id: int) -> Progress:
        """How far the rater and the campaign are. Raises StoreError if there is no such campaign."""
        nothing = Progress(0, 0, 0, 0, 0)
        return self._database.read(lambda c: vote_stats.progress(c, rater_id, campaigns.campaign(c, campaign_id)), nothing)

    def stats(self, campaign_id: int | None = None, now: float | None = None) -> VoteStats:
        """Counts, agreement, biases and gold accuracy of one campaign, or of all."""
        moment = time.time() if now is None else now
        found = self._database.read(lambda c: vote_stats.vote_stats(c, campaign_id, moment), None)
        return vote_stats.NO_VOTES if found is None else found

    def export(
        self, campaign_id: int | None = None, *, include_gold: bool = False, include_bad: bool = True
    ) -> Iterator[ExportRow]:
        """Effective votes in the order of their ids, skipped and withdrawn ones left out.

        Without `include_bad` those that call both answers bad are left out too.
        """
        for vote in reading.pages(
            lambda cursor, limit: self._database.read(
                lambda c: reading.votes_after(c, cursor, limit, campaign_id, changes=False), []
            )
        ):
            if (include_gold or not vote.is_gold) and (include_bad or vote.verdict != "both_bad"):
                yield export_row(vote)

    def export_rankings(self, campaign_id: int | None = None) -> Iterator[StoredRanking]:
        """Effective rankings in the order of their ids."""
        return reading.pages(
            lambda cursor, limit: self._database.read(
                lambda c: reading.rankings_after(c, cursor, limit, campaign_id, changes=False), []
            )
        )

    def export_demonstrations(self, campaign_id: int | None = None) -> Iterator[StoredDemonstration]:
        """Effective written answers in the order of their ids."""
        return reading.pages(lambda cursor, limit: self.demonstrations_after(cursor, limit, campaign_id))
