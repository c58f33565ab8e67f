"""Logging in, joining by an invitation, and the admin's page."""

import pytest

from page_parts import faults_of, press, wait_until_sent
from server_parts import Client, pairs
from tunesmith.collect.store.inferences import Speaker
from tunesmith.collect.store.records import Choice, Feedback, Inference, KeySettings
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API

pytestmark = pytest.mark.browser


def test_the_printed_link_works_once_and_leaves_no_token_in_sight(serve, visit):
    visit.expected = ("401",)
    server = serve(pairs(1))
    page = visit.open(server)
    press(page)
    assert "token" not in page.url
    assert page.context.cookies()[0]["httpOnly"] and page.context.cookies()[0]["sameSite"] == "Strict"
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto(server.login_url)
    page.get_by_role("alert").get_by_text("unknown, has expired or was used").wait_for()
    assert "token=" not in page.url and faults_of(page) == []
    page.goto(f"{server.url}/vote")
    page.wait_for_url("**/login?next=vote")


def test_an_invited_rater_joins_and_votes(serve, visit):
    visit.expected = ("401",)
    server = serve(pairs(4))
    admin = visit.open(server)
    admin.get_by_role("link", name="Raters").click()
    admin.get_by_label("Name").fill("grace")
    admin.get_by_role("button", name="Make a link").click()
    link = admin.wait_for_selector("#made:not([hidden]) #link").input_value()
    assert faults_of(admin) == []
    context = visit.stranger(width=390)
    page = visit.page(context, server, link)
    assert faults_of(page) == []
    page.get_by_label("Your name").fill("Grace H.")
    page.get_by_role("button", name="Join").click()
    page.get_by_role("link", name="Begin").wait_for()
    token = page.locator("#token").inner_text()
    assert faults_of(page) == []
    page.get_by_role("link", name="Begin").click()
    press(page, "1")
    assert page.get_by_role("link", name="Raters").count() == 0
    assert Client(server.url, token).get("/session").json == {"name": "Grace H.", "role": "rater"}
    again = visit.page(context, server, link)
    again.get_by_role("button", name="Join").click()
    again.get_by_role("alert").get_by_text("was used").wait_for()
    admin.reload()
    admin.locator("#rows").get_by_role("cell", name="Grace H.", exact=True).wait_for()
    admin.on("dialog", lambda dialog: dialog.accept())
    admin.get_by_role("button", name="End the access of Grace H.").click()
    admin.get_by_role("cell", name="ended", exact=True).wait_for()
    told = admin.locator("#log tr").first
    assert told.locator("td").all_inner_texts()[1:] == ["admin", "rater ended", "Grace H.", ""]
    assert "role rater" in admin.locator("#log tr").nth(1).inner_text() and faults_of(admin) == []
    assert not admin.get_by_role("button", name="Earlier").is_visible()
    for number in range(20):
        server.rater(f"rater {number}", Client(server.url, admin.context.cookies()[0]["value"]))
    admin.reload()
    admin.get_by_role("button", name="Earlier").click()
    admin.get_by_role("cell", name="Grace H.", exact=True).nth(2).wait_for()
    assert admin.locator("#log tr").count() >= 23 and not admin.get_by_role("button", name="Earlier").is_visible()
    assert Client(server.url, token).get("/session").status == 401


def test_keys_are_marked_and_their_users_are_one_row_without_a_button(serve, visit, tmp_path):
    (tmp_path / "live").mkdir()
    with VoteStore.open(tmp_path / "live" / "votes.db") as store:
        app = store.add_rater("app", key=KeySettings(("generate", "feedback")))
        store.add_rater("owner", key=KeySettings(("admin",)))
        for number in range(3):
            name, choice = f"chatcmpl-{number}", Choice("Red.", (5,), (-0.5,), (-0.5,), "stop")
            asked = {"model": "m", "prompt": "A colour", "prompt_ids": (1,), "choices": (choice,), "options": {}}
            store.record(Inference(name=name, rater_id=app.rater.id, user=f"user {number}", **asked))
            store.give_feedback(1, Feedback(metric="thumbs", value=True, inference=name), Speaker(app.rater.id))
    server = serve(pairs(1), flags=("--openai", "tiny:llama"))
    page = visit.page(visit.context(server), server, f"{server.url}/raters")
    page.get_by_role("cell", name="3 users of the key app", exact=True).wait_for()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#rows tr").all()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("app", "key", "End access"),
        ("3 users of the key app", "", "that of the key"),
        ("owner", "admin's key", "End access"),
        ("admin", "admin", "End access"),
    ]
    assert faults_of(page) == []
    admin, key = Client(server.url, page.context.cookies()[0]["value"]), Client(server.url, app.token)
    listed = admin.get("/raters").json
    user = next(one for one in listed if one["user_of"] == app.rater.id)
    refused = admin.send("DELETE", f"{API}/raters/{user['id']}")
    assert refused.status == 409 and "end that of the key" in refused.json["detail"]
    assert key.send("GET", "/v1/feedback").status == 200
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="End the access of app").click()
    page.get_by_role("cell", name="ended", exact=True).nth(1).wait_for()
    assert key.send("GET", "/v1/feedback").status == 401


def open_without_script(visit, page, address: str, script: str) -> None:
    """The page as it is while that script has not come; a reload brings it."""
    visit.expected = ("ERR_FAILED",)
    page.route(f"**/static/{script}", lambda route: route.abort(), times=1)
    page.goto(address)


def test_a_form_is_not_sent_before_its_script_has_come(serve, visit):
    server = serve(pairs(1))
    page = visit.open(server)
    open_without_script(visit, page, f"{server.url}/raters", "raters.js")
    methods = []
    page.on("request", lambda request: methods.append(request.method))
    page.get_by_label("Name").fill("grace")
    page.get_by_label("Name").press("Enter")
    page.get_by_role("button", name="Make a link").click(force=True)
    page.reload()
    assert set(methods) == {"GET"}
    page.get_by_label("Name").fill("grace")
    page.get_by_role("button", name="Make a link").click()
    assert "/join/" in page.wait_for_selector("#made:not([hidden]) #link").input_value()


def test_a_button_waits_for_its_script(serve, visit):
    server = serve(pairs(1))
    stranger, rater = visit.page(visit.stranger(), server, f"{server.url}/login"), visit.open(server)
    for page, path, script, button in (
        (stranger, "/login", "login.js", "Log in"),
        (stranger, "/join/x", "login.js", "Join"),
        (rater, "/watch", "page.js", "Log out"),
    ):
        open_without_script(visit, page, f"{server.url}{path}", script)
        page.locator("button:disabled", has_text=button).wait_for()
        page.reload()
        page.locator("button:enabled", has_text=button).wait_for()


def test_an_expired_session_leads_to_the_login_and_keeps_the_vote(serve, visit):
    visit.expected = ("401",)
    server = serve(pairs(3))
    page = visit.open(server)
    press(page)
    page.wait_for_load_state("networkidle")
    cookies = page.context.cookies()
    page.context.clear_cookies()
    press(page, "1")
    page.wait_for_url("**/login?next=vote")
    page.context.add_cookies(cookies)
    page.goto(f"{server.url}/vote")
    wait_until_sent(page, 1)


def test_the_choice_of_colours_stays(serve, visit):
    page = visit.open(serve(pairs(1)))
    press(page)
    page.get_by_role("button", name="Dark mode").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Light mode").wait_for()
