"""`VoteReader`: how the trainer reads `votes.db`, without ever writing or checkpointing it."""

from pathlib import Path

from tunesmith.store import reading
from tunesmith.store.database import ReadOnlyDatabase
from tunesmith.store.records import Command, StoredDemonstration, StoredRanking, StoredVote


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
