"""Rankings of several answers, by keys and by buttons."""

import pytest

from page_parts import answers, faults_of, looks, press, wait_until_sent
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.store.votes import VoteStore

pytestmark = pytest.mark.browser


def rankings(count: int, num_answers: int) -> list[NewItem]:
    return [
        NewItem(f"Prompt {i}", tuple(Candidate(f"{i}-{j}") for j in range(num_answers)), kind="ranking")
        for i in range(count)
    ]


def stored_ranks(server) -> list[dict[str, int]]:
    with VoteStore.open(server.folder / "votes.db") as store:
        return [
            {candidate.text: rank for candidate, rank in zip(one.candidates, one.ranks, strict=True)}
            for one in store.reader.export_rankings()
        ]


def test_a_ranking_by_keys_is_stored_with_its_ties(serve, visit):
    server = serve(rankings(2, 4), kind="ranking")
    page = visit.open(server)
    first = answers(page)
    press(page, "3", "1", "=", "4", "Enter")
    wait_until_sent(page, 1)
    second = answers(page)
    press(page, "1", "2", "Backspace", "4", "Enter")
    page.get_by_text("Give every answer a place first.").wait_for()
    press(page, "1", "2", "1", "3", "Enter")
    page.get_by_text("Nothing to judge right now").wait_for()
    wait_until_sent(page, 2)
    visit.end(server)
    assert stored_ranks(server) == [
        {first[2]: 1, first[0]: 2, first[3]: 2, first[1]: 3},
        {second[3]: 1, second[1]: 2, second[0]: 3, second[2]: 4},
    ]


def test_a_ranking_by_buttons_can_be_undone_and_skipped(serve, visit):
    server = serve(rankings(2, 3), kind="ranking")
    page = visit.open(server)
    shown = answers(page)
    for label in ("Answer C: no place yet", "Answer B: no place yet", "Answer A: no place yet"):
        page.get_by_role("button", name=label).click()
    page.get_by_role("button", name="Send the ranking").click()
    wait_until_sent(page, 1)
    press(page, "u")
    page.get_by_text("Undone: vote again.").wait_for()
    assert answers(page) == shown
    press(page, "1", "2", "Enter")
    wait_until_sent(page, 1)
    press(page, "s")
    page.get_by_text("Nothing to judge right now").wait_for()
    wait_until_sent(page, 1)
    visit.end(server)
    assert stored_ranks(server) == [{shown[0]: 1, shown[1]: 2, shown[2]: 3}]


def test_anyone_can_rank_at_any_width(serve, visit):
    page = visit.open(serve([*rankings(1, 3), *rankings(1, 5)], kind="ranking"))
    for num_answers in (3, 5):
        press(page, "2", "=")
        page.locator(f".answers[data-count='{num_answers}']").wait_for()
        for width, _ in looks(page):
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert faults_of(page) == []
        press(page, "s")
