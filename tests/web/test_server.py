"""`tunesmith serve` as a process: how it starts, what it bears, how it ends."""

import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from server_parts import Client, pairs
from tunesmith.apps.cli.main import main
from tunesmith.collect.store.records import CampaignSettings, Candidate, GivenVote, NewOffer, PolicyVersion
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API

BEGUN = (
    b"POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\nContent-Type: application/json\r\n\r\n{"
)
"""A request whose body does not come to its end."""


def connect(server) -> socket.socket:
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=30)


def seconds_until_closed(connection: socket.socket) -> float:
    start = time.monotonic()
    while connection.recv(4096):
        pass
    return time.monotonic() - start


def test_many_raters_vote_at_once_and_every_vote_is_there_once(serve, stored):
    server = serve(pairs(60), overlap=2)
    admin = server.admin()
    raters = [server.rater(f"rater {i}", admin) for i in range(6)]

    def work(client: Client) -> int:
        count = 0
        while shown := client.next(2):
            for one in shown:
                answers = [client.vote(one["token"], "left") for _ in range(2)]
                assert [answer.status for answer in answers] == [200, 200], answers
                assert answers[0].json["revision"] == 1 and answers[1].json["is_repeat"]
                count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        counts = list(pool.map(work, raters))
    assert sum(counts) == 120
    assert server.stop() == 0
    rows = stored(server)
    assert len(rows) == 120 and server.complaints == []
    assert len({(row.prompt, row.rater) for row in rows}) == 120


def test_votes_receipts_and_errors_over_http(serve):
    server = serve(pairs(3))
    client = server.rater("rob")
    shown = client.next(1)[0]
    assert {one["text"] for one in shown["answers"]} in ({f"first {i}", f"second {i}"} for i in range(3))
    path = f"{API}/presentations/{shown['token']}/vote"
    first = client.send("PUT", path, {"verdict": "left", "dwell_ms": 5}, {"Idempotency-Key": "k1"})
    again = client.send("PUT", path, {"verdict": "left", "dwell_ms": 5}, {"Idempotency-Key": "k1"})
    assert (first.json["revision"], again.json["revision"], again.json["is_repeat"]) == (1, 1, True)
    changed = client.send("PUT", path, {"verdict": "right"}, {"Idempotency-Key": "k2"})
    assert changed.json["revision"] == 2
    undone = client.send("DELETE", path)
    assert undone.status == 200 and undone.json["verdict"] == "withdrawn"
    assert client.next(1)[0]["token"] == shown["token"]
    assert client.get("/progress").json["num_votes"] == 0
    for method, body, status in (("PUT", {"verdict": "left"}, 404), ("DELETE", None, 404)):
        assert client.send(method, f"{API}/presentations/nothing/vote", body).status == status
    ranked = client.send("PUT", f"{API}/presentations/{shown['token']}/ranking", {"ranks": [1, 2]})
    assert ranked.status in (200, 422)
    nul = client.send("PUT", path, {"verdict": "left", "reason": "a\x00b"})
    assert nul.status == 422 and "NUL" in nul.json["detail"]
    surrogate = client.send("PUT", path, b'{"verdict": "left", "reason": "\\ud800"}')
    assert surrogate.status == 422


def test_head_ends_even_where_the_body_would_not(serve):
    client = serve().admin()
    for path in ("/vote", "/static/app.css", f"{API}/stream"):
        head = client.send("HEAD", path)
        assert head.status == 200 and head.body == b"" and head.headers["content-type"], path


def test_it_ends_in_time_with_requests_under_way(serve):
    server = serve(pairs(1))
    idle, slow = connect(server), connect(server)
    slow.sendall(BEGUN)
    time.sleep(0.3)
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 30  # not until the connections end by themselves
    idle.close()
    slow.close()


def test_a_session_outlives_a_restart_and_kill(serve):
    server = serve(pairs(2))
    admin = server.admin()
    shown = admin.next(1)[0]
    server.kill()
    server.start()
    assert admin.next(1)[0]["token"] == shown["token"]
    assert admin.vote(shown["token"], "right").status == 200
    assert server.admin().get("/session").json["role"] == "admin"


def test_silent_and_slow_clients_are_hung_up_on(serve):
    server = serve()
    silent, dripping, slow_body = connect(server), connect(server), connect(server)
    dripping.sendall(b"GET / HTTP/1.1\r\nHo")
    slow_body.sendall(BEGUN)
    with ThreadPoolExecutor(3) as pool:
        for seconds in pool.map(seconds_until_closed, (silent, dripping, slow_body)):
            assert seconds < 25
    assert Client(server.url).send("GET", "/login").status == 200


def test_a_large_body_is_refused_before_it_is_read(serve):
    server = serve()
    with connect(server) as connection:
        head = b"POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    with connect(server) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with pytest.raises(OSError):
            for _ in range(10_000):
                connection.sendall(chunk)
    with connect(server) as connection:
        connection.sendall(b"GET /" + b"a" * 1_000_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_offers_of_a_trainer_become_pairs_and_versions_can_be_rolled_back(serve):
    server = serve()
    admin = server.admin()
    assert admin.next() == []
    assert admin.send("POST", f"{API}/versions/1/rollback").status == 404
    with RunStore.open(server.folder / "runs.db") as runs:
        runs.add_version(PolicyVersion(version=1, created_at=time.time(), serving=True))
        runs.add_offers([NewOffer(1, "Hello", (Candidate("a", weight_version=1), Candidate("b", weight_version=1)))])
    deadline = time.monotonic() + 20
    while not (shown := admin.next()):
        assert time.monotonic() < deadline, server.complaints
        time.sleep(0.1)
    assert shown[0]["prompt"][0]["text"] == "Hello"
    assert admin.send("POST", f"{API}/versions/1/rollback").status == 202
    assert server.rater("rob", admin).send("POST", f"{API}/versions/1/rollback").status == 403


def test_a_taken_port_and_an_open_address_are_refused(tmp_path, capsys, own_logging):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--dir", str(tmp_path), "--port", str(port)]) == 2
        assert "is taken" in capsys.readouterr().err
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert main(["serve", "--dir", str(tmp_path), "--host", host, "--port", "0"]) == 2
        assert "--login" in capsys.readouterr().err
    assert main(["serve", "--dir", str(tmp_path), "--host", "no.such.host.invalid", "--login"]) == 2
    assert main(["serve", "--dir", str(tmp_path), "--port", "70000"]) == 2
    for flag, value in (("--overlap", "0"), ("--gold-share", "0.6"), ("--max-votes", "-1"), ("--lease", "0")):
        assert main(["serve", "--dir", str(tmp_path), flag, value]) == 2
        assert f"{flag} is {value};" in capsys.readouterr().err
    for flags in (["--allow-origin", "https://a.example"], ["--openai", "m", "--allow-origin", "https://a.example/x"]):
        assert main(["serve", "--dir", str(tmp_path), *flags]) == 2
        assert "--allow-origin is" in capsys.readouterr().err
    for flags in (["--scopes", "admin"], ["--new-key", "k", "--scopes", "generate,all"]):
        assert main(["serve", "--dir", str(tmp_path), *flags]) == 2
        assert "--scopes is" in capsys.readouterr().err
    assert main(["serve", "--dir", str(tmp_path / "new"), "--guidelines", str(tmp_path / "none.md")]) == 2
    assert "none.md cannot be read: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "new").exists(), "nothing is made before all flags are read"
    long = tmp_path / "long.md"
    long.write_text("Be kind. " * 10_000)
    capsys.readouterr()
    assert main(["serve", "--dir", str(tmp_path), "--port", "0", "--guidelines", str(long)]) == 2
    assert "90,000 characters; 50,000 are allowed" in capsys.readouterr().err
    assert main(["serve", "--dir", str(long), "--port", "0"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_with_login_only_known_names_are_answered(serve):
    server = serve(flags=["--host", "0.0.0.0", "--login", "--allow-host", "127.0.0.1"])
    assert server.admin().get("/session").status == 200
    assert Client(server.url).send("GET", "/login", headers={"Host": "evil.example"}).status == 400


def test_an_imported_rater_may_have_the_name_of_the_first_admin(serve):
    server = serve(pairs(1))
    server.stop()
    shutil.rmtree(server.folder)
    with VoteStore.open(server.folder / "votes.db") as store:
        made = store.set_campaign(CampaignSettings()).id
        store.import_votes(made, [GivenVote(pairs(1)[0], "better", 0, rater="admin")])
    server.start()
    assert [(one["name"], one["role"]) for one in server.admin().get("/raters").json] == [
        ("admin", "rater"),
        ("admin 2", "admin"),
    ]


def test_flags_change_the_campaign_and_leave_the_rest(serve, tmp_path):
    text = tmp_path / "guide.md"
    text.write_text("Be *kind*.")
    server = serve(pairs(1), flags=["--guidelines", str(text), "--raw", "--max-votes", "1"], overlap=3)
    admin = server.admin()
    mark = '<span class="mark">*</span>'  # which the page hides here
    assert admin.get("/guidelines").json == {"text": "Be *kind*.", "html": f"<p>Be {mark}<em>kind</em>{mark}.</p>"}
    assert admin.next(1)[0]["answers"][0]["html"] is None
    server.stop()
    server.flags = ()
    server.start()
    assert admin.get("/guidelines").json["text"] == "Be *kind*."
    assert [rater.next(1)[0]["prompt"][0]["text"] for rater in (server.rater(name, admin) for name in "ab")]
    server.stop()
    with VoteStore.open(server.folder / "votes.db") as store:
        (campaign,) = store.reader.campaigns()
    assert (campaign.settings.max_votes_per_rater, campaign.settings.overlap) == (1, 3)
