"""The file of a judge: its answers, what they cost, and how far it agrees with people.

A request is written down with the tokens that it may cost before it is sent, and with what it did cost afterwards. So a
process that is killed meanwhile leaves a count that is not too low, and several processes share one limit. What one of
them asks is not asked by the others, which wait for its answer.
"""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.base.core.errors import StoreError

_WAIT_S = 60.0
_CHUNK = 500
_NAMES = {"answers", "requests", "costs", "agreements", "running"}
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, num_tokens INTEGER NOT NULL, created_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, state TEXT NOT NULL, num_tokens INTEGER NOT NULL,
    created_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS costs (
    id INTEGER PRIMARY KEY CHECK (id = 1), num_requests INTEGER NOT NULL, num_tokens INTEGER NOT NULL
);
INSERT OR IGNORE INTO costs VALUES (1, 0, 0);
CREATE TABLE IF NOT EXISTS agreements (judge TEXT PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS running (key TEXT PRIMARY KEY, pid INTEGER NOT NULL, until_s REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Requests that were sent, and the tokens of them: as the server counted, or, where it did not say, at most."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that is written down."""

    id: int
    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The outcome of questions: tickets of those to ask now, and `known` answers, which others have stored meanwhile.
    The rest is `busy`, being asked by others, or beyond the limits.
    """

    tickets: list[Ticket]
    known: dict[str, str]
    busy: set[str]


@dataclass(frozen=True, slots=True)
class PeopleAgreement:
    """How often a judge prefers the answer that people preferred, with the 95 % interval; a tie of the judge is half.

    `num_votes` are votes of people for one of two answers, to `num_prompts` prompts. `order_decided` is the share of
    pairs that the judge decided otherwise when they were shown in the other order; None for grades. `source` says whose
    votes they were.
    """

    share: float
    low: float
    high: float
    num_votes: int
    num_prompts: int
    order_decided: float | None
    source: str

    @classmethod
    def of_json(cls, stored: str) -> "PeopleAgreement":
        """The fields from JSON. Raises sqlite3.Error for what is damaged."""
        try:
            found = cls(**json.loads(stored))
        except (TypeError, ValueError) as error:
            raise _Damaged("an agreement with people in it is damaged") from error
        numbers = (found.share, found.low, found.high, found.num_votes, found.num_prompts, found.order_decided or 0)
        if not all(isinstance(one, int | float) for one in numbers):
            raise _Damaged("an agreement with people in it is damaged")
        return found


class _Damaged(sqlite3.DatabaseError):
    """The file can be opened, but holds what was never written."""


class LimitError(Exception):
    """One more request could cost more than is allowed. The message says what was used up."""


class Answers:
    """The answers in the file at `path`, which is made when it is first needed.

    Safe to call from any number of threads and processes. Raises StoreError for a file that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        if path.exists():  # one that cannot be used is told at once
            self.found(())

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def found(self, keys: Sequence[str]) -> dict[str, str]:
        """The answers to those of `keys` that have one, by key."""
        with self._transaction() as connection:
            return _found(connection, keys)

    def begin(
        self,
        wanted: Mapping[str, int],
        most_requests: int | None,
        most_tokens: int | None,
        longest_s: float | None = None,
    ) -> Begun:
        """Write down requests before they are sent, each by its key with the tokens that it may cost: those that the
        limits allow, in order, and that no other thread or process is asking. Raises LimitError if there are none, and
        nothing is known or busy.

        A request takes `longest_s` at most; None: others do not wait for it.
        """
        tickets: list[Ticket] = []
        busy = set[str]()
        why = ""
        with self._transaction() as connection:
            known = _found(connection, list(wanted))
            so_far = _costs(connection)
            requests, tokens = so_far.num_requests, so_far.num_tokens
            for key, num_tokens in wanted.items():
                if key in known:
                    continue
                if longest_s is not None and _is_running(connection, key):
                    busy.add(key)
                    continue
                if most_requests is not None and requests + 1 > most_requests:
                    why = f"{requests} of {most_requests} requests (most_requests) are used up"
                    break
                if most_tokens is not None and tokens + num_tokens > most_tokens:
                    why = f"{tokens} of {most_tokens} tokens (most_tokens) are used up; one more may cost {num_tokens}"
                    break
                requests, tokens = requests + 1, tokens + num_tokens
                values = key, "sent", num_tokens, time.time()
                row = "INSERT INTO requests (key, state, num_tokens, created_at) VALUES (?, ?, ?, ?)"
                tickets.append(Ticket(int(connection.execute(row, values).lastrowid or 0), key, num_tokens))
                if longest_s is not None:
                    values = key, os.getpid(), time.time() + longest_s
                    connection.execute("INSERT OR REPLACE INTO running VALUES (?, ?, ?)", values)
            connection.execute("UPDATE costs SET num_requests = ?, num_tokens = ?", (requests, tokens))
        if why and not (tickets or known or busy):
            raise LimitError(f"{why}, counted in {self.path}; raise the limit, or name another file (answers)")
        return Begun(tickets, known, busy)

    def end(self, ticket: Ticket, model: str, text: str, num_tokens: int | None) -> str:
        """Store an answer and what it cost, None for what was written down; returns the first answer to this key, which
        another process may have stored before.
        """
        used = ticket.num_tokens if num_tokens is None else num_tokens
        with self._transaction() as connection:
            self._settle(connection, ticket, "answered", used)
            row = "INSERT OR IGNORE INTO answers (key, model, text, num_tokens, created_at) VALUES (?, ?, ?, ?, ?)"
            connection.execute(row, (ticket.key, model, text, used, time.time()))
            query = "SELECT text FROM answers WHERE key = ?"
            return str(connection.execute(query, (ticket.key,)).fetchone()[0])

    def fail(self, ticket: Ticket, *, is_refused: bool) -> None:
        """Note that a request got no answer. One that a server refused cost no tokens, one that was lost may have."""
        state, used = ("refused", 0) if is_refused else ("lost", ticket.num_tokens)
        with self._transaction() as connection:
            self._settle(connection, ticket, state, used)

    def take_back(self, ticket: Ticket) -> None:
        """Strike out a request that no server saw: there was no connection."""
        with self._transaction() as connection:
            self._settle(connection, ticket, "not sent", 0)
            connection.execute("UPDATE costs SET num_requests = num_requests - 1")

    @property
    def costs(self) -> Costs:
        """What all requests cost so far, those that run included."""
        with self._transaction() as connection:
            return _costs(connection)

    def agreement(self, judge: str) -> PeopleAgreement | None:
        """The agreement with people that was measured last for the judge of this identity; None if none was."""
        with self._transaction() as connection:
            row = connection.execute("SELECT facts FROM agreements WHERE judge = ?", (judge,)).fetchone()
            return None if row is None else PeopleAgreement.of_json(row[0])

    def set_agreement(self, judge: str, found: PeopleAgreement) -> None:
        """Store what was measured."""
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO agreements VALUES (?, ?)", (judge, json.dumps(asdict(found))))

    @staticmethod
    def _settle(connection: sqlite3.Connection, ticket: Ticket, state: str, num_tokens: int) -> None:
        change = "UPDATE requests SET state = ?, num_tokens = ? WHERE id = ? AND state = 'sent'"
        if connection.execute(change, (state, num_tokens, ticket.id)).rowcount:
            more = num_tokens - ticket.num_tokens
            connection.execute("UPDATE costs SET num_tokens = num_tokens + ?", (more,))
            connection.execute("DELETE FROM running WHERE key = ? AND pid = ?", (ticket.key, os.getpid()))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                connection = self._opened()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.rollback()
                    raise
                connection.commit()
            except (sqlite3.Error, OSError) as error:
                raise StoreError(
                    f"{self.path} cannot be used as a file of answers: {error}; free the disk or the file, or name "
                    "another one (answers)"
                ) from error

    def _opened(self) -> sqlite3.Connection:
        """The connection of this process: one does not survive a fork."""
        if self._connection is None or self._pid != os.getpid():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            opened = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            if others := {str(name) for (name,) in opened.execute(query)} - _NAMES:
                opened.close()
                raise _Damaged(f"it is another database, with {', '.join(sorted(others)[:3])}")
            opened.executescript(_TABLES)
            self._connection, self._pid = opened, os.getpid()
        return self._connection


def _found(connection: sqlite3.Connection, keys: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for start in range(0, len(keys), _CHUNK):
        some = keys[start : start + _CHUNK]
        marks = ", ".join("?" * len(some))
        texts |= dict(connection.execute(f"SELECT key, text FROM answers WHERE key IN ({marks})", [*some]))
    if not all(isinstance(text, str) for text in texts.values()):
        raise _Damaged("an answer in it is no text")
    return texts


def _is_running(connection: sqlite3.Connection, key: str) -> bool:
    """True if a process that is alive asks for `key`, in time."""
    row = connection.execute("SELECT pid, until_s FROM running WHERE key = ?", (key,)).fetchone()
    if row is None or row[1] < time.time():
        return False
    try:
        os.kill(row[0], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _costs(connection: sqlite3.Connection) -> Costs:
    row = connection.execute("SELECT num_requests, num_tokens FROM costs").fetchone()
    if row is None or not all(isinstance(one, int) and one >= 0 for one in row):
        raise _Damaged("its costs are damaged")
    return Costs(*row)
