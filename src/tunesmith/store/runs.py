"""`RunStore`: the trainer's side of `runs.db`, its only writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.store.records import NewOffer, PolicyVersion


class RunStore:
    """Versions, offers, metrics and a heartbeat. To be used by one thread at a time."""

    @classmethod
    def open(cls, path_or_url: str | Path) -> "RunStore":
        """The store in a file, which is made if it is missing. Raises StoreError as `VoteStore.open` does."""
        ...

    def close(self) -> None:
        """Let go of the file. Harmless if called twice."""
        ...

    def __enter__(self) -> "RunStore": ...

    def __exit__(self, *exc: object) -> None: ...

    def add_version(self, version: PolicyVersion) -> None:
        """Add or replace a version. If it is `serving`, no other one is."""
        ...

    def set_serving(self, version: int) -> None:
        """Let this version serve and no other. Raises StoreError if there is none of this number."""
        ...

    def add_offers(
        self, offers: Sequence[NewOffer], *, retires_before: int = 0, now: float | None = None
    ) -> list[int]:
        """Ids of the offers, in their order. Offers with an id below `retires_before` are stale from now on.

        Raises DataError for fewer than two or equal answers, or a text that cannot be stored (`text.is_storable`).
        """
        ...

    def add_metrics(self, step: int, values: Mapping[str, float], now: float | None = None) -> None:
        """Write the numbers of a step, one row each; those that are not finite as null."""
        ...

    def add_metric_rows(self, rows: Sequence[tuple[int, float, str, float]]) -> None:
        """Write (step, time, name, value) rows in one transaction, as `watch` does of `metrics.jsonl`."""
        ...

    def truncate_metrics(self, from_step: int) -> int:
        """Number of metrics removed: those of `from_step` and later, as on resume."""
        ...

    def start_job(self, kind: str, detail: Mapping[str, object] | None = None, now: float | None = None) -> int:
        """Id of a job that has begun."""
        ...

    def end_job(
        self,
        job_id: int,
        state: str = "done",
        detail: Mapping[str, object] | None = None,
        now: float | None = None,
    ) -> None:
        """Mark the end of a job."""
        ...

    def beat(self, state: str, now: float | None = None) -> None:
        """Sign of life: this process, its host, the time and what it is doing."""
        ...
