"""OpenAI's responses and Anthropic's messages by the clients that are published, and the forms of all answers by the
types of these clients, which are made from the published schemas.
"""

import json
import re
import sys
from contextlib import closing

import pytest

from arena_parts import make_loop
from form_parts import CHAT, MESSAGES, RESPONSES, TEXT, ask, conforms, kind_of_error, stream
from server_parts import Client, Server
from tunesmith.collect.store.records import KeySettings
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.api.anthropic import MessagesRequest
from tunesmith.collect.web.api.openai import RefusedError
from tunesmith.collect.web.api.responses import ResponsesRequest
from tunesmith.engine.models import tool_messages

openai = pytest.importorskip("openai")

from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

QUESTION = {"role": "user", "content": "Name a colour."}
ASKED = {"messages": [QUESTION], "max_tokens": 12, "seed": 5}
INPUT = {"input": [QUESTION], "max_output_tokens": 12, "seed": 5}
LETTERS = {str(token): 50 for token in range(68, 94)}
"""Has no answer end by itself."""

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    RESPONSES: [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
    MESSAGES: [{"name": "weather", "description": "Says it.", "input_schema": SCHEMA}],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("api"), ("--openai", "tiny:llama")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def anthropics(served, anthropic):
    with anthropic.Anthropic(base_url=served.url, api_key=served.facts["key"], max_retries=0) as made:
        yield made


def kinds(path: str) -> tuple[object, object]:
    """The types of a whole answer and of the events of a stream."""
    if path == MESSAGES:
        types = pytest.importorskip("anthropic.types")
        return types.Message, types.RawMessageStreamEvent
    return {
        CHAT: (ChatCompletion, ChatCompletionChunk),
        TEXT: (Completion, Completion),
        RESPONSES: (Response, ResponseStreamEvent),
    }[path]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "user": "ada", "stop": ["e"], "presence_penalty": 1, "logit_bias": {"70": 1}},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
        {"compare": 2},
    ],
)
def test_chats_have_openais_form(served, options):
    conforms(ChatCompletion, ask(served, CHAT, {**ASKED, **options}))
    for event in stream(served, CHAT, {**ASKED, **options}):
        conforms(ChatCompletionChunk, event)


@pytest.mark.parametrize("options", [{}, {"n": 2, "logprobs": 2}, {"stream_options": {"include_usage": True}}])
def test_texts_have_openais_form(served, options):
    asked = {"prompt": "The film", "max_tokens": 6, **options}
    conforms(Completion, ask(served, TEXT, asked))
    for event in stream(served, TEXT, asked):
        for choice in event["choices"]:
            choice["finish_reason"] = (
                choice["finish_reason"] or "stop"
            )  # null before the end, as OpenAI's server has it
        conforms(Completion, event)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"instructions": "Be brief.", "metadata": {"page": "home"}, "temperature": 0.5, "top_p": 0.9, "user": "ada"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"store": False, "parallel_tool_calls": True, "truncation": "disabled", "text": {"format": {"type": "text"}}},
    ],
)
def test_responses_have_openais_form_and_a_stream_is_the_whole_one(served, options):
    whole = ask(served, RESPONSES, {**INPUT, **options})
    conforms(Response, whole)
    events = stream(served, RESPONSES, {**INPUT, **options})
    for event in events:
        conforms(ResponseStreamEvent, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta") == text
    for name in {*whole} - {"id", "created_at", "output"}:
        assert last[name] == whole[name], name
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    scores = whole["output"][0]["content"][0]["logprobs"]
    assert len(scores) == (whole["usage"]["output_tokens"] if "include" in options else 0)


@pytest.mark.parametrize("options", [{}, {"system": "Be brief.", "temperature": 0.5, "top_k": 9, "top_p": 0.9}])
def test_messages_have_anthropics_form_and_a_stream_is_the_whole_one(served, options):
    kind, kind_of_event = kinds(MESSAGES)
    whole = ask(served, MESSAGES, {**ASKED, **options})
    conforms(kind, whole)
    events = stream(served, MESSAGES, {**ASKED, **options})
    for event in events:
        conforms(kind_of_event, event)
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"] and events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_calls_of_tools_have_the_form_of_each_api(calling, path):
    question = {"role": "user", "content": "ask Paris"}
    asked = {"input": [question]} if path == RESPONSES else {"messages": [question], "max_tokens": 12}
    asked["tools"] = TOOLS[path]
    kind, kind_of_event = kinds(path)
    whole, events = ask(calling, path, asked), stream(calling, path, asked)
    conforms(kind, whole)
    for event in events:
        conforms(kind_of_event, event)
    if path == CHAT:
        message = whole["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in events]
        said = [message["reasoning_content"], message["content"], *message["tool_calls"]]
        assert [deltas[2]["content"], deltas[3]["content"]] == ["Let me", " see."]
        text = "".join(delta.get("content", "") for delta in deltas)
        streamed = [deltas[1]["reasoning_content"], text, *deltas[4]["tool_calls"]]
        calls = [(one["id"], one["function"]["arguments"]) for one in (*said[2:], *streamed[2:])]
        assert whole["choices"][0]["finish_reason"] == "tool_calls" and said[:2] == streamed[:2]
    elif path == RESPONSES:
        streamed = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert streamed == events[-1]["response"]["output"] and whole["status"] == "completed"
        assert [one["delta"] for one in events if one["type"] == "response.output_text.delta"] == ["Let me", " see."]
        for items in (whole["output"], streamed):
            assert [one["type"] for one in items] == ["reasoning", "message", "function_call", "function_call"]
            assert [one["content"][0]["text"] for one in items[:2]] == ["Hm.", "Let me see."]
        calls = [(one["call_id"], one["arguments"]) for one in (*whole["output"][2:], *streamed[2:])]
    else:
        assert [one["type"] for one in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["stop_reason"] == "tool_use" == events[-2]["delta"]["stop_reason"]
        begun = [one["content_block"] for one in events if one["type"] == "content_block_start"]
        assert [one["type"] for one in begun] == [one["type"] for one in whole["content"]]
        deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
        assert [deltas[0]["thinking"], deltas[1]["text"], deltas[2]["text"]] == ["Hm.", "Let me", " see."]
        calls = [(one["id"], json.dumps(one["input"])) for one in whole["content"][2:]]
        calls += [(one["id"], delta["partial_json"]) for one, delta in zip(begun[2:], deltas[3:], strict=True)]
    assert len({id for id, _ in calls}) == 4 and {arguments for _, arguments in calls} == {'{"city": "Paris"}'}


def test_one_seed_has_one_answer_in_every_form_and_each_id_gets_feedback(served, client, anthropics, key):
    chat = client.chat.completions.create(model="tiny:llama", **ASKED)
    message = anthropics.messages.create(model="tiny:llama", messages=[QUESTION], max_tokens=12, extra_body={"seed": 5})
    response = client.responses.create(
        model="tiny:llama", input="Name a colour.", max_output_tokens=12, extra_body={"seed": 5}
    )
    text = chat.choices[0].message.content
    assert text == message.content[0].text == response.output_text
    assert chat.usage.prompt_tokens == message.usage.input_tokens == response.usage.input_tokens
    with anthropics.messages.stream(
        model="tiny:llama", messages=[QUESTION], max_tokens=12, extra_body={"seed": 5}
    ) as streamed:
        assert "".join(streamed.text_stream) == text
        assert streamed.get_final_message().stop_reason == message.stop_reason
    before = Client(served.url, served.facts["key"]).send("GET", "/metrics").body
    counted = anthropics.messages.count_tokens(model="tiny:llama", messages=[QUESTION])
    assert counted.input_tokens == message.usage.input_tokens
    for id in (chat.id, message.id, response.id):
        said = {"inference_id": id, "metric_name": "thumbs", "value": True}
        assert key.send("POST", "/v1/feedback", said).status == 200
    after = Client(served.url, served.facts["key"]).send("GET", "/metrics").body
    requests = b'tunesmith_requests_total{end="answered"}'
    assert [line for line in before.splitlines() if line.startswith(requests)] == [
        line for line in after.splitlines() if line.startswith(requests)
    ]  # reading alone is no answer


def test_an_answer_says_why_it_ended(served):
    def end(**options):
        message = ask(served, MESSAGES, {**ASKED, **options})
        assert stream(served, MESSAGES, {**ASKED, **options})[-2]["delta"] == {
            name: message[name] for name in ("stop_reason", "stop_sequence")
        }
        return message["stop_reason"], message["stop_sequence"]

    text = ask(served, MESSAGES, {**ASKED, "logit_bias": LETTERS})["content"][0]["text"]
    assert end(logit_bias=LETTERS) == ("max_tokens", None)
    assert end(logit_bias=LETTERS, stop_sequences=["never in it", text[3:5]]) == ("stop_sequence", text[3:5])
    assert end(logit_bias={"2": 100}) == ("end_turn", None)
    response = ask(served, RESPONSES, {**INPUT, "logit_bias": LETTERS})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    response = ask(served, RESPONSES, {**INPUT, "logit_bias": {"2": 100}})
    assert (response["status"], response["incomplete_details"]) == ("completed", None)


def test_a_response_goes_on_from_a_stored_one_of_the_same_key_and_user_alone(served, client, key):
    options = {"model": "tiny:llama", "max_output_tokens": 8, "extra_body": {"seed": 1}}
    first = client.responses.create(input="Name a colour.", instructions="Be brief.", **options)
    second = client.responses.create(input="Another one.", previous_response_id=first.id, **options)
    third = client.responses.create(input="And?", previous_response_id=second.id, instructions="Rhyme.", **options)
    said = [QUESTION, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Another one."}]
    said += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "And?"}]
    for response, messages in ((second, said[:3]), (third, [{"role": "system", "content": "Rhyme."}, *said])):
        chat = client.chat.completions.create(model="tiny:llama", messages=messages, max_tokens=8, seed=1)
        assert chat.usage.prompt_tokens == response.usage.input_tokens
        assert chat.choices[0].message.content == response.output_text
    assert third.previous_response_id == second.id
    unkept = client.responses.create(input="Name a colour.", store=False, **options)
    chat = client.chat.completions.create(model="tiny:llama", messages=[QUESTION], max_tokens=8)
    ada = Client(served.url, key.send("POST", "/v1/user_tokens", {"user": "ada"}).json["token"])
    adas = ask(served, RESPONSES, {**INPUT, "user": "ada"})["id"]
    for name, asking, user in (
        (unkept.id, key, None),
        (chat.id, key, None),
        ("resp_0", key, None),
        (first.id, ada, None),
        (first.id, key, "ada"),
        (adas, key, None),
        (adas, key, "bob"),
    ):
        refused = asking.send("POST", RESPONSES, {**INPUT, "previous_response_id": name, "user": user})
        assert refused.status == 400 and refused.json["error"]["code"] == "previous_response_not_found"
    assert ask(served, RESPONSES, {**INPUT, "previous_response_id": adas, "user": "ada"})["status"]
    assert ada.send("POST", RESPONSES, {**INPUT, "previous_response_id": adas}).status == 200
    feedback = {"inference_id": unkept.id, "metric_name": "thumbs", "value": True}
    assert key.send("POST", "/v1/feedback", feedback).status == 404


def test_results_of_tools_go_on_from_a_stored_response(calling):
    asked = {"input": "ask Paris", "tools": TOOLS[RESPONSES], "instructions": "Be brief."}
    first = ask(calling, RESPONSES, asked)
    calls = [one for one in first["output"] if one["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "Rain."} for one in calls]
    second = ask(calling, RESPONSES, {**asked, "input": results, "previous_response_id": first["id"]})
    with closing(VoteReader.open(calling.folder / "votes.db")) as reader:
        kept = reader.inference(second["id"])
    question, answer, *told = kept.options["conversation"]
    assert question == {"role": "user", "content": "ask Paris"} and answer["content"] == "Let me see."
    assert [one["id"] for one in answer["tool_calls"]] == [one["call_id"] for one in calls]
    tool = {"role": "tool", "name": "weather", "content": "Rain."}
    assert told == [{**tool, "tool_call_id": one["call_id"]} for one in calls]


def test_anthropics_messages_become_those_of_a_chat():
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    returned = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [
        QUESTION,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, used]},
        {"role": "user", "content": [returned, {"type": "text", "text": "Go on."}]},
    ]
    choice = {"type": "none"}
    body = {"system": [{"type": "text", "text": "Be brief."}], "messages": turns, "max_tokens": 9, "top_k": 3}
    body |= {"tools": TOOLS[MESSAGES], "tool_choice": choice, "metadata": {"user_id": "ada"}, "stop_sequences": ["\n"]}
    chat = MessagesRequest.model_validate(body).as_chat()
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert [message.as_message() for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "name": "weather", "tool_call_id": "t1"},
        {"role": "user", "content": "Go on."},
    ]
    function = {"name": "weather", "description": "Says it.", "parameters": SCHEMA}
    assert chat.tools == [{"type": "function", "function": function}] and chat.tool_choice == "none"
    assert (chat.max_tokens, chat.top_k, chat.stop, chat.user) == (9, 3, ["\n"], "ada")


def test_turns_of_one_role_that_follow_each_other_are_one():
    def text(content):
        return {"type": "text", "text": content}

    used, returned = turns_of(2)
    turns = [
        QUESTION,
        {"role": "user", "content": [text("A warm "), text("one.")]},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
        used,
        {"role": "user", "content": returned["content"][:1]},
        {"role": "user", "content": "Go on."},
        {"role": "user", "content": returned["content"][1:]},
        {"role": "user", "content": "Please."},
    ]
    chat = MessagesRequest.model_validate({"messages": turns, "max_tokens": 1}).as_chat()
    said = [(one.role, one.content, len(one.tool_calls or ())) for one in chat.messages]
    assert said == [
        ("user", "Name a colour.\n\nA warm one.", 0),
        ("assistant", "I look.", 2),
        ("tool", "", 0),
        ("tool", "", 0),
        ("user", "Go on.\n\nPlease.", 0),
    ]


def test_items_of_a_response_become_messages_of_a_chat():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ]
    chat = ResponsesRequest.model_validate({"input": items, "max_output_tokens": 7}).as_chat(())
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    assert [message.as_message() for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "Rain.", "name": "weather", "tool_call_id": "c1"},
    ]
    assert chat.max_tokens == 7


def turns_of(num):
    """Calls and their results in one turn each, as Anthropic's blocks."""
    used = [{"type": "tool_use", "id": str(number), "name": "f"} for number in range(num)]
    returned = [{"type": "tool_result", "tool_use_id": str(number % 7)} for number in range(num)]
    return [{"role": "assistant", "content": used}, {"role": "user", "content": returned}]


def items_of(num):
    """Calls, and then their results, as items of a response."""
    called = [{"type": "function_call", "call_id": str(number), "name": "f"} for number in range(num)]
    told = [{"type": "function_call_output", "call_id": str(number % 7), "output": ""} for number in range(num)]
    return [*called, *told]


def steps_of(work):
    """Number of bytecode instructions that are run."""
    num = 0

    def trace(frame, event, _):
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    for _ in range(2):  # from Python 3.12 on a frame that asks for opcodes enables them for the next tracing alone
        num = 0
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return num


def test_twice_as_many_calls_and_results_take_twice_as_many_steps():
    def steps(num):
        message = MessagesRequest.model_validate({"messages": turns_of(num), "max_tokens": 1})
        response = ResponsesRequest.model_validate({"input": items_of(num)})
        before = [one.as_message() for one in message.as_chat().messages]
        return [
            steps_of(message.as_chat),
            steps_of(lambda: response.as_chat(before)),
            steps_of(lambda: tool_messages._answered(before)),
        ]

    for once, twice in zip(steps(100), steps(200), strict=True):
        assert 1.5 * once < twice < 2.5 * once


def test_a_conversation_that_goes_on_is_left_as_it_is():
    call = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": {}}}
    before = [{"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    asked = ResponsesRequest.model_validate({"input": items_of(1)})
    messages = asked.as_chat(before).model_dump(exclude_none=True)["messages"]
    assert len(messages[0]["tool_calls"]) == 2 and before[0]["tool_calls"] == [call]


def said_by_user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10_000}, 400, "context"),
        ({"max_tokens": 4, "min_tokens": 9}, 400, "min_tokens"),
        ({"model": "claude"}, 404, "claude"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "assistant", "content": "The colour"}]}, 400, "the beginning of an answer"),
        (said_by_user({"type": "image", "source": {}}), 400, "'image'"),
        (said_by_user(*[{"type": "tool_result", "tool_use_id": "0"}] * 4097), 400, "at most 4096 items"),
        (said_by_user(*[1] * 4097), 400, "at most 4096 items"),
        ({"messages": turns_of(4000) * 3}, 400, "the body has more than 65,536 texts, objects and lists"),
        ({"stop_sequences": ["x"] * 4097}, 400, "at most 4096 items"),
        (said_by_user({"type": "tool_use", "id": "t", "name": "f", "input": {}}), 400, "'tool_use'"),
        (said_by_user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}), 400, "'image'"),
        ({"system": [{"type": "image"}]}, 400, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 400, "disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "thinking"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config"),
        ({"n": 2}, 400, "n 2"),
        ({"compare": 2}, 400, "compare 2"),
        ({"stop_sequences": [""]}, 400, "stop"),
        ({"metadata": {"user_id": "a\x00"}}, 400, "user_id"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused_in_anthropics_form(key, change, status, named):
    for more in ({}, {"stream": True}):
        answer = key.send("POST", MESSAGES, {**ASKED, **change, **more})
        assert answer.status == status, answer.body
        assert kind_of_error(answer.json)
        assert named in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "limit", "param"),
    [
        (CHAT, {"messages": [QUESTION]}, "max_tokens", "messages"),
        (CHAT, {"messages": [QUESTION]}, "max_completion_tokens", "messages"),
        (TEXT, {"prompt": "Name a colour."}, "max_tokens", "prompt"),
        (RESPONSES, {"input": [QUESTION]}, "max_output_tokens", "input"),
        (MESSAGES, {"messages": [QUESTION]}, "max_tokens", None),
    ],
)
def test_a_limit_beyond_the_context_is_refused_by_the_name_that_it_was_given_under(key, path, body, limit, param):
    answer = key.send("POST", path, {**body, limit: 1_000_000})
    error = answer.json["error"]
    assert answer.status == 400 and error.get("param") == param
    told = rf"the prompt has \d+ tokens and {limit} is 1000000, but the model's context holds \d+; .* lower {limit}"
    assert re.fullmatch(told, error["message"]), error["message"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": ""}, 400, None),
        ({"input": []}, 400, None),
        ({"input": [{"type": "item_reference", "id": "m"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input"),
        ({"input": items_of(2049)}, 400, None),
        ({"model": "gpt-9"}, 404, "model"),
        ({"max_output_tokens": 0}, 400, None),
        ({"tools": [{"type": "web_search"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"background": True}, 400, "background"),
        ({"return_token_ids": True}, 400, "return_token_ids"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"reasoning": {"effort": "high"}}, 400, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, 400, "text"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ({"include": ["reasoning.encrypted_content"]}, 400, "include"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"max_tool_calls": 1}, 400, "max_tool_calls"),
    ],
)
def test_responses_that_cannot_be_given_are_refused_in_openais_form(key, change, status, param):
    for more in ({}, {"stream": True}):
        answer = key.send("POST", RESPONSES, {**INPUT, **change, **more})
        assert answer.status == status, answer.body
        error = answer.json["error"]
        assert error["message"] and error["type"] == "invalid_request_error" and error["param"] == param


def test_a_key_may_come_in_anthropics_header_on_the_api_alone(served, anthropic, anthropics, admin):
    def send(path, body=None, **headers):
        return Client(served.url).send("GET" if body is None else "POST", path, body, headers)

    assert send(MESSAGES, ASKED, **{"x-api-key": served.facts["key"]}).status == 200
    assert send("/v1/models", **{"X-Api-Key": served.facts["key"]}).status == 200
    for path in ("/vote", "/api/v1/stats"):
        assert send(path, **{"x-api-key": admin.token}).status in (303, 401)
    for wrong in (send(MESSAGES, ASKED), send(MESSAGES, ASKED, **{"x-api-key": "sk-wrong"})):
        assert wrong.status == 401 and kind_of_error(wrong.json) == "authentication_error"
    right = Client(served.url, served.facts["key"])
    for answer, kind in (
        (right.send("GET", MESSAGES), "invalid_request_error"),
        (right.send("POST", f"{MESSAGES}/batches", {}), "not_found_error"),
        (Client(served.url, admin.token).send("POST", MESSAGES, ASKED), "permission_error"),
        (right.send("POST", MESSAGES, b"{"), "invalid_request_error"),
        (right.send("POST", MESSAGES, ASKED, {"Content-Type": "text/plain"}), "invalid_request_error"),
    ):
        assert kind_of_error(answer.json) == kind
    with pytest.raises(anthropic.AuthenticationError):
        anthropics.with_options(api_key="sk-wrong").messages.create(
            model="tiny:llama", messages=[QUESTION], max_tokens=1
        )


def test_one_limit_of_a_key_counts_the_requests_of_all_forms(tmp_path):
    folder = make_loop(tmp_path / "live")
    with VoteStore.open(folder / "votes.db") as store:
        token = store.add_rater("often", key=KeySettings(("generate",), 3)).token
    server = Server(folder, ("--openai", str(folder)), prepare="arena_parts").start()
    try:
        often = Client(server.url, token)
        for path, body in ((CHAT, ASKED), (RESPONSES, INPUT), (MESSAGES, ASKED)):
            assert often.send("POST", path, body).status == 200
        refused = often.send("POST", MESSAGES, ASKED)
        assert refused.status == 429 and refused.json["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) > 0
        assert often.send("POST", RESPONSES, INPUT).json["error"]["code"] == "rate_limit_exceeded"
    finally:
        server.kill()


def test_what_is_no_chat_is_told_before_anything_is_asked():
    many = MessagesRequest.model_validate({"messages": [QUESTION], "max_tokens": 1, "container": "c"})
    with pytest.raises(RefusedError, match='container "c" is not offered; leave it out'):
        many.as_chat()
