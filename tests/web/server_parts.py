"""A server as a process of its own, forked from one that has its modules loaded, and clients that talk to it."""

import http.client
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.runs.folder import RunFolder
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.web.access import API

START_S = 60


class Trainer(RunStore):
    """What the trainer of a live loop writes: `runs.db`, and `metrics.jsonl` beside it."""

    def __init__(self, place: str | Path) -> None:
        super().__init__(place)
        self.files = RunFolder(Path(place).parent)

    def add_metrics(self, step: int, values: dict[str, float]) -> None:
        self.files.append_metrics(step, values)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Client:
    """Sends requests with a token, or with none."""

    url: str
    token: str = ""

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=300)
        given = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if body is not None:
            given["Content-Type"] = "application/json"
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        with closing(connection):
            connection.request(method, path, raw, {**given, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def get(self, path: str) -> Answer:
        return self.send("GET", API + path)

    def next(self, count: int = 2) -> list[dict]:
        answer = self.get(f"/next?count={count}")
        assert answer.status == 200, answer.body
        return answer.json["presentations"]

    def vote(self, token: str, verdict: str = "left", **more) -> Answer:
        return self.send("PUT", f"{API}/presentations/{token}/vote", {"verdict": verdict, **more})


@dataclass
class Server:
    """`tunesmith serve`, or another command, on a free port. `start` may be called again after `stop` or `kill`, on the
    same port.
    """

    folder: Path
    flags: Sequence[str] = ()
    command: Sequence[str] = ("serve", "--dir")
    port: int = 0
    url: str = ""
    login_url: str | None = None
    process: BaseProcess | None = None
    output: TextIO | None = None
    facts: dict = field(default_factory=dict)
    """What was printed at the start."""
    prepare: str = ""
    """A module that the server's process imports first."""
    complaints: list[str] = field(default_factory=list)

    def start(self) -> "Server":
        return self.launch().until_started()

    def launch(self) -> "Server":
        """Start the process, and do not wait for it."""
        words = [*self.command, str(self.folder), "--port", str(self.port), "--json", *self.flags]
        ends = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        given = (words, *(there for _, there in ends), self.prepare)
        self.process = context().Process(target=_serve, args=given, daemon=True)
        self.process.start()
        self.output, complaints = (os.fdopen(os.dup(here.fileno()), encoding="utf-8") for here, _ in ends)
        for end in itertools.chain(*ends):
            end.close()
        # A full pipe would stop the server.
        threading.Thread(target=self._listen, args=(complaints,), daemon=True).start()
        return self

    def until_started(self) -> "Server":
        """Wait for what is printed at the start."""
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        line = self.output.readline()
        timer.cancel()
        assert line, "".join(self.complaints)
        self.facts = json.loads(line)
        self.url, self.login_url = self.facts["url"], self.facts["login_url"]
        self.port = urlsplit(self.url).port
        return self

    def _listen(self, complaints):
        with complaints:
            for line in complaints:
                self.complaints.append(line)

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.process.terminate()
        self.process.join(timeout=120)
        assert self.process.exitcode is not None, "the server does not end"
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join(timeout=120)

    def admin(self) -> Client:
        """The first admin, let in by the link that was printed."""
        link_token = self.login_url.partition("token=")[2].partition("&")[0]
        answer = Client(self.url).send("POST", f"{API}/session", {"token": link_token})
        assert answer.status == 200, answer.body
        return Client(self.url, answer.headers["set-cookie"].partition(";")[0].partition("=")[2])

    def rater(self, name: str, admin: Client | None = None) -> Client:
        admin = admin or self.admin()
        answer = admin.send("POST", f"{API}/raters", {"name": name})
        assert answer.status == 201, answer.body
        return Client(self.url, answer.json["token"])


def pairs(count: int) -> list[NewItem]:
    """Pairs whose texts say which one they are, so that a test can tell sides apart."""
    return [NewItem(f"Prompt {i}", (Candidate(f"first {i}"), Candidate(f"second {i}"))) for i in range(count)]


def context() -> Any:
    """Processes that are forked from one that has `loaded.py` behind it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["loaded"])
    with pytest.MonkeyPatch.context() as patch:  # the forkserver's path is not this process's
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return found


def _serve(words, out, errors, prepare):
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    out.close()
    errors.close()
    if prepare:
        importlib.import_module(prepare)
    sys.exit(main(words))
