"""`VoteStore`: the server's side of `votes.db`, its only writer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunesmith.store.records import (
    Campaign,
    CampaignSettings,
    CommandKind,
    ExportRow,
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
    VoteStats,
)


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
        ...

    def close(self) -> None:
        """Finish what was asked and let go of the file. Harmless if called twice."""
        ...

    def __enter__(self) -> "VoteStore": ...

    def __exit__(self, *exc: object) -> None: ...

    # Campaigns

    def set_campaign(self, settings: CampaignSettings, now: float | None = None) -> Campaign:
        """The campaign of this name, made or changed to `settings`. Raises StoreError for values out of range."""
        ...

    def campaigns(self) -> list[Campaign]:
        """All campaigns, oldest first."""
        ...

    def campaign(self, campaign_id: int) -> Campaign:
        """One campaign. Raises StoreError if there is none of this id."""
        ...

    def close_campaign(self, campaign_id: int, now: float | None = None) -> None:
        """Ask for no more votes."""
        ...

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
        ...

    def rater_of(self, token: str, now: float | None = None) -> Rater | None:
        """Whom `token` lets in; None for a wrong, expired or disabled one."""
        ...

    def redeem(
        self, token: str, *, expires_at: float | None = None, name: str | None = None, now: float | None = None
    ) -> NewRater | None:
        """The same rater with a fresh token in place of `token`, which is void from now on (a one-time link, an
        invite); None if it was not good. `name` renames the rater."""
        ...

    def raters(self) -> list[Rater]:
        """All raters, oldest first."""
        ...

    def disable_rater(self, rater_id: int, now: float | None = None) -> None:
        """End a rater's access; their votes stay."""
        ...

    # Items

    def add_items(self, campaign_id: int, new: Sequence[NewItem], now: float | None = None) -> list[int]:
        """Ids of the items made of `new`, in its order. Raises DataError for fewer than two or equal answers, or a text
        that cannot be stored."""
        ...

    def ingest(self, campaign_id: int, offers: Sequence[Offer], now: float | None = None) -> int:
        """Number of items made of the trainer's offers; those that are here already are passed over, stale ones are
        retired."""
        ...

    def last_offer_id(self, campaign_id: int) -> int:
        """The newest offer that was ingested, 0 if none: the cursor of `RunReader.offers_after`."""
        ...

    def retire_items(self, item_ids: Sequence[int], now: float | None = None) -> int:
        """Number of items that were taken out of the queue. Votes on them stay."""
        ...

    # Votes

    def next_presentations(
        self, rater_id: int, campaign_id: int, count: int = 1, now: float | None = None
    ) -> list[Presentation]:
        """What the rater is to judge next, `count` at most: first what they hold already, then fresh items.

        Fewer come back where overlap, limit or items are used up. Each is written down before it is returned.
        """
        ...

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
        ...

    def withdraw(self, token: str, rater_id: int, now: float | None = None) -> VoteReceipt:
        """Undo the vote or ranking: the presentation is open again. Errors as in `vote`; VoteError if there is none."""
        ...

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
        ...

    def demonstrate(
        self, token: str, rater_id: int, text: str, request_key: str | None = None, now: float | None = None
    ) -> VoteReceipt:
        """As `vote`, of an answer that the rater wrote. It stands beside the vote and does not take its place."""
        ...

    def progress(self, rater_id: int, campaign_id: int, now: float | None = None) -> Progress:
        """How far the rater and the campaign are."""
        ...

    # The trainer

    def command(self, kind: CommandKind, argument: str, rater_id: int, now: float | None = None) -> int:
        """Id of a command that the trainer will read and obey."""
        ...

    def copy_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Keep the trainer's versions here, for display."""
        ...

    # Reading

    def stats(self, campaign_id: int | None = None, now: float | None = None) -> VoteStats:
        """Counts, agreement, biases and gold accuracy of one campaign, or of all."""
        ...

    def export(self, campaign_id: int | None = None, *, include_gold: bool = False) -> Iterator[ExportRow]:
        """Effective votes in the order of their ids. Skipped and withdrawn ones are left out."""
        ...

    def export_rankings(self, campaign_id: int | None = None) -> Iterator[StoredRanking]:
        """Effective rankings in the order of their ids."""
        ...

    def export_demonstrations(self, campaign_id: int | None = None) -> Iterator[StoredDemonstration]:
        """Effective written answers in the order of their ids."""
        ...
