"""Prompt, sampled ids and suffix are what a published template writes for the whole conversation, or a new sequence."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from template_families import (
    FAMILIES,
    HERMES_CALL,
    TOOL,
    TOOLS,
    USER,
    Family,
    asked,
    ids_after,
    rendered,
    tokenizer_of,
    turn_of,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models import assets
from tunesmith.engine.models.conversation import named_tokens
from tunesmith.engine.models.tokenizer import decode, decode_marked, encode_rendered
from tunesmith.engine.models.tool_messages import traits_of, with_tools
from tunesmith.engine.models.turns import Answer, ContentStream, call_ends, next_turn, parse_answer, reply_ranges
from tunesmith.engine.rollout.engine import decode_of
from tunesmith.engine.rollout.sequence import TextStream

pytest.importorskip("trl", reason="needs TRL, which has the templates of published models")

EXAMPLES = settings(deadline=None, max_examples=12)
LETTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2581")
# Hypothesis tries strings of the sources too, which are marks of a format here.
PLAIN = st.text(st.one_of(LETTERS, st.sampled_from(' \n{}[]"\\:,;')), max_size=12).filter(
    lambda text: re.search(r"<[|/a-z]|\[[A-Z/]", text) is None
)
MARKED = st.sampled_from(
    ["<|im_end|>", "a<|im_end|>\n", "<|eot_id|>b", "<end_of_turn>", "</s>", "<|end|>x", "<turn|>", "<|im_start|>user\n"]
)
LIKE_FORMATS = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": 1}', "<think>", "a</think>b", "[INST] a"])
NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text("abc_", min_size=1, max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {"text": PLAIN},
    optional={
        "count": st.integers(-(10**6), 10**6),
        "flag": st.booleans(),
        "data": st.dictionaries(st.text("abc_", min_size=1, max_size=3), NESTED, max_size=2),
    },
)


def answers(family: Family) -> st.SearchStrategy[dict[str, Any]]:
    """Answers of the assistant: said, or calls of tools; with reasoning or not."""

    def built(content: str, calls: list[dict[str, Any]], thinking: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking is not None and family.thinking:
            found[family.thinking] = thinking
        if calls and family.calls:
            found["content"] = "" if family.calls == 1 or "Mistral" in str(family) else content
            found["tool_calls"] = [
                {"type": "function", "id": f"call{index:05d}", "function": {"name": "search", "arguments": arguments}}
                for index, arguments in enumerate(calls[: family.calls])
            ]
        return found

    thinking = st.one_of(st.none(), PLAIN.filter(str.strip))
    return st.builds(built, st.one_of(PLAIN, MARKED), st.lists(ARGUMENTS, max_size=3), thinking)


@st.composite
def talks(draw: st.DrawFn, family: Family) -> tuple[Prompt, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """A prompt, and answers with what follows each: results of its calls, and a turn of the user."""
    text = st.one_of(PLAIN, MARKED, LIKE_FORMATS)
    system = draw(st.none() | PLAIN)
    messages = ({"role": "user", "content": draw(text)},)
    if system is not None:
        messages = ({"role": "system", "content": system}, *messages)
    rounds: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for _ in range(draw(st.integers(1, 5))):
        answer = draw(answers(family))
        results = [{"role": "tool", "content": draw(text)} for _ in answer.get("tool_calls", ())]
        asks = not results or (family.asks_after_results and draw(st.integers(0, 3)) == 0)
        rounds.append((answer, [*results, *([{"role": "user", "content": draw(text)}] if asks else [])]))
    columns: dict[str, object] = {"tools": TOOLS} if draw(st.booleans()) else {}
    return Prompt("1", messages, columns), rounds


def ends_of(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {tokenizer.eos_token_id, *call_ends(tokenizer)}


def sampled_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Any], answer: Any) -> str:
    """What a model that writes as its template does samples, up to the token that ends the turn."""
    opened = rendered(tokenizer, prompt, messages, opens=True)
    whole = rendered(tokenizer, prompt, [*messages, answer], opens=False)
    if not whole.startswith(opened):
        reject()
    names = [name for name, (index, _) in named_tokens(tokenizer).items() if index in ends_of(tokenizer)]
    assert whole.rstrip().endswith(tuple(names))
    return whole.rstrip()[len(opened) :]


def check_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Any], answer: Any, new: Sequence[Any]
) -> Answer:
    """One turn: the suffix is there exactly if the template still writes all that was before, and is what it writes."""
    opened = rendered(tokenizer, prompt, messages, opens=True)
    text = sampled_text(tokenizer, prompt, messages, answer)
    before, sampled = ids_after(tokenizer, opened, text)
    if "\ufffd" in decode_marked(tokenizer, sampled):  # the tokenizer lacks a byte, as SmolLM2's does some
        reject()
    parsed = parse_answer(tokenizer, opened, sampled, TOOLS)
    whole = rendered(tokenizer, prompt, [*messages, parsed.message, *new], opens=True)
    suffix = next_turn(tokenizer, prompt, messages, parsed.message, sampled, new)
    assert (suffix is not None) == whole.startswith(opened + text)
    if suffix is not None:
        expected = encode_rendered(tokenizer, whole)
        assert decode_marked(tokenizer, before + sampled + suffix) == decode_marked(tokenizer, expected)
        assert suffix[0] not in ends_of(tokenizer)  # a second one would end the turn again
        if expected[: len(before + sampled)] == before + sampled:
            assert before + sampled + suffix == expected
    return parsed


def check_talk(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, rounds: Any) -> None:
    """Check each turn of a conversation."""
    prompt = with_tools(tokenizer, prompt)
    messages: list[Any] = list(prompt.content)
    for answer, new in rounds:
        parsed = check_turn(tokenizer, prompt, messages, answer, new)
        messages += [parsed.message, *new]


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_turns_and_suffixes_are_the_template_s_text(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]

    @EXAMPLES
    @given(talks(family))
    def check(talk: Any) -> None:
        check_talk(tokenizer, *talk)

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_other_tokens_of_the_same_text_have_the_same_suffix(name: str) -> None:
    tokenizer = tokenizer_of(name)

    @EXAMPLES
    @given(talks(FAMILIES[name]))
    def check(talk: Any) -> None:
        prompt, rounds = talk
        prompt = with_tools(tokenizer, prompt)
        answer, new = rounds[0]
        opened = rendered(tokenizer, prompt, prompt.content, opens=True)
        text = sampled_text(tokenizer, prompt, prompt.content, answer)
        _, sampled = ids_after(tokenizer, opened, text)
        odd = in_small_pieces(tokenizer, sampled)
        assert decode_marked(tokenizer, odd) == decode_marked(tokenizer, sampled)
        parsed = parse_answer(tokenizer, opened, sampled, TOOLS)
        assert parse_answer(tokenizer, opened, odd, TOOLS) == parsed
        suffix = next_turn(tokenizer, prompt, prompt.content, parsed.message, sampled, new)
        assert next_turn(tokenizer, prompt, prompt.content, parsed.message, odd, new) == suffix

    check()


def in_small_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, ...]:
    """Other ids with the same text: a piece of letters by its letters, or by its bytes."""
    found: list[int] = []
    named = {index for index, _ in named_tokens(tokenizer).values()}
    for index in ids:
        piece = str(tokenizer.convert_ids_to_tokens(index))
        letters = tokenizer.convert_tokens_to_ids(list(piece))
        is_known = index not in named and tokenizer.unk_token_id not in letters and None not in letters
        found += letters if is_known and not piece.startswith("<0x") else [index]
    return tuple(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_is_closed(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ends = named_tokens(tokenizer)

    @EXAMPLES
    @given(talks(FAMILIES[name]), st.integers(0, 60))
    def check(talk: Any, length: int) -> None:
        prompt, rounds = talk
        prompt = with_tools(tokenizer, prompt)
        opened = rendered(tokenizer, prompt, prompt.content, opens=True)
        text = sampled_text(tokenizer, prompt, prompt.content, rounds[0][0])
        before, sampled = ids_after(tokenizer, opened, text)
        cut = sampled[: min(length, len(sampled) - 1)]
        said = decode_marked(tokenizer, before + cut).removeprefix(decode_marked(tokenizer, before))
        assume(not ends_of(tokenizer) & set(sampled[:-1]) and "\ufffd" not in said)
        parsed = parse_answer(tokenizer, opened, cut, TOOLS)
        new = [{"role": "tool", "content": "4"} for _ in parsed.calls] or [{"role": "user", "content": "Go on."}]
        suffix = next_turn(tokenizer, prompt, prompt.content, parsed.message, cut, new)
        whole = rendered(tokenizer, prompt, [*prompt.content, parsed.message, *new], opens=True)
        if whole.startswith(opened + said):
            assert suffix is not None
            if "Mistral v3" not in name:  # whose decoder shows the space that the tokenizer puts before each text
                assert decode_marked(tokenizer, before + cut + suffix) == whole
        elif suffix is not None:
            assert suffix[0] in {*ends_of(tokenizer), *([ends["<|end|>"][0]] if "<|end|>" in ends else [])}

    check()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]

    @settings(deadline=None, max_examples=25)
    @given(answers(family).filter(lambda answer: "tool_calls" in answer))
    def check(answer: dict[str, Any]) -> None:
        prompt = Prompt("1", ({"role": "user", "content": "Q"},), {"tools": TOOLS})
        opened = rendered(tokenizer, prompt, prompt.content, opens=True)
        text = sampled_text(tokenizer, prompt, prompt.content, answer)
        _, sampled = ids_after(tokenizer, opened, text)
        parsed = parse_answer(tokenizer, opened, sampled, TOOLS)
        assert parsed.malformed is None
        assert [dict(call.arguments) for call in parsed.calls] == [
            call["function"]["arguments"] for call in answer["tool_calls"]
        ]
        assert [call.name for call in parsed.calls] == ["search"] * len(answer["tool_calls"])
        assert sampled_text(tokenizer, prompt, prompt.content, parsed.message) == text

    check()


@pytest.mark.parametrize(
    ("name", "said", "new", "suffix"),
    [
        ("SmolLM2", "A<|im_end|>", USER, "\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        ("SmolLM2", "A<|im_end|>\n", USER, "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        ("SmolLM2", "A", USER, "<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        ("SmolLM2", "", USER, "<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        ("Llama 3", " A ", USER, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nB<|eot_id|>"),
        ("Gemma", "A", USER, "<end_of_turn>\n<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n"),
        ("Gemma", "A<end_of_turn>", USER, "\n<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n"),
        ("Mistral v13", "A</s>", USER, "[INST]B[/INST]"),
        ("Mistral v13", "A", USER, "</s>[INST]B[/INST]"),
    ],
)
def test_a_turn_is_closed_once_with_what_the_template_writes_behind_it(
    name: str, said: str, new: list[dict[str, str]], suffix: str
) -> None:
    found = turn_of(name, said, new)
    assert found is not None
    assert found.startswith(suffix)


def test_another_token_that_ended_the_turn_stays() -> None:
    tokenizer, prompt, opened = asked("Qwen 2.5")
    _, sampled = ids_after(tokenizer, opened, "A<|endoftext|>")
    stop_ids = [named_tokens(tokenizer)["<|endoftext|>"][0]]
    answer = parse_answer(tokenizer, opened, sampled, stop_ids=stop_ids)
    assert answer.message["content"] == "A"
    suffix = next_turn(tokenizer, prompt, prompt.content, answer.message, sampled, USER, stop_ids=stop_ids)
    assert suffix is not None
    assert decode_marked(tokenizer, suffix) == "\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_of_llama_may_end_with_its_own_token() -> None:
    call = '{"name": "search", "parameters": {"text": "a"}}<|eom_id|>'
    assert turn_of("Llama 3.1", call, TOOL, tools=TOOLS) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"B"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )


@pytest.mark.parametrize("name", ["Qwen 2.5", "Qwen 3", "Qwen 3 2507"])
@pytest.mark.parametrize(
    "call",
    [
        HERMES_CALL,
        '<tool_call>{"arguments":{"text":"\\u0061"},"name":"search"}</tool_call>',
        f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}\n",
    ],
)
def test_a_call_spelled_otherwise_keeps_the_sequence(name: str, call: str) -> None:
    result = [{"role": "tool", "content": "B"}] * call.count("<tool_call>")
    responses = "\n<tool_response>\nB\n</tool_response>" * len(result)
    after = f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"
    assert turn_of(name, f"{call}<|im_end|>", result, tools=TOOLS) == after
    assert turn_of(name, call, result, tools=TOOLS) == f"<|im_end|>{after}"


@pytest.mark.parametrize(
    ("name", "said", "new", "is_kept"),
    [
        ("Qwen 3", "<think>\nT\n</think>\n\nA<|im_end|>", USER, False),
        ("Qwen 3", "A<|im_end|>", USER, True),
        ("Qwen 3", f"<think>\nT\n</think>\n\n{HERMES_CALL}<|im_end|>", TOOL, True),
        ("Qwen 3", f"<think>\nT\n</think>\n\n{HERMES_CALL}<|im_end|>", [*TOOL, *USER], False),
        ("Qwen 3", "<think>\nT was cut", USER, False),
        ("Qwen 3 2507", "<think>\nT\n</think>\n\nA<|im_end|>", USER, True),
        ("Qwen 3.5", "T\n</think>\n\nA<|im_end|>", USER, False),
        ("Gemma 4", "<|channel>thought\nT\n<channel|>A<turn|>", USER, False),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>",
            USER,
            False,
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>commentary to=functions.search "
            '<|constrain|>json<|message|>{"text":"a"}<|call|>',
            TOOL,
            True,  # though the template writes the recipient first
        ),
    ],
)
def test_a_template_that_drops_reasoning_begins_another_sequence(
    name: str, said: str, new: list[dict[str, str]], is_kept: bool
) -> None:
    assert (turn_of(name, said, new, tools=TOOLS) is not None) == is_kept


def test_reasoning_that_was_cut_is_closed_where_the_template_keeps_it() -> None:
    tokenizer, prompt, opened = asked("Qwen 3.5", tools=TOOLS)
    _, sampled = ids_after(tokenizer, opened, "T ")
    answer = parse_answer(tokenizer, opened, sampled)
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": "T "}
    suffix = next_turn(tokenizer, prompt, prompt.content, answer.message, sampled, TOOL)
    assert suffix is not None
    assert decode_marked(tokenizer, suffix).startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_an_opening_that_the_template_does_not_write_again_is_part_of_the_answer() -> None:
    tokenizer = FAMILIES["SmolLM2"].make()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("assistant\n' }}", "assistant\n<think>\n' }}")
    prompt = Prompt("1", ({"role": "user", "content": "Q"},))
    opened = rendered(tokenizer, prompt, prompt.content, opens=True)
    assert opened.endswith("<think>\n")
    _, sampled = ids_after(tokenizer, opened, "T</think>A<|im_end|>")
    answer = parse_answer(tokenizer, opened, sampled)
    assert answer.message["content"] == "<think>\nT</think>A"
    suffix = next_turn(tokenizer, prompt, prompt.content, answer.message, sampled, USER)
    assert suffix is not None
    assert decode_marked(tokenizer, suffix).startswith("\n<|im_start|>user\nB")


@pytest.mark.parametrize("kept", ["A prefix", "A prefix "])
def test_an_answer_that_a_prompt_began_goes_on(kept: str) -> None:
    tokenizer = tokenizer_of("SmolLM2")
    prompt = Prompt("1", ({"role": "user", "content": "Q"}, {"role": "assistant", "content": kept}))
    _, sampled = ids_after(tokenizer, "", " and more<|im_end|>")
    answer = parse_answer(tokenizer, kept, sampled)
    suffix = next_turn(tokenizer, prompt, prompt.content, answer.message, sampled, USER)
    assert suffix is not None
    assert decode_marked(tokenizer, suffix).startswith("\n<|im_start|>user\nB")


@pytest.mark.parametrize(
    ("name", "ends"),
    [("gpt-oss", ["<|call|>"]), ("Llama 3.2", ["<|eom_id|>"]), ("Gemma 4", ["<|tool_response>"]), ("Qwen 3", [])],
)
def test_generation_stops_at_a_call_where_the_family_does(name: str, ends: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.convert_ids_to_tokens(list(call_ends(tokenizer))) == ends


def test_a_refusal_of_the_template_names_the_prompt() -> None:
    with pytest.raises(DataError, match="refuses prompt 1"):
        turn_of("gpt-oss", "<|channel|>final<|message|>A<|return|>", TOOL)


@pytest.mark.parametrize("name", ["Qwen 3", "Qwen 3.5", "gpt-oss", "Gemma 4", "Llama 3.1"])
def test_a_tokenizer_s_own_description_of_answers_is_used(name: str) -> None:
    from trl.chat_template_utils import add_response_schema

    tokenizer = add_response_schema(FAMILIES[name].make())
    prompt = Prompt("1", ({"role": "user", "content": "Q"},), {"tools": TOOLS})
    opened = rendered(tokenizer, prompt, prompt.content, opens=True)
    function = {"name": "search", "arguments": {"text": "a", "count": 3}}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00000", "function": function}],
    }
    if field := FAMILIES[name].thinking:
        answer[field] = "T"
    text = sampled_text(tokenizer, prompt, prompt.content, answer)
    _, sampled = ids_after(tokenizer, opened, text)
    parsed = parse_answer(tokenizer, opened, sampled, TOOLS)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [("search", {"text": "a", "count": 3})]
    suffix = next_turn(tokenizer, prompt, prompt.content, parsed.message, sampled, TOOL)
    whole = rendered(tokenizer, prompt, [*prompt.content, parsed.message, *TOOL], opens=True)
    assert suffix is not None
    assert whole.endswith(decode_marked(tokenizer, suffix))
    cut = parse_answer(tokenizer, opened, sampled[: len(sampled) // 2], TOOLS)
    assert cut.calls == ()


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    converted = assets._conversion_folder(assets.GGUF_SHA256)
    if not assets.is_published(converted):
        pytest.skip(f"needs a converted copy of SmolLM2 in the cache, {converted}; another test makes it")
    return AutoTokenizer.from_pretrained(converted)


def test_the_real_tokenizer_of_smollm2(smollm2: PreTrainedTokenizerBase) -> None:
    @settings(deadline=None, max_examples=25)
    @given(talks(FAMILIES["SmolLM2"]))
    def check(talk: Any) -> None:
        check_talk(smollm2, *talk)

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ranges_of_a_reply_are_its_contents_without_the_template(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]

    @EXAMPLES
    @given(st.lists(PLAIN, min_size=1, max_size=3))
    def check(contents: list[str]) -> None:
        contents = contents[: family.calls or 1]
        if name in WRITE_JSON:  # a comma or colon may be in one token with the quote beside it, which no range holds
            assume(all(content.strip() == content.strip().strip(",:") for content in contents))
        prompt = with_tools(tokenizer, Prompt("1", ({"role": "user", "content": "Q"},), {"tools": TOOLS}))
        calls = [
            {"type": "function", "id": f"call{index:05d}", "function": {"name": "search", "arguments": {"text": "a"}}}
            for index in range(len(contents))
        ]
        answer = {"role": "assistant", "content": "", **({"tool_calls": calls} if family.calls else {"content": "A"})}
        opened = rendered(tokenizer, prompt, prompt.content, opens=True)
        text = sampled_text(tokenizer, prompt, prompt.content, answer)
        _, sampled = ids_after(tokenizer, opened, text)
        role = "tool" if family.calls else "user"
        new = [{"role": role, "content": content} for content in contents]
        message = parse_answer(tokenizer, opened, sampled, TOOLS).message
        suffix = next_turn(tokenizer, prompt, prompt.content, message, sampled, new)
        if suffix is None:
            return
        ranges = reply_ranges(tokenizer, prompt, (*prompt.content, message), new, suffix)
        found = [decode_marked(tokenizer, suffix[part.start : part.stop]).strip() for part in ranges]
        assert "\ufffd" in "".join(found) or found == [
            shown for content in contents if (shown := as_written(name, content).strip())
        ]

    check()


WRITE_JSON = ("Llama 3.1", "Llama 3.2", "gpt-oss")
"""Families whose templates write a content as JSON, between quotes."""


def as_written(name: str, content: str) -> str:
    """A content as the template of a family writes it."""
    return json.dumps(content, ensure_ascii=False)[1:-1] if name in WRITE_JSON else content


CALLS = [
    HERMES_CALL,
    HERMES_CALL[:-3],
    "<tool_call><function=search><parameter=text>a</parameter></function></tool_call>",
    '<|python_tag|>{"name": "search", "parameters": {"text": "a"}}',
    '{"name": "search", "parameters": {"text": "a"}}',
    '[TOOL_CALLS]search[ARGS]{"text": "a"}',
    '[TOOL_CALLS] [{"name": "search", "arguments": {"text": "a"}}]',
    '<|tool_call>call:search{text:<|"|>a<|"|>}<tool_call|>',
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    '<|start|>assistant<|channel|>commentary to=functions.search<|message|>{"text": "a"}<|call|>',
]
REASONING = ["<think>", "</think>", "<think>\nHm.\n</think>\n\n", "<|channel>thought\nHm.<channel|>", "<think></think>"]
SAID = st.lists(
    st.one_of(
        st.sampled_from(CALLS),
        st.sampled_from([*CALLS, *REASONING, "<|im_end|>", "</s>", "<eos>"]).flatmap(
            lambda text: st.integers(1, len(text)).map(lambda end: text[:end])
        ),
        st.sampled_from(
            [*REASONING, "\n", "\n\n", " ", "Sure.", "<", "[", "{", '{"name"', "a <b> [c]", "\u00e9\u4e2d"]
        ),
        PLAIN,
    ),
    max_size=5,
).map("".join)


def streamed(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]
) -> tuple[Any, list[str], Any]:
    """The reasoning, the pieces of the content and the message of a turn that is drawn token by token."""
    stream = ContentStream(tokenizer, before)
    texts = TextStream(decode_of(tokenizer, with_marks=False), list(before[-8:]))
    thinking, pieces = "", []
    for end in range(1, len(ids)):
        thought, piece = stream.push(texts.push(list(ids[:end])), ids[end - 1 : end])
        thinking, pieces = thinking + thought, [*pieces, piece]
    plain = decode(tokenizer, [*before[-8:], *ids])[len(decode(tokenizer, before[-8:])) :]
    message, thought, piece = stream.finish(texts.finish(plain), plain, parse_answer(tokenizer, before, ids, TOOLS))
    return thinking + thought, [*pieces, piece], message


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_content_is_that_of_the_whole_answer(name: str) -> None:
    tokenizer, _, opened = asked(name, tools=TOOLS)
    traits = traits_of(tokenizer)
    opens = traits.opens.rstrip()

    @settings(deadline=None, max_examples=25)
    @given(SAID, st.booleans())
    def check(said: str, is_small: bool) -> None:
        before, ids = ids_after(tokenizer, opened, said)
        ids = in_small_pieces(tokenizer, ids) if is_small else ids
        assume(ids)
        thinking, pieces, message = streamed(tokenizer, before, ids)
        assert ("".join(pieces), thinking) == (message["content"], message.get("reasoning_content") or "")
        answer = parse_answer(tokenizer, before, ids, TOOLS)
        assert message.get("tool_calls") == answer.message.get("tool_calls")
        begins = said.lstrip().startswith(opens) or opened.rstrip().endswith(opens)
        if answer.malformed is None and (begins or traits.closes not in said):
            assert message == answer.message

    check()


@pytest.mark.parametrize(
    ("name", "said", "given"),
    [
        ("Qwen 2.5", f"I look.\n{HERMES_CALL}", "I look."),
        ("Qwen 2.5", "1 < 2, <tool> and more", "1 < 2, <tool> and mor"),
        ("SmolLM2", f"I look. {HERMES_CALL}", "I look. "),
        ("Qwen 3", f"<think>\nHm.\n</think>\n\nI look.\n\n{HERMES_CALL}", "I look.\n"),
        ("Qwen 3.5", f"Hm.\n</think>\n\nI look.{CALLS[2]}", "I look."),
        ("Llama 3.1", '{"a": 1}, as asked', '{"a": 1}, as aske'),
        ("Llama 3.1", '{"name": "search", "parameters": {"text": "a"}}', ""),
        ("Mistral v13", f"I look.{CALLS[5]}", "I look."),
        ("Gemma 4", f"I look {CALLS[7]}", "I look "),
        ("Gemma 4", f"<|channel>thought\nHm.<channel|>I look {CALLS[7]}", "I look "),
        ("gpt-oss", CALLS[8], ""),
    ],
)
def test_content_is_streamed_until_a_call_may_begin(name: str, said: str, given: str) -> None:
    tokenizer, _, opened = asked(name, tools=TOOLS)
    before, ids = ids_after(tokenizer, opened, said)
    *pieces, _ = streamed(tokenizer, before, in_small_pieces(tokenizer, ids))[1]
    assert "".join(pieces) == given


def test_reasoning_that_begins_nowhere_is_content_that_was_streamed() -> None:
    tokenizer, _, opened = asked("Qwen 3", tools=TOOLS)
    for behind, calls in (("Yes.", 0), (HERMES_CALL, 1)):
        before, ids = ids_after(tokenizer, opened, f"Hm.</think>{behind}")
        thinking, _, message = streamed(tokenizer, before, ids)
        assert (thinking, message["content"]) == ("", "Hm." if calls else "Hm.</think>Yes.")
        assert len(message.get("tool_calls", ())) == calls
