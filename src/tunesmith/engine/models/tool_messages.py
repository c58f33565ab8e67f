"""Conversations with calls of tools, as a chat template takes them.

Templates differ in what they know: tools, calls in the assistant's turn, a role for the results, a system message,
several turns of the user in a row. What one knows is found by rendering short probes. What it does not know is said in
plain turns instead: tools in the system message, calls in the assistant's content and results in a turn of the user, in
the format of Hermes.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from tunesmith.base.core.errors import DataError, InputError, ModelError
from tunesmith.base.schema.records import Message, Prompt
from tunesmith.engine.models.call_formats import Parser, Tool, call_id, parse_harmony, parser_of
from tunesmith.engine.models.conversation import whole_text

Turn = Mapping[str, Any]
"""A message with the fields that chat templates read beside its text: `tool_calls`, `tool_call_id`, reasoning."""

_PROBE = "tunesmithprobe"
_ASK: tuple[Turn, ...] = ({"role": "user", "content": "a"},)
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "a",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": []},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The tools and turns that a chat template knows, and how its model writes calls and reasoning.

    `reasoning_field`: the field of a message that it writes as reasoning, if any. `opens`, `closes`: the texts around
    reasoning.
    """

    parser: Parser
    reads_tools: bool
    reads_calls: bool
    takes_several_calls: bool
    has_tool_role: bool
    has_system_role: bool
    takes_users_in_a_row: bool
    reasoning_field: str | None
    opens: str
    closes: str


def schema_of(function: Callable[..., Any]) -> Tool:
    """The JSON schema of a tool, from its type hints and Google docstring.

    Raises:
        InputError: the function lacks a hint or a line of its docstring.
    """
    try:
        return get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise InputError(
            f"tool `{name}` has no schema: {error}. Give each argument a type hint and a line under `Args:` in the "
            "docstring"
        ) from error


def traits_of(tokenizer: PreTrainedTokenizerBase) -> TemplateTraits:
    """The traits of the tokenizer's chat template. Raises ModelError without a template."""
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so that a conversation has no text; take an instruction-tuned model"
        )
    return _traits_of(tokenizer, str(tokenizer.chat_template))


def tool_instructions(tools: Sequence[Tool]) -> str:
    """A text for the system message that describes `tools` and how to call them, for a model whose template has no
    words for it.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, each given by its JSON schema:\n<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and arguments as JSON, and nothing behind the last call:\n"
        '<tool_call>{"name": "<name>", "arguments": {"<argument>": <value>}}</tool_call>\n'
        "The results follow in <tool_response> tags."
    )


def with_tools(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Prompt:
    """`prompt` as the chat template takes it: its messages as of `as_template_takes`, and the row's `tools`, if the
    template does not read them, described in the system message instead. A text is returned as it is.
    """
    if isinstance(prompt.content, str):
        return prompt
    messages, columns = prompt.content, dict(prompt.columns)
    tools = cast(Sequence[Tool], columns.get("tools") or ())
    if tools and not traits_of(tokenizer).reads_tools:
        del columns["tools"]
        text = tool_instructions(tools)
        if messages and messages[0]["role"] == "system":
            messages = ({**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:])
        else:
            messages = ({"role": "system", "content": text}, *messages)
    return replace(prompt, content=as_template_takes(tokenizer, messages), columns=columns)


def as_template_takes(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Turn]) -> tuple[Message, ...]:
    """`messages` with the roles and fields that the chat template knows; what it knows stays.

    Results of tools that name no call get name and id of the calls before them, in order. A system message that the
    template refuses begins the first turn of the user; so do others of the user that follow each other.

    Applied again it changes nothing. Raises ModelError without a template.
    """
    traits = traits_of(tokenizer)
    found = _answered(messages)
    if not traits.reads_calls:
        found = [_said(message) for message in found]
    elif not traits.takes_several_calls:
        found = [_said(one) if len(one.get("tool_calls") or ()) > 1 else one for one in found]
    if not traits.has_tool_role:
        found = list(_as_users(found))
    if not traits.has_system_role and found and found[0]["role"] == "system":
        rest = found[1:]
        found = [{"role": "user", "content": found[0]["content"]}, *rest]
    if not traits.takes_users_in_a_row:
        found = list(_joined_users(found))
    return tuple(found)


def calls_as_text(calls: Sequence[Turn]) -> str:
    """The calls of a message in the format that `tool_instructions` asks for."""
    functions = [cast(Turn, call.get("function", call)) for call in calls]
    shown = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    return "\n".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in shown)


def _answered(messages: Sequence[Turn]) -> list[Turn]:
    """`messages` whose results of tools name the calls that they answer."""
    found: list[Turn] = []
    waiting: dict[int, Turn] = {}
    places: dict[object, deque[int]] = {}  # of the calls of each id: a turn may have thousands
    for message in messages:
        if message["role"] == "tool":
            known = message.get("tool_call_id")
            same = places.get(known, deque()) if known is not None else deque(islice(waiting, 1))
            while same and same[0] not in waiting:
                same.popleft()
            if same:
                call = waiting.pop(same[0])
                function = cast(Turn, call.get("function", call))
                named = {"name": function["name"], **({"tool_call_id": call["id"]} if call.get("id") else {})}
                message = {**named, **message}
        else:
            waiting = dict(enumerate(cast(Sequence[Turn], message.get("tool_calls") or ())))
            places = {}
            for place, call in waiting.items():
                places.setdefault(call.get("id"), deque()).append(place)
        found.append(message)
    return found


def _said(message: Turn) -> Turn:
    """`message` with its calls in its content."""
    if not message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    parts = (message.get("content") or "", calls_as_text(message["tool_calls"]))
    return {**rest, "content": "\n".join(part for part in parts if part)}


def _as_users(messages: Sequence[Turn]) -> Iterator[Turn]:
    """`messages` with neighbouring results of tools as one turn of the user."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _joined_users(messages: Sequence[Turn]) -> Iterator[Turn]:
    """`messages` with neighbouring turns of the user as one."""
    for is_user, run in groupby(messages, lambda message: message["role"] == "user"):
        if not is_user:
            yield from run
            continue
        first, *others = run
        yield {**first, "content": "\n\n".join(str(one["content"]) for one in (first, *others))} if others else first


@lru_cache(maxsize=16)
def _traits_of(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateTraits:
    written = _Writes(tokenizer)
    parser = parser_of(template)
    reads_calls = written((*_ASK, _calling(_PROBE)))
    known = (marks for marks in _REASONING if marks[1] in template)
    opens, closes = _HARMONY if parser is parse_harmony else next(known, _REASONING[0])
    names_role = re.search(r"""["'](?:tool|tools|ipython|tool_results|function|observation)["']""", template)
    result: Turn = {"role": "tool", "name": "a", "tool_call_id": call_id(0), "content": _PROBE}
    asked_before = (*_ASK, _calling("a") if reads_calls else {"role": "assistant", "content": "a"})
    return TemplateTraits(
        parser=parser,
        reads_tools=written(_ASK, tools=[_TOOL]),
        reads_calls=reads_calls,
        takes_several_calls=written((*_ASK, _calling("a", _PROBE))),
        has_tool_role=bool(names_role) and written((*asked_before, result)),
        has_system_role=written(({"role": "system", "content": _PROBE}, *_ASK)),
        takes_users_in_a_row=written((*_ASK, {"role": "user", "content": _PROBE})),
        reasoning_field=_reasoning_field(written, reads_calls),
        opens=opens,
        closes=closes,
    )


_HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))


def _reasoning_field(written: Callable[[Sequence[Turn]], bool], reads_calls: bool) -> str | None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        answers: list[Turn] = [{"role": "assistant", "content": "a"}, {**_calling("a"), "content": ""}]
        if any(written((*_ASK, {**answer, name: _PROBE})) for answer in answers[: 1 + reads_calls]):
            return name
    return None


def _calling(*names: str) -> Turn:
    """An answer that calls the tools `names`."""
    functions = [{"name": name, "arguments": {"a": "a"}} for name in names]
    calls = [{"type": "function", "id": call_id(index), "function": one} for index, one in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class _Writes:
    """True, called with messages that have the probe, if the template writes them with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[Turn], **columns: object) -> bool:
        prompt = Prompt("probe", (), columns)
        try:
            return _PROBE in whole_text(self._tokenizer, prompt, messages)
        except DataError:
            return False
