"""What the watch page asks of the votes: how many come each minute, and which were between answers of two versions."""

import re
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, func, or_, select

from tunesmith.store.database import ReadOnlyDatabase
from tunesmith.store.tables import candidates, item_candidates, items, presentations, votes

MINUTES = 60
"""Minutes that `per_minute` looks back."""

_MINUTE_S = 60.0
_PORTION = 5_000
_EVEN = ("tie", "both_bad")
_NOTHING = ("skip", "withdrawn")
_SOURCE = re.compile(r"v(\d{1,9})")


@dataclass(frozen=True, slots=True)
class VersionContest:
    """An effective vote between answers of two versions: `score` 1 if `first` won, 0 if it lost, 0.5 for a tie, also
    of two bad answers.
    """

    first: int
    second: int
    score: float
    prompt_id: int


class VoteWatch:
    """Reads only votes that are new since the last call, and of those no texts. Safe to call from any number of threads.

    A file that is not there yet has no votes. Raises StoreError for one that cannot be read.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = ReadOnlyDatabase(place, "votes")
        self._lock = threading.Lock()
        self._times: deque[float] = deque()
        self._total = 0
        self._last_vote_id = 0
        self._last_contest_id = 0
        self._changes = 0
        self._contests: dict[int, VersionContest] = {}

    @property
    def total(self) -> int:
        """Presentations that were voted on, as of the last `per_minute`; those undone since are still counted."""
        return self._total

    def close(self) -> None:
        """Close all connections. Harmless if called twice."""
        self._database.close()

    def per_minute(self, now: float) -> list[int]:
        """Votes of each of the last `MINUTES` minutes before `now`, the oldest first. A changed vote counts once."""
        with self._lock:
            oldest = now - MINUTES * _MINUTE_S
            self._database.read(lambda connection: self._count(connection, oldest), None)
            while self._times and self._times[0] <= oldest:
                self._times.popleft()
            counts = [0] * MINUTES
            for time in self._times:
                # A clock that was set back makes votes of the future; they count as of now.
                counts[max(0, min(MINUTES - 1, MINUTES - 1 - int((now - time) // _MINUTE_S)))] += 1
            return counts

    def contests(self) -> tuple[int, list[VersionContest]]:
        """A number that grows with every change, and the contests. Gold items and rankings are left out."""
        with self._lock:
            while self._database.read(self._compare, False):
                pass
            return self._changes, list(self._contests.values())

    def _count(self, connection: Connection, oldest: float) -> None:
        last = connection.execute(select(func.max(votes.c.id))).scalar() or 0
        if last <= self._last_vote_id:
            return
        new = (votes.c.revision == 1, votes.c.id > self._last_vote_id, votes.c.id <= last)
        if self._last_vote_id == 0:
            # Only the times of the last hour are kept, and ids grow with time.
            self._total = connection.execute(select(func.count()).where(*new[:1])).scalar() or 0
            self._times.extend(_recent(connection, oldest))
        else:
            times = connection.execute(select(votes.c.created_at).where(*new).order_by(votes.c.id)).scalars().all()
            self._total += len(times)
            self._times.extend(times)
        self._last_vote_id = last

    def _compare(self, connection: Connection) -> bool:
        """Take in the next portion of votes between versions; True if there may be more."""
        found = connection.execute(_between_versions(self._last_contest_id)).all()
        for row in found:
            self._last_contest_id = row.id
            first, second = _version(row.source_a, row.version_a), _version(row.source_b, row.version_b)
            if first is None or second is None or first == second:
                continue
            self._changes += 1
            if row.verdict in _NOTHING:
                self._contests.pop(row.presentation_id, None)
                continue
            score = 0.5 if row.verdict in _EVEN else float(row.chosen_candidate_id == row.first_id)
            self._contests[row.presentation_id] = VersionContest(first, second, score, row.prompt_id)
        return len(found) == _PORTION


def _recent(connection: Connection, oldest: float) -> list[float]:
    """Times of first votes after `oldest`, in order, read backwards from the newest."""
    times: list[float] = []
    below: int | None = None
    while True:
        query = select(votes.c.id, votes.c.created_at, votes.c.revision).order_by(votes.c.id.desc()).limit(_PORTION)
        rows = connection.execute(query if below is None else query.where(votes.c.id < below)).all()
        times += [created_at for _, created_at, revision in rows if revision == 1 and created_at > oldest]
        if len(rows) < _PORTION or rows[-1].created_at <= oldest:
            return times[::-1]
        below = rows[-1].id


def _version(source_id: str, weight_version: int | None) -> int | None:
    """The version that wrote an answer: the trainer names it `v12`; else the version that it was offered with."""
    found = _SOURCE.fullmatch(source_id)
    return weight_version if found is None else int(found[1])


def _between_versions(after: int) -> Select[Any]:
    """Votes on pairs whose two answers were written by two sources: the first candidate of the item is `a`."""
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
        .where(votes.c.id > after, items.c.kind == "pair", items.c.is_gold.is_(False))
        .where(or_(a.c.weight_version != b.c.weight_version, a.c.source_id != b.c.source_id))
        .order_by(votes.c.id)
        .limit(_PORTION)
    )
