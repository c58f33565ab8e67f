"""Logging in and out: what people expect of a server that others reach, and how they get back in."""

import http.client
import json
import socket
import time
from contextlib import closing
from dataclasses import replace
from urllib.parse import urlsplit

import psutil
import pytest

from app_parts import URL, app_in
from page_parts import press
from server_parts import Client, Trainer, pairs
from tunesmith.apps.cli.main import main
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web import logins
from tunesmith.collect.web.access import API
from tunesmith.collect.web.settings import Limits


def test_a_cookie_is_worth_nothing_after_its_logout(serve):
    """People copy a cookie, or leave it on a shared machine, and log out; the copy must not go on.

    Reported: bitwarden/server#383
    """
    server = serve()
    first, second = server.admin(), Client(server.url)
    link = Client(server.url).send("POST", f"{API}/session", {"token": server.rater("rob", first).token})
    second.token = link.headers["set-cookie"].partition(";")[0].partition("=")[2]
    assert [one.get("/session").status for one in (first, second)] == [200, 200]
    assert first.send("DELETE", f"{API}/session").status == 204
    assert [one.get("/session").status for one in (first, second)] == [401, 200]
    server.stop()
    server.start()
    assert [one.get("/session").status for one in (first, second)] == [401, 200]
    assert server.admin().get("/session").status == 200
    kept = (server.folder / "session.ended").read_text()
    assert first.token not in kept and len(kept.splitlines()) == 3  # two links and the session


def test_a_logout_in_one_window_leaves_the_others_alone(tmp_path):
    """The same person is logged in at home and at work, by logins of the same second.

    Reported: expressjs/cookie-session#106
    """
    with app_in(tmp_path) as parts:
        sessions = [parts.client().post(f"{API}/session", json={"token": parts.admin}) for _ in range(2)]
        first, second = ({"Cookie": one.headers["set-cookie"].partition(";")[0]} for one in sessions)
        assert first != second
        assert parts.client().delete(f"{API}/session", headers={**first, "Origin": URL}).status_code == 204
        assert parts.client().get(f"{API}/session", headers=first).status_code == 401
        assert parts.client().get(f"{API}/session", headers=second).status_code == 200
        token = parts.client(parts.rater)
        assert token.delete(f"{API}/session").status_code == 204
        assert token.get(f"{API}/session").status_code == 200  # a personal token is no session


def test_a_stream_ends_with_the_access_of_its_reader(serve):
    """An admin ends a rater's access, whose page would otherwise be told of votes and metrics until it is closed.

    Reported: issue 45.18
    """
    server = serve()
    admin = server.admin()
    rater = server.rater("rob", admin)
    place = urlsplit(server.url)
    with (
        Trainer.open(server.folder / "runs.db") as trainer,
        closing(http.client.HTTPConnection(place.hostname, place.port, timeout=20)) as connection,
    ):
        connection.request("GET", f"{API}/stream", headers={"Authorization": f"Bearer {rater.token}"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"retry")
        (rob,) = (one["id"] for one in admin.get("/raters").json if one["name"] == "rob")
        assert admin.send("DELETE", f"{API}/raters/{rob}").status == 204
        trainer.add_metrics(1, {"reward": 0.125})
        assert b"0.125" not in answer.read()


@pytest.mark.parametrize("forwarded", [True, False])
def test_somebody_who_guesses_locks_nobody_out(tmp_path, monkeypatch, forwarded):
    """Behind a proxy all clients have its address, and one of them tries tokens.

    Reported: issue 45.18
    """
    monkeypatch.setattr(logins, "_CACHE_S", -1)  # nothing is remembered
    with app_in(tmp_path, Limits(failures=3, failure_every_s=1000, rate_per_s=1, burst=5)) as parts:
        guess, honest = ({"X-Forwarded-For": address} if forwarded else {} for address in ("10.0.0.1", "10.0.0.2"))
        client = parts.client()
        wrong = [client.post(f"{API}/session", json={"token": "x"}, headers=guess).status_code for _ in range(5)]
        wrong += [
            client.get(f"{API}/next", headers={**guess, "Authorization": f"Bearer {n}"}).status_code for n in "12"
        ]
        assert wrong == [401, 401, 401, 429, 429, 429, 429]
        mistyped = client.post(f"{API}/session", json={"token": "y"}, headers=honest).status_code
        assert mistyped == (401 if forwarded else 429)
        for path in ("/login", "/static/app.css") * 10:
            assert client.get(path, headers=honest).status_code == 200
        session = client.post(f"{API}/session", json={"token": parts.rater}, headers=guess)
        assert session.status_code == 200
        cookie = {"Cookie": session.headers["set-cookie"].partition(";")[0]}
        assert client.get(f"{API}/session", headers={**guess, **cookie}).status_code == 200
        bearer = {"Authorization": f"Bearer {parts.admin}"}
        assert client.get(f"{API}/session", headers={**guess, **bearer}).status_code == 200


def test_every_link_that_is_printed_is_answered(serve):
    """People start a server for their team and click what it prints: addresses of the machine, and its name.

    Reported: issue 45.18
    """
    server = serve(pairs(1), flags=["--host", "0.0.0.0", "--login"])
    port = urlsplit(server.url).port
    names = [urlsplit(url).hostname for url in server.facts["urls"]]
    own = [one.address for ones in psutil.net_if_addrs().values() for one in ones if one.family == socket.AF_INET]
    assert set(names) >= {address for address in own if not address.startswith(("127.", "169.254."))}
    assert socket.gethostname().lower() in names and "0.0.0.0" not in names
    for url in server.facts["urls"]:
        at = Client(f"http://127.0.0.1:{port}")
        answer = at.send("GET", "/login", headers={"Host": urlsplit(url).netloc})
        if urlsplit(url).hostname in own:  # an address is accepted where it is the one that was reached
            at, answer = Client(url), Client(url).send("GET", "/login")
        assert answer.status == 200, url


def test_a_second_start_says_how_to_get_in(serve):
    """The first start prints a link; whoever starts the server again has no token, and maybe no cookie.

    Reported: issue 45.18
    """
    server = serve(flags=["--host", "0.0.0.0", "--login", "--allow-host", "127.0.0.1"])
    first = server.admin()
    server.stop()
    server.start()
    second = server.admin()
    assert second.get("/session").json == first.get("/session").json
    assert Client(server.url).send("POST", f"{API}/session", {"token": _token(server.login_url)}).status == 401  # used


def test_a_lost_cookie_of_the_admin_is_replaced_from_the_command_line(serve, studio, capsys, own_logging, tmp_path):
    """The admin's browser forgot its cookies while the server runs, and nobody else can invite.

    Reported: issue 45.18
    """
    for server, words in ((serve(), ["serve", "--dir"]), (studio(), ["studio"])):
        place = ["--port", str(server.port), "--json", "--new-admin-link"]
        for _ in range(2):
            capsys.readouterr()
            assert main([*words, str(server.folder), *place]) == 0
            answer = json.loads(capsys.readouterr().out)
            assert answer["url"] == server.url
            found = replace(server, login_url=answer["login_url"]).admin()
            assert found.get("/session").json["role"] == "admin"
            again = Client(server.url).send("POST", f"{API}/session", {"token": _token(answer["login_url"])})
            assert again.status == 401
    assert main(["serve", "--dir", str(tmp_path / "new"), "--new-admin-link"]) == 2
    assert "no admin yet" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_forged_or_late_link_lets_nobody_in(serve, monkeypatch):
    """A link is signed: another key, another kind of value or another rater are nobody.

    Reported: issue 45.18
    """
    server = serve()
    key = logins.read_key(server.folder)
    hour = time.time() + 3600
    session = logins.signed(key, "session", 1, hour)
    late = logins.signed(key, "link", 1, time.time() - 1)
    other = logins.signed(b"x" * 32, "link", 1, hour)
    good = logins.signed(key, "link", 1, hour)
    for token in (session, late, other, good.replace("1.", "2.", 1), ".".join(good.split(".")[1:])):
        assert Client(server.url).send("POST", f"{API}/session", {"token": token}).status == 401
    assert Client(server.url, good).get("/session").status == 401  # a link is no session
    assert Client(server.url).send("POST", f"{API}/session", {"token": good}).status == 200


def test_what_a_flag_set_a_flag_takes_back(serve, capsys, own_logging, tmp_path):
    """Somebody starts once with `--raw`, and all later starts show raw text.

    Reported: issue 45.18
    """
    text = tmp_path / "rules.md"
    text.write_text("Be kind.")
    server = serve(pairs(1), flags=["--raw", "--max-votes", "1", "--guidelines", str(text), "--gold-share", "0.1"])
    for flags, style in (
        ((), "raw"),
        (("--no-raw", "--max-votes", "0", "--gold-share", "0"), "markdown"),
        ((), "markdown"),
    ):
        server.stop()
        server.flags = flags
        server.start()
        server.stop()
        with VoteStore.open(server.folder / "votes.db") as store:
            settings = store.reader.campaigns()[0].settings
        assert settings.answer_style == style
        server.start()
    assert (settings.max_votes_per_rater, settings.gold_share, settings.guidelines) == (0, 0, "Be kind.")
    text.write_text("")
    server.stop()
    server.flags = ("--guidelines", str(text))
    server.start()
    assert server.admin().get("/guidelines").json["text"] == ""
    assert main(["serve", "--dir", str(tmp_path / "x"), "--raw", "--no-raw"]) == 2
    assert "contradict" in capsys.readouterr().err


@pytest.mark.browser
def test_a_login_goes_on_to_where_one_was_going(serve, visit):
    """A link to a page is opened after the session has ended; the login must lead there, and nowhere else.

    Reported: issue 45.25
    """
    visit.expected = ("401", "404", "422")
    server = serve(pairs(2))
    token = server.rater("rob").token
    for wanted, reached in (
        ("/watch", "/watch"),
        ("/arena#0123", "/arena#0123"),
        ("/leaderboard?x=1&y=2", "/leaderboard?x=1&y=2"),
        ("/login?next=//evil.example/x", "/evil.example/x"),
        ("/login?next=https://evil.example/x", "/vote"),
        ("/login?next=javascript:alert(1)", "/vote"),
        ("/login?next=/%5C%5Cevil.example", "/evil.example"),
        ("/login?next=login", "/vote"),
    ):
        page = visit.page(visit.stranger(), server, f"{server.url}{wanted}")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{server.url}{reached}")
        page.context.close()


@pytest.mark.browser
def test_a_session_that_ends_meanwhile_leads_back_to_the_page(serve, visit):
    """The pages ask for data by script; when that is refused the login must know where one was.

    Reported: issue 45.25
    """
    visit.expected = ("401",)
    server = serve(pairs(2))
    rater = server.rater("rob")
    page = visit.page(visit.stranger(), server, f"{server.url}/login?token={rater.token}&next=arena")
    page.wait_for_url("**/arena")
    page.context.clear_cookies()
    page.get_by_label("Your message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/login?next=arena")
    page.get_by_label("Token").fill(rater.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/arena")
    page.goto(f"{server.url}/vote")
    press(page)


@pytest.mark.browser
def test_a_mistyped_address_is_a_page(serve, visit):
    """People mistype an address, follow a link to a run that is gone, or open a page that is for admins.

    Reported: issue 45.25
    """
    visit.expected = ("404", "403", "401", "400")
    server = serve(pairs(1))
    rater = server.rater("rob")
    page = visit.page(visit.stranger(), server, f"{server.url}/vot")
    page.get_by_role("heading", name="There is no such page").wait_for()
    page.get_by_role("link", name="Go to the start").click()
    page.wait_for_url("**/login")
    page.goto(f"{server.url}/login?token={rater.token}&next=vote")
    page.wait_for_url("**/vote")
    for path, words in (("/a/b/c/", "There is no such page"), ("/raters", "Only an admin may do this")):
        answer = page.goto(f"{server.url}{path}")
        assert answer.status in (403, 404)
        page.get_by_text(words).wait_for()
        page.get_by_role("link", name="Go to the start").click()
        page.wait_for_url("**/vote")
    asked = Client(server.url, rater.token)
    for headers in ({}, {"Accept": "application/json"}):
        assert asked.send("GET", "/vot", headers=headers).json["detail"] == "there is nothing at this address"
    assert (
        asked.send("GET", f"{API}/nothing", headers={"Accept": "text/html"}).headers["content-type"]
        == "application/json"
    )


def test_a_studio_makes_its_folder(studio, tmp_path):
    """People open the studio before their first run.

    Reported: issue 45.25
    """
    server = studio(run="new/below")
    assert (tmp_path / "runs" / "new" / "below").is_dir()
    assert server.admin().get("/runs").json["rows"] == []


def _token(link: str) -> str:
    return link.partition("token=")[2].partition("&")[0]
