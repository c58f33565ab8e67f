"""The arena in a browser: a conversation with two models, and votes by keys."""

import re

import pytest

from app_parts import make_run
from arena_parts import HOSTILE, make_loop
from page_parts import faults_of, looks
from server_parts import Server

pytestmark = pytest.mark.browser


@pytest.fixture
def server(serve, tmp_path):
    return serve.run(Server(make_loop(tmp_path / "live"), prepare="arena_parts"))


@pytest.fixture
def arena(visit, server):
    """The arena in a window that is logged in; every text that the server sends is kept in `told`."""
    page = visit.page(visit.context(server), server, f"{server.url}/arena")
    page.told = []
    page.on(
        "response",
        lambda answer: page.told.append(answer) if re.search(r"/api/v1/arena(?!.*stream)", answer.url) else None,
    )
    return page


def say(page, text):
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def press(page, key):
    page.wait_for_selector("main[data-state=voting]")
    page.wait_for_timeout(300)  # the page takes no key on answers that have just appeared
    page.keyboard.press(key)


def names(page, turn=0):
    return page.locator(".turn").nth(turn).locator(".name").all_inner_texts()


def test_a_person_talks_votes_by_keys_and_goes_on(arena, server, stored, visit):
    say(arena, "The film was")
    arena.locator(".answer .passage", has_text="GAMMA hears The film was").wait_for()
    texts = arena.locator(".answer .passage").all_inner_texts()
    assert not re.search(r"\bv[012]\b", arena.content().replace("/api/v1", ""))
    assert names(arena) == [] and not any(re.search(r"\bv[012]\b", one.text()) for one in arena.told)
    press(arena, "5")
    arena.get_by_text("Recorded: B is much better.").wait_for()
    assert "v2" in names(arena)
    assert arena.locator(".answer.kept .passage").inner_text() == texts[1]
    arena.keyboard.press("t")
    say(arena, "The cast was")
    arena.locator(".turn").nth(1).get_by_text("GAMMA hears The cast was").wait_for()
    press(arena, "3")
    arena.get_by_text("Recorded: a tie.").wait_for()
    arena.keyboard.press("u")
    arena.get_by_text("Not counted.").wait_for()
    arena.reload()
    arena.locator(".turn").nth(1).wait_for()
    visit.end(server)
    (only,) = stored(server)
    assert only.prompt == "The film was" and only.chosen.strip() == texts[1].strip() and only.margin == 2


def test_hostile_answers_are_text(arena):
    say(arena, "hostile")
    arena.wait_for_selector("main[data-state=voting]")
    shown = {one.strip() for one in arena.locator(".answer .passage").all_inner_texts()}
    assert shown == set(HOSTILE)
    say(arena, HOSTILE[0])
    arena.locator(".turn").nth(1).wait_for()
    assert arena.title().startswith("Arena") and arena.locator("main img, main script").count() == 0


def test_an_error_is_shown_and_a_retry_helps(arena, tmp_path):
    say(arena, f"die until {tmp_path / 'mended'}")
    arena.get_by_text("No answer: the process that draws answers ended (code 9)").wait_for()
    (tmp_path / "mended").touch()
    arena.get_by_role("button", name="Try again").click()
    arena.wait_for_selector("main[data-state=voting]")


def test_a_server_that_was_killed_is_waited_for(arena, server, visit, tmp_path):
    visit.expected = ("ERR_", "Failed to load")
    gate = tmp_path / "open"
    say(arena, f"wait for {gate}")
    arena.get_by_text("Both are answering.").wait_for()
    server.kill()
    arena.get_by_text("The connection broke").wait_for()
    server.start()
    gate.touch()
    arena.wait_for_selector("main[data-state=voting]")
    server.kill()
    press(arena, "1")
    arena.locator("#unsent").wait_for()
    server.start()
    arena.get_by_text("Recorded: A is much better.").wait_for()


def test_the_pages_are_accessible_and_fit_their_screen(arena, server):
    say(arena, "The film was")
    press(arena, "1")
    arena.get_by_text("Recorded").wait_for()
    say(arena, "A story " * 40)
    arena.wait_for_selector("main[data-state=voting]")
    for width, _ in looks(arena):
        assert arena.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(arena) == []
    arena.get_by_role("link", name="Leaderboard").click()
    arena.get_by_role("cell", name="v2").or_(arena.get_by_role("rowheader", name="v2")).wait_for()
    for width, _ in looks(arena):
        assert arena.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(arena) == []


def test_an_admin_of_the_studio_chooses_runs_and_their_base(serve, visit, tmp_path):
    for day in (1, 2):
        run = make_run(tmp_path / "runs" / f"2026010{day}-120000-grpo-000{day}")
        (run / "final").mkdir()
    server = serve.run(Server(tmp_path / "runs", command=("studio",), prepare="arena_parts"))
    page = visit.page(visit.context(server), server, f"{server.url}/arena")
    page.locator("#choice summary").click()
    for name in ("20260101-120000-grpo-0001", "smollm2"):
        page.get_by_label(name).check()
    say(page, "The film was")
    press(page, "2")
    page.get_by_text("Recorded: A is better.").wait_for()
    assert set(names(page)) == {"20260101-120000-grpo-0001", "smollm2"}
    assert faults_of(page) == []
