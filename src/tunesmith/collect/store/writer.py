"""`Writer`: the one thread that changes a database, with changes that come together in one transaction."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from tunesmith.base.core.errors import StoreError
from tunesmith.collect.store.database import OwnedDatabase, failure
from tunesmith.collect.store.postgres import WAIT_S

T = TypeVar("T")

GROUP_S = 0.005
"""Changes that arrive within this time of the first are committed with it."""


class Writer:
    """Applies changes in one thread, each atomically, and commits those that wait together (group commit).

    If the database's server goes away meanwhile, it is waited for, and a group that was not committed is applied again:
    a change may be called several times, and has no effect but on the database.
    """

    def __init__(self, database: OwnedDatabase) -> None:
        self._database = database
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="tunesmith-store", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Connection], T]) -> T:
        """The value of `work` once its change is on disk. If it raises, its change is rolled back.

        Raises StoreError if the database could not be written, or is closed.
        """
        change = _Change(work)
        with self._lock:
            if not self._is_open:
                raise StoreError(f"{self._database.place} is closed")
            self._changes.put(change)
        return change.future.result()

    def is_awaited(self) -> bool:
        """True if further changes wait for the one that calls this."""
        return not self._changes.empty() or self._database.is_awaited()

    def close(self) -> None:
        """Finish pending changes and close the database. Harmless if called twice."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._changes.put(None)
        self._thread.join()
        self._database.close()

    def _serve(self) -> None:
        while (change := self._changes.get()) is not None:
            group: list[_Change] = []
            error = self._commit(change, group)
            if isinstance(error, DBAPIError):
                error = failure(self._database.place, error)
            for one in group or [change]:  # none, if the transaction did not begin
                if isinstance(one.error, DBAPIError) and not isinstance(one.error, IntegrityError):
                    one.error = failure(self._database.place, one.error)
                one.tell(error)

    def _commit(self, first: "_Change", group: list["_Change"]) -> BaseException | None:
        """Apply and commit `first` and what arrives meanwhile, which is put into `group`; returns why it failed."""
        until_s = time.monotonic() + WAIT_S
        while True:
            outcome, transaction = _Outcome(), ""
            with outcome:
                self._database.prepare()
                with self._database.connection.begin():
                    self._apply_group(first, group)
                    self._check_unbroken()
                    transaction = self._database.transaction()
            if outcome.error is None:
                return None
            end = self._database.settle(outcome.error, transaction, until_s)
            if end != "undone":
                return None if end == "stored" else outcome.error

    def _apply_group(self, first: "_Change", group: list["_Change"]) -> None:
        again = tuple(group)
        for change in again or self._arriving(first):
            if not again:
                group.append(change)
            with change, self._database.connection.begin_nested():
                change.value = change.work(self._database.connection)
            if isinstance(change.error, DBAPIError) and not isinstance(change.error, IntegrityError | DataError):
                # The database may have rolled back everything, so no change of the group may be acknowledged.
                raise change.error

    def _arriving(self, first: "_Change") -> Iterator["_Change"]:
        """`first` and the changes that come soon after it."""
        deadline = time.monotonic() + GROUP_S
        change: _Change | None = first
        while change is not None:
            yield change
            change = self._next_before(deadline)

    def _next_before(self, deadline: float) -> "_Change | None":
        if time.monotonic() > deadline or self._changes.empty():
            return None
        change = self._changes.get()
        if change is None:
            # For `_serve`, which ends after this group.
            self._changes.put(None)
        return change

    def _check_unbroken(self) -> None:
        """Raise StoreError if SQLite ended the transaction by itself, as it does when the disk is full."""
        raw = self._database.connection.connection.dbapi_connection
        if getattr(raw, "in_transaction", True) is False:
            raise StoreError(f"{self._database.place}: the transaction was rolled back; is the disk full?")


class _Outcome:
    """Keeps the exception of its `with` block."""

    error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


class _Change(_Outcome):
    """A change, its value or exception, and the future on which its caller waits."""

    def __init__(self, work: Callable[[Connection], Any]) -> None:
        self.work = work
        self.value: object = None
        self.future: Future[Any] = Future()

    def tell(self, group_error: BaseException | None) -> None:
        """Wake the caller after the commit, or with `group_error` if it failed."""
        error = group_error or self.error
        if error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(error)
