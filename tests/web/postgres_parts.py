"""A server of PostgreSQL in a folder of its own, which is reached by a socket in it."""

import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, make_url

from tunesmith.collect.store.tables import votes_metadata
from tunesmith.collect.store.votes import VoteStore

DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""Where Debian has the programs, which are not in PATH."""

PATH = os.pathsep.join([os.environ.get("PATH", ""), *map(str, reversed(DEBIAN))])
START_S = 60
SOCKET = ".s.PGSQL.5432"


@dataclass
class Postgres:
    """`start` and `stop` may be called again and again; `close` removes everything."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tunesmith-pg-", dir="/tmp")))
    num_databases: int = 0
    is_prepared: bool = False

    def make(self, *, is_durable: bool = False) -> "Postgres":
        if os.geteuid() == 0:  # whom PostgreSQL refuses
            shutil.chown(self.folder, "postgres", "postgres")
        self._run("initdb", "--username=tunesmith", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "-D")
        settings = ["listen_addresses = ''", f"unix_socket_directories = '{self.folder}'", "max_connections = 200"]
        settings += [f"fsync = {'on' if is_durable else 'off'}"]
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.write("\n".join([*settings, "shared_buffers = 32MB", ""]))
        logins = self.folder / "data" / "pg_hba.conf"
        logins.write_text("local all guarded scram-sha-256\n" + logins.read_text())
        return self.start()

    def start(self) -> "Postgres":
        self._run("pg_ctl", "start", "--silent", "--wait", f"--timeout={START_S}", f"--log={self.folder}/log", "-D")
        return self

    def stop(self, mode: str = "fast") -> None:
        """With `immediate` as after a crash: nothing is finished, and the next start recovers from the log."""
        self._run("pg_ctl", "stop", "--silent", "--wait", f"--mode={mode}", "-D")

    def close(self) -> None:
        self.stop("immediate")
        shutil.rmtree(self.folder)

    def url(self, database: str = "postgres", user: str = "tunesmith") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def new(self, name: str = "", options: str = "") -> str:
        """The URL of a new database, empty."""
        self.num_databases += 1
        name = name or f"votes{self.num_databases}"
        self.execute(f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def emptied(self) -> str:
        """The URL of a database with the empty tables of a store, always the same one."""
        if not self.is_prepared:
            VoteStore.open(self.new("emptied")).close()
            self.is_prepared = True
        self.end_sessions("emptied")
        tables = ", ".join(one.name for one in votes_metadata.sorted_tables)
        self.execute(f"TRUNCATE {tables} RESTART IDENTITY", "emptied")
        return self.url("emptied")

    def end_sessions(self, database: str) -> int:
        """Number of the sessions of a database, which are ended as an administrator ends them."""
        query = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database}'"
        return len(self.execute(query))

    def execute(self, sql: str, database: str = "postgres") -> Any:
        """The rows of a statement, outside of a transaction; none for one without rows."""
        url = make_url(self.url(database)).set(drivername="postgresql+psycopg")
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            found = connection.exec_driver_sql(sql)
            return found.fetchall() if found.returns_rows else []

    def num_waiting(self, database: str) -> int:
        """Number of sessions that wait for the lock of writers."""
        query = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE NOT granted"
        return self.execute(f"{query} AND locktype = 'advisory' AND datname = '{database}'")[0][0]

    def _run(self, program: str, *words: str) -> None:
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*as_user, shutil.which(program, path=PATH) or program, *words, str(self.folder / "data")]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=2 * START_S
        )
        assert done.returncode == 0, done.stdout + done.stderr


def wait_until(is_so: Any, patience_s: float = 60.0) -> None:
    """Return as soon as `is_so()`."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Proxy:
    """A socket in a folder of its own before the server's. `cut` says when a connection is cut, once: `before` the next
    COMMIT reaches the server, or `after`, when the server has done it but its answer has not come.
    """

    def __init__(self, server: Postgres, folder: Path) -> None:
        self.cut = ""
        self.num_cut = 0
        self._server = server.folder / SOCKET
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, server = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
            server.connect(str(self._server))
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    is_cut = source is client and b"COMMIT" in data and self.cut
                    if not data or is_cut == "before":
                        self.num_cut += bool(is_cut)
                        self.cut = "" if is_cut else self.cut
                        return
                    (server if source is client else client).sendall(data)
                    if is_cut:
                        self.cut, self.num_cut = "", self.num_cut + 1
                        server.recv(1 << 16)
                        return
