"""Calls are read in each family's format; a wrong one is told, and what only looks like one is left alone."""

import json

import pytest
from template_families import HERMES_CALL, TOOLS, USER, asked, ids_after, tokenizer_of, turn_of

from tunesmith.engine.models.tool_messages import traits_of
from tunesmith.engine.models.turns import Answer, parse_answer

pytest.importorskip("trl", reason="needs TRL, which has the templates of published models")


def read(name: str, said: str, **columns: object) -> Answer:
    tokenizer, _, opened = asked(name, **columns)
    return parse_answer(tokenizer, opened, ids_after(tokenizer, opened, said)[1], TOOLS)


@pytest.mark.parametrize(
    ("name", "said", "wrong"),
    [
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": {"text": }}</tool_call>', "no valid JSON"),
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": {"text": "a"}}', "</tool_call> is missing"),
        ("Qwen 2.5", "<tool_call>", "there is none"),
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "search are a list"),
        ("Qwen 2.5", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("Qwen 2.5", "<tool_call>[1]</tool_call>", "not a list"),
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": {"count": NaN}}</tool_call>', "NaN"),
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": {"text": "\\ud800"}}</tool_call>', "surrogate"),
        ("Qwen 2.5", f'{HERMES_CALL}<tool_call>{{"name": "search", "argu', "no valid JSON"),
        ("Qwen 2.5", "<tool_call>" + '{"a":' * 100_000, "no valid JSON"),
        ("Qwen 2.5", '<tool_call>{"name": "search", "arguments": {"count": 1e999}}</tool_call>', "1e999"),
        (
            "Qwen 2.5",
            '<tool_call>{"name": "search", "arguments": {"count": "a"}, "b": ' + "[" * 32 + "]" * 32 + "}",
            "nested",
        ),
        ("Gemma 4", "<|tool_call>call:search{count:1e999}<tool_call|>", "1e999"),
        ("Gemma 4", "<|tool_call>call:search{count:" + "[" * 100_000, "nested deeper"),
        ("Gemma 4", "<|tool_call>call:search{count:" + "[" * 32 + "1" + "]" * 32 + "}<tool_call|>", "nested deeper"),
        ("Qwen 3.5", "</think><tool_call>\n<parameter=text>a</parameter></tool_call>", "<function=name>"),
        ("Qwen 3.5", "</think><tool_call>\n<function=search>\n<parameter=text>\na", "</function> is missing"),
        ("Llama 3.1", '{"name": "search", "parameters": {"text": "a"', "no valid JSON"),
        ("Llama 3.1", '{"name": "search", "parameters": 3}', "are a number"),
        ("Llama 3.1", '{"name": "search", "parameters": {}} and so on', "no valid JSON"),
        ("Mistral v13", '[TOOL_CALLS] [{"name": "search", "arguments": {"text": "a"}', "no valid JSON"),
        ("Mistral v13", "[TOOL_CALLS]", "no call behind"),
        ("Mistral v13", "[TOOL_CALLS]search[ARGS]{", "no valid JSON"),
        ("Gemma 4", '<|tool_call>call:search{text:<|"|>a}', "no closing"),
        ("Gemma 4", "<|tool_call>call:search{count:1", "followed by a comma"),
        ("Gemma 4", "<|tool_call>search()<tool_call|>", "call:name"),
        ("gpt-oss", " to=functions.search<|channel|>commentary json<|message|>{<|call|>", "no valid JSON"),
        ("SmolLM2", '<tool_call>{"name": "search", "arguments": "a"}</tool_call>', "no valid JSON"),
    ],
)
def test_a_wrong_call_is_told_and_stays_as_it_was_said(name: str, said: str, wrong: str) -> None:
    found = read(name, said)
    assert found.malformed is not None
    assert wrong in found.malformed
    assert found.calls == ()
    assert "tool_calls" not in found.message
    if name != "gpt-oss":
        assert found.message["content"] == said.removeprefix("</think>")
    if len(said) < 1000:
        suffix = turn_of(name, said, USER, tools=TOOLS) if name in ("Qwen 2.5", "Mistral v13", "Llama 3.1") else "B"
        assert suffix is not None
        assert "B" in suffix


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Llama 3.1", '{"answer": {"name": 4}}'),
        ("Llama 3.1", 'Sure: {"name": "search", "parameters": {}}'),
        ("Qwen 2.5", '{"name": "search", "arguments": {}}'),
        ("Mistral v13", '[{"name": "search", "arguments": {}}]'),
        ("gpt-oss", "plain text without a channel"),
        ("Gemma 4", "call:search{}"),
    ],
)
def test_what_only_looks_like_a_call_is_an_answer(name: str, said: str) -> None:
    found = read(name, said)
    assert (found.calls, found.malformed) == ((), None)
    assert found.message["content"] == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen 2.5", HERMES_CALL + HERMES_CALL),
        ("Llama 3.1", '<|python_tag|>{"name": "search", "parameters": {"text": "a"}}; ' * 2),
        ("Mistral v3", "[TOOL_CALLS] " + json.dumps([{"name": "search", "arguments": {"text": "a"}}] * 2)),
        ("Mistral v3", '[TOOL_CALLS]search[ARGS]{"text": "a"}[TOOL_CALLS]search[CALL_ID]abcdefgh1[ARGS]{"text": "a"}'),
        ("Gemma 4", '<|tool_call>call:search{text:<|"|>a<|"|>}<tool_call|>' * 2),
        ("SmolLM2", HERMES_CALL.replace("\n", "") * 2),
        (
            "Qwen 3.5",
            "T</think>" + "<tool_call><function=search><parameter=text>a</parameter></function></tool_call>" * 2,
        ),
    ],
)
def test_several_calls_of_a_turn_are_read_in_order(name: str, said: str) -> None:
    found = read(name, said)
    assert [(call.name, dict(call.arguments)) for call in found.calls] == [("search", {"text": "a"})] * 2
    assert len({call.id for call in found.calls}) == 2
    takes_both = traits_of(tokenizer_of(name)).takes_several_calls
    assert ("tool_calls" in found.message) == takes_both


def test_a_marker_inside_of_a_string_ends_no_call() -> None:
    text = 'a</tool_call>"}}<tool_call>\n\\'
    said = f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'text': text}})}</tool_call>"
    assert [dict(call.arguments) for call in read("Qwen 2.5", said).calls] == [{"text": text}]


def test_calls_inside_of_reasoning_are_none() -> None:
    found = read("Qwen 3", f"<think>\nI could write {HERMES_CALL}\n</think>\n\nNo.<|im_end|>")
    assert (found.calls, found.message["content"]) == ((), "No.")


def test_values_of_xml_calls_have_the_types_of_the_schema() -> None:
    values = {"text": "75001", "count": 3, "flag": True, "data": {"a": [None]}, "other": "None of it", "more": 2.5}
    shown = "".join(
        f"<parameter={name}>\n{value if not isinstance(value, dict) else json.dumps(value)}\n</parameter>\n"
        for name, value in values.items()
    )
    said = f"T\n</think>\n\n<tool_call>\n<function=search>\n{shown}</function>\n</tool_call><|im_end|>"
    (call,) = read("Qwen 3.5", said).calls
    assert dict(call.arguments) == values
