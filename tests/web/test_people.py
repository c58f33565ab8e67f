"""What is old, and the data of one person, is removed while a server answers others; the log tells who did it."""

import json
import threading
import time
from pathlib import Path

import pytest

from server_parts import Client, Server, pairs
from tunesmith.apps.cli.main import main
from tunesmith.collect.store.records import CampaignSettings, Choice, Inference, KeySettings
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API
from tunesmith.collect.web.arena import FOLDER, Conversation, Turn

ASKED = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4, "n": 2, "seed": 5}
LETTERS = {"logit_bias": {str(token): 50 for token in range(68, 94)}}
DATA = "/v1/person_data"
DAY_S = 24 * 3600.0

pytestmark = pytest.mark.usefixtures("own_logging")


def answered(store: VoteStore, key: int, name: str, days: float) -> None:
    choice = Choice("Red.", (5,), (-0.5,), (-0.5,), "stop")
    store.record(
        Inference(
            name=name,
            rater_id=key,
            model="m",
            prompt="Old prompt",
            prompt_ids=(1,),
            choices=(choice,),
            options={},
            user="old user",
            created_at=time.time() - days * DAY_S,
        )
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server that keeps answers for 30 days, over a folder with older ones, and the key of an admin."""
    folder: Path = tmp_path_factory.mktemp("people") / "live"
    with VoteStore.open(folder / "votes.db") as store:
        made = store.add_rater("owner", key=KeySettings(("admin",)))
        store.add_items(store.set_campaign(CampaignSettings()).id, pairs(3))
        for number, days in enumerate((40, 31, 29)):
            answered(store, made.rater.id, f"old-{number}", days)
    server = Server(folder, ("--openai", "tiny:llama", "--retention-days", "30")).start()
    yield server, Client(server.url, made.token)
    server.kill()


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict, str]:
    code = main([*map(str, words), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if code == 0 else {}, shown.err


def reader(server: Server) -> VoteReader:
    return VoteReader.open(server.folder / "votes.db")


def make_app(admin: Client, name: str) -> Client:
    return Client(admin.url, admin.send("POST", "/v1/keys", {"name": name}).json["key"])


def talk(app: Client, user: str) -> str:
    """An answer for a user of the key, who likes one of its choices better."""
    name = app.send("POST", "/v1/chat/completions", {**ASKED, **LETTERS, "user": user}).json["id"]
    said = {"inference_id": name, "metric_name": "preference", "value": {"better": 0, "worse": 1}}
    assert app.send("POST", "/v1/feedback", said).status == 200
    return name


def test_an_admins_key_exports_and_deletes_a_user_and_nobody_else_does(served):
    server, admin = served
    app = make_app(admin, "app")
    names = {user: talk(app, user) for user in ("ada", "bob")}
    ada = Client(server.url, app.send("POST", "/v1/user_tokens", {"user": "ada"}).json["token"])
    address = f"{DATA}?user=ada&key=app"
    boss = server.admin()
    for method, path in (("GET", address), ("DELETE", address), ("GET", "/v1/audit")):
        for client, status in ((app, 403), (ada, 403), (boss, 403), (Client(server.url), 401)):
            assert client.send(method, path).status == status
    exported = admin.send("GET", address)
    assert exported.headers["content-type"].startswith("application/x-ndjson")
    rows = [json.loads(line) for line in exported.body.decode().splitlines()]
    assert [row["kind"] for row in rows] == ["export", "key", "rater", "answer", "feedback", "vote"]
    assert rows[3]["prompt"] == ASKED["messages"] and rows[3]["id"] == names["ada"] and len(rows[3]["answers"]) == 2
    done = admin.send("DELETE", address).json["deleted"]
    assert {name: done[name] for name in ("answers", "feedback", "votes")} == dict.fromkeys(
        done.keys() - {"id", "conversations"}, 1
    )
    again = {"inference_id": names["ada"], "metric_name": "thumbs", "value": True}
    assert app.send("POST", "/v1/feedback", again).status == 404
    assert app.send("POST", "/v1/feedback", {**again, "inference_id": names["bob"]}).status == 200
    assert [one["user"] for one in app.send("GET", "/v1/feedback").json["data"]] == ["bob", "bob"]
    assert admin.send("GET", address).status == admin.send("DELETE", address).status == 404
    assert admin.send("GET", f"{DATA}?user=ada&key=other").json["error"]["param"] == "key"
    assert admin.send("DELETE", f"{DATA}?user=owner").status == 409
    log = admin.send("GET", "/v1/audit?limit=4")
    # What the server does by itself at its start may come in between.
    told = [(one["who"], one["kind"], one["about"]) for one in log.json["data"] if "about" in one][:3]
    hidden = f"deleted {done['id']}"
    assert told == [("owner", "data deleted", hidden), ("owner", "data exported", hidden), ("owner", "key made", "app")]
    assert log.json["has_more"] and "ada" not in log.body.decode()
    assert not any(one.token in log.body.decode() for one in (admin, app))
    rest = admin.send("GET", f"/v1/audit?before={log.json['data'][0]['id']}").json["data"]
    assert rest[:3] == log.json["data"][1:] and {"prune", "rater invited"} <= {one["kind"] for one in rest}
    # The page of admins shows the same.
    assert boss.send("GET", f"{API}/audit?limit=4").json == log.json["data"]
    assert server.rater("rob", boss).send("GET", f"{API}/audit").status == 403


def test_a_key_is_found_by_its_name_in_whatever_spelling_and_takes_none_of_a_user(served):
    server, admin = served
    made = admin.send("POST", "/v1/keys", {"name": "  My  app "}).json
    talk(Client(server.url, made["key"]), "ada")
    as_given, address = "%20%20My%20%20app%20", f"{DATA}?user=ada&key="
    rows = [admin.send("GET", f"{address}{name}").body.splitlines()[1:3] for name in (as_given, "my%20app")]
    assert rows[0] == rows[1] and json.loads(rows[0][0])["name"] == made["name"]
    taken = admin.send("POST", "/v1/keys", {"name": json.loads(rows[0][1])["name"]})
    assert taken.status == 422 and "choose another" in taken.json["error"]["message"]
    assert admin.send("DELETE", f"/v1/keys/{as_given}").status == 204
    ended = [one["ended_at"] for one in admin.send("GET", "/v1/keys").json["data"] if one["name"] == made["name"]]
    assert ended != [None] and len(ended) == 1
    assert admin.send("DELETE", f"{DATA}?user={as_given}").status == 200


def test_others_are_answered_and_lose_nothing_while_somebodys_data_is_deleted(served):
    server, admin = served
    app = make_app(admin, "busy")
    answers: list[str] = []
    users = [f"user {number}" for number in range(6)]
    for user in users:
        talk(app, user)

    def ask() -> None:
        answers.extend(talk(app, "carl") for _ in range(6))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for user in users:
        assert admin.send("DELETE", f"{DATA}?user={user.replace(' ', '%20')}&key=busy").json["deleted"]["answers"] == 1
    for thread in threads:
        thread.join()
    assert len(answers) == 18
    with reader(server) as votes:
        assert set(votes.inferences(answers)) == set(answers)
        said = [one for one in votes.feedback_after(0) if one.user not in ("ada", "bob")]
        assert {one.inference for one in said} == set(answers) and {one.user for one in said} == {"carl"}


def test_what_is_old_is_removed_at_the_start_and_failed_keys_are_counted(served, capsys):
    server, admin = served
    deadline = time.monotonic() + 30
    with reader(server) as votes:
        while set(votes.inferences(["old-0", "old-1", "old-2"])) != {"old-2"} and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(votes.inferences(["old-0", "old-1", "old-2"])) == {"old-2"}
    for token in ("sk-wrong", "sk-other", "ut-wrong"):
        assert Client(server.url, token).send("GET", "/v1/models").status == 401
    assert Client(server.url).send("POST", f"{API}/session", {"token": "guess"}).status == 401
    code, facts, told = run(capsys, "votes", "prune", "--dir", server.folder, "--days", 28)
    assert (code, facts["removed"]["answers"]) == (0, 1), told
    assert admin.send("GET", "/v1/models").status == 200  # the server has the votes as before
    server.stop()
    code, facts, _ = run(capsys, "votes", "audit", "--dir", server.folder)
    kinds = {one["kind"]: one["detail"] for one in reversed(facts["entries"])}
    assert kinds["refused"] == {"num": 4, "num_addresses": 1} and kinds["prune"] == {"days": 28, "answers": 1}
    assert not any(word in json.dumps(facts) for word in ("wrong", "guess", "old user", admin.token))
    assert run(capsys, "votes", "prune", "--dir", server.folder, "--days", 28)[1]["removed"] == {}
    server.start()


def test_a_rater_is_exported_and_deleted_by_commands_with_their_conversations(served, capsys, tmp_path):
    server, _ = served
    boss = server.admin()
    grace = server.rater("Grace Hopper", boss)
    (shown, *_) = grace.next()
    assert grace.vote(shown["token"], reason="So kind.").status == 200
    person = next(one for one in boss.send("GET", f"{API}/raters").json if one["name"] == "Grace Hopper")
    for number, rater_id in enumerate((person["id"], person["id"] + 1)):
        turn = Turn("What I asked", [], [{"text": "One"}, {"text": "Two"}])
        conversation = Conversation(f"{number}" * 32, rater_id, [], [turn])
        (server.folder / FOLDER / f"{conversation.id}.json").write_text(conversation.to_json())
    dest = tmp_path / "grace.jsonl"
    code, facts, _ = run(capsys, "users", "export", "grace hopper", dest, "--dir", server.folder)
    rows = list(map(json.loads, dest.read_text().splitlines()))
    assert (code, facts["num_rows"]) == (0, 4) and dest.stat().st_mode & 0o777 == 0o600
    assert [row["kind"] for row in rows] == ["export", "rater", "vote", "conversation"]
    assert rows[2]["reason"] == "So kind." and rows[3]["turns"][0]["answers"] == ["One", "Two"]
    assert "nothing is overwritten" in run(capsys, "users", "export", "Grace Hopper", dest, "--dir", server.folder)[2]
    found = run(capsys, "users", "delete", "Grace Hopper", "--dir", server.folder)[1]["found"]
    assert found == {"export": 1, "rater": 1, "vote": 1, "conversation": 1}  # and nothing is removed
    done = run(capsys, "users", "delete", "Grace Hopper", "--dir", server.folder, "--yes")[1]["deleted"]
    assert done == {"id": person["id"], "votes": 1, "conversations": 1}
    assert [file.stem for file in (server.folder / FOLDER).glob("*.json")] == ["1" * 32]
    deadline = time.monotonic() + 30  # the server remembers a login for two seconds
    while grace.get("/session").status != 401 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert grace.get("/session").status == 401
    ids = [one["rater_id"] for one in boss.send("GET", f"{API}/stats").json["raters"]]
    assert person["id"] not in ids
    code, _, told = run(capsys, "users", "delete", "Grace Hopper", "--dir", server.folder, "--yes")
    assert code == 2 and "there is no rater and no key 'Grace Hopper'" in told
    entries = boss.send("GET", f"{API}/audit?limit=2").json
    assert [(one["who"], one["kind"]) for one in entries] == [("server", "data deleted"), ("server", "data exported")]
    assert "Grace" not in json.dumps(boss.send("GET", f"{API}/audit").json)


@pytest.mark.parametrize("words", [("votes", "prune", "--days", "0"), ("serve", "--retention-days", "-1")])
def test_days_are_more_than_none(words, tmp_path, capsys):
    code, _, told = run(capsys, *words, "--dir", tmp_path)
    assert code == 2 and "give a number of days above 0" in told
