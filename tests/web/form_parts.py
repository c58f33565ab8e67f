"""Requests of the API in each of its forms, and answers held against the types of the clients that are published."""

import json

import pytest
from pydantic import BaseModel, TypeAdapter

from server_parts import Answer, Client, Server

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def ask(server: Server, path: str, body: dict) -> dict:
    answer = Client(server.url, server.facts["key"]).send("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


def stream(server: Server, path: str, body: dict) -> list[dict]:
    """The events of a stream; one with a type has its name."""
    answer = Client(server.url, server.facts["key"]).send("POST", path, {**body, "stream": True})
    events = events_of(answer)
    has_failed = any("error" in event or "failed" in event.get("type", "") for event in events)
    assert answer.body.endswith(b"data: [DONE]\n\n") == (path in (CHAT, TEXT) and not has_failed)
    return events


def events_of(answer: Answer) -> list[dict]:
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.body.decode().removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n"):
        *named, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert named == ([f"event: {events[-1]['type']}"] if "type" in events[-1] else [])
    return events


def asked_in(path: str, said: str) -> dict:
    """A request that says one thing."""
    named = {TEXT: {"prompt": said}, RESPONSES: {"input": said}}
    return named.get(path, {"messages": [{"role": "user", "content": said}], "max_tokens": 9})


def unknown_in(made: object, place: str = "") -> list[str]:
    """The fields that the types do not have."""
    if isinstance(made, list):
        return [name for number, one in enumerate(made) for name in unknown_in(one, f"{place}[{number}]")]
    if not isinstance(made, BaseModel):
        return []
    known = [
        name for field, one in made for name in unknown_in(one, f"{place}.{field}") if field in type(made).model_fields
    ]
    return [*(f"{place}.{name}" for name in made.model_extra or ()), *known]


def kind_of_error(body: dict) -> str:
    """The type of an error in Anthropic's form."""
    conforms(pytest.importorskip("anthropic.types.shared").ErrorResponse, body)
    return body["error"]["type"]


def conforms(kind: object, given: object) -> None:
    """All required fields are there, of their types, and no other ones but those that the documentation names."""
    made = TypeAdapter(kind).validate_python(given)
    ours = ("token_ids", "prompt_token_ids", "reasoning_content")
    assert [name for name in unknown_in(made) if name.rpartition(".")[2] not in ours] == []
