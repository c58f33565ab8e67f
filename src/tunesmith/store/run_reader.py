"""`RunReader`: how the server reads `runs.db`, without ever writing or checkpointing it."""

from pathlib import Path

from tunesmith.store.records import Heartbeat, Job, Metric, Offer, PolicyVersion, Series


class RunReader:
    """Offers, versions and metrics by cursor. A file or table that is not there yet is "nothing yet".

    Safe to call from any number of threads.
    """

    @classmethod
    def open(cls, path_or_url: str | Path) -> "RunReader":
        """A reader of the file, which may appear later. Raises StoreError if it is of a newer release."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...

    def offers_after(self, cursor: int, limit: int = 100) -> list[Offer]:
        """Offers with an id above `cursor`, in order."""
        ...

    def versions(self) -> list[PolicyVersion]:
        """All versions, oldest first."""
        ...

    def metric_names(self) -> list[str]:
        """Names of all metrics, sorted."""
        ...

    def series(self, name: str, after_id: int = 0, points: int = 2000) -> Series:
        """The metric's points with an id above `after_id`, at most about `points`: of each bucket the lowest and the
        highest, and every gap (a value of None) that a bucket begins with."""
        ...

    def metrics_after(self, cursor: int, limit: int = 1000) -> list[Metric]:
        """Metrics of every name with an id above `cursor`, in order."""
        ...

    def last_metric_id(self) -> int:
        """The newest metric's id, 0 if there is none."""
        ...

    def jobs_after(self, cursor: int, limit: int = 100) -> list[Job]:
        """Jobs with an id above `cursor`, in order, as they are now."""
        ...

    def heartbeat(self) -> Heartbeat | None:
        """The trainer's last sign of life; None if there was never one."""
        ...
