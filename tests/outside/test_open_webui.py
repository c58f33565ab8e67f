"""Open WebUI as it is published, over our API: a person talks, presses thumbs and compares in its pages, and what it
exports is read by `votes import`.

It needs packages of other versions than ours, so it is installed apart: `OPEN_WEBUI=/path/to/bin/open-webui`.
"""

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from server_parts import Server
from tunesmith.apps.cli.main import main
from tunesmith.collect.store.vote_reader import VoteReader

MODEL = "tiny:llama"
SETTINGS = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",  # or it loads a model of sentences from the hub
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "WEBUI_SECRET_KEY": "not a secret of anything",
    "ANONYMIZED_TELEMETRY": "false",
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.browser,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("own_logging"),
]


class WebUI:
    """Open WebUI with one admin, who has added our server under Settings, Connections."""

    def __init__(self, command: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.token = ""
        words = (command, "serve", "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2])
        self.log = folder / "log"
        with self.log.open("w") as log:
            given = {**os.environ, **SETTINGS, "DATA_DIR": str(folder)}
            self.process = subprocess.Popen(words, cwd=folder, env=given, stdout=log, stderr=log)

    def send(self, path: str, body: object = None) -> object:
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, raw, headers), timeout=300) as answer:
            return json.load(answer)

    def until_started(self) -> "WebUI":
        deadline = time.monotonic() + 1200
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                self.send("/health")
                return self
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-2000:])

    def sign_up(self, server: Server) -> None:
        me = {"name": "Ada", "email": "ada@example.com", "password": "Engine-1843"}
        self.token = self.send("/api/v1/auths/signup", me)["token"]
        version = self.send("/api/config")["version"]
        self.send("/api/v1/users/user/settings/update", {"ui": {"version": version}})  # has read what is new
        connection = {"OPENAI_API_BASE_URLS": [server.facts["api"]], "OPENAI_API_KEYS": [server.facts["key"]]}
        self.send("/openai/config/update", {"ENABLE_OPENAI_API": True, "OPENAI_API_CONFIGS": {}, **connection})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("api"), ("--openai", MODEL)).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def webui(tmp_path_factory, served):
    command = os.environ.get("OPEN_WEBUI")
    if not command:
        pytest.skip("OPEN_WEBUI does not name the command of an Open WebUI")
    started = WebUI(command, tmp_path_factory.mktemp("webui"))
    try:
        started.until_started().sign_up(served)
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def ask(browser, webui):
    """A function: a window in which a model has answered a question."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(300_000)
    context.add_init_script(f"localStorage.token = {json.dumps(webui.token)}")

    def asked(model: str, question: str):
        page = context.new_page()
        page.goto(f"{webui.url}/?models={model}&q={question.replace(' ', '+')}")
        page.get_by_role("button", name="Good Response").wait_for()
        return page

    yield asked
    context.close()


def test_what_people_say_in_open_webui_is_read_from_its_export(served, webui, ask, tmp_path, capsys):
    """People rate answers in Open WebUI, alone and in its arena, and ask how to train on that. Reported:
    open-webui/pipelines #222.
    """
    models = [one["id"] for one in webui.send("/api/models")["data"]]
    assert {MODEL, "arena-model"} <= set(models)

    page = ask(MODEL, "Name a colour.")
    page.get_by_role("button", name="Good Response").click()
    page.get_by_role("button", name="Save").click()
    page.close()

    page = ask("arena-model", "Name an animal.")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text(re.compile("2/2")).wait_for()
    page.get_by_role("button", name="Bad Response").click()
    page.close()

    deadline, given = time.monotonic() + 300, []
    while len(given) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        given = webui.send("/api/v1/evaluations/feedbacks/all/export")
    file = tmp_path / "feedback.json"
    file.write_text(json.dumps(given))
    words = ["votes", "import", str(file), "--dir", str(tmp_path / "app"), "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    (seen,) = facts["files"]
    assert (seen["format"], seen["num_rows"], seen["num_bad"]) == ("open-webui", 2, 0)
    assert (seen["num_pairs"], seen["num_labels"]) == (1, 1) and facts["num_new"] == facts["num_feedback"] == 1
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_new"] == facts["num_feedback"] == 0

    with VoteReader.open(served.folder / "votes.db") as reader:
        drawn = {one.prompt[-1]["content"]: [] for one in reader.inferences_after(0)}
        for one in reader.inferences_after(0):
            drawn[one.prompt[-1]["content"]].append(one.choices[0].text)
    with VoteReader.open(tmp_path / "app" / "votes.db") as reader:
        (vote,), (said,) = reader.votes_after(0), list(reader.export_feedback())
    print(drawn, vote, said)
