"""`VoteReader`: how the trainer reads `votes.db`, without ever writing or checkpointing it."""

from pathlib import Path

from tunesmith.store.records import Command, StoredDemonstration, StoredRanking, StoredVote


class VoteReader:
    """Votes and commands by cursor. A file or table that is not there yet is "nothing yet"."""

    @classmethod
    def open(cls, path_or_url: str | Path) -> "VoteReader":
        """A reader of the file, which may appear later. Raises StoreError if it is of a newer release."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...

    def votes_after(self, cursor: int, limit: int = 1000) -> list[StoredVote]:
        """Effective votes with an id above `cursor`, in order; pass the last one's id as the next cursor.

        A vote that was changed comes again with a higher `revision`, one that was undone with the verdict `withdrawn`:
        both take the place of what came before with the same `presentation_id`. Skips come only in such a place.
        """
        ...

    def rankings_after(self, cursor: int, limit: int = 1000) -> list[StoredRanking]:
        """As `votes_after`, of rankings; those that were undone have no `ranks`."""
        ...

    def demonstrations_after(self, cursor: int, limit: int = 1000) -> list[StoredDemonstration]:
        """As `votes_after`, of answers that raters wrote."""
        ...

    def commands_after(self, cursor: int, limit: int = 100) -> list[Command]:
        """Commands with an id above `cursor`, in order."""
        ...
