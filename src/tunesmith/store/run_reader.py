"""`RunReader`: how the server reads `runs.db`, without ever writing or checkpointing it."""

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from tunesmith.store import series as series_of
from tunesmith.store.candidates import chunks
from tunesmith.store.content import decode_content, decode_floats, decode_ints
from tunesmith.store.database import ReadOnlyDatabase
from tunesmith.store.records import Candidate, Heartbeat, Job, Metric, Offer, PolicyVersion, Series
from tunesmith.store.tables import heartbeat, jobs, metrics, offer_candidates, offers, policy_versions


class RunReader:
    """Offers, versions and metrics by cursor. A file or table that is not there yet is "nothing yet".

    Safe to call from any number of threads.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = ReadOnlyDatabase(place, "runs")

    @classmethod
    def open(cls, path_or_url: str | Path) -> "RunReader":
        """A reader of the file, which may appear later. Its calls raise StoreError if it is of another release."""
        return cls(path_or_url)

    def close(self) -> None:
        """Let go of the file. Harmless if called twice."""
        self._database.close()

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def offers_after(self, cursor: int, limit: int = 100) -> list[Offer]:
        """Offers with an id above `cursor`, in order."""
        return self._database.read(lambda connection: _offers_after(connection, cursor, limit), [])

    def versions(self) -> list[PolicyVersion]:
        """All versions, oldest first."""
        query = select(policy_versions).order_by(policy_versions.c.version)
        return self._database.read(lambda c: [PolicyVersion(**row) for row in c.execute(query).mappings()], [])

    def metric_names(self) -> list[str]:
        """Names of all metrics, sorted."""
        return self._database.read(series_of.metric_names, [])

    def series(self, name: str, after_id: int = 0, points: int = 2000) -> Series:
        """The metric's points with an id above `after_id`, in order: all of them if they are at most `points`, else of
        each of `points // 2` buckets the lowest and the highest, and the first gap (a value of None) where it has one.
        """
        nothing = Series(name, (), after_id, 0, False)
        return self._database.read(lambda c: series_of.series(c, name, after_id, points), nothing)

    def metrics_after(self, cursor: int, limit: int = 1000) -> list[Metric]:
        """Metrics of every name with an id above `cursor`, in order."""
        query = select(metrics).where(metrics.c.id > cursor).order_by(metrics.c.id).limit(limit)
        return self._database.read(lambda c: [Metric(**row) for row in c.execute(query).mappings()], [])

    def last_metric_id(self) -> int:
        """The newest metric's id, 0 if there is none."""
        return self._database.read(lambda c: int(c.execute(select(func.max(metrics.c.id))).scalar() or 0), 0)

    def jobs_after(self, cursor: int, limit: int = 100) -> list[Job]:
        """Jobs with an id above `cursor`, in order, as they are now."""
        query = select(jobs).where(jobs.c.id > cursor).order_by(jobs.c.id).limit(limit)
        return self._database.read(lambda c: [_job(row) for row in c.execute(query)], [])

    def heartbeat(self) -> Heartbeat | None:
        """The trainer's last sign of life; None if there was never one."""
        query = select(heartbeat.c.pid, heartbeat.c.host, heartbeat.c.time, heartbeat.c.state)

        def read(connection: Connection) -> Heartbeat | None:
            row = connection.execute(query).mappings().first()
            return None if row is None else Heartbeat(**row)

        return self._database.read(read, None)


def _offers_after(connection: Connection, cursor: int, limit: int) -> list[Offer]:
    rows = connection.execute(select(offers).where(offers.c.id > cursor).order_by(offers.c.id).limit(limit)).all()
    versions = {row.id: row.version for row in rows}
    answers: dict[int, list[Candidate]] = {row.id: [] for row in rows}
    for chunk in chunks([row.id for row in rows]):
        query = select(offer_candidates).where(offer_candidates.c.offer_id.in_(chunk))
        for row in connection.execute(query.order_by(offer_candidates.c.offer_id, offer_candidates.c.position)):
            answers[row.offer_id].append(_candidate(row, versions[row.offer_id]))
    return [
        Offer(
            id=row.id,
            version=row.version,
            prompt=decode_content(row.prompt_json),
            candidates=tuple(answers[row.id]),
            heldout=row.heldout,
            created_at=row.created_at,
            retires_before=row.retires_before,
        )
        for row in rows
    ]


def _candidate(row: Any, version: int) -> Candidate:
    return Candidate(
        text=row.text,
        token_ids=decode_ints(row.token_ids_json),
        logps=decode_floats(row.logps_json),
        weight_version=version,
        source_id=row.source_id or f"policy-{version}",
    )


def _job(row: Any) -> Job:
    return Job(row.id, row.kind, row.state, row.created_at, row.ended_at, row.detail_json)
