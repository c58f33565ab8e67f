"""`runs.db`: `RunStore`, the trainer's side and only writer; `RunReader`, the server's read access."""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import DBAPIError

from tunesmith.base.core.errors import StoreError
from tunesmith.collect.store.content import check_content, check_name
from tunesmith.collect.store.database import Closeable, OwnedDatabase, ReadOnlyDatabase, failure, or_now
from tunesmith.collect.store.items import check_answers, chunks
from tunesmith.collect.store.records import Candidate, Deleted, Heartbeat, NewOffer, Offer, PolicyVersion
from tunesmith.collect.store.tables import heartbeat, jobs, new_id, offer_candidates, offers, policy_versions

T = TypeVar("T")


TRIED = "tried on "
"""Begin of the note of a version that was served to a share of the conversations alone, so far."""


def is_only_tried(version: PolicyVersion) -> bool:
    """True if it is on trial, or the trial ended undecided: it was never served to everybody."""
    return not version.serving and version.note.startswith(TRIED)


class RunStore(Closeable):
    """Versions, offers, jobs and a heartbeat. Safe to call from several threads.

    A call returns when its change is committed, but not synced, because the data can be reproduced. `now` is in seconds
    since the epoch, by default the clock's.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = OwnedDatabase(place, "runs", durable=False)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path_or_url: str | Path) -> "RunStore":
        """The store in a file, which is created if missing. Raises StoreError as `VoteStore.open` does."""
        return cls(path_or_url)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def add_version(self, version: PolicyVersion) -> None:
        """Add or replace a version. If it is `serving`, the others stop serving."""

        def work(connection: Connection) -> None:
            if version.serving:
                connection.execute(update(policy_versions).values(serving=False))
            connection.execute(delete(policy_versions).where(policy_versions.c.version == version.version))
            connection.execute(insert(policy_versions).values(**asdict(version)))

        self._transact(work)

    def version(self, number: int) -> PolicyVersion | None:
        """The record of a version; None if there is none."""
        query = select(policy_versions).where(policy_versions.c.version == number)
        row = self._transact(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else PolicyVersion(**row)

    def mark_learnt(self, deleted: Deleted) -> list[int]:
        """Numbers of the versions that may have learnt from data that was deleted, which is noted in their records.

        Where a record does not say what was learnt, the version has learnt what was there when it was made.
        """
        table = policy_versions
        last = (
            (table.c.last_vote_id, deleted.vote_id),
            (table.c.last_feedback_id, deleted.feedback_id),
            (table.c.last_request_id, deleted.request_id),
        )
        is_known = or_(*(column.is_not(None) for column, _ in last))
        learnt = [table.c.version < 0, *(column >= smallest for column, smallest in last if smallest is not None)]
        if deleted.since is not None:
            learnt.append(and_(~is_known, table.c.version > 0, table.c.created_at > deleted.since))

        def work(connection: Connection) -> list[int]:
            found = list(connection.execute(select(table.c.version).where(or_(*learnt))).scalars())
            for part in chunks(found):
                connection.execute(update(table).where(table.c.version.in_(part)).values(learnt_deleted=True))
            return found

        return self._transact(work)

    def add_offers(self, new: Sequence[NewOffer], *, retires_before: int = 0, now: float | None = None) -> list[int]:
        """Ids of the new offers, in order. Offers with an id below `retires_before` become stale.

        Raises DataError for fewer than two or equal answers, or text that cannot be stored (`content.is_storable`);
        then nothing is added.
        """
        for number, offer in enumerate(new, start=1):
            check_content(offer.prompt, f"the prompt of offer {number}")
            check_answers([candidate.text for candidate in offer.candidates], f"offer {number}")
        moment = or_now(now)
        return self._transact(lambda c: [_add_offer(c, offer, retires_before, moment) for offer in new])

    def start_job(self, kind: str, detail: Mapping[str, object] | None = None, now: float | None = None) -> int:
        """Id of a new job in the state `running`."""
        values = {
            "kind": check_name(kind, "a job's kind")[:64],
            "state": "running",
            "created_at": or_now(now),
            "detail_json": detail or {},
        }
        return self._transact(lambda connection: new_id(connection.execute(insert(jobs).values(**values))))

    def num_jobs(self, kind: str) -> int:
        """Number of jobs of this kind that were started."""
        query = select(func.count()).select_from(jobs).where(jobs.c.kind == kind)
        return self._transact(lambda connection: int(connection.execute(query).scalar_one()))

    def end_job(
        self,
        job_id: int,
        state: str = "done",
        detail: Mapping[str, object] | None = None,
        now: float | None = None,
    ) -> None:
        """Mark the end of a job; `detail` replaces that of its start."""
        values: dict[str, object] = {"state": state[:32], "ended_at": or_now(now)}
        if detail is not None:
            values["detail_json"] = detail
        self._transact(lambda connection: connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values)))

    def beat(self, state: str, now: float | None = None) -> None:
        """Write the heartbeat: process id, host, time and `state`."""
        host = socket.gethostname()[:200]
        values = {"pid": os.getpid(), "host": host, "time": or_now(now), "state": state[:64]}

        def work(connection: Connection) -> None:
            if not connection.execute(update(heartbeat).where(heartbeat.c.id == 1).values(**values)).rowcount:
                connection.execute(insert(heartbeat).values(id=1, **values))

        self._transact(work)

    def _transact(self, work: Callable[[Connection], T]) -> T:
        with self._lock:
            if self._database.connection.closed:
                raise StoreError(f"{self._database.place} is closed")
            try:
                with self._database.connection.begin():
                    return work(self._database.connection)
            except DBAPIError as error:
                raise failure(self._database.place, error) from error


class RunReader(ReadOnlyDatabase):
    """Offers, versions and the heartbeat."""

    name = "runs"

    def offers_after(self, cursor: int, limit: int = 100) -> list[Offer]:
        """Offers with an id above `cursor`, in order."""
        return self.read(lambda connection: _offers_after(connection, cursor, limit), [])

    def versions(self) -> list[PolicyVersion]:
        """All versions, oldest first."""
        query = select(policy_versions).order_by(policy_versions.c.version)
        return self.read(lambda c: [PolicyVersion(**row) for row in c.execute(query).mappings()], [])

    def heartbeat(self) -> Heartbeat | None:
        """The trainer's last heartbeat; None if there was never one."""
        query = select(heartbeat.c.pid, heartbeat.c.host, heartbeat.c.time, heartbeat.c.state)
        row = self.read(lambda c: c.execute(query).mappings().first(), None)
        return None if row is None else Heartbeat(**row)


def _offers_after(connection: Connection, cursor: int, limit: int) -> list[Offer]:
    columns = [column for column in offers.c if column is not offers.c.prompt_json]
    query = select(*columns, offers.c.prompt_json.label("prompt")).where(offers.c.id > cursor)
    found = {row["id"]: row for row in connection.execute(query.order_by(offers.c.id).limit(limit)).mappings()}
    answers: dict[int, list[Candidate]] = {offer_id: [] for offer_id in found}
    for chunk in chunks(list(found)):
        query = select(offer_candidates).where(offer_candidates.c.offer_id.in_(chunk))
        for row in connection.execute(query.order_by(offer_candidates.c.offer_id, offer_candidates.c.position)):
            version: int = found[row.offer_id]["version"]
            source = row.source_id or f"policy-{version}"
            answers[row.offer_id].append(Candidate(row.text, row.token_ids_json, row.logps_json, version, source))
    return [Offer(**row, candidates=tuple(answers[offer_id])) for offer_id, row in found.items()]


def _add_offer(connection: Connection, offer: NewOffer, retires_before: int, now: float) -> int:
    result = connection.execute(
        insert(offers).values(
            version=offer.version,
            heldout=offer.heldout,
            selection=offer.selection[:64],
            prompt_json=offer.prompt,
            retires_before=retires_before,
            created_at=now,
        )
    )
    offer_id = new_id(result)
    rows = [
        {
            "offer_id": offer_id,
            "position": position,
            "text": candidate.text,
            "token_ids_json": candidate.token_ids,
            "logps_json": candidate.logps,
            "source_id": candidate.source_id[:200],
        }
        for position, candidate in enumerate(offer.candidates)
    ]
    connection.execute(insert(offer_candidates), rows)
    return offer_id
