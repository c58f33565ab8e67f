"""Two servers of one database and one folder: what one of them does is there for the other."""

import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import pytest

from server_parts import Client, Server
from tunesmith.collect.store.records import Candidate, KeySettings, NewItem
from tunesmith.collect.store.votes import VoteStore

ASKED = {
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 6,
    "logit_bias": {str(token): 50 for token in range(68, 94)},  # letters, which votes can hold
}
CHAT, FEEDBACK = "/v1/chat/completions", "/v1/feedback"


@pytest.fixture(scope="module")
def url(postgres):
    return postgres.new()


@pytest.fixture(scope="module")
def servers(url, tmp_path_factory):
    """Both begin at the same time, on a database without tables."""
    folder = tmp_path_factory.mktemp("shared")
    made = [Server(folder, ("--openai", "tiny:llama", "--database", url)) for _ in range(2)]
    for server in made:
        server.launch()
    yield [server.until_started() for server in made]
    for server in made:
        server.kill()


@pytest.fixture(scope="module")
def key(servers):
    """The first key, which one of them made."""
    (found,) = [server.facts["key"] for server in servers if server.facts["key"]]
    return found


def clients(servers, token) -> list[Client]:
    return [Client(server.url, token) for server in servers]


def ask(client: Client, **more):
    answer = client.send("POST", CHAT, {**ASKED, **more})
    assert answer.status == 200, answer.body
    return answer.json


def test_a_password_is_nowhere_in_what_a_server_says_and_writes(servers, url):
    place = url.replace("tunesmith@", "tunesmith:s3cret-word@")
    server = Server(servers[0].folder, ("--openai", "tiny:llama", "--database", place)).start()
    facts = dict(server.facts)
    server.stop()
    assert unquote(facts["votes"]) == url and "s3cret-word" not in str(facts) + "".join(server.complaints)
    files = [file for file in server.folder.rglob("*") if file.is_file()]
    assert files and not any(b"s3cret-word" in file.read_bytes() for file in files)


def test_each_token_is_charged_once_and_what_is_used_up_is_used_up_at_both(servers, key, url):
    with VoteStore.open(url) as store:  # while they run
        owner = store.add_rater("owner", key=KeySettings(("admin",))).token
    admins = clients(servers, owner)
    made = admins[0].send("POST", "/v1/keys", {"name": "limited", "tokens_per_day": 200}).json["key"]
    limited = clients(servers, made)

    def work(number: int) -> int:
        """Tokens that were read and drawn until the key had none left."""
        num_tokens = 0
        while (answer := limited[number % 2].send("POST", CHAT, {**ASKED, "seed": number})).status == 200:
            num_tokens += answer.json["usage"]["total_tokens"]
        assert answer.status == 429 and "200 tokens of this day" in answer.json["error"]["message"]
        return num_tokens

    with ThreadPoolExecutor(4) as pool:
        num_tokens = sum(pool.map(work, range(4)))
    for admin in admins:
        shown = {one["name"]: one["tokens_today"] for one in admin.send("GET", "/v1/keys").json["data"]}
        # At most what the four asked for at once is above the limit.
        assert 200 <= shown["limited"] == num_tokens < 200 + 4 * 100
    assert admins[1].send("DELETE", "/v1/keys/limited").status == 204
    deadline = time.monotonic() + 60
    while limited[0].send("GET", "/v1/models").status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_feedback_at_one_server_is_on_answers_of_the_other_and_both_list_it(servers, key):
    first, second = clients(servers, key)
    one, two = ask(first, n=2, seed=1), ask(second, seed=2)
    assert second.send("POST", FEEDBACK, {"id": one["id"], "metric_name": "thumbs", "value": True}).status == 200
    again = first.send("POST", FEEDBACK, {"id": one["id"], "metric_name": "thumbs", "value": True})
    assert again.json["is_repeat"]
    preferred = {"metric_name": "preference", "value": {"better": two["id"], "worse": f"{one['id']}#1"}}
    assert first.send("POST", FEEDBACK, preferred).status == 200
    listed = [client.send("GET", FEEDBACK).json for client in (first, second)]
    assert listed[0] == listed[1] and [one["metric_name"] for one in listed[0]["data"]] == ["thumbs", "preference"]
    user = first.send("POST", "/v1/user_tokens", {"user": "ada"}).json["token"]
    assert Client(servers[1].url, user).send("GET", "/v1/models").status == 200


def test_raters_of_both_servers_share_the_queue_and_a_link_lets_in_once(servers, url):
    with VoteStore.open(url) as store:
        (campaign,) = store.reader.campaigns()
        store.add_items(campaign.id, [NewItem(f"p{n}", (Candidate("a"), Candidate("b"))) for n in range(6)])
    admin = servers[0].admin()
    raters = [Client(servers[n % 2].url, servers[0].rater(f"rater {n}", admin).token) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(lambda rater: rater.next(2), raters))
    tokens = [shown["token"] for one in held for shown in one]
    assert len(tokens) == len(set(tokens)) == 6
    shown = next(one for one in held if one)[0]
    rater = raters[held.index(next(one for one in held if one))]
    for server in servers:
        receipt = Client(server.url, rater.token).vote(shown["token"])
        assert receipt.status == 200, receipt.body
    link = servers[0].login_url.partition("token=")[2].partition("&")[0]
    assert Client(servers[1].url).send("POST", "/api/v1/session", {"token": link}).status == 401
