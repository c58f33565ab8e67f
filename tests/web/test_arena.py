"""Conversations over HTTP: what is stored of them, what is told before a vote, and what goes wrong."""

import http.client
import itertools
import json
import re
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from fastapi import HTTPException

from app_parts import TALK_ID, app_in
from arena_parts import TOO_LONG, make_loop
from server_parts import Server
from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows.live_raters import Raters, RaterTraits, Talk
from tunesmith.base.core.errors import RunError
from tunesmith.collect.store.records import KeySettings
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.web.access import API

ARENA = f"{API}/arena"


@pytest.fixture
def parts(tmp_path):
    make_loop(tmp_path)
    with app_in(tmp_path) as made:
        yield made


@pytest.fixture
def rob(parts):
    return parts.client(parts.rater)


def begin(client, **body):
    answer = client.post(ARENA, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def say(client, id, text, number=0):
    answer = client.post(f"{ARENA}/{id}/turns", json={"number": number, "text": text})
    assert answer.status_code == 202, answer.text
    return answers(client, id)


def answers(client, id):
    """The events of the stream: name and data."""
    text = client.get(f"{ARENA}/{id}/stream").text
    return [(name, json.loads(data)) for name, data in re.findall(r"event: (\w+)\ndata: (.*)\n", text)]


def vote(client, id, verdict, number=0, **more):
    return client.put(f"{ARENA}/{id}/turns/{number}/vote", json={"verdict": verdict, **more})


def stored(parts):
    return list(parts.store.reader.votes_after(0))


def test_a_vote_has_the_whole_conversation_as_prompt_and_goes_on_with_the_better_answer(parts, rob):
    id = begin(rob)
    events = say(rob, id, "The film was")
    left, right = (one["text"] for one in events[-1][1]["turns"][0]["answers"])
    streamed = ["".join(data["text"] for name, data in events if name == "text" and data["side"] == k) for k in (0, 1)]
    assert streamed == [left, right]
    first = vote(rob, id, "right_much", reason="warmer", dwell_ms=1200).json()["turns"][0]
    assert first["kept"] == 1 and {"v2"} < set(first["names"]) <= {"v0", "v1", "v2"}
    second = say(rob, id, "The cast was", 1)[-1][1]["turns"][1]
    assert vote(rob, id, "tie", 1).json()["turns"][1]["names"]
    one, two = stored(parts)
    assert one.prompt == "The film was" and two.prompt == f"The film was{right}\nThe cast was"
    assert (one.chosen.text, one.rejected.text, one.verdict, one.reason) == (right, left, "right_much", "warmer")
    assert (one.chosen.source_id, one.rejected.source_id) == tuple(reversed(first["names"]))
    assert one.chosen.weight_version == int(first["names"][1][1:]) and one.chosen.token_ids == (1, 2)
    assert [two.chosen.text, two.rejected.text] == [answer["text"] for answer in second["answers"]]
    assert not one.heldout and one.rater == "rob" and one.dwell_ms == 1200


def test_nothing_names_a_version_before_the_vote(parts, rob):
    id = begin(rob)
    answer = rob.post(f"{ARENA}/{id}/turns", json={"number": 0, "text": "no model"})
    told = [answer.text]
    for _ in range(20):
        told.append(rob.get(f"{ARENA}/{id}/stream").text)  # an error first, as one model cannot be loaded
        if "event: done" in told[-1]:
            break
    told += [rob.get(f"{ARENA}/{id}").text, vote(rob, id, "skip").text, rob.get("/arena").text]
    assert any("event: failed" in one for one in told)
    assert not any(re.search(r"v0|v1|v2|base", one.replace("/api/v1", "")) for one in told if "static" not in one)
    assert not re.search(r"\bv\d\b", told[-1].replace("/api/v1", ""))


def test_the_sides_are_random_and_the_newest_version_takes_part(parts, rob):
    seen = set()
    for _ in range(12):
        id = begin(rob)
        say(rob, id, f"film {_}")
        names = vote(rob, id, "left").json()["turns"][0]["names"]
        assert "v2" in names
        seen.add(tuple(names))
    assert {names.index("v2") for names in seen} == {0, 1} and len(seen) >= 3


def test_without_a_vote_the_conversation_goes_on_blind_with_one_of_the_answers(parts, rob):
    id = begin(rob)
    say(rob, id, "The film was")
    turns = say(rob, id, "The cast was", 1)[-1][1]["turns"]
    assert turns[0]["names"] == turns[1]["names"] == []
    kept = turns[0]["answers"][turns[0]["kept"]]["text"]
    vote(rob, id, "left", 1)
    (only,) = stored(parts)
    assert only.prompt == f"The film was{kept}\nThe cast was"


def test_a_vote_is_counted_once_and_can_be_undone_but_not_changed_after_the_names_are_known(parts, rob):
    id = begin(rob)
    say(rob, id, "The film was")
    for _ in range(3):
        assert vote(rob, id, "left").status_code == 200
    assert len(stored(parts)) == 1
    assert vote(rob, id, "right").status_code == 409
    assert vote(rob, id, "skip").json()["turns"][0]["names"]
    assert [one.verdict for one in stored(parts)] == ["skip"]
    assert parts.store.reader.stats().num_votes == 0
    assert rob.get(f"{API}/next").json()["presentations"] == []


def test_equal_answers_cannot_be_voted_on(parts, rob):
    id = begin(rob)
    assert say(rob, id, "same")[-1][1]["turns"][0]["can_vote"] is False
    assert vote(rob, id, "left").status_code == 422
    assert stored(parts) == []


def test_a_turn_is_sent_once_and_in_order(parts, rob):
    id = begin(rob)
    path = f"{ARENA}/{id}/turns"
    assert rob.post(path, json={"number": 1, "text": "x"}).status_code == 409
    assert rob.post(path, json={"number": 0, "text": "x"}).status_code == 202
    assert rob.post(path, json={"number": 0, "text": "x"}).status_code == 202
    assert rob.post(path, json={"number": 0, "text": "y"}).status_code == 409
    assert rob.post(path, json={"number": 1, "text": "y"}).status_code == 409  # not answered yet
    assert vote(rob, id, "left").status_code == 409
    assert len(rob.get(f"{ARENA}/{id}").json()["turns"]) == 1
    for text in ("", "  ", "a\x00b", "\ud800"):
        body = json.dumps({"number": 0, "text": text}).encode()
        answer = rob.post(f"{ARENA}/{begin(rob)}/turns", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, text


def test_a_conversation_is_its_raters_alone_and_only_admins_choose_the_models(parts, rob):
    id, admin = begin(rob), parts.client(parts.admin)
    say(rob, id, "The film was")
    assert admin.get(f"{ARENA}/{id}").status_code == 404
    assert admin.get(f"{ARENA}/{id}/stream").status_code == 404
    assert admin.post(f"{ARENA}/{id}/turns", json={"number": 1, "text": "x"}).status_code == 404
    assert vote(admin, id, "left").status_code == 404
    assert rob.post(ARENA, json={"names": ["v0"]}).status_code == 403
    assert rob.get(f"{ARENA}/models").status_code == 403
    assert admin.get(f"{ARENA}/models").json() == ["v2", "v1", "v0"]
    chosen = begin(admin, names=["v0", "v1"])
    say(admin, chosen, "The film was")
    assert set(vote(admin, chosen, "left").json()["turns"][0]["names"]) == {"v0", "v1"}
    assert admin.post(ARENA, json={"names": ["v9"]}).status_code == 409


def test_what_cannot_be_answered_is_told_and_tried_again(parts, rob, tmp_path):
    id = begin(rob)
    assert say(rob, id, "too long") == [("failed", {"detail": "prompt 7 has 900 tokens"})]
    id = begin(rob)
    (failed,) = say(rob, id, f"die until {tmp_path / 'mended'}")
    assert failed[0] == "failed" and "ended" in failed[1]["detail"]
    (tmp_path / "mended").touch()
    assert answers(rob, id)[-1][0] == "done"  # by a new process


def test_a_loop_without_a_trainer_says_what_is_missing(tmp_path):
    with app_in(tmp_path) as parts:
        answer = parts.client(parts.rater).post(ARENA, json={})
        assert answer.status_code == 409 and "tunesmith live" in answer.json()["detail"]
        assert parts.client(parts.rater).get(f"{API}/leaderboard").json() == []


def test_the_quota_of_the_campaign_counts_votes_in_the_arena(parts, rob):
    campaign = parts.app.state.services.campaign()
    parts.store.set_campaign(replace(campaign.settings, max_votes_per_rater=1))
    id = begin(rob)
    say(rob, id, "one")
    assert vote(rob, id, "left").status_code == 200
    say(rob, id, "two", 1)
    assert vote(rob, id, "left", 1).status_code == 409


def test_votes_make_the_leaderboard(parts, rob):
    for number in range(6):
        id = begin(rob)
        turn = say(rob, id, f"film {number}")[-1][1]["turns"][0]
        side = next(k for k, one in enumerate(turn["answers"]) if "GAMMA" in one["text"])
        vote(rob, id, ("left", "right")[side])
    board = rob.get(f"{API}/leaderboard").json()
    assert board[0]["name"] == "v2" and board[0]["win_rate"] > 0.5
    page = rob.get("/leaderboard").text
    assert "v2" in page and "against" in page


def test_a_conversation_goes_on_after_the_server_was_killed(tmp_path):
    folder, gate = make_loop(tmp_path / "live"), tmp_path / "open"
    server = Server(folder, prepare="arena_parts").start()
    rater = server.rater("rob")
    id = rater.send("POST", ARENA, {}).json["id"]
    said = {"number": 0, "text": f"wait for {gate}"}
    assert rater.send("POST", f"{ARENA}/{id}/turns", said).status == 202
    threading.Thread(target=lambda: _quietly(rater, id), daemon=True).start()
    time.sleep(0.2)
    server.kill()
    server.start()
    gate.touch()
    assert rater.send("POST", f"{ARENA}/{id}/turns", said).status == 202
    assert b"event: done" in rater.send("GET", f"{ARENA}/{id}/stream").body
    assert rater.send("PUT", f"{ARENA}/{id}/turns/0/vote", {"verdict": "left"}).status == 200
    server.kill()
    server.start()
    (turn,) = rater.send("GET", f"{ARENA}/{id}").json["turns"]
    assert turn["verdict"] == "left" and turn["names"]
    assert rater.send("PUT", f"{ARENA}/{id}/turns/0/vote", {"verdict": "left"}).status == 200
    server.stop()
    with VoteWatch(folder / "votes.db") as watch:
        assert watch.per_minute(time.time())[-1] + watch.per_minute(time.time())[-2] == 1


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("way", ["API", "command"])
def test_a_conversation_that_was_deleted_while_it_was_answered_is_not_stored_again(parts, tmp_path, way):
    arena, rob = parts.app.state.services.arena, parts.store.reader.rater_of(parts.rater)
    talk, gate = arena.begin(rob.id), tmp_path / "gate"
    arena.say(talk, 0, f"wait for {gate}")
    assert not arena.progress(talk).is_over  # as an open stream asks, again and again
    if way == "API":
        boss = parts.client(parts.store.add_rater("boss", key=KeySettings(("admin",))).token)
        assert boss.delete("/v1/person_data?user=rob").json()["deleted"]["conversations"] == 1
    else:
        assert main(["users", "delete", "rob", "--dir", str(tmp_path), "--yes"]) == 0
    gate.touch()
    while not (told := arena.progress(talk)).is_over:
        time.sleep(0.01)
    assert "removed with all data" in told.error and told.texts == ("", "")
    with pytest.raises(RunError, match="removed with all data"):
        arena.begin(rob.id)  # by a login that the server still remembers
    with pytest.raises(HTTPException):
        arena.get(talk.id, rob.id)
    assert {file.name for file in (tmp_path / "arena").iterdir()} == {f"{TALK_ID}.json"}  # somebody else's


def test_each_rater_has_so_many_streams_in_the_arena_too(tmp_path):
    server = Server(make_loop(tmp_path / "live"), prepare="arena_parts").start()
    rater = server.rater("rob")
    id = rater.send("POST", ARENA, {}).json["id"]
    said = {"number": 0, "text": f"wait for {tmp_path / 'nothing'}"}
    assert rater.send("POST", f"{ARENA}/{id}/turns", said).status == 202
    place = urlsplit(server.url)
    with ExitStack() as stack:

        def status():
            connection = stack.enter_context(
                closing(http.client.HTTPConnection(place.hostname, place.port, timeout=30))
            )
            connection.request("GET", f"{ARENA}/{id}/stream", headers={"Authorization": f"Bearer {rater.token}"})
            return connection.getresponse().status

        assert [status() for _ in range(17)] == [200] * 16 + [429]
    server.kill()


def _quietly(rater, id):
    with suppress(OSError, http.client.HTTPException):
        rater.send("GET", f"{ARENA}/{id}/stream")


def test_simulated_raters_talk_and_vote(tmp_path):
    server = Server(make_loop(tmp_path / "live"), prepare="arena_parts").start()
    admin = server.admin()
    tokens = [server.rater(name, admin).token for name in ("ann", "bob")]
    talk = Talk(6, [f"Film {number} was" for number in range(1_000)])
    with Raters(server.url, tokens, RaterTraits(pace_s=0.0), 0, talk) as raters:
        for thread in raters._threads:
            thread.join(60)
    assert raters.problems == [] and raters.num_conversations == 6
    stats = admin.get("/stats").json
    assert 6 <= raters.num_votes == stats["num_votes"] <= 18
    server.stop()
    assert list(itertools.islice(server.folder.glob("arena/*.json"), 6)) != []


def test_a_full_context_is_no_dead_end(parts, rob):
    id = begin(rob)
    for number, text in enumerate(("one", "two")):
        say(rob, id, text, number)
    (failed,) = say(rob, id, "full", 2)
    assert failed == ("failed", {"detail": TOO_LONG})
    path = f"{ARENA}/{id}/first"
    assert rob.put(path, json={"number": 3}).status_code == 409
    assert rob.put(path, json={"number": 1}).json()["first"] == 1
    assert answers(rob, id)[-1][0] == "done"
    assert rob.put(path, json={"number": 0}).status_code == 409  # answered
    vote(rob, id, "left", 2)
    (only,) = stored(parts)
    turns = rob.get(f"{ARENA}/{id}").json()["turns"]
    kept = turns[1]["answers"][turns[1]["kept"]]["text"]
    assert only.prompt == f"two{kept}\nfull"


def test_a_message_is_taken_back_while_it_is_answered(parts, rob, tmp_path):
    id = begin(rob)
    say(rob, id, "one")
    body = {"number": 1, "text": f"wait for {tmp_path / 'gate'}"}
    assert rob.post(f"{ARENA}/{id}/turns", json=body).status_code == 202
    for _ in range(2):
        assert len(rob.delete(f"{ARENA}/{id}/turns/1").json()["turns"]) == 1
    assert rob.delete(f"{ARENA}/{id}/turns/0").status_code == 409  # answered
    (tmp_path / "gate").touch()
    assert say(rob, id, "two", 1)[-1][1]["turns"][1]["text"] == "two"


def test_answers_that_cannot_be_stored_are_told_apart_from_equal_ones(parts, rob):
    id = begin(rob)
    turn = say(rob, id, "nul")[-1][1]["turns"][0]
    assert not turn["can_vote"] and "NUL" in turn["obstacle"]
    answer = vote(rob, id, "left")
    assert answer.status_code == 422 and "NUL" in answer.json()["detail"]
    turn = say(rob, id, "after it", 1)[-1][1]["turns"][1]
    assert not turn["can_vote"] and "NUL" in turn["obstacle"]  # in the conversation that both answer
    id = begin(rob)
    turn = say(rob, id, "same")[-1][1]["turns"][0]
    assert "the same" in turn["obstacle"]
