"""Conversations with calls of tools have the roles and fields that each published template knows."""

import pytest
from template_families import FAMILIES, TOOL, TOOLS, asked, ids_after, rendered, tokenizer_of, turn_of

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models.tool_messages import as_template_takes, tool_instructions
from tunesmith.engine.models.turns import parse_answer

pytest.importorskip("trl", reason="needs TRL, which has the templates of published models")


def test_a_model_without_a_format_is_told_one_and_gets_results_from_the_user() -> None:
    tokenizer, prompt, opened = asked("SmolLM2", tools=TOOLS)
    assert "tools" not in prompt.columns
    assert tool_instructions(TOOLS) in opened
    said = '<tool_call>{"name": "search", "arguments": {"text": "a"}}</tool_call><|im_end|>'
    _, sampled = ids_after(tokenizer, opened, said)
    answer = parse_answer(tokenizer, opened, sampled)
    assert answer.message == {"role": "assistant", "content": said.removesuffix("<|im_end|>")}
    assert turn_of("SmolLM2", said, [*TOOL, *TOOL], tools=TOOLS) == (
        "\n<|im_start|>user\n<tool_response>\nB\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_are_what_the_template_takes_and_stay_so(name: str) -> None:
    tokenizer = tokenizer_of(name)
    function = {"name": "search", "arguments": {"text": "a"}}
    call = {"type": "function", "id": "call00000", "function": function}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "B"},
    ]
    taken = as_template_takes(tokenizer, messages)
    assert as_template_takes(tokenizer, taken) == taken
    text = rendered(tokenizer, Prompt("1", ()), messages, opens=True)
    assert "search" in text
    assert all(part in text for part in ("S", "Q", "B"))


def test_results_name_their_calls_in_order() -> None:
    calls = [
        {"type": "function", "id": f"call0000{index}", "function": {"name": f"f{index}", "arguments": {}}}
        for index in (0, 1)
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *TOOL, *TOOL]
    taken = as_template_takes(tokenizer_of("Gemma 4"), messages)
    assert [(message["name"], message["tool_call_id"]) for message in taken[1:]] == [
        ("f0", "call00000"),
        ("f1", "call00001"),
    ]
