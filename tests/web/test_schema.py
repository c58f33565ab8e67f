"""Requests made up from the OpenAPI description: whatever comes, nothing answers 500."""

import copy
import json
import sqlite3
import sys
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app_parts import app_in
from tunesmith.apps.workflows import model_worker
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.web import drawing
from tunesmith.collect.web.access import API, is_api
from tunesmith.collect.web.api.endpoint import Endpoint

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, app_in(tmp_path_factory.mktemp("app")) as made:
        # Tests of the arena in the same process have put another one in its place.
        patch.setattr(drawing, "command", lambda **_: [sys.executable, "-m", model_worker.__name__])
        campaign = made.app.state.services.campaign()
        made.store.add_items(campaign.id, [NewItem(f"p{i}", (Candidate("a"), Candidate("b"))) for i in range(50)])
        yield made


@pytest.fixture(scope="module")
def schema(parts):
    return schemathesis.openapi.from_dict(parts.app.openapi())


SETTINGS = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_nothing_made_from_the_description_answers_500(parts, schema):
    admin, key = parts.client(parts.admin), parts.client(parts.key)
    names = []
    for found in schema.get_all_operations():
        operation = found.ok()
        names.append(operation.label)
        _send_many(key if is_api(operation.path) else admin, operation)
    assert len(names) >= 30
    assert {"POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens"} <= {*names}


def _send_many(client, operation):
    @settings(SETTINGS, max_examples=12)
    @given(case=operation.as_strategy())
    def send(case):
        arguments = case.as_transport_kwargs(base_url="http://127.0.0.1:8000")
        path = arguments["url"].removeprefix("http://127.0.0.1:8000")
        if path.endswith(f"{API}/session") and arguments["method"] == "DELETE":
            return
        answer = client.request(
            arguments["method"],
            path,
            params=arguments.get("params"),
            json=arguments.get("json"),
            headers={"Content-Type": "application/json"} if "json" in arguments else None,
        )
        assert answer.status_code < 500, (operation.label, answer.text)
        if is_api(path):
            _check_form(path, answer)

    send()


def _check_form(path, answer):
    """What is refused is said in the form of the API that was asked."""
    if answer.status_code >= 400:
        body = answer.json()
        assert body["error"]["message"] and body["error"]["type"]
        assert ({*body}, "param" in body["error"]) == (
            ({"type", "error"}, False) if path.startswith("/v1/messages") else ({"error"}, True)
        )


CALL = {"name": "f", "arguments": {"a": 1, "b": ["c"]}}
"""Its arguments are sent as JSON in a text, see `_sent`."""

SPOKEN = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stream": False}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}]},
]
RESPONSE = {
    **SPOKEN,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "c", **CALL},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ],
    "instructions": "Be brief.",
    "max_output_tokens": 2,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "none",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "store": True,
}
MESSAGE = {
    **SPOKEN,
    "messages": TURNS,
    "system": [{"type": "text", "text": "Be brief."}],
    "max_tokens": 2,
    "stop_sequences": ["x"],
    "tools": [{"name": "f", "description": "Counts.", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
    "metadata": {"user_id": "u"},
}
CHAT = {
    **SPOKEN,
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "2"},
    ],
    "max_tokens": 2,
    "logprobs": True,
    "stop": ["x"],
}
VALID = {
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/v1/chat/completions": CHAT,
}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
ODD = st.recursive(SCALARS, lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text(max_size=5), one))


def _sent(value):
    """A body as it is sent."""
    if isinstance(value, list):
        return [_sent(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: json.dumps(one) if name == "arguments" and isinstance(one, dict | list) else _sent(one)
        for name, one in value.items()
    }


def _places(value, place=()):
    """The places of all values in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*place, name)
        yield from _places(one, (*place, name))


@pytest.mark.parametrize("path", VALID)
def test_a_valid_request_with_an_odd_value_anywhere_is_answered_or_refused_in_its_form(parts, path):
    client = parts.client(parts.key)
    assert client.post(path, json=_sent(VALID[path])).status_code == 200

    @settings(SETTINGS, max_examples=60)
    @given(place=st.sampled_from(list(_places(VALID[path]))), odd=ODD, streams=st.booleans())
    def send(place, odd, streams):
        body = {**copy.deepcopy(VALID[path]), "stream": streams}
        *outer, last = place
        inner = body
        for name in outer:
            inner = inner[name]
        inner[last] = odd
        answer = client.post(path, content=json.dumps(_sent(body)), headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text
        _check_form(path, answer)

    send()


ANSWERED = {"max_tokens": 2, "max_output_tokens": 2}


def _called_with(arguments):
    """Requests of both of OpenAI's forms in which a call has these arguments."""
    call = {"name": "f", "arguments": arguments}
    items = [{"role": "user", "content": "Hello"}, {"type": "function_call", "call_id": "c", **call}]
    messages = [items[0], {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}]
    return [
        ("/v1/responses", {**ANSWERED, "input": items}),
        ("/v1/chat/completions", {**ANSWERED, "messages": messages}),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("[" * 5000, "nested deeper than 32 levels"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested deeper than 32 levels"),
        ('{"a": NaN}', "a number that is not finite"),
        ('{"a": [1e999]}', "a number that is not finite"),
        ('{"a": "\\ud800"}', "a lone surrogate"),
    ],
)
def test_arguments_that_cannot_be_stored_are_refused_where_they_come_first(parts, arguments, reason):
    client = parts.client(parts.key)
    for path, body in _called_with(arguments):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        _check_form(path, answer)
        message = answer.json()["error"]["message"]
        assert reason in message and ".1." in message and "arguments" in message


@pytest.mark.parametrize("arguments", ['{"a": "\\u0000"}', "5", "[1]", '"a"', "null", "no JSON", ""])
def test_a_conversation_goes_on_after_whatever_arguments_were_taken(parts, arguments):
    client = parts.client(parts.key)
    (path, body), (_, chat) = _called_with(arguments)
    first = client.post(path, json=body)
    assert first.status_code == 200 == client.post("/v1/chat/completions", json=chat).status_code
    asked = {**ANSWERED, "input": "And?", "previous_response_id": first.json()["id"]}
    assert client.post(path, json=asked).status_code == 200


@pytest.mark.parametrize("place", ["9" * 5000, "9" * 190, "-1", "\u0663"])
def test_a_preference_for_a_choice_that_there_cannot_be_is_refused(parts, place):
    client = parts.client(parts.key)
    id = client.post("/v1/messages", json=_sent(MESSAGE)).json()["id"]
    value = {"better": f"{id}#{place}", "worse": id}
    answer = client.post("/v1/feedback", json={"metric_name": "preference", "value": value})
    assert answer.status_code == 422
    _check_form("/v1/feedback", answer)


def test_feedback_holds_no_number_that_json_does_not_have(parts):
    client = parts.client(parts.key)
    id = client.post("/v1/messages", json=_sent(MESSAGE)).json()["id"]
    for metric, value in (("stars", "NaN"), ("stars", "1e999"), ("preference", '{"better": 0, "worse": 0, "x": NaN}')):
        body = f'{{"id": "{id}", "metric_name": "{metric}", "value": {value}}}'
        answer = client.post("/v1/feedback", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422 and "finite" in answer.json()["error"]["message"]


def test_the_reason_why_the_store_fails_is_for_admins_pages_and_the_log(parts, caplog):
    sent = [
        (parts.key, "POST", "/v1/messages", _sent(MESSAGE)),
        (parts.key, "POST", "/v1/responses", {**_sent(RESPONSE), "stream": True}),
        (parts.key, "POST", "/v1/feedback", {"id": "chatcmpl-1", "metric_name": "thumbs", "value": True}),
        (parts.rater, "GET", f"{API}/next", None),
    ]
    for token, method, path, body in sent:
        with _broken(parts, "inferences", "items"), caplog.at_level("WARNING"):
            caplog.clear()
            answer = parts.client(token).request(method, path, json=body)
        failed = answer.text if answer.status_code == 200 else ""
        assert answer.status_code == 503 or "response.failed" in failed, answer.text
        assert "cannot be used at the moment" in answer.text and "votes.db" not in answer.text
        assert "votes.db" in caplog.text
    with _broken(parts, "items"):
        assert "votes.db" in parts.client(parts.admin).get(f"{API}/next").text
    with _broken(parts, "raters"):  # so that the guard itself fails
        parts.app.state.services.logins.forget()
        answer = parts.client(parts.key).post("/v1/messages", json=_sent(MESSAGE))
    assert answer.status_code == 503 and "votes.db" not in answer.text
    _check_form("/v1/messages", answer)


@contextmanager
def _broken(parts, *tables):
    """Another program has changed the tables meanwhile."""
    with closing(sqlite3.connect(parts.app.state.services.settings.votes_place)) as connection:
        for table in tables:
            connection.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
        try:
            yield
        finally:
            for table in tables:
                connection.execute(f"ALTER TABLE {table}_away RENAME TO {table}")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_error_that_nobody_expected_has_the_form_of_the_api(parts, monkeypatch, path):
    def fail(*_):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Endpoint, "models", fail)
    answer = parts.client(parts.key).post(path, json=_sent(VALID[path]))
    assert answer.status_code == 500 and answer.headers["x-content-type-options"] == "nosniff"
    _check_form(path, answer)
    assert "log says why" in answer.json()["error"]["message"] and "secret" not in answer.text
