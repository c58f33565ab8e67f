"""The chat page of `examples/app` in a browser: another server's page, which asks and judges with a user's token."""

import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("axe_playwright_python")

from arena_parts import HOSTILE, make_loop
from page_fixtures import browser
from page_parts import WENT_AWAY, faults_of, looks
from pages import blocks
from server_parts import Client, Server
from tunesmith.collect.store.votes import VoteStore

pytestmark = pytest.mark.browser

__all__ = ["browser"]

APP = Path(__file__).parents[2] / "examples" / "app"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """`python -m http.server` without its log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(APP))) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_port}"
        files.shutdown()


@pytest.fixture
def server(tmp_path: Path, origin: str) -> Iterator[Server]:
    folder = make_loop(tmp_path / "live")
    made = Server(folder, ("--openai", str(folder), "--allow-origin", origin), prepare="arena_parts").start()
    yield made
    if made.process.is_alive():
        made.kill()


def link(server: Server, origin: str, user: str = "ada") -> str:
    key = Client(server.url, server.facts["key"])
    token = key.send("POST", "/v1/user_tokens", {"user": user}).json["token"]
    return f"{origin}/#api={server.facts['api']}&token={token}"


@pytest.fixture
def page(browser: Any, server: Server, origin: str) -> Iterator[Any]:
    """The page by the link of a user. A console that says anything, or a request elsewhere, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    made = context.new_page()
    complaints: list[str] = []
    ours = (origin, server.url, "data:")
    made.expected = ()
    made.on("console", lambda said: any(one in said.text for one in made.expected) or complaints.append(said.text))
    made.on("pageerror", lambda error: complaints.append(str(error)))
    is_ours = lambda url: url.startswith((*ours, *made.expected))  # noqa: E731 - `expected` is set later
    made.on("request", lambda sent: is_ours(sent.url) or complaints.append(f"foreign: {sent.url}"))
    made.goto(link(server, origin))
    made.locator("#model", has_text="live").wait_for()
    yield made
    context.close()
    assert not complaints, complaints


def ask(page: Any, text: str) -> None:
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")


def press(page: Any, name: str) -> Any:
    button = page.get_by_role("button", name=name, exact=True).last
    button.click()
    return button


def said(server: Server) -> list[tuple[str, object]]:
    """Metric and value of all feedback, as the key of the application sees it."""
    key = Client(server.url, server.facts["key"])
    return [(one["metric_name"], one["value"]) for one in key.send("GET", "/v1/feedback").json["data"]]


def test_the_link_of_the_readme_leads_to_a_model_that_draws(browser: Any, origin: str, tmp_path: Path):
    flags = ("--openai", "tiny:llama", "--allow-origin", origin)
    server = Server(tmp_path / "app", flags).start()
    context = browser.new_context()
    context.set_default_timeout(60_000)
    try:
        (script,) = (block.text for block in blocks(APP / "README.md") if block.language == "sh")
        for address, ours in (("http://127.0.0.1:8000", server.url), ("http://localhost:9000", origin)):
            assert address in script
            script = script.replace(address, ours)
        given = {**os.environ, "OPENAI_API_KEY": server.facts["key"]}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        page = context.new_page()
        page.goto(done.stdout.strip())
        page.locator("#model", has_text="llama").wait_for()
        ask(page, "Hello")
        page.get_by_role("button", name="Bad answer").and_(page.locator(":enabled")).click()
        page.locator("[aria-label='Bad answer'][aria-pressed=true]").wait_for()
        assert said(server) == [("thumbs", False)]
    finally:
        context.close()
        server.kill()
    with VoteStore.open(tmp_path / "app" / "votes.db") as store:
        (asked,) = store.reader.inferences_after(0)
    assert asked.user == "ada" and asked.choices[0].token_ids


def test_a_person_asks_judges_corrects_and_goes_on(page: Any, server: Server):
    assert "token" not in page.url
    ask(page, "The film was")
    page.locator(".text", has_text="GAMMA hears The film was").wait_for()
    up = page.get_by_role("button", name="Good answer")
    up.click()
    page.get_by_text("Thank you.").wait_for(state="attached")
    assert up.get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.activeElement.ariaLabel") == "Good answer"
    press(page, "Good answer")
    page.get_by_text("Taken back.").wait_for(state="attached")
    press(page, "Bad answer")
    page.locator("[aria-label='Bad answer'][aria-pressed=true]").wait_for()
    press(page, "Correct the answer")
    page.keyboard.press("Control+A")
    page.keyboard.type("The film was long.")
    press(page, "Save")
    page.get_by_text("Corrected by you.").wait_for()
    ask(page, "More")
    page.locator(".text:not(.busy)", has_text="GAMMA hears More").wait_for()  # whole: the server is killed below
    assert page.locator(".turn").count() == 2
    assert said(server) == [
        *(("thumbs", value) for value in (True, None, False)),
        ("demonstration", "The film was long."),
    ]
    server.kill()
    with VoteStore.open(server.folder / "votes.db") as store:
        (vote,) = store.reader.votes_after(0)
        *_, last = store.reader.inferences_after(0)
    assert (vote.chosen.text, vote.rejected.text) == ("The film was long.", " GAMMA hears The film was")
    # The corrected answer is what the conversation goes on from.
    assert last.prompt == "The film wasThe film was long.\nMore" and last.user == "ada" and last.episode


def test_of_two_unnamed_answers_the_person_picks_one(page: Any, server: Server):
    page.get_by_label("Two answers to choose from").check()
    ask(page, "The cast was")
    page.get_by_role("button", name="A is better").and_(page.locator(":enabled")).wait_for()
    texts = page.locator(".pair .text").all_inner_texts()
    assert sorted(texts) == ["BETA hears The cast was", "GAMMA hears The cast was"]
    shown = re.sub("BETA|GAMMA", "", page.locator("main").inner_text())
    assert not re.search(r"\bv[012]\b", shown)
    assert page.locator("#send").is_disabled()  # the next question needs an answer to go on from
    assert faults_of(page) == []
    press(page, "B is better")
    page.get_by_text("· You chose this one.").wait_for()
    assert page.locator(".text").inner_text() == texts[1]
    ask(page, "same")  # two equal answers, of which none is better
    page.locator(".text", has_text="the same").first.wait_for()  # two of them until both are whole
    page.get_by_role("button", name="Good answer").last.and_(page.locator(":enabled")).wait_for()
    assert said(server) == [("preference", {"better": 1, "worse": 0, "verdict": "better"})]


def test_another_answer_is_asked_for_and_the_ones_before_are_kept(page: Any, server: Server):
    ask(page, "Hello")
    page.locator(".text", has_text="GAMMA hears Hello").wait_for()
    press(page, "Another answer")
    page.get_by_text("2 of 2").wait_for()
    page.get_by_role("button", name="Answer before").and_(page.locator(":enabled")).click()
    page.get_by_text("1 of 2").wait_for()
    key = Client(server.url, server.facts["key"])
    assert key.send("GET", "/metrics").body.decode().count('end="answered"} 2') == 1


def test_what_goes_wrong_is_said_and_can_be_mended(page: Any, server: Server, tmp_path: Path):
    page.expected = ("status of 401", "status of 503", *WENT_AWAY)
    ask(page, "no model")
    page.locator("#fault", has_text="the model cannot be used").wait_for()
    assert page.locator("#question").input_value() == "no model"
    page.locator("#question").fill("")
    ask(page, HOSTILE[0])
    page.get_by_role("button", name="Good answer").and_(page.locator(":enabled")).wait_for()
    assert page.locator(".question").inner_text() == HOSTILE[0] and page.locator("main img").count() == 0
    ask(page, f"wait for {tmp_path / 'ever'}")
    press(page, "Stop")
    page.locator("#send").wait_for()
    token = page.evaluate("sessionStorage.getItem('token')")
    page.evaluate("sessionStorage.setItem('token', 'ut-wrong.x')")
    ask(page, "Hello")
    page.locator("#connection[open]").wait_for()
    page.get_by_label("Token of a user").fill(token)
    press(page, "Connect")
    page.locator("#model", has_text="live").wait_for()
    server.kill()
    page.locator("#question").fill("")
    ask(page, "Hello")
    page.locator("#fault", has_text="--allow-origin").wait_for()


def test_a_new_link_in_an_open_page_connects_and_closes_the_dialog(page: Any, server: Server, origin: str):
    page.expected = ("status of 401",)
    ask(page, "The film was")
    page.get_by_role("button", name="Good answer").and_(page.locator(":enabled")).wait_for()
    page.evaluate("sessionStorage.setItem('token', 'ut-old.x')")
    press(page, "Bad answer")  # a thumb finds it out first
    page.locator("#connection[open] .fault", has_text="Your link has expired").wait_for()
    assert page.locator(".turn .fault", has_text="ask for a new one").count() == 1 and faults_of(page) == []
    new = link(server, origin)
    page.evaluate("hash => { location.hash = hash; }", new.partition("#")[2])
    page.locator("#connection:not([open])").wait_for(state="attached")
    page.locator("#model", has_text="live").wait_for()
    press(page, "Bad answer")
    page.locator("[aria-label='Bad answer'][aria-pressed=true]").wait_for()
    page.locator(".turn .fault").wait_for(state="hidden")
    assert "token" not in page.url and said(server) == [("thumbs", False)]


def test_the_header_stays_and_an_empty_page_does_not_scroll(page: Any):
    page.set_viewport_size({"width": 1280, "height": 800})
    assert page.evaluate("document.documentElement.scrollHeight") == 800
    page.set_viewport_size({"width": 1280, "height": 300})
    for text in ("The film was", "The cast was"):
        ask(page, text)
        page.get_by_role("button", name="Good answer").last.and_(page.locator(":enabled")).wait_for()
    assert page.evaluate("scrollY") > 0
    assert page.locator("header").evaluate("element => element.getBoundingClientRect().top") == 0


def test_it_is_usable_on_a_phone_and_by_assistive_technology_in_both_colours(page: Any):
    assert faults_of(page) == []
    for text in ("The film was", "hostile"):
        ask(page, text)
        page.get_by_role("button", name="Good answer").last.and_(page.locator(":enabled")).wait_for()
    press(page, "Correct the answer")
    press(page, "Connection")
    for _ in looks(page):
        assert faults_of(page) == []
    page.keyboard.press("Escape")
    page.get_by_label("Two answers to choose from").check()
    press(page, "Cancel")
    ask(page, "The cast was")
    page.get_by_role("button", name="A is better").and_(page.locator(":enabled")).wait_for()
    for width, scheme in looks(page):
        assert faults_of(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, scheme


def test_a_link_to_another_address_begins_a_new_chat_and_the_address_is_shown(page: Any, server: Server):
    page.expected = ("Failed to load resource", "http://127.0.0.1:9/")
    page.locator("#model", has_text=f"live at {urlsplit(server.facts['api']).netloc}").wait_for()
    ask(page, "The film was")
    page.get_by_role("button", name="Good answer").and_(page.locator(":enabled")).wait_for()
    page.evaluate("location.hash = '#api=http://127.0.0.1:9/v1&token='")  # no token: nothing is taken from it
    page.wait_for_function("location.hash === ''")
    assert page.locator(".question").count() == 1
    page.evaluate("location.hash = '#api=http://127.0.0.1:9/v1&token=ut-x'")
    page.locator(".question").wait_for(state="detached")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    ask(page, "Hello")
    page.locator(".turn .fault, #fault").filter(has_text="No answer from").first.wait_for()
    assert not any("The film was" in body for body in asked)
