"""Votes for the pages: their number per minute, and comparisons of two policy versions or other models."""

import re
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, Table, exists, func, or_, select

from tunesmith.collect.store.database import ReadOnlyDatabase
from tunesmith.collect.store.queue import by_people
from tunesmith.collect.store.records import MODEL_SOURCE
from tunesmith.collect.store.tables import candidates, commands, item_candidates, items, presentations, rankings, votes

MINUTES = 60
"""Minutes that `per_minute` covers."""

_MINUTE_S = 60.0
_BATCH = 5_000
_EVEN = ("tie", "both_bad")
_NOTHING = ("skip", "withdrawn")
_SOURCE = re.compile(r"v\d{1,9}")


@dataclass(frozen=True, slots=True)
class Contest:
    """An effective vote between answers of two versions or models: `score` is 1 if `first` won, 0 if it lost, 0.5 for a
    tie or two bad answers. A version is named `v` and its number. Votes on one prompt depend on each other. `vote_id`
    is that of the vote.
    """

    first: str
    second: str
    score: float
    prompt_id: int
    vote_id: int = field(default=0, compare=False)


class VoteWatch(ReadOnlyDatabase):
    """Reads the votes of people added since the last call, without texts. Safe to call from any number of threads.

    Raises StoreError for a file that cannot be read.
    """

    name = "votes"

    def __init__(self, place: str | Path) -> None:
        super().__init__(place)
        self._counting = threading.Lock()
        self._counted = (_Counted(votes), _Counted(rankings))
        self._last_contest_id = 0
        self._changes = 0
        self._deletion = 0
        self._contests: dict[int, Contest] = {}

    @property
    def total(self) -> int:
        """Number of votes and rankings as of the last `per_minute`, without skips; undone ones are still counted."""
        return sum(one.total for one in self._counted)

    def per_minute(self, now: float) -> list[int]:
        """Number of votes and rankings in each of the last `MINUTES` minutes before `now`, oldest first, without skips.
        A changed one counts once.
        """

        def read(connection: Connection) -> None:
            for one in self._counted:
                one.read_new(connection, now - MINUTES * _MINUTE_S)

        counts = [0] * MINUTES
        with self._counting:
            self.read(read, None)
            for time in (time for one in self._counted for time in one.times):
                # After a clock was set back, votes lie in the future; they count as of now.
                counts[max(0, min(MINUTES - 1, MINUTES - 1 - int((now - time) // _MINUTE_S)))] += 1
        return counts

    def contests(self) -> tuple[int, list[Contest]]:
        """A change counter, and all contests. Gold items and rankings are left out."""
        with self._counting:
            deletion = self.read(_last_deletion, 0)
            if deletion != self._deletion:  # votes are gone: read the others again
                self._deletion, self._last_contest_id = deletion, 0
                self._contests.clear()
                self._changes += 1
            while self.read(self._compare, False):
                pass
            return self._changes, list(self._contests.values())

    def _compare(self, connection: Connection) -> bool:
        """Read the next batch of votes between versions; True if there may be more."""
        found = connection.execute(_between_versions(self._last_contest_id)).all()
        for row in found:
            self._last_contest_id = row.id
            first, second = _name(row.source_a, row.version_a), _name(row.source_b, row.version_b)
            if first is None or second is None or first == second:
                continue
            self._changes += 1
            if row.verdict in _NOTHING:
                self._contests.pop(row.presentation_id, None)
                continue
            score = 0.5 if row.verdict in _EVEN else float(row.chosen_candidate_id == row.first_id)
            self._contests[row.presentation_id] = Contest(first, second, score, row.prompt_id, row.id)
        return len(found) == _BATCH


class _Counted:
    """Times of the first revisions of the last hour in a table, and the total number of first revisions."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._last_id = 0
        self.times: deque[float] = deque()
        self.total = 0

    def read_new(self, connection: Connection, oldest: float) -> None:
        """Add new rows, and drop the times up to `oldest`."""
        ids, times = self._table.c.id, self._table.c.created_at
        of_person = exists().where(presentations.c.id == self._table.c.presentation_id, by_people())
        is_new = ids > self._last_id, self._table.c.revision == 1, self._table.c.verdict != "skip", of_person
        num_new, last_id = connection.execute(select(func.count(), func.max(ids)).where(*is_new)).one()
        if num_new:
            # Read before anything is counted: a query whose server went away is repeated.
            fresh = connection.execute(select(times).where(*is_new, times > oldest).order_by(ids)).scalars().all()
            self.times.extend(fresh)
            self.total += num_new
            self._last_id = last_id
        while self.times and self.times[0] <= oldest:
            self.times.popleft()


def _last_deletion(connection: Connection) -> int:
    """Id of the command that told of the last deletion of somebody's data; 0 without one."""
    query = select(func.max(commands.c.id)).where(commands.c.kind == "forget")
    return int(connection.execute(query).scalar() or 0)


def _name(source_id: str, weight_version: int | None) -> str | None:
    """Name of what generated an answer: a source such as `v12`, a model, else the version of its offer."""
    if source_id.startswith(MODEL_SOURCE):
        return source_id.removeprefix(MODEL_SOURCE)
    if _SOURCE.fullmatch(source_id):
        return source_id
    return None if weight_version is None else f"v{weight_version}"


def _between_versions(after: int) -> Select[*tuple[Any, ...]]:
    """Query of votes on pairs with answers of two sources; `a` is the item's first candidate."""
    place_a, place_b = item_candidates.alias("place_a"), item_candidates.alias("place_b")
    a, b = candidates.alias("a"), candidates.alias("b")
    return (
        select(
            votes.c.id,
            votes.c.presentation_id,
            votes.c.verdict,
            votes.c.chosen_candidate_id,
            a.c.id.label("first_id"),
            a.c.weight_version.label("version_a"),
            a.c.source_id.label("source_a"),
            b.c.weight_version.label("version_b"),
            b.c.source_id.label("source_b"),
            items.c.prompt_id,
        )
        .select_from(votes)
        .join(presentations, presentations.c.id == votes.c.presentation_id)
        .join(items, items.c.id == presentations.c.item_id)
        .join(place_a, (place_a.c.item_id == items.c.id) & (place_a.c.position == 0))
        .join(place_b, (place_b.c.item_id == items.c.id) & (place_b.c.position == 1))
        .join(a, a.c.id == place_a.c.candidate_id)
        .join(b, b.c.id == place_b.c.candidate_id)
        .where(votes.c.id > after, items.c.kind == "pair", items.c.is_gold.is_(False), by_people())
        .where(or_(a.c.weight_version != b.c.weight_version, a.c.source_id != b.c.source_id))
        .order_by(votes.c.id)
        .limit(_BATCH)
    )
