"""A server as a process of its own, and clients that talk to it."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tunesmith.store.records import Candidate, NewItem
from tunesmith.web.access import API

START_S = 60


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
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
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
    """`tunesmith serve` on a free port. `start` may be called again after `stop` or `kill`, on the same port."""

    folder: Path
    flags: Sequence[str] = ()
    port: int = 0
    url: str = ""
    login_url: str | None = None
    process: subprocess.Popen[str] | None = None
    complaints: list[str] = field(default_factory=list)

    def start(self) -> "Server":
        words = ["serve", "--dir", str(self.folder), "--port", str(self.port), "--json", *self.flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tunesmith", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, self.process.stderr.read()
        # A full pipe would stop the server.
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()
        said = json.loads(line)
        self.url, self.login_url = said["url"], said["login_url"]
        self.port = urlsplit(self.url).port
        return self

    def _listen(self, process):
        for line in process.stderr:
            self.complaints.append(line)

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def admin(self) -> Client:
        """The first admin, let in by the link that was printed."""
        link_token = self.login_url.partition("token=")[2]
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
