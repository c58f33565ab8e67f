"""The OpenAI-compatible API by the client that OpenAI publishes, over a model that draws."""

import asyncio
import base64
import json
import os
import queue
import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from arena_parts import make_loop
from server_parts import Client, Server
from tunesmith.apps.workflows.model_worker import Worker
from tunesmith.collect.store.inferences import conversation_of
from tunesmith.collect.store.records import KeySettings
from tunesmith.collect.store.runs import RunReader, RunStore
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.api.endpoint import Collected, Endpoint
from tunesmith.collect.web.api.metrics import Metrics
from tunesmith.collect.web.api.openai import RefusedError, message_of
from tunesmith.collect.web.app import create_app
from tunesmith.collect.web.arena import Contestant, of_live_loop, tried_in
from tunesmith.collect.web.drawing import Drawer
from tunesmith.collect.web.settings import ServerSettings

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
LETTERS = {str(token): 50 for token in range(68, 94)}
"""Has random bytes be letters, which votes can hold."""

OPTIONS = {"model": "tiny:llama", "messages": MESSAGES, "max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
def served(request, tmp_path_factory):
    flags = () if request.param == "sqlite" else ("--database", request.getfixturevalue("postgres").new())
    server = Server(tmp_path_factory.mktemp("api"), ("--openai", "tiny:llama", *flags)).start()
    yield server
    if server.process.is_alive():
        server.kill()


def figures(key: Client) -> dict[str, float]:
    lines = key.send("GET", "/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def worker_of(server: Server) -> psutil.Process:
    (worker,) = [
        one for one in psutil.Process(server.process.pid).children() if "model_worker" in " ".join(one.cmdline())
    ]
    return worker


def test_models_are_listed_and_named(client):
    assert [one.id for one in client.models.list()] == ["tiny:llama"]
    client.chat.completions.create(**OPTIONS)
    assert client.models.retrieve("tiny:llama").model_extra == {"max_model_len": 256}
    with pytest.raises(openai.NotFoundError, match="there are tiny:llama"):
        client.models.retrieve("other")


def test_a_stream_is_the_whole_answer_piece_by_piece(client):
    whole = client.chat.completions.create(**OPTIONS, n=2, logprobs=True, top_logprobs=3)
    assert whole.id.startswith("chatcmpl-") and len(whole.choices) == 2
    for choice in whole.choices:
        assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
        tokens = choice.logprobs.content
        assert all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in tokens)
        assert (
            bytes(b for one in tokens for b in one.bytes).decode("utf-8", "replace").startswith(choice.message.content)
        )
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts, finishes, usage = ["", ""], {}, None
    for event in client.chat.completions.create(**OPTIONS, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        usage = event.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_settings_reach_the_engine(client):
    plain = client.chat.completions.create(**OPTIONS, extra_body={"return_token_ids": True})
    ids = plain.choices[0].model_extra["token_ids"]
    assert len(ids) == plain.usage.completion_tokens and plain.model_extra["prompt_token_ids"]
    text = plain.choices[0].message.content
    stopped = client.chat.completions.create(**OPTIONS, stop=[text[3:5]])
    assert stopped.choices[0].message.content == text[: text.index(text[3:5])]
    assert stopped.choices[0].finish_reason == "stop"
    forced = client.chat.completions.create(**OPTIONS, logit_bias={"70": 100}, extra_body={"min_tokens": 12})
    assert len(set(forced.choices[0].message.content)) == 1
    likely = {**OPTIONS, "temperature": 0, "logit_bias": {"70": 50, "71": 44}}
    assert set(client.chat.completions.create(**likely).choices[0].message.content) == {"d"}
    assert "e" in client.chat.completions.create(**likely, frequency_penalty=2).choices[0].message.content


def test_texts_and_token_ids_are_continued(client, key):
    options = {"model": "tiny:llama", "max_tokens": 6, "seed": 1}
    one = client.completions.create(prompt="The film", logprobs=2, **options)
    many = client.completions.create(prompt=["The film", "A story"], n=2, **options)
    assert many.choices[0].text == one.choices[0].text and len(many.choices) == 4
    assert len(one.choices[0].logprobs.tokens) == one.usage.completion_tokens
    ids = key.send("POST", "/v1/completions", {"prompt": "The film", "return_token_ids": True, **options}).json
    prompt_ids = ids["choices"][0]["prompt_token_ids"]
    assert client.completions.create(prompt=prompt_ids, **options).choices[0].text == one.choices[0].text
    streamed = client.completions.create(prompt="The film", stream=True, **options)
    assert "".join(event.choices[0].text for event in streamed) == one.choices[0].text
    body = {"token_ids": prompt_ids, "sampling_params": {"max_tokens": 6, "seed": 1, "logprobs": 1}}
    generated = key.send("POST", "/inference/v1/generate", body).json
    (choice,) = generated["choices"]
    assert choice["token_ids"] == ids["choices"][0]["token_ids"] and generated["prompt_token_ids"] == prompt_ids
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(entry["logprob"] <= 0 for entry in entries)
    for streamed in ({**body, "stream": True}, {**body, "sampling_params": {"stream": True}}):
        assert key.send("POST", "/inference/v1/generate", streamed).status == 400


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"messages": []}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"max_tokens": 10_000}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 9_000}]}, 400, "messages"),
        ({"temperature": -1}, 400, None),
        ({"n": 99}, 400, None),
        ({"top_k": 10**30}, 400, None),
        ({"repetition_penalty": 1e-300}, 400, None),  # which would make a logit infinite
        ({"top_logprobs": 30, "logprobs": True}, 400, None),
        ({"stop": [""]}, 400, "stop"),
        ({"logit_bias": {"red": 1}}, 400, None),
        ({"logit_bias": {"999999": 1}}, 400, None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "messages"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"user": "a\x00"}, 400, None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ({"compare": 2, "n": 2}, 400, "n"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_in_openais_form(key, change, status, param, stream):
    answer = key.send("POST", "/v1/chat/completions", {**OPTIONS, "stream": stream, **change})
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["param"] == param


def test_keys_are_for_the_api_and_logins_for_the_pages(served, key, admin):
    for path in ("/v1/models", "/metrics"):
        assert Client(served.url).send("GET", path).status == 401
        wrong = Client(served.url, "sk-wrong").send("GET", path)
        assert wrong.status == 401 and wrong.json["error"]["code"] == "invalid_api_key"
        assert Client(served.url, admin.token).send("GET", path).status == 403
    assert Client(served.url).send("GET", "/health").json == {"status": "ok"}
    for path in ("/api/v1/next", "/vote", "/api/v1/stats"):
        assert key.send("GET", path).status == 403


def test_one_version_answers_a_comparison_twice_and_not_the_same(client):
    both = client.chat.completions.create(**OPTIONS, extra_body={"compare": 2})
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].message.content != both.choices[1].message.content


@pytest.fixture
def owner(place, tmp_path):
    """A server of its own with the key of an admin, which was made before."""
    with VoteStore.open(place) as store:
        token = store.add_rater("owner", key=KeySettings(("admin",))).token
    flags = () if isinstance(place, Path) else ("--database", place)
    server = Server(tmp_path, ("--openai", "tiny:llama", *flags)).start()
    yield server, token
    server.kill()


def test_keys_are_made_and_ended_by_an_admins_key_while_the_server_runs(owner):
    server, token = owner
    admin = Client(server.url, token)
    made = admin.send("POST", "/v1/keys", {"name": "app", "scopes": ["generate"], "expires_days": 2})
    assert made.status == 201 and made.json["key"].startswith("sk-")
    app = Client(server.url, made.json["key"])
    assert app.send("GET", "/v1/models").status == 200
    assert app.send("GET", "/v1/keys").status == 403 and app.send("GET", "/v1/feedback").status == 403
    assert server.admin().send("GET", "/v1/keys").status == 403  # a login of the pages is no key
    assert admin.send("POST", "/v1/keys", {"name": "APP"}).status == 409
    wrong = admin.send("POST", "/v1/keys", {"name": "x", "scopes": ["all"]})
    told = "body.scopes.0: Input should be 'generate', 'feedback' or 'admin'"
    assert (wrong.status, wrong.json["error"]["message"]) == (400, told)
    empty = admin.send("POST", "/v1/keys", {"name": "x", "scopes": []})
    assert empty.status == 400 and "at least 1 item" in empty.json["error"]["message"]
    shown = admin.send("GET", "/v1/keys")
    assert [one["name"] for one in shown.json["data"]] == ["owner", "app"]
    assert made.json["key"].encode() not in shown.body
    assert made.json["key"].encode() not in b"".join(file.read_bytes() for file in server.folder.glob("votes.db*"))
    assert admin.send("DELETE", "/v1/keys/app").status == 204
    ended = app.send("GET", "/v1/models")
    assert ended.status == 401 and ended.json["error"]["code"] == "invalid_api_key"
    assert admin.send("DELETE", "/v1/keys/nobody").status == 404
    assert admin.send("DELETE", "/v1/keys/owner").status == 409


def test_a_token_of_a_user_asks_and_judges_as_that_user_alone(owner):
    server, token = owner
    admin = Client(server.url, token)
    app = Client(server.url, admin.send("POST", "/v1/keys", {"name": "app"}).json["key"])

    def user(name, **more):
        made = app.send("POST", "/v1/user_tokens", {"user": name, "expires_s": 600, **more})
        assert made.status == 201, made.body
        return Client(server.url, made.json["token"])

    def ask(client, **more):
        return client.send("POST", "/v1/chat/completions", {**OPTIONS, "logit_bias": LETTERS, "n": 2, **more})

    ada, bob = user("ada"), user("bob", scopes=["feedback"])
    hers = ask(ada).json["id"]
    assert ask(ada, user="ada").status == 200
    refused = ask(ada, user="bob")
    assert refused.status == 403 and refused.json["error"]["param"] == "user"
    refused = ask(bob)
    assert refused.status == 403 and refused.json["error"]["message"].endswith("this is a token of a user for feedback")
    his = ask(app, user="bob").json["id"]
    better = {"metric_name": "preference", "value": {"better": 0, "worse": 1}}
    worse = {"metric_name": "preference", "value": {"better": 1, "worse": 0}}
    assert ada.send("POST", "/v1/feedback", {"inference_id": hers, **better}).status == 200
    assert bob.send("POST", "/v1/feedback", {"inference_id": his, **worse}).status == 200
    assert bob.send("POST", "/v1/feedback", {"inference_id": hers, **worse}).status == 404
    (given,) = ada.send("GET", "/v1/feedback").json["data"]
    assert (given["inference_id"], given["user"]) == (hers, "ada")
    assert len(app.send("GET", "/v1/feedback").json["data"]) == 2
    rows = [json.loads(row) for row in server.admin().send("GET", "/api/v1/export").body.decode().splitlines()]
    assert rows[0]["chosen"] == rows[1]["rejected"] and rows[0]["rater"] != rows[1]["rater"]
    for path in ("/metrics", "/v1/keys", "/vote"):
        assert ada.send("GET", path).status == 403
    assert ada.send("POST", "/v1/user_tokens", {"user": "bob"}).status == 403
    assert app.send("POST", "/v1/user_tokens", {"user": "eve", "scopes": ["admin"]}).status == 400
    content, _, signature = ada.token.removeprefix("ut-").partition(".")
    forged = base64.urlsafe_b64encode(base64.urlsafe_b64decode(content).replace(b"ada", b"bob")).decode()
    for wrong in (f"ut-{forged}.{signature}", f"ut-{content}", "ut-", "ut-\u00e9.x"):
        unknown = Client(server.url, wrong).send("GET", "/v1/models")
        assert unknown.status == 401 and "this token of a user is unknown" in unknown.json["error"]["message"]
    assert admin.send("DELETE", "/v1/keys/app").status == 204
    assert ada.send("GET", "/v1/models").status == 401
    assert "this key of the API is unknown" in app.send("GET", "/v1/models").json["error"]["message"]


def test_tokens_of_a_deleted_user_are_refused_from_then_on_and_a_new_one_is_for_somebody_new(owner):
    server, token = owner
    admin = Client(server.url, token)
    app = Client(server.url, admin.send("POST", "/v1/keys", {"name": "app"}).json["key"])

    def sign(user: str) -> Client:
        return Client(server.url, app.send("POST", "/v1/user_tokens", {"user": user}).json["token"])

    def rated(client: Client) -> str:
        name = client.send("POST", "/v1/chat/completions", OPTIONS).json["id"]
        thumb = {"inference_id": name, "metric_name": "thumbs", "value": True}
        assert client.send("POST", "/v1/feedback", thumb).status == 200
        return name

    ada, eve, bob = sign("ada"), sign("eve"), sign("bob")
    rated(ada)
    for user in ("ada", "eve"):  # eve has asked for nothing yet
        assert admin.send("DELETE", f"/v1/person_data?user={user}&key=app").status == 200
    thumb = {"episode_id": "e", "metric_name": "thumbs", "value": True}
    for old in (ada, eve):
        for given in (
            ("POST", "/v1/chat/completions", OPTIONS),
            ("POST", "/v1/feedback", thumb),
            ("GET", "/v1/models"),
        ):
            refused = old.send(*given)
            assert refused.status == 401 and refused.json["error"]["code"] == "invalid_api_key"
    rated(bob)
    again = sign("ada")
    assert again.send("GET", "/v1/feedback").json["data"] == []
    name = rated(again)
    assert [one["inference_id"] for one in again.send("GET", "/v1/feedback").json["data"]] == [name]
    assert ada.send("GET", "/v1/models").status == 401


def test_a_key_has_its_requests_of_a_minute_and_its_tokens_of_a_day_also_after_a_restart(owner):
    server, token = owner
    admin = Client(server.url, token)

    def make(name, **limits):
        return Client(server.url, admin.send("POST", "/v1/keys", {"name": name, **limits}).json["key"])

    def ask(client):
        return client.send("POST", "/v1/chat/completions", OPTIONS)

    often = make("often", requests_per_minute=2)
    asked = [ask(often) for _ in range(3)]
    assert [one.status for one in asked] == [200, 200, 429]
    assert 0 < int(asked[-1].headers["retry-after"]) <= 30 and "2 times a minute" in asked[-1].json["error"]["message"]
    assert often.send("GET", "/v1/models").status == 200
    much = make("much", tokens_per_day=1)
    first = ask(much)
    assert first.status == 200
    (shown,) = [one for one in admin.send("GET", "/v1/keys").json["data"] if one["name"] == "much"]
    assert shown["tokens_today"] == first.json["usage"]["total_tokens"]
    server.stop()
    server.start()
    refused = ask(much)
    assert refused.status == 429 and refused.json["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 24 * 3600
    assert ask(admin).status == 200


def test_feedback_is_stored_with_what_was_drawn(client, key, admin):
    options = {**OPTIONS, "logit_bias": LETTERS}
    first = client.chat.completions.create(**options, n=2, user="u7", extra_body={"episode_id": "chat 1"})
    second = client.chat.completions.create(**{**options, "seed": 9})

    def say(**body):
        return key.send("POST", "/v1/feedback", body)

    thumb = say(inference_id=first.id, metric_name="thumbs", value=True, choice=1)
    assert thumb.status == 200 and thumb.json["feedback_id"].startswith("feedback-")
    assert say(inference_id=first.id, metric_name="thumbs", value=True, choice=1).json["is_repeat"]
    assert say(episode_id="chat 1", metric_name="stars", value=4.5, tags={"page": "home"}).status == 200
    assert say(metric_name="preference", value={"better": second.id, "worse": f"{first.id}#1"}).status == 200
    assert say(id=first.id, metric_name="demonstration", value="Red.").status == 200
    assert say(inference_id="chatcmpl-0", metric_name="thumbs", value=True).status == 404
    assert say(inference_id=first.id, metric_name="thumbs", value="good").status == 422
    assert say(inference_id=first.id, metric_name="thumbs", value=True, choices=[1]).status == 400
    given = key.send("GET", "/v1/feedback").json
    assert [one["metric_name"] for one in given["data"]] == ["thumbs", "stars", "preference", "demonstration"]
    assert key.send("GET", f"/v1/feedback?after={given['after']}").json["data"] == []
    votes = admin.send("GET", "/api/v1/export").body.decode().splitlines()
    rows = [json.loads(line) for line in votes]
    chosen = [row["chosen"] if isinstance(row["chosen"], str) else row["chosen"][0]["content"] for row in rows]
    assert sorted(chosen) == sorted([second.choices[0].message.content, "Red."])
    metrics = figures(key)
    assert metrics['tunesmith_feedback_total{kind="metric"}'] == 2
    assert metrics['tunesmith_tokens_total{kind="drawn"}'] > 0


def test_what_is_drawn_ends_when_the_client_goes(client, key):
    before = figures(key)
    options = {**OPTIONS, "max_tokens": 150, "extra_body": {"min_tokens": 150}, "n": 16}
    with client.chat.completions.create(**options, stream=True) as stream:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(**options)
    deadline = time.monotonic() + 20
    while (now := figures(key))["tunesmith_open_requests"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now["tunesmith_open_requests"] == 0
    drawn = 'tunesmith_tokens_total{kind="drawn"}'
    assert now[drawn] - before.get(drawn, 0) < 2 * 16 * 150
    failed = 'tunesmith_requests_total{end="failed"}'
    assert now.get(failed) == before.get(failed)
    assert client.chat.completions.create(**OPTIONS).choices


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_whose_client_goes_counts_as_stopped(tmp_path, is_stream):
    with Drawer(tmp_path / "log") as drawer:
        metrics = Metrics(Endpoint(drawer, lambda: [], "m"))

        async def replies():
            with metrics.request():
                yield 0
                await asyncio.sleep(3600)

        async def go():
            drawn = replies()
            await anext(drawn)
            if is_stream:
                await drawn.aclose()
                return
            task = asyncio.create_task(anext(drawn))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(go())
    assert b'tunesmith_requests_total{end="stopped"} 1.0' in metrics.text()
    assert b"failed" not in metrics.text()


def test_a_prompt_that_is_too_long_counts_as_refused(client, key):
    name, before = 'tunesmith_requests_total{{end="{}"}}'.format, figures(key)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context"):
            client.chat.completions.create(**{**OPTIONS, "max_tokens": 10_000}, stream=stream)
    now = figures(key)
    assert now[name("refused")] - before.get(name("refused"), 0) == 2
    assert now.get(name("failed")) == before.get(name("failed"))


def test_a_process_that_dies_costs_what_it_drew_and_the_next_request_has_another(served, client):
    options = {**OPTIONS, "max_tokens": 200, "extra_body": {"min_tokens": 200}}
    stream = client.chat.completions.create(**options, stream=True)
    events = iter(stream)
    next(events)
    os.kill(worker_of(served).pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="ended"):
        list(events)
    assert client.chat.completions.create(**OPTIONS).choices


def test_a_second_start_prints_no_key_and_the_first_one_works(tmp_path):
    server = Server(tmp_path / "live", ("--openai", "tiny:llama")).start()
    key = server.facts["key"]
    server.stop()
    again = Server(tmp_path / "live", ("--openai", "tiny:llama")).start()
    try:
        assert again.facts["key"] is None
        assert Client(again.url, key).send("GET", "/v1/models").status == 200
    finally:
        again.kill()


def test_two_versions_answer_a_comparison_unnamed_and_the_vote_knows_them(tmp_path: Path):
    make_loop(tmp_path / "live")
    server = Server(tmp_path / "live", ("--openai", str(tmp_path / "live")), prepare="arena_parts").start()
    try:
        key = Client(server.url, server.facts["key"])
        assert [one["id"] for one in key.send("GET", "/v1/models").json["data"]] == ["live", "v2", "v1", "v0"]
        asked = {"model": "live", "messages": [{"role": "user", "content": "hello"}]}
        whole = key.send("POST", "/v1/chat/completions", asked).json
        assert whole["choices"][0]["message"]["content"] == " GAMMA hears hello" and whole["system_fingerprint"] == "v2"
        both = key.send("POST", "/v1/chat/completions", {**asked, "compare": 2}).json
        texts = [choice["message"]["content"] for choice in both["choices"]]
        assert sorted(texts) == [" BETA hears hello", " GAMMA hears hello"] and both["system_fingerprint"] is None
        better = texts.index(" BETA hears hello")
        value = {"better": better, "worse": 1 - better, "verdict": "much_better"}
        said = {"inference_id": both["id"], "metric_name": "preference", "value": value}
        assert key.send("POST", "/v1/feedback", said).status == 200
    finally:
        server.kill()
    with VoteStore.open(tmp_path / "live" / "votes.db") as store:
        (vote,) = store.reader.votes_after(0)
    assert (vote.chosen.source_id, vote.rejected.source_id) == ("v1", "v2") and vote.verdict.endswith("_much")
    assert vote.chosen.token_ids == (1, 2)


@pytest.mark.parametrize("serves_loop", [False, True])
def test_answers_are_drawn_in_8_bits_when_asked(serves_loop, tmp_path):
    model = {"name": "tiny:llama", "dtype": "float32"}
    folder, name = tmp_path / "app", "tiny:llama"
    if serves_loop:
        name = str(make_loop(folder, num_versions=1))
        sections = "model: {name: 'tiny:llama', dtype: float32}\nrollout: {top_p: 1.0}\n"
        (folder / "recipe.yaml").write_text(f"algorithm: live\n{sections}")
    else:
        model = {"name": name}
    server = Server(folder, ("--openai", name, "--weights", "int8")).start()
    try:
        key = Client(server.url, server.facts["key"])
        asked = {
            "model": Path(name).name if not serves_loop else "live",
            "prompt": "A word",
            "max_tokens": 8,
            "seed": 3,
        }
        answered = key.send("POST", "/v1/completions", {**asked, "logprobs": 0}).json
        assert "choices" in answered, answered
        told = answered["choices"][0]
    finally:
        server.kill()
    found = {}
    for weights in ("model", "int8"):
        replies = []
        worker = Worker(replies.extend, weights)
        waiting = queue.SimpleQueue()
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
        waiting.put({"id": 0, "model": model, "text": "A word", "sampling": sampling})
        worker.work(waiting, idle_s=0.01)
        (answer,) = [one["answer"] for one in replies if "answer" in one]
        found[weights] = answer["logps"]
    assert told["logprobs"]["token_logprobs"] == pytest.approx(found["int8"], abs=1e-5)
    assert found["int8"] != pytest.approx(found["model"], abs=1e-3)


def test_more_than_can_wait_is_told_to_come_again(tmp_path):
    async def ask(endpoint):
        replies = endpoint.draw([{"model": {"name": "tiny:llama"}, "text": "x", "sampling": {}}] * 3)
        return await anext(replies)

    with Drawer(tmp_path / "log") as drawer:
        endpoint = Endpoint(drawer, lambda: [Contestant("m", {}, {})], "m", max_open=2)
        with pytest.raises(RefusedError) as refused:
            asyncio.run(ask(endpoint))
    assert refused.value.status_code == 429 and refused.value.headers == {"retry-after": "5"}


def test_requests_are_read_outside_of_the_event_loop(tmp_path):
    is_in_loop = []

    def contestants():
        try:
            asyncio.get_running_loop()
            is_in_loop.append(True)
        except RuntimeError:
            is_in_loop.append(False)
        return []

    settings = ServerSettings(tmp_path)
    with (
        VoteStore.open(settings.votes_place) as store,
        closing(RunReader.open(settings.runs_path)) as runs,
        Drawer(tmp_path / "log") as drawer,
    ):
        token = store.add_rater("app", key=KeySettings(("generate",))).token
        app = create_app(settings, store, runs, endpoint=Endpoint(drawer, contestants, "m"))
        client = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {token}"})
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "A"}),
            ("/v1/responses", {"input": "A"}),
            ("/v1/messages", {"messages": MESSAGES[1:], "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES[1:]}),
            ("/inference/v1/generate", {"token_ids": [1]}),
        ):
            assert client.post(path, json=body).status_code == 503
    assert is_in_loop == [False] * 6


def test_calls_have_openais_form():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    collected = Collected([Contestant("m", {}, {})], 1)
    answer = {"text": "x", "message": {"role": "assistant", "content": "", "tool_calls": calls}}
    collected.note(0, {"sample": 0, "answer": answer})
    message = message_of(collected.answers[0])
    (call,) = message["tool_calls"]
    assert message["content"] is None and call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_version_that_is_tried_answers_its_share_of_the_conversations_and_always_the_same_ones(tmp_path):
    folder, drawer = make_loop(tmp_path / "live", num_versions=3), Drawer(tmp_path / "worker.log", stays=False)
    served = Contestant("v1", {"name": "v1"}, {}, 1)
    (folder / "trial.json").write_text(json.dumps({"version": 2, "share": 0.25}))
    endpoint = Endpoint(drawer, lambda: [served], "live", tried=partial(tried_in, folder))
    said = [conversation_of(1, "", f"user {number}", "Hello") for number in range(400)]
    drawn = [endpoint.model("live", one).version for one in said]
    assert drawn == [endpoint.model("", one).version for one in said]
    assert 0.15 < drawn.count(2) / len(drawn) < 0.35 and drawn.count(1) + drawn.count(2) == 400
    assert endpoint.model("v1", said[drawn.index(2)]) == served  # asked for by its name
    assert endpoint.model("v2").version == 2 and endpoint.model("live") == served
    # The share says how many, so whoever has a small one's place has that of a larger one too.
    (folder / "trial.json").write_text(json.dumps({"version": 2, "share": 0.9}))
    assert all(endpoint.model("live", one).version == 2 for one, before in zip(said, drawn, strict=True) if before == 2)
    for text in ("", "{", '{"version": 7, "share": 0.5}', '{"version": 1, "share": 0.5}', "[]"):
        (folder / "trial.json").write_text(text)
        assert endpoint.model("live", said[0]) == served


def test_all_versions_whose_weights_are_kept_can_be_asked_for_and_later_ones_are_not_compared(tmp_path):
    folder, drawer = make_loop(tmp_path / "live", num_versions=6), Drawer(tmp_path / "worker.log", stays=False)
    with RunStore.open(folder / "runs.db") as store:
        for number, is_serving in ((5, False), (3, True)):  # gone back to the third
            store.add_version(replace(store.version(number), serving=is_serving))
    (folder / "versions" / "v000001").rmdir()
    with RunReader.open(folder / "runs.db") as runs:
        assert [one.name for one in of_live_loop(folder, runs)] == ["v3", "v2", "v0"]
        endpoint = Endpoint(drawer, partial(of_live_loop, folder, runs, has_all=True), "live")
        assert [one.name for one in endpoint.models()] == ["v3", "v2", "v5", "v4", "v0"]
        assert endpoint.model("v5").version == 5 and endpoint.model("live").version == 3
        assert {one.name for one in endpoint.two("live")} == {"v3", "v2"}
        assert {one.name for one in endpoint.two("v2")} == {"v3", "v2"}


def test_the_conversation_of_a_request_is_its_episode_its_user_or_how_it_began():
    begun = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    later = (*begun, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"})
    assert conversation_of(1, "", "", begun) == conversation_of(1, "", "", later)
    assert conversation_of(1, "e", "", begun) == conversation_of(1, "e", "u", "something else")
    names = [(1, "e", ""), (1, "", "e"), (2, "e", ""), (1, "", "")]
    assert len({conversation_of(*name, begun) for name in names}) == 4
