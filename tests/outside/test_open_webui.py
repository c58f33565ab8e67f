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
    "ENABLE_EVALUATION_ARENA_MODELS": "true",
    # Its tools are 26,000 tokens of a byte tokenizer; and answers are letters, which every database holds.
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    "DEFAULT_MODEL_PARAMS": json.dumps({"max_tokens": 12, "logit_bias": ",".join(f"{n}:50" for n in range(68, 94))}),
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
    """A function: the page on which a model has answered a question."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(300_000)
    context.add_init_script(f"localStorage.token = {json.dumps(webui.token)}")
    page = context.new_page()

    def asked(model: str, question: str):
        page.goto(f"{webui.url}/?models={model}")
        page.locator("#chat-input").click()
        page.keyboard.type(question)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Good Response").wait_for()
        return page

    yield asked
    context.close()


def test_what_people_say_in_open_webui_is_read_from_its_export(served, webui, ask, tmp_path, capsys):
    """People rate answers in Open WebUI, alone and in its arena, and ask how to train on them. Reported: pipelines #222
    of open-webui.
    """
    models = {one["id"] for one in webui.send("/api/models")["data"]}
    assert models == {MODEL, "arena-model"}

    def press(page, name: str) -> None:
        # A thumb is stored, and then again with the tags that it has asked the model for.
        with page.expect_response(re.compile("/evaluations/feedback/.")):
            page.get_by_role("button", name=name).click()

    page = ask(MODEL, "Name a colour.")
    press(page, "Good Response")
    page.get_by_placeholder("Feel free to add specific details").fill("Short and right.")
    press(page, "Save")
    page = ask("arena-model", "Name an animal.")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Try Again").click()
    page.get_by_text("2/2").wait_for()
    press(page, "Bad Response")
    given = webui.send("/api/v1/evaluations/feedbacks/all/export")
    file = tmp_path / "feedback.json"
    file.write_text(json.dumps(given))
    words = ["votes", "import", str(file), "--dir", str(tmp_path / "app"), "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    (seen,) = facts["files"]
    assert (seen["format"], seen["num_rows"], seen["num_bad"]) == ("open-webui", 2, 0), seen
    assert (facts["num_new"], facts["num_feedback"]) == (1, 2)
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_new"] == facts["num_feedback"] == 0

    with VoteReader.open(served.folder / "votes.db") as reader:
        drawn = {one.choices[0].text: one.prompt for one in reader.inferences_after(0)}
    with VoteReader.open(tmp_path / "app" / "votes.db") as reader:
        (vote,), rated = reader.votes_after(0), list(reader.export_feedback())
    assert {one.metric: one.value for one in rated} == {"thumbs": True, "comment": "Short and right."}
    assert {one.rater for one in rated} == {f"open-webui:{given[0]['user_id']}"}
    for text, said in ((rated[0].answer, "colour"), (vote.chosen.text, "animal"), (vote.rejected.text, "animal")):
        assert said in drawn[text][-1]["content"]
    # The one that was asked for again was worse than the first.
    assert list(drawn).index(vote.chosen.text) < list(drawn).index(vote.rejected.text)
