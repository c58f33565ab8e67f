"""What raters and admins are told of votes: each rater of themselves alone."""

import json
import re
import time
from dataclasses import replace

import pytest

from app_parts import app_in
from page_parts import faults_of, looks
from server_parts import Client, pairs
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.web.access import API


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with app_in(tmp_path_factory.mktemp("app")) as made:
        asked = made.store.set_campaign(CampaignSettings(overlap=3)).id
        made.store.add_items(
            asked, [NewItem(f"p {n}", (Candidate(f"good {n}"), Candidate(f"poor {n}"))) for n in range(40)]
        )
        for name in ("rob", "Grace Hopper", "Alan Turing"):
            rater = next((one.id for one in made.store.reader.raters() if one.name == name), None)
            vote(made.store, rater or made.store.add_rater(name).rater.id, asked)
        yield made


def vote(store, rater, asked):
    while shown := store.next_presentations(rater, asked, 10):
        for one in shown:
            store.vote(one.token, rater, "left" if one.answers[0].startswith("good") else "right", dwell_ms=4000)


def test_a_rater_is_told_of_their_own_votes_alone(parts):
    rob = parts.client(parts.rater)
    told = rob.get(f"{API}/raters/me").json()
    assert told["report"]["num_votes"] == 40
    assert "You have preferred an answer in 40 votes." in told["words"][0]
    assert told["report"]["reliability"]["low"] > 0.6
    ids = {one.id for one in parts.store.reader.raters() if one.name != "rob"}
    assert told["report"]["rater_id"] not in ids
    text = json.dumps(told)
    assert not any(name in text for name in ("Grace", "Turing", "ada"))
    for path in (f"{API}/raters/estimates", f"{API}/stats", f"{API}/raters"):
        assert rob.get(path).status_code == 403
    assert rob.get(f"{API}/raters/me?rater_id=1").json() == told
    assert parts.client().get(f"{API}/raters/me").status_code == 401


def test_admins_see_all_raters_and_what_votes_are_worth(parts):
    found = parts.client(parts.admin).get(f"{API}/raters/estimates").json()
    assert found["num_votes"] == 120
    assert 100 < found["effective"] < 120
    assert len(found["raters"]) == 3
    assert all(one["notes"] == ["nearly the same time, 4.0 s, for all 40 votes"] for one in found["raters"])
    assert "weight_of" not in found
    # An admin without votes is told that there are none.
    own = parts.client(parts.admin).get(f"{API}/raters/me").json()
    assert own["report"] is None
    assert "not preferred an answer" in own["words"][0]


def test_estimates_are_not_made_again_for_each_request(parts):
    client = parts.client(parts.rater)
    first = client.get(f"{API}/raters/me").json()
    rob = first["report"]["rater_id"]
    asked = parts.store.reader.campaigns()[-1].id
    parts.store.add_items(asked, pairs(1))
    vote(parts.store, rob, asked)
    assert client.get(f"{API}/raters/me").json() == first
    deadline = time.monotonic() + 300
    while client.get(f"{API}/raters/me").json() == first:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.browser
def test_the_pages_show_it(serve, visit, stored):
    reasons = ["random", "infomax 0.21", "infomax 0.2"]
    server = serve([replace(one, selection=reasons[n % 3]) for n, one in enumerate(pairs(30))], overlap=2)
    context = visit.context(server)
    page = visit.page(context, server, f"{server.url}/raters")
    admin = Client(server.url, context.cookies()[0]["value"])
    clients = [server.rater(name, admin) for name in ("Grace", "Alan")]
    for client in clients:
        while shown := client.next(10):
            for one in shown:
                client.vote(one["token"], "left" if one["answers"][0]["text"].startswith("first") else "right")
    worth = page.locator("#worth:not(:empty)")
    while "say as much as" not in worth.inner_text():  # they are made again every five seconds at most
        page.wait_for_timeout(500)
        page.reload()
    told = page.locator("#asked").inner_text()
    assert re.search(r"infomax: \d+ votes, agreement 1.00 over \d+ items; random: \d+ votes, agreement 1.00", told)
    row = page.locator("#rows tr", has_text="Grace")
    assert " % to " in row.inner_text()
    notes = row.locator("td.words")  # as long as they are, the button behind them stays in sight
    notes.evaluate("one => { one.textContent = 'the left answer in 60 of 60 votes; '.repeat(5) }")
    last = row.get_by_role("button").bounding_box()
    assert last is not None and last["x"] + last["width"] < page.evaluate("innerWidth")
    assert faults_of(page) == []
    page.goto(f"{server.url}/votes")
    page.get_by_text("How your votes are understood", exact=True).click()
    page.get_by_text("not preferred an answer").wait_for()
    assert "Grace" not in page.content()
    for _ in looks(page):
        assert faults_of(page) == []
