"""The vote page in a real browser, against a real server process."""

import pytest

from page_parts import HOSTILE, WENT_AWAY, answers, faults_of, looks, number, press, wait_until_sent
from server_parts import pairs
from tunesmith.collect.store.records import Candidate, NewItem, NewOffer
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API

pytestmark = pytest.mark.browser


def test_votes_by_keyboard_alone_are_stored_as_they_were_meant(serve, visit, stored):
    server = serve(pairs(7), guidelines="Prefer the *shorter* one.")
    page = visit.open(server)
    assert page.locator("#guidelines em").inner_text() == "shorter"
    meant = {}
    for key in "123450s":
        meant[tuple(answers(page))] = key
        press(page, key)
    page.get_by_text("Nothing to judge right now").wait_for()
    wait_until_sent(page, 6)
    visit.end(server)
    rows = stored(server)
    assert len(rows) == 6
    for row in rows:
        key = next(k for shown, k in meant.items() if set(shown) == {row.chosen, row.rejected})
        shown = next(s for s, k in meant.items() if k == key)
        winner = {"1": 0, "2": 0, "3": 0, "4": 1, "5": 1, "0": 0}[key]
        assert row.chosen == shown[winner]
        assert row.margin == {"1": 2, "2": 1, "3": 0, "4": 1, "5": 2, "0": 0}[key]
        assert (row.tie, row.verdict == "both_bad") == (key in "30", key == "0")
        assert row.dwell_ms is not None and row.dwell_ms >= 200


def test_the_next_pair_is_there_without_asking_the_server(serve, visit):
    server = serve(pairs(4))
    page = visit.open(server)
    press(page)
    page.wait_for_load_state("networkidle")
    page.route(f"**{API}/next*", lambda route: None)
    first = number(page)
    press(page, "2")
    assert number(page) != first


def test_undo_brings_the_pair_back_and_one_vote_counts(serve, visit, stored):
    server = serve(pairs(3))
    page = visit.open(server)
    shown, first = answers(page), number(page)
    press(page, "1")
    assert number(page) != first
    press(page, "u")
    page.get_by_text("Undone: vote again.").wait_for()
    assert number(page) == first and answers(page) == shown
    press(page, "5")
    wait_until_sent(page, 1)
    press(page, "u", "u")
    page.get_by_text("There is nothing to undo.").wait_for()
    press(page, "4")
    wait_until_sent(page, 1)
    visit.end(server)
    rows = stored(server)
    assert [(row.chosen, row.margin) for row in rows] == [(shown[1], 1)]


def test_a_reason_and_a_written_answer_go_with_the_vote(serve, visit, stored):
    server = serve(pairs(2))
    page = visit.open(server)
    press(page, "r")
    page.keyboard.type("too long 12 s")
    page.keyboard.press("Enter")
    press(page, "w")
    page.keyboard.type("A better\none: 1 2 3")
    page.keyboard.press("Control+Enter")
    page.get_by_text("Your answer is stored.").wait_for()
    press(page, "2")
    wait_until_sent(page, 1)
    assert page.locator("#reason").input_value() == ""
    visit.end(server)
    assert [row.reason for row in stored(server)] == ["too long 12 s"]
    with VoteStore.open(server.folder / "votes.db") as store:
        assert [one.text for one in store.reader.export_demonstrations()] == ["A better\none: 1 2 3"]


def test_a_key_pressed_twice_judges_one_pair(serve, visit, stored):
    server = serve(pairs(3))
    page = visit.open(server)
    press(page)
    page.evaluate("""async () => {
      for (const start = performance.now(); performance.now() - start < 100; ) {
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "1", bubbles: true }));
        await new Promise((resolve) => setTimeout(resolve, 10));
      }
    }""")
    wait_until_sent(page, 1)
    press(page)
    visit.end(server)
    assert len(stored(server)) == 1


def test_a_restart_of_the_server_loses_and_doubles_nothing(serve, visit, stored):
    visit.expected = WENT_AWAY
    server = serve(pairs(6))
    page = visit.open(server)
    press(page, "1")
    wait_until_sent(page, 1)
    press(page)
    page.wait_for_load_state("networkidle")
    server.kill()
    press(page, "2")
    page.locator("#unsent").get_by_text("One action is kept here").wait_for()
    press(page, "3")
    page.locator("#unsent").get_by_text("2 actions are kept here").wait_for()
    server.start()
    page.locator("#unsent").wait_for(state="hidden")
    for count in (4, 5, 6):
        press(page, "4")
        wait_until_sent(page, count)
    visit.end(server)
    rows = stored(server)
    assert len(rows) == 6 and len({row.prompt for row in rows}) == 6


def test_what_was_not_sent_survives_a_reload(serve, visit, stored):
    visit.expected = WENT_AWAY
    server = serve(pairs(4))
    context = visit.context(server)
    page = visit.page(context, server)
    first = number(page)
    # Requests that change something fail, as on a network that drops out, while the page itself can be loaded.
    page.route(f"**{API}/presentations/**", lambda route: route.abort("connectionrefused"))
    press(page, "1")
    page.locator("#unsent").wait_for()
    page.reload()
    assert number(page) != first
    page.unroute(f"**{API}/presentations/**")
    wait_until_sent(page, 1)
    visit.end(server)
    assert [row.prompt for row in stored(server)] == [f"Prompt {first}"]


def test_a_vote_whose_answer_got_lost_counts_once(serve, visit, stored):
    visit.expected = WENT_AWAY
    server = serve(pairs(3))
    page = visit.open(server)
    keys = []

    def lose_first_answer(route):
        keys.append(route.request.headers["idempotency-key"])
        if len(keys) == 1:
            route.fetch()
            route.abort("connectionreset")
        else:
            route.continue_()

    page.route(f"**{API}/presentations/**", lose_first_answer)
    press(page, "1")
    wait_until_sent(page, 1)
    assert len(keys) == 2 and len(set(keys)) == 1
    visit.end(server)
    assert len(stored(server)) == 1


def test_eight_tabs_show_eight_pairs_and_each_vote_counts(serve, visit, stored):
    server = serve(pairs(16))
    context = visit.context(server)
    tabs = [visit.page(context, server) for _ in range(8)]
    assert len({number(page) for page in tabs}) == 8
    for page in tabs:
        press(page, "2")
    wait_until_sent(tabs[-1], 8)
    visit.end(server)
    rows = stored(server)
    assert len(rows) == 8 and len({row.prompt for row in rows}) == 8


def test_hostile_answers_do_nothing(serve, visit):
    texts = [(HOSTILE[i], HOSTILE[(i + 1) % len(HOSTILE)]) for i in range(len(HOSTILE))]
    server = serve([NewItem(a, (Candidate(a), Candidate(b))) for a, b in texts])
    page = visit.open(server)
    for _ in texts:
        for _ in range(2):
            press(page, "m")
            assert page.title() == "Vote · Tunesmith"
            assert page.locator("#table :is(img, script, style, iframe, base, [href^='javascript'])").count() == 0
            assert page.locator(".answer").count() == 2 and page.locator(".verdicts").is_visible()
        press(page, "s")
    page.get_by_text("Nothing to judge right now").wait_for()
    assert page.url == f"{server.url}/vote"


def test_new_pairs_appear_by_themselves(serve, visit):
    server = serve()
    page = visit.open(server)
    page.get_by_text("Nothing to judge right now").wait_for()
    assert not page.get_by_role("button", name="Undo the last vote").is_visible()
    with RunStore.open(server.folder / "runs.db") as runs:
        runs.add_offers([NewOffer(0, "Prompt 7", (Candidate("a"), Candidate("b")))])
    assert number(page) == 7
    press(page, "1")
    page.get_by_role("button", name="Undo the last vote").wait_for()
    wait_until_sent(page, 1)
    page.reload()
    page.get_by_role("button", name="Undo the last vote").wait_for()


def test_anyone_can_use_it_at_any_width(serve, visit):
    long = "A long answer. " * 200
    conversation = ({"role": "user", "content": "Hello `there`"}, {"role": "assistant", "content": "# Hi\n\n- yes"})
    items = [NewItem(conversation, (Candidate(long + "x" * 300), Candidate("|a|b|\n|-|-|\n|" + "w" * 200 + "|2|")))]
    server = serve([*items, *pairs(1)], guidelines="# Be fair\n\n[More](https://x.example)")
    page = visit.open(server)
    for width, _ in looks(page):
        press(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert faults_of(page) == []
        box = page.locator("#pair-keys").bounding_box()
        assert box["y"] + box["height"] <= 900, "the keys are always in sight"
        press(page, "?")
        page.locator("#help").wait_for()
        assert faults_of(page) == []
        page.keyboard.press("Escape")
        press(page, "w")
        assert faults_of(page) == []
        page.keyboard.press("Escape")
    press(page, "2")
    press(page, "2")
    page.get_by_text("Nothing to judge right now").wait_for()
    for _ in looks(page):
        assert faults_of(page) == []


def test_the_vote_is_said_and_the_next_prompt_has_the_focus(serve, visit):
    page = visit.open(serve(pairs(2)))
    press(page)
    page.get_by_role("button", name="A better", exact=False).first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("status").get_by_text("Recorded: A is").wait_for()
    assert page.evaluate("document.activeElement.id") == "prompt-title"
    assert page.locator("#prompt-title").is_visible()
