"""A real server process for the watch page, and a real browser."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest


@dataclass
class Running:
    """A server process: where it is, and the token of the first admin's session."""

    process: subprocess.Popen
    url: str
    login_url: str
    cookie: str = ""
    streams: list = field(default_factory=list)

    @property
    def port(self):
        return urlsplit(self.url).port

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def log_in(self):
        token = parse_qs(urlsplit(self.login_url).query)["token"][0]
        connection = self.connect()
        connection.request(
            "POST",
            "/api/v1/session",
            json.dumps({"token": token}),
            {"content-type": "application/json", "origin": f"http://127.0.0.1:{self.port}"},
        )
        response = connection.getresponse()
        assert response.status < 300, response.read()
        self.cookie = response.getheader("set-cookie").partition(";")[0]
        connection.close()

    def get(self, path, **headers):
        """Status and body of a request by the admin."""
        connection = self.connect()
        connection.request("GET", path, headers={"cookie": self.cookie, **headers})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body

    def json(self, path):
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def stream(self, after=0, last_event_id=None):
        """An open stream of events."""
        connection = self.connect()
        headers = {"cookie": self.cookie} | ({"last-event-id": str(last_event_id)} if last_event_id else {})
        connection.request("GET", f"/api/v1/stream?after={after}", headers=headers)
        opened = Stream(connection, connection.getresponse())
        self.streams.append(opened)
        return opened

    def stop(self, number=signal.SIGTERM):
        for stream in self.streams:
            stream.close()
        self.process.send_signal(number)
        return self.process.wait(30)


class Stream:
    """Server-sent events as they come."""

    def __init__(self, connection, response):
        self.connection = connection
        self.response = response

    @property
    def status(self):
        return self.response.status

    def next(self):
        """The next event: (name, data, id); None at the end. Comments and the time to retry are passed over."""
        found = {}
        while raw := self.response.readline():
            text = raw.decode().rstrip("\n")
            if text:
                key, _, value = text.partition(": ")
                found[key] = value
            elif "data" in found:
                return found["event"], json.loads(found["data"]), found.get("id")
            else:
                found = {}
        return None

    def until(self, name):
        """The next event of this name."""
        while (event := self.next()) is not None:
            if event[0] == name:
                return event
        raise AssertionError(f"the stream ended before an event {name}")

    def close(self):
        self.connection.close()


def start(*words, port=0):
    """A server by the command line; it has printed where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", *words, "--port", str(port), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    line = process.stdout.readline()
    if not line:
        process.wait(30)
        pytest.fail(f"the server ended with {process.returncode} before it said where it is")
    facts = json.loads(line)
    running = Running(process, facts["url"], facts["login_url"])
    running.log_in()
    return running


@pytest.fixture
def launch():
    """A function that starts servers, which end with the test."""
    running = []

    def begin(*words, port=0):
        running.append(start(*words, port=port))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.stop()


@pytest.fixture(scope="module")
def browser(chromium):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        instance = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield instance
        instance.close()


@pytest.fixture
def look(browser):
    """Opens pages of a server in one browser profile; fails the test on anything in the console."""
    complaints, contexts = [], {}

    def open_page(server, path="/watch", width=1280, scheme="light", allow=()):
        key = (server.url, width, scheme)
        if key not in contexts:
            contexts[key] = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            name, _, value = server.cookie.partition("=")
            contexts[key].add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{server.port}"}])
        page = contexts[key].new_page()
        page.on(
            "console",
            lambda message: None if any(text in message.text for text in allow) else complaints.append(message.text),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}{path}")
        return page

    yield open_page
    for context in contexts.values():
        context.close()
    assert complaints == []


def wait_for(holds, message="what was waited for did not happen"):
    """What `holds` gives once it is true."""
    for _ in range(600):
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(message)


@pytest.fixture(name="wait_for")
def _wait_for():
    return wait_for


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a live loop."""
    return tmp_path / "live"
