"""Rows as other tools write them, one file for each format.

`mlflow.jsonl`, `argilla.jsonl` and `argilla_flat.jsonl` beside `foreign/` were written by MLflow 3.17.2 and Argilla
2.8.0 themselves. The others are built from the tools' schemas: FastChat's and LibreChat's sources, the types in the
Python packages of Langfuse 5.0.4 and TensorZero 2026.6.0, and the documentation of OpenAI, Portkey and Label Studio.
"""

import json
from pathlib import Path
from typing import Any

ASKED = [{"role": "user", "content": "Name a colour."}]


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _battle(answer: str) -> list[dict[str, Any]]:
    return [*ASKED, _turn("assistant", answer)]


def _node(id_: str, parent: str | None, role: str, content: str, **more: object) -> dict[str, Any]:
    return {"id": id_, "parentId": parent, "childrenIds": [], "role": role, "content": content, **more}


def _open_webui(rating: object, arena: bool, id_: str) -> dict[str, Any]:
    nodes = [
        _node("q", None, "user", "Name a colour."),
        _node("a", "q", "assistant", "Red.", model="arena-model", selectedModelId="m1"),
        _node("b", "q", "assistant", "Blue.", model="arena-model", selectedModelId="m2"),
    ]
    return {
        "id": id_,
        "user_id": "u1",
        "version": 0,
        "type": "rating",
        "data": {"rating": rating, "model_id": "m1", "sibling_model_ids": ["m2"], "reason": "clear", "comment": "ok"},
        "meta": {"arena": arena, "model_id": "m1", "message_id": "a", "message_index": 2, "chat_id": "c"},
        "snapshot": {"chat": {"id": "c", "chat": {"history": {"messages": {one["id"]: one for one in nodes}}}}},
        "created_at": 1704067200,
        "updated_at": 1704067201,
    }


def _state(answer: str, name: str) -> dict[str, Any]:
    messages = [["USER", "Name a colour."], ["ASSISTANT", answer]]
    roles = ["USER", "ASSISTANT"]
    return {"template_name": "t", "system_message": "", "roles": roles, "messages": messages, "offset": 0,
            "conv_id": name, "model_name": name}  # fmt: skip


FILES: dict[str, list[dict[str, Any]]] = {
    "open-webui": [_open_webui(-1, True, "f1"), _open_webui("1", False, "f2")],
    "fastchat": [
        {"tstamp": 1704067200.5, "type": "rightvote", "models": ["", ""], "ip": "10.0.0.1",
         "states": [_state("Red.", "m1"), _state("Blue.", "m2")]},
        {"tstamp": 1704067201.5, "type": "upvote", "model": "m1", "state": _state("Red.", "m1"), "ip": "10.0.0.1"},
        {"tstamp": 1704067201.5, "type": "chat", "model": "m1", "state": _state("Red.", "m1"), "ip": "10.0.0.1"},
    ],
    "lmarena": [
        {"question_id": "1", "model_a": "m1", "model_b": "m2", "winner": "model_b", "judge": "arena_user_1",
         "conversation_a": _battle("Red."), "conversation_b": _battle("Blue."), "turn": 1, "tstamp": 1704067200.5},
    ],
    "lmarena-flat": [
        {"id": 1, "model_a": "m1", "model_b": "m2", "prompt": '["Name a colour."]', "response_a": '["Red."]',
         "response_b": '["Blue."]', "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0},
    ],
    "openai-preference": [
        {"input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
         "preferred_output": [_turn("assistant", "Blue.")], "non_preferred_output": [_turn("assistant", "Red.")]},
    ],
    "openai-chat": [{"messages": [*ASKED, _turn("assistant", "Blue.")]}],
    "label-studio": [
        {"id": 1, "data": {"prompt": "Name a colour.", "text1": "Red.", "text2": "Blue."},
         "annotations": [{"id": 7, "completed_by": 3, "was_cancelled": False, "created_at": "2024-01-01T00:00:00Z",
                          "result": [{"from_name": "pw", "to_name": "text1,text2", "type": "pairwise",
                                      "value": {"selected": "right"}}]}]},
    ],
    "librechat": [
        {"messageId": "q", "conversationId": "c", "parentMessageId": "00000000-0000-0000-0000-000000000000",
         "isCreatedByUser": True, "text": "Name a colour.", "user": "u1"},
        {"messageId": "a", "conversationId": "c", "parentMessageId": "q", "isCreatedByUser": False, "text": "",
         "content": [{"type": "text", "text": "Red."}], "model": "m1", "user": "u1",
         "feedback": {"rating": "thumbsDown", "tag": "inaccurate", "text": "no"},
         "updatedAt": {"$date": "2024-01-01T00:00:00Z"}},
    ],
    "tensorzero": [
        {"id": "i1", "function_name": "f", "variant_name": "v", "episode_id": "e", "tags": {"user_id": "u1"},
         "input": '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]}',
         "output": '[{"type": "text", "text": "Red."}]', "timestamp": "2024-01-01 00:00:00"},
        {"id": "t1", "target_id": "i1", "metric_name": "good", "value": False, "tags": {}},
        {"id": "t2", "inference_id": "i1", "value": '[{"type": "text", "text": "Blue."}]', "tags": {}},
    ],
    "langfuse": [
        {"id": "s1", "traceId": "t", "name": "good", "value": 1, "dataType": "BOOLEAN", "source": "ANNOTATION",
         "authorUserId": "u1", "comment": "ok", "timestamp": "2024-01-01T00:00:00Z"},
        {"id": "s2", "traceId": "t", "name": "edit", "value": 0, "stringValue": "Blue.", "dataType": "CORRECTION",
         "source": "ANNOTATION", "authorUserId": "u1", "timestamp": "2024-01-01T00:00:00Z"},
        {"id": "s3", "traceId": "t", "name": "judge", "value": 0.5, "dataType": "NUMERIC", "source": "EVAL"},
        {"id": "t", "input": {"messages": ASKED}, "output": "Red.", "sessionId": None, "userId": "u2"},
    ],
    "portkey": [
        {"trace_id": "t", "value": -1, "weight": 1, "metadata": {"_user": "u1"}},
        {"trace_id": "t", "request": {"messages": ASKED}, "ai_model": "m1",
         "response": {"choices": [{"message": _turn("assistant", "Red.")}]}},
    ],
    "columns": [{"prompt": "Name a colour.", "completion": "Red.", "label": False}],
}  # fmt: skip

for name in ("mlflow", "argilla", "argilla_flat"):
    lines = (Path(__file__).parent / "foreign" / f"{name}.jsonl").read_text().splitlines()
    FILES[name.replace("_", "-")] = [json.loads(line) for line in lines]
