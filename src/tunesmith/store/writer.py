"""The one thread that writes a database. Callers wait until their change is on disk."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from tunesmith.core.errors import StoreError
from tunesmith.store.database import OwnedDatabase, failure

T = TypeVar("T")

GROUP_S = 0.005
"""Changes that come within this time of the first are committed with it."""

Work = Callable[[Connection], Any]


class Writer:
    """Applies changes one after the other, each whole or not at all, and commits those that wait together."""

    def __init__(self, database: OwnedDatabase) -> None:
        self._database = database
        self._jobs: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="tunesmith-store", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Connection], T]) -> T:
        """What `work` gave, once it is on disk. What it raises is raised here, and nothing of it is stored.

        Raises StoreError if the database could not be written, or is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if not self._is_open:
                raise StoreError(f"{self._database.place} is closed")
            self._jobs.put((work, future))
        return future.result()

    def close(self) -> None:
        """Finish what was asked and close the database. Harmless if called twice."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._jobs.put(None)
        self._thread.join()
        self._database.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            group: list[_Done] = []
            outcome = _Outcome()
            with outcome, self._database.connection.begin():
                self._apply_group(job, group)
                self._check_unbroken()
            for done in group:
                done.tell(outcome.error)

    def _apply_group(self, first: tuple[Work, "Future[Any]"], group: list["_Done"]) -> None:
        deadline = time.monotonic() + GROUP_S
        job: tuple[Work, Future[Any]] | None = first
        while job is not None:
            done = _Done(job[1])
            group.append(done)
            with done.outcome, self._database.connection.begin_nested():
                done.value = job[0](self._database.connection)
            if isinstance(done.outcome.error, DBAPIError) and not isinstance(done.outcome.error, IntegrityError):
                # The database may have rolled back everything: nothing of the group may be called stored.
                raise failure(self._database.place, done.outcome.error) from done.outcome.error
            job = self._next_before(deadline)

    def _next_before(self, deadline: float) -> tuple[Work, "Future[Any]"] | None:
        if time.monotonic() > deadline:
            return None
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return None
        if job is None:
            self._jobs.put(None)
        return job

    def _check_unbroken(self) -> None:
        """Raise StoreError if SQLite ended the transaction by itself, as it does when the disk is full."""
        raw = self._database.connection.connection.dbapi_connection
        if getattr(raw, "in_transaction", True) is False:
            raise StoreError(f"{self._database.place}: the transaction was rolled back; is the disk full?")


class _Outcome:
    """Keeps whatever is raised in the block, for the thread that waits."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


class _Done:
    """A change that was applied and waits for the commit."""

    def __init__(self, future: "Future[Any]") -> None:
        self.outcome = _Outcome()
        self.value: object = None
        self._future = future

    def tell(self, group_error: BaseException | None) -> None:
        """Wake the caller, with the value or with what went wrong."""
        error = self.outcome.error if group_error is None else _as_store_error(group_error)
        if error is None:
            self._future.set_result(self.value)
        else:
            self._future.set_exception(error)


def _as_store_error(error: BaseException) -> BaseException:
    return failure("the database", error) if isinstance(error, DBAPIError) else error
