"""The guard: what it lets through, for every route there is."""

import json
import time
from urllib.parse import unquote, urljoin

import pytest
from fastapi.routing import iter_route_contexts
from starlette.websockets import WebSocketDisconnect

from app_parts import JOB_ID, RUN_ID, TALK_ID, URL, app_in
from tunesmith.collect.store.records import Candidate, KeySettings, NewItem
from tunesmith.collect.web import logins
from tunesmith.collect.web.access import API, RouteTable, Rule, is_api
from tunesmith.collect.web.settings import Limits

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
PUBLIC = {
    ("GET", "/login"),
    ("GET", "/join/x"),
    ("POST", f"{API}/session"),
    ("POST", f"{API}/join"),
    ("GET", "/health"),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with app_in(tmp_path_factory.mktemp("app")) as made:
        yield made


PARAMETERS = {
    **{"token": "x", "invite": "x", "rater_id": "7", "version": "7"},
    **{"run": RUN_ID, "name": "recipe.yaml", "job": JOB_ID, "conversation": TALK_ID, "number": "0"},
}


def filled(path: str) -> str:
    """The path of a route with something in place of its parameters."""
    for name, value in PARAMETERS.items():
        path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
    return path


def table_of(app) -> RouteTable:
    return next(one.kwargs["table"] for one in app.user_middleware if "table" in one.kwargs)


def routes_of(app) -> list[tuple[str, str]]:
    """Every path of the app, with something in place of its parameters, and every method."""
    paths = set()
    for context in iter_route_contexts(app.routes):
        paths.add(filled(getattr(context, "path", "") or getattr(context.original_route, "path", "")))
    assert {f"{API}/next", f"{API}/presentations/x/vote", "/vote", f"{API}/runs/{RUN_ID}/stream"} <= paths
    assert not any("{" in path for path in paths), paths
    return [(method, path) for path in sorted(paths) for method in METHODS if not path.startswith("/static")]


def test_every_route_and_method_is_closed_without_a_good_token(parts):
    expired = parts.store.add_rater("late", expires_at=time.time() - 1).token
    gone = parts.store.add_rater("gone")
    parts.store.disable_rater(gone.rater.id)
    open_ones = set()
    for token in ("", "wrong", expired, gone.token):
        client = parts.client(token)
        for method, path in routes_of(parts.app):
            status = client.request(method, path).status_code
            is_page = status == 303 and any(rule.is_page for rule in table_of(parts.app).at(path))
            if status != 401 and not is_page:
                open_ones.add(("GET" if method == "HEAD" else method, path))
    assert open_ones <= PUBLIC


def test_head_answers_as_get_does_without_the_body(parts):
    client = parts.client(parts.admin)
    for method, path in routes_of(parts.app):
        if is_api(path) or method != "GET" or (client.options(path).headers.get("allow", "").find("GET") < 0):
            continue
        head = client.head(path, params={"name": "kl", "step": 1})
        assert head.content == b"" and head.status_code in (200, 303), (path, head.status_code)
        if not path.endswith("/stream"):  # whose body does not end
            get = client.get(path, params={"name": "kl", "step": 1})
            assert (head.status_code, head.headers) == (get.status_code, get.headers), path
    style = client.head("/static/app.css")
    assert style.content == b"" and int(style.headers["content-length"]) > 1000


def test_admin_routes_are_closed_to_raters(parts):
    client = parts.client(parts.rater)
    admin_rules = [rule for rule in table_of(parts.app).rules if rule.access == "admin"]
    assert len(admin_rules) >= 26
    for rule in admin_rules:
        for method in rule.methods:
            assert client.request(method, filled(rule.path)).status_code == 403, (method, rule.path)


def test_every_route_of_the_app_has_a_rule(parts):
    table = table_of(parts.app)
    for context in iter_route_contexts(parts.app.routes):
        path = getattr(context, "path", "") or context.original_route.path
        for method in getattr(context, "methods", None) or ():
            assert any(rule.path == path and (method == "HEAD" or method in rule.methods) for rule in table.rules), path


def test_what_no_rule_names_is_not_there(parts):
    client = parts.client(parts.admin)
    for path in ("/nothing", "/docs", "/redoc", "/openapi.json", f"{API}/next/", "/vote/", "/%2e%2e/vote"):
        assert client.get(path).status_code == 404, path
    refused = client.patch(f"{API}/next")
    assert refused.status_code == 405 and refused.headers["allow"] == "GET, HEAD"
    assert client.options(f"{API}/next").status_code == 405


def test_paths_that_only_look_alike_do_not_match():
    table = RouteTable((Rule(("GET",), "/a.b/{x}", "rater"), Rule(("GET",), "/s/{p:path}", "public")))
    assert table.find("GET", "/a.b/1") is not None and table.find("HEAD", "/a.b/1") is not None
    assert table.find("GET", "/s/x/y") is not None
    for path in ("/aXb/1", "/a.b/", "/a.b/1/2", "/A.b/1"):
        assert table.find("GET", path) is None, path
    assert table.find("POST", "/a.b/1") is None


def test_a_token_lets_a_rater_in_and_admins_further(parts):
    assert parts.client(parts.rater).get(f"{API}/session").json() == {"name": "rob", "role": "rater"}
    assert parts.client(parts.admin).get(f"{API}/raters").status_code == 200


def test_a_rater_who_is_shut_out_is_out_at_once(parts):
    new = parts.store.add_rater("brief")
    client, admin = parts.client(new.token), parts.client(parts.admin)
    session = parts.app.state.services.logins.sessions.sign(new.rater.id, time.time() + 60)
    both = (client, parts.client(session))
    assert [one.get(f"{API}/session").status_code for one in both] == [200, 200]
    assert admin.delete(f"{API}/raters/{new.rater.id}").status_code == 204
    assert [one.get(f"{API}/session").status_code for one in both] == [401, 401]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "a b", "127.0.0.2"]
)
def test_a_foreign_host_is_refused_everywhere(parts, host):
    for path in ("/login", "/vote", "/static/app.css", f"{API}/next", f"{API}/stream"):
        assert parts.client(parts.admin).get(path, headers={"Host": host}).status_code == 400, path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:8000", "votes.example"])
def test_own_names_are_answered_on_any_port(tmp_path, host):
    with app_in(tmp_path, hosts=("Votes.Example",)) as parts:
        assert parts.client(parts.rater).get(f"{API}/session", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9", "http://[", "file://", ""])
def test_a_foreign_origin_is_refused_whatever_it_asks(parts, origin):
    client = parts.client(parts.admin)
    for method, path in (("GET", f"{API}/next"), ("POST", f"{API}/raters"), ("POST", f"{API}/session")):
        answer = client.request(method, path, headers={"Origin": origin})
        assert answer.status_code == 403 and "another server" in answer.json()["detail"], (method, path)
    site = client.get(f"{API}/next", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"})
    assert site.status_code == 403


def test_pages_of_listed_origins_may_ask_the_api_alone(tmp_path):
    listed, asks = "https://app.example", {"Access-Control-Request-Method": "POST"}
    with app_in(tmp_path, origins=(listed,)) as made:
        key = made.store.add_rater("app", key=KeySettings(("generate", "feedback"))).token
        client, preflight = made.client(key), made.client()
        for path, origin, is_open in (
            ("/v1/feedback", listed, True),
            ("/v1/feedback", "https://other.example", False),
            ("/v1/feedback", "http://app.example", False),
            ("/v1/feedback", "https://app.example:8443", False),
            ("/v1/feedback", "null", False),
            (f"{API}/next", listed, False),
            ("/vote", listed, False),
        ):
            headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
            asked = preflight.options(path, headers={**headers, **asks, "Access-Control-Request-Headers": "x-a"})
            allowed = asked.headers.get("access-control-allow-origin")
            assert (asked.status_code == 200 and allowed == origin) == is_open, path
            answer = client.get(path, headers=headers)
            assert answer.status_code == (200 if is_open else 403), (path, origin)
            assert answer.headers.get("access-control-allow-origin") == (origin if is_open else None)
            assert "access-control-allow-credentials" not in answer.headers
        refused = preflight.get("/v1/feedback", headers={"Origin": listed})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == listed
        both = client.get("/v1/feedback", headers=[("Origin", listed), ("Origin", "https://other.example")])
        assert both.status_code == 403


def test_a_cookie_alone_changes_nothing_without_an_origin(parts):
    sessions = parts.app.state.services.logins.sessions
    rater_id = next(rater.id for rater in parts.store.reader.raters() if rater.name == "rob")
    cookie = f"{sessions.cookie}={sessions.sign(rater_id, time.time() + 60)}"
    client = parts.client()
    assert client.get(f"{API}/session", headers={"Cookie": cookie}).status_code == 200
    assert client.delete(f"{API}/session", headers={"Cookie": cookie}).status_code == 403
    assert client.delete(f"{API}/session", headers={"Cookie": cookie, "Origin": URL}).status_code == 204
    late = f"{sessions.cookie}={sessions.sign(rater_id, time.time() - 1)}"
    forged = f"{cookie[:-2]}xx"
    for bad in (late, forged, f"{sessions.cookie}=1.99999999999.x", f"{sessions.cookie}=", "a=b;;=;\\"):
        assert client.get(f"{API}/session", headers={"Cookie": bad}).status_code == 401, bad


def test_bodies_are_json_small_and_shallow(parts):
    client, path = parts.client(parts.rater), f"{API}/presentations/x/vote"
    json_type = {"Content-Type": "application/json"}
    assert client.put(path, content=b"verdict=left", headers={"Content-Type": "text/plain"}).status_code == 415
    for depth in (33, 10_000):
        deep = client.put(path, content=b"[" * depth + b"]" * depth, headers=json_type)
        assert deep.status_code == 400 and "deeper than 32" in deep.json()["detail"]
    assert client.put(path, content=b" " * 70_000, headers=json_type).status_code == 413
    assert client.put(path, content=(b" " * 1000 for _ in range(70)), headers=json_type).status_code == 413
    assert client.request("GET", f"{API}/next", content=b"{}", headers=json_type).status_code == 400
    for body in (b"{", b"[]", b"null", b'"left"', b'{"verdict": "best"}', b'{"verdict": "left", "x": 1}'):
        assert client.put(path, content=body, headers=json_type).status_code == 422, body
    assert client.put(path, content=b"\xff", headers=json_type).status_code == 400


def test_errors_do_not_repeat_what_was_sent(parts):
    client, path = parts.client(parts.rater), f"{API}/presentations/x/vote"
    for body in ({"verdict": "\ud800"}, {"verdict": "left", "reason": "\ud800"}, {"verdict": "x" * 5000}):
        answer = client.put(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 422 and len(answer.content) < 1000


def test_a_rater_who_asks_too_often_must_wait_and_others_need_not(tmp_path):
    with app_in(tmp_path, Limits(rate_per_s=0.01, burst=3)) as parts:
        client = parts.client(parts.rater)
        assert [client.get(f"{API}/session").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert int(client.get(f"{API}/session").headers["retry-after"]) >= 1
        assert parts.client(parts.admin).get(f"{API}/session").status_code == 200


def test_wrong_tokens_are_slowed_down_for_their_address_and_good_ones_go_on(tmp_path, monkeypatch):
    # Nothing is remembered, so that every request is looked up.
    monkeypatch.setattr(logins, "_CACHE_S", -1)
    with app_in(tmp_path, Limits(failures=3, failure_every_s=1000)) as parts:
        good = parts.client(parts.rater)
        assert good.get(f"{API}/session").status_code == 200
        session = parts.client().post(f"{API}/session", json={"token": parts.rater}).headers["set-cookie"]
        bad = parts.client("wrong")
        assert [bad.get(f"{API}/session").status_code for _ in range(5)] == [401, 401, 401, 429, 429]
        assert parts.client().post(f"{API}/session", json={"token": parts.rater}).status_code == 200
        assert good.get(f"{API}/session").status_code == 200
        cookie = {"Cookie": session.partition(";")[0]}
        assert parts.client().get(f"{API}/session", headers=cookie).status_code == 200
        assert parts.client("wrong", address="10.0.0.9").get(f"{API}/session").status_code == 401


def test_every_answer_carries_the_safety_headers(parts):
    answers = [
        parts.client().get("/login"),
        parts.client().get("/vote"),
        parts.client().get("/static/app.css"),
        parts.client().get(f"{API}/next"),
        parts.client(parts.rater).get(f"{API}/next"),
        parts.client(parts.rater).get("/login", headers={"Host": "evil.example"}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy and "default-src 'none'" in policy, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == ("no-cache" if "static" in str(answer.url) else "no-store")
        assert answer.headers.get_list("cache-control") == [answer.headers["cache-control"]]


def test_no_socket_is_opened(parts):
    with pytest.raises(WebSocketDisconnect), parts.client(parts.admin).websocket_connect(f"{API}/next"):
        pass


def test_static_files_do_not_lead_out_of_their_folder(parts):
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/",
    ):
        assert parts.client().get(path).status_code in (401, 404), path


def test_pages_send_strangers_to_the_login(parts):
    pages = [rule for rule in table_of(parts.app).rules if rule.is_page]
    assert len(pages) >= 8
    for rule in pages:
        answer = parts.client().get(filled(rule.path))
        page, _, target = urljoin(filled(rule.path), answer.headers["location"]).partition("?next=")
        assert answer.status_code == 303 and page == "/login" and f"/{unquote(target)}" == filled(rule.path)


def test_a_vote_on_another_raters_pair_is_unknown(parts):
    campaign = parts.app.state.services.campaign()
    parts.store.add_items(campaign.id, [NewItem("p", (Candidate("a"), Candidate("b")))])
    shown = parts.client(parts.rater).get(f"{API}/next").json()["presentations"][0]
    path = f"{API}/presentations/{shown['token']}/vote"
    for method, body in (("PUT", {"verdict": "left"}), ("DELETE", None)):
        assert parts.client(parts.admin).request(method, path, json=body).status_code == 404
    assert parts.client(parts.rater).put(path, json={"verdict": "left"}).status_code == 200
    assert "version" not in json.dumps(shown) and "source" not in json.dumps(shown)
