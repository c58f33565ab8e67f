"""The pages behind nginx: with a path prefix and without, with TLS, and with what configurations leave out."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from app_parts import URL, app_in, make_run
from page_parts import press, wait_until_sent
from server_parts import Client, Server, Trainer, pairs
from tunesmith.collect.web.access import API
from watch_parts import label

ALL_HEADERS = """
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_set_header X-Forwarded-Proto $scheme;
"""
CONFIGURATION = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr warn;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port} {tls}; location {location} {{ proxy_pass {server}; {headers} }} }}
}}
"""
PREFIXED = {
    "without a prefix": ("/", "", ALL_HEADERS, ()),
    "removed by nginx, which says so": ("/tune/", "/", f"{ALL_HEADERS} proxy_set_header X-Forwarded-Prefix /tune;", ()),
    "removed by nginx, which says nothing": ("/tune/", "/", ALL_HEADERS, ()),
    "left in the path": ("/tune/", "", ALL_HEADERS, ("--root-path", "/tune")),
    "named like a page": ("/vote/", "/", f"{ALL_HEADERS} proxy_set_header X-Forwarded-Prefix /vote;", ()),
    "no header at all": ("/a/b/", "/", "", ()),
}
"""Location of nginx, what it puts in the place of the prefix, its headers, and flags of the server."""

Behind = Callable[..., Server]


@pytest.fixture
def behind(tmp_path: Path, require) -> Iterator[Behind]:
    """A function: the same server as it is reached through nginx."""
    nginx = require("nginx", "/usr/sbin/nginx")
    with ExitStack() as stack:

        def start(
            server: Server, location: str = "/", rest: str = "", headers: str = "", *, tls: bool = False
        ) -> Server:
            with closing(socket.create_server(("127.0.0.1", 0))) as free:
                port = free.getsockname()[1]
            words = f"ssl; ssl_certificate {tmp_path}/cert.pem; ssl_certificate_key {tmp_path}/key.pem"
            text = CONFIGURATION.format(
                folder=tmp_path,
                port=port,
                location=location,
                server=f"{server.url}{rest}",
                headers=headers,
                tls=words if tls else "",
            )
            (tmp_path / "nginx.conf").write_text(text)
            process = subprocess.Popen([nginx, "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
            stack.callback(process.wait)
            stack.callback(process.terminate)
            _wait_for_port(port)
            url = f"{'https' if tls else 'http'}://127.0.0.1:{port}{location.rstrip('/')}"
            return replace(server, url=url, login_url=server.login_url.replace(server.url, url))

        yield start


def _wait_for_port(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("nginx does not listen")


def looked_at(visit, context, server: Server, path: str):
    """A page of the server; fails if anything that it asks for is refused, or lies elsewhere."""
    page = visit.page(context, server, "about:blank")
    answers: list[tuple[str, int]] = []
    page.on("response", lambda answer: answers.append((answer.url, answer.status)))
    page.goto(f"{server.url}{path}", wait_until="load")
    page.locator("#theme:visible").wait_for()
    refused = [one for one in answers if one[1] >= 400 or not one[0].startswith(f"{server.url}/")]
    assert refused == [], path
    return page


@pytest.mark.browser
@pytest.mark.parametrize(("location", "rest", "headers", "flags"), PREFIXED.values(), ids=PREFIXED)
def test_people_vote_and_watch_below_a_path_prefix(serve, behind, visit, location, rest, headers, flags):
    """People serve several applications under one host name, each below its own path, with TLS or without.

    Reported: issue 45.19
    """
    server = serve(pairs(4), flags=flags)
    with Trainer.open(server.folder / "runs.db") as trainer:
        trainer.add_metrics(1, {"reward": 0.5})
        seen = behind(server, location, rest, headers)
        context = visit.context(seen)
        page = looked_at(visit, context, seen, "/vote")
        assert [cookie["path"] for cookie in context.cookies()] in (["/"], [location.rstrip("/")])
        press(page, "1")
        wait_until_sent(page, 1)
        for path in ("/arena", "/leaderboard", "/raters", "/login", "/join/x"):
            looked_at(visit, context, seen, path)
        page.get_by_role("link", name="Watch").click()
        label(page, "reward", "reward 0.5 at step 1")
        trainer.add_metrics(2, {"reward": 0.75})
        label(page, "reward", "reward 0.75 at step 2")
        page.get_by_role("link", name="Raters").click()
        page.get_by_label("Name").fill("grace")
        page.get_by_role("button", name="Make a link").click()
        link = page.wait_for_selector("#made:not([hidden]) #link").input_value()
        assert link.startswith(f"{seen.url}/join/")
        guest = visit.page(visit.stranger(), seen, link)
        guest.get_by_role("button", name="Join").click()
        guest.get_by_role("link", name="Begin").click()
        press(guest, "1")
        visit.expected = ("401",)
        guest.get_by_role("button", name="Log out").click()
        expect(guest).to_have_url(re.compile(re.escape(seen.url) + r"/login(\?next=vote)?$"))
        guest.goto(f"{seen.url}/vote")
        guest.wait_for_url(f"{seen.url}/login?next=vote")
        visit.close()


@pytest.mark.browser
def test_admins_use_the_pages_of_runs_below_a_path_prefix(studio, behind, visit, tmp_path):
    """Teams put the pages of training runs behind nginx below a path, as they do with TensorBoard's `--path_prefix`.

    Reported: tensorflow/tensorboard#1885
    """
    rows = [{"step": step, "reward": step / 10, "time/step_s": 2.0} for step in range(1, 6)]
    for name in ("one", "two"):
        make_run(tmp_path / "runs" / name, "algorithm: grpo\nmodel: {name: smollm2}\n", *rows)
    seen = behind(studio(), "/lab/tune/", "/", ALL_HEADERS)
    context = visit.context(seen)
    page = looked_at(visit, context, seen, "/runs")
    page.get_by_role("link", name="one", exact=True).click()
    label(page, "reward", "reward 0.5 at step 5")
    address = page.url
    page.get_by_role("link", name="Report").click()
    page.wait_for_url(f"{address}/report")
    page.goto(address)
    page.locator("#files-part summary").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="recipe.yaml").click()
    assert "smollm2" in download.value.path().read_text()
    page.get_by_role("link", name="Clone", exact=True).click()
    page.locator("#start:not([disabled])").wait_for()
    for path in ("/runs/new", "/compare", "/arena", "/leaderboard", "/raters"):
        looked_at(visit, context, seen, path)
    page.goto(f"{seen.url}/runs")
    for name in ("one", "two"):
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("link", name=re.compile("^Compare ")).click()
    label(page, "reward", "one 0.5 at step 5")
    assert page.url.startswith(f"{seen.url}/compare?")


@pytest.fixture
def certificate(require, tmp_path) -> None:
    """A certificate of our own for nginx."""
    command = [
        require("openssl"),
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*command, "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"], check=True, capture_output=True
    )


@pytest.mark.browser
@pytest.mark.parametrize("headers", [ALL_HEADERS, ""], ids=["all headers", "not even Host"])
def test_tls_ends_at_the_proxy(serve, behind, visit, certificate, headers):
    """The proxy has the certificate, so the browser is told to send the session over TLS alone; nginx passes on no
    Host header unless its configuration says so, and then Django's check of the Origin refuses each form.

    Reported: issue 45.19
    """
    seen = behind(serve(pairs(2)), "/", "", headers, tls=True)
    context = visit.context(seen, ignore_https_errors=True)
    (cookie,) = context.cookies()
    assert cookie["secure"] and cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page = looked_at(visit, context, seen, "/vote")
    press(page, "1")
    wait_until_sent(page, 1)


def test_events_come_through_the_proxy_as_they_happen(serve, behind):
    """nginx collects answers before it passes them on, so live pages of many tools stand still behind it.

    Reported: ggml-org/llama.cpp#20872
    """
    server = serve()
    with Trainer.open(server.folder / "runs.db") as trainer:
        trainer.add_metrics(1, {"reward": 0.5})
        seen = behind(server, "/tune/", "/", ALL_HEADERS)
        token = server.admin().token
        place = urlsplit(seen.url)
        with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=20)) as connection:
            connection.request("GET", f"/tune{API}/stream", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            for step in (1, 2, 3):
                while f'[{step},"reward"' not in (line := answer.readline().decode()) and '"rows"' not in line:
                    assert line, "the stream has ended"
                (row,) = json.loads(line.removeprefix("data: "))["rows"]
                assert row[1] == step
                trainer.add_metrics(step + 1, {"reward": 0.5})


def test_the_api_below_a_prefix_with_tls_as_documented(serve, behind, certificate):
    """Clients ask an API behind nginx at https://host/prefix/v1: streams came at once at the end, long prompts were too
    large, and slow answers were cut off after a minute.

    Reported: ggml-org/llama.cpp#20872
    """
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    lines = re.search(r"location /tunesmith/ \{\n(.*?)\n\}", page, re.DOTALL)[1].splitlines()
    headers = "\n".join(line for line in lines if "proxy_pass" not in line)
    server = serve(flags=["--openai", "tiny:llama"])
    seen = behind(server, "/tunesmith/", "/", headers, tls=True)
    with httpx.Client(verify=False) as unchecked:  # the certificate is our own
        client = openai.OpenAI(
            base_url=f"{seen.url}/v1", api_key=server.facts["key"], http_client=unchecked, max_retries=0
        )
        asked = {"model": "tiny:llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 1}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        events = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == whole
        large = {"metadata": {"note": "x" * 1_100_000}}
        assert client.chat.completions.create(**asked, extra_body=large).choices[0].message.content == whole
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()


def test_a_vote_that_a_proxy_spoils_names_the_remedy(serve, behind):
    """Without `proxy_set_header Host $http_host;` the Origin of each vote is another host's.

    Reported: HumanSignal/label-studio#6344
    """
    names = ("127.0.0.1", "named.example", "named.example:8443")
    server = serve(pairs(2), flags=[f"--allow-host={name}" for name in names])
    client = replace(server.rater("rob"), url=behind(server).url)
    path = f"{API}/presentations/{client.next(1)[0]['token']}/vote"

    def vote(origin: str, **headers: str):
        return client.send("PUT", path, {"verdict": "left"}, {"Origin": origin, **headers})

    refused = vote("http://votes.example")
    assert refused.status == 403
    for remedy in ("proxy_set_header Host $http_host", "--allow-host votes.example", "http.client"):
        assert (remedy in refused.json["detail"]) == (remedy != "http.client")
    assert vote("http://votes.example", **{"X-Forwarded-Host": "votes.example"}).status == 400
    for origin in ("http://named.example", "https://named.example:8443"):
        assert vote(origin).status == 200
    assert vote("https://named.example:9").status == 403
    assert vote("https://any.example", **{"Sec-Fetch-Site": "same-origin"}).status == 200  # the browser compared them
    assert vote("https://any.example", **{"Sec-Fetch-Site": "cross-site"}).status == 403


def test_what_a_proxy_says_is_believed_if_it_is_trusted(tmp_path):
    """Clients write X-Forwarded headers of their own, to be someone else for a rate limit or an address check.

    Reported: langflow-ai/langflow#13509
    """
    with app_in(tmp_path) as parts:
        headers = {"X-Forwarded-Prefix": "/tune", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "127.0.0.1"}
        for address, location, cookie in (
            ("127.0.0.1", "/tune/runs", "path=/tune; samesite=strict; secure"),
            ("::ffff:127.0.0.1", "/tune/runs", "path=/tune; samesite=strict; secure"),
            ("10.0.0.1", "./runs", "path=/; samesite=strict"),
        ):
            client = parts.client(parts.admin, address)
            assert client.get("/", headers=headers).headers["location"] == location
            answer = client.post(f"{API}/session", json={"token": parts.admin}, headers={**headers, "Origin": URL})
            assert answer.headers["set-cookie"].lower().endswith(cookie)
        client = parts.client(parts.admin)
        for prefix in ("/a/../b", "//evil.example", "/a; Domain=evil", "/\u00e9".encode(), "x"):
            assert client.get("/", headers={"X-Forwarded-Prefix": prefix}).headers["location"] == "./runs", prefix
        named = client.get("/", headers={"X-Forwarded-Host": "evil.example"})
        assert named.status_code == 400 and "--allow-host evil.example" in named.json()["detail"]


def test_no_address_in_a_page_begins_at_the_root_of_the_host():
    """An address that begins with a slash leaves the path prefix.

    Reported: issue 45.19
    """
    folder = Path(__file__).parents[2] / "src" / "tunesmith" / "collect" / "web"
    wrong = re.compile(r"""(?:href|src|action)="/|(?:fetch|assign|replace|EventSource|import)\(["'`]/|url\(["'`]?/""")
    files = [*folder.glob("templates/*.html"), *folder.glob("static/*.js"), *folder.glob("static/*.css")]
    assert len(files) > 20
    for file in files:
        assert not wrong.search(file.read_text()), file.name


def test_a_prefix_that_cannot_be_one_is_refused(serve, tmp_path, capsys, own_logging):
    """A wrong address of a proxy would match nothing, in silence.

    Reported: issue 45.19
    """
    from tunesmith.apps.cli.main import main

    for flag, value in (
        ("--root-path", "/a b"),
        ("--root-path", "/a/../b"),
        ("--forwarded-allow-ips", "proxy.local"),
        ("--forwarded-allow-ips", "*"),
    ):
        assert main(["serve", "--dir", str(tmp_path), "--port", "0", flag, value]) == 2
        assert f"{flag} {value}" in capsys.readouterr().err
    server = serve(flags=["--root-path", "tune/", "--forwarded-allow-ips", "10.0.0.0/8"])
    refused = Client(server.url).send("GET", "/elsewhere/vote", headers={"Accept": "text/html"})
    assert refused.status == 404 and b"--root-path" in refused.body
    assert Client(server.url).send("GET", "/tune/login").status == 200
