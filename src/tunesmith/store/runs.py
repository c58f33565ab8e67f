"""`RunStore`: the trainer's side of `runs.db`, its only writer."""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError

from tunesmith.core.errors import StoreError
from tunesmith.store.content import check_content, check_name, encode_content, encode_numbers
from tunesmith.store.database import OwnedDatabase, failure
from tunesmith.store.items import check_answers
from tunesmith.store.records import NewOffer, PolicyVersion
from tunesmith.store.tables import heartbeat, jobs, metrics, offer_candidates, offers, policy_versions

T = TypeVar("T")


class RunStore:
    """Versions, offers, metrics and a heartbeat. Safe to call from several threads; a call returns when its change is
    committed (not synced: what is here can be made again).

    `now` is the time in seconds since the epoch; left out, it is the clock's.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = OwnedDatabase(place, "runs", durable=False)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path_or_url: str | Path) -> "RunStore":
        """The store in a file, which is made if it is missing. Raises StoreError as `VoteStore.open` does."""
        return cls(path_or_url)

    def close(self) -> None:
        """Let go of the file. Harmless if called twice."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add_version(self, version: PolicyVersion) -> None:
        """Add or replace a version. If it is `serving`, no other one is."""

        def work(connection: Connection) -> None:
            if version.serving:
                connection.execute(update(policy_versions).values(serving=False))
            connection.execute(delete(policy_versions).where(policy_versions.c.version == version.version))
            connection.execute(insert(policy_versions).values(**asdict(version)))

        self._transact(work)

    def set_serving(self, version: int) -> None:
        """Let this version serve and no other. Raises StoreError if there is none of this number."""

        def work(connection: Connection) -> None:
            is_it = policy_versions.c.version == version
            if connection.execute(select(policy_versions.c.version).where(is_it)).first() is None:
                raise StoreError(f"there is no version {version} of the policy")
            connection.execute(update(policy_versions).values(serving=False))
            connection.execute(update(policy_versions).where(is_it).values(serving=True))

        self._transact(work)

    def add_offers(self, new: Sequence[NewOffer], *, retires_before: int = 0, now: float | None = None) -> list[int]:
        """Ids of the offers, in their order. Offers with an id below `retires_before` are stale from now on.

        Raises DataError for fewer than two or equal answers, or a text that cannot be stored (see
        `content.is_storable`); then nothing is added.
        """
        for number, offer in enumerate(new, start=1):
            check_content(offer.prompt, f"the prompt of offer {number}")
            check_answers([candidate.text for candidate in offer.candidates], f"offer {number}")
        moment = _or_now(now)
        return self._transact(lambda c: [_add_offer(c, offer, retires_before, moment) for offer in new])

    def add_metrics(self, step: int, values: Mapping[str, float], now: float | None = None) -> None:
        """Write the numbers of a step, one row each; those that are not finite as null."""
        moment = _or_now(now)
        self.add_metric_rows([(step, moment, name, value) for name, value in values.items()])

    def add_metric_rows(self, rows: Sequence[tuple[int, float, str, float | None]]) -> None:
        """Write (step, time, name, value) rows in one transaction, as is done of a `metrics.jsonl`."""
        if not rows:
            return
        values = [
            {
                "step": step,
                "time": moment,
                "name": check_name(name, "a metric's name"),
                "value": value if value is not None and math.isfinite(value) else None,
            }
            for step, moment, name, value in rows
        ]
        self._transact(lambda connection: connection.execute(insert(metrics), values))

    def truncate_metrics(self, from_step: int) -> int:
        """Number of metrics removed: those of `from_step` and later, as on resume."""
        return self._transact(lambda c: c.execute(delete(metrics).where(metrics.c.step >= from_step)).rowcount)

    def start_job(self, kind: str, detail: Mapping[str, object] | None = None, now: float | None = None) -> int:
        """Id of a job that has begun."""
        values = {
            "kind": check_name(kind, "a job's kind")[:64],
            "state": "running",
            "created_at": _or_now(now),
            "detail_json": json.dumps(dict(detail or {})),
        }
        return self._transact(lambda connection: _new_id(connection.execute(insert(jobs).values(**values))))

    def num_jobs(self, kind: str) -> int:
        """Number of jobs of this kind that have begun so far."""
        query = select(func.count()).select_from(jobs).where(jobs.c.kind == kind)
        return self._transact(lambda connection: int(connection.execute(query).scalar_one()))

    def end_job(
        self,
        job_id: int,
        state: str = "done",
        detail: Mapping[str, object] | None = None,
        now: float | None = None,
    ) -> None:
        """Mark the end of a job; `detail` takes the place of the one it began with."""
        values: dict[str, object] = {"state": state[:32], "ended_at": _or_now(now)}
        if detail is not None:
            values["detail_json"] = json.dumps(dict(detail))
        self._transact(lambda connection: connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values)))

    def beat(self, state: str, now: float | None = None) -> None:
        """Sign of life: this process, its host, the time and what it is doing."""
        values = {
            "pid": os.getpid(),
            "host": socket.gethostname()[:200],
            "time": _or_now(now),
            "state": state[:64],
        }

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


def _add_offer(connection: Connection, offer: NewOffer, retires_before: int, now: float) -> int:
    result = connection.execute(
        insert(offers).values(
            version=offer.version,
            heldout=offer.heldout,
            prompt_json=encode_content(offer.prompt),
            retires_before=retires_before,
            created_at=now,
        )
    )
    offer_id = _new_id(result)
    rows = [
        {
            "offer_id": offer_id,
            "position": position,
            "text": candidate.text,
            "token_ids_json": encode_numbers(candidate.token_ids),
            "logps_json": encode_numbers(candidate.logps),
            "source_id": candidate.source_id[:200],
        }
        for position, candidate in enumerate(offer.candidates)
    ]
    connection.execute(insert(offer_candidates), rows)
    return offer_id


def _new_id(result: Any) -> int:
    return int(result.inserted_primary_key[0])


def _or_now(now: float | None) -> float:
    return time.time() if now is None else now
