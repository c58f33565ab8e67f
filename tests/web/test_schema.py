"""Requests made up from the OpenAPI description: whatever comes, nothing answers 500."""

import copy
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app_parts import app_in
from tunesmith.apps.workflows import model_worker
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.web import drawing
from tunesmith.collect.web.access import API, is_api

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, app_in(tmp_path_factory.mktemp("app")) as made:
        # Tests of the arena in the same process have put another one in its place.
        patch.setattr(drawing, "command", lambda *, stays: [sys.executable, "-m", model_worker.__name__])
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


CALL = {"name": "f", "arguments": '{"a": 1}'}
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


def _places(value, place=()):
    """The places of all values in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*place, name)
        yield from _places(one, (*place, name))


@pytest.mark.parametrize("path", VALID)
def test_a_valid_request_with_an_odd_value_anywhere_is_answered_or_refused_in_its_form(parts, path):
    client = parts.client(parts.key)
    assert client.post(path, json=VALID[path]).status_code == 200

    @settings(SETTINGS, max_examples=60)
    @given(place=st.sampled_from(list(_places(VALID[path]))), odd=ODD, streams=st.booleans())
    def send(place, odd, streams):
        body = {**copy.deepcopy(VALID[path]), "stream": streams}
        *outer, last = place
        inner = body
        for name in outer:
            inner = inner[name]
        inner[last] = odd
        answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text
        _check_form(path, answer)

    send()
