"""Calls of tools in the text of an answer, in the formats in which published models write them.

A format is recognised by what the chat template writes; its parser takes the text of a turn behind the reasoning, and
returns the calls and what else was said. JSON is read to the end of its value, so that a marker inside of a string ends
nothing. One wrong call makes the whole turn malformed, since nobody can tell which of the others the model meant.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

MAX_DEPTH = 32
"""Levels of lists and objects in a call."""

Tool = Mapping[str, Any]
"""A tool's JSON schema, as chat templates take it: `{"type": "function", "function": {"name": ...}}`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool `name`. `id` ties a tool's result to it, in templates that ask for one."""

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parts of a turn: `content` outside of its `calls`, and `thinking` where that is part of the format.

    `malformed`: what is wrong with a call, None if nothing is; then there are no calls.
    """

    content: str
    calls: tuple[Call, ...] = ()
    malformed: str | None = None
    thinking: str = ""


class MalformedCallError(Exception):
    """An error in a call, in words for the model."""


Parser = Callable[[str, Sequence[Tool]], Parsed]


def parser_of(template: str) -> Parser:
    """The parser of the format in which a chat template writes calls; of Hermes where it writes none."""
    for marks, parser in _FORMATS:
        if all(mark in template for mark in marks):
            return parser
    return parse_hermes


def parse_hermes(text: str, tools: Sequence[Tool]) -> Parsed:
    """Qwen 2.5 and 3, Hermes, SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""
    return _collected(text, "<tool_call>", _hermes_call)


def parse_xml(text: str, tools: Sequence[Tool]) -> Parsed:
    """Qwen 3.5 and Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    A value has the type that the tool's schema gives it. Without one it is JSON if it can be, else text.
    """
    return _collected(text, "<tool_call>", lambda rest: _xml_call(rest, tools))


def parse_gemma(text: str, tools: Sequence[Tool]) -> Parsed:
    """Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, any number."""
    return _collected(text, "<|tool_call>", _gemma_call)


def parse_llama(text: str, tools: Sequence[Tool]) -> Parsed:
    """Llama 3.1 to 3.3: the whole turn is `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or not.

    Several of them, separated by `;`, a comma or space, are several calls. Other JSON is an answer, not a call.
    """
    tagged = text.strip().startswith(_PYTHON_TAG)
    rest = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not tagged and not re.match(r'\{\s*"name"\s*:', rest):
        return Parsed(text)
    if tagged and (builtin := re.fullmatch(r"([\w.]+)\.call\((.*)\)", rest, re.DOTALL)):
        return Parsed("", (Call(builtin[1], dict(re.findall(r'(\w+)="([^"]*)"', builtin[2])), call_id(0)),))
    found: list[tuple[str, Mapping[str, Any], str]] = []
    try:
        while rest:
            value, end = _json_at(rest)
            if not tagged and not found and not _is_llama_call(value):
                return Parsed(text)
            found.append(checked_call(value))
            rest = re.sub(r"^(?:[\s;,]|<\|python_tag\|>)+", "", rest[end:])
    except MalformedCallError as error:
        return Parsed(text, malformed=str(error))
    return Parsed("", numbered(found))


def parse_mistral(text: str, tools: Sequence[Tool]) -> Parsed:
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and in later models `[TOOL_CALLS]name[ARGS]{...}`,
    once for each call.
    """
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return Parsed(text)
    found: list[tuple[str, Mapping[str, Any], str]] = []
    try:
        while rest.strip():
            if named := re.match(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*", rest):
                value, end = _json_at(rest[named.end() :])
                found.append(checked_call({"name": named[1], "arguments": value, "id": named[2]}))
                rest = rest[named.end() + end :]
                continue
            value, end = _json_at(rest)
            found += [checked_call(call) for call in (cast(list[Any], value) if isinstance(value, list) else [value])]
            rest = rest[end:].lstrip().removeprefix("[TOOL_CALLS]")
    except MalformedCallError as error:
        return Parsed(text, malformed=str(error))
    if not found:
        return Parsed(text, malformed="there is no call behind [TOOL_CALLS]")
    return Parsed(content, numbered(found))


def parse_harmony(text: str, tools: Sequence[Tool]) -> Parsed:
    """gpt-oss: messages on the channels `analysis` (the thinking), `commentary` (calls `to=functions.name`, and what is
    said before them) and `final`. A turn ends at its first call.
    """
    said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    rest = text
    while header := re.match(r"\s*(?:<\|start\|>assistant)?((?:(?!<\|message\|>|<\|start\|>).)*)<\|message\|>", rest):
        rest = rest[header.end() :]
        thinking = "\n".join(said["analysis"])
        if to := re.search(r"\bto=(?:functions\.)?([^\s<]+)", header[1]):
            try:
                value, _ = _json_at(rest)
                call = checked_call({"name": to[1], "arguments": value})
            except MalformedCallError as error:
                body = re.split(_HARMONY_END, rest, maxsplit=1)[0]
                return Parsed(body, malformed=str(error), thinking=thinking)
            return Parsed("\n".join(said["commentary"]), numbered([call]), thinking=thinking)
        body = re.split(_HARMONY_END, rest, maxsplit=1)[0]
        rest = rest[len(body) :]
        rest = re.sub(r"^<\|(?:end|return|call)\|>", "", rest)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header[1])
        said.get(channel[1] if channel else "final", said["final"]).append(body)
    if rest.strip():  # without the markers, which the template refuses inside of a content
        said["final"].append(re.sub(r"<\|\w+\|>", "", rest))
    thinking, preamble, content = ("\n".join(said[name]) for name in said)
    return Parsed("\n".join(part for part in (preamble, content) if part), thinking=thinking)


def settled(parser: Parser, text: str, others: Sequence[str] = ()) -> str:
    """The beginning of `text` that stays content whatever follows: up to what may begin a call, or one of the texts
    `others`. Empty for a format whose calls have no beginning of their own.
    """
    marks = _MARKS.get(parser)
    if marks is None or (parser is parse_llama and _may_be_llama_call(text)):
        return ""
    marks = (*marks, *others)
    text = text[: min((place for mark in marks if (place := text.find(mark)) >= 0), default=len(text))]
    return text[: len(text) - num_open(text, marks)].removesuffix("\n")  # a line break before a call is part of it


def num_open(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that are the beginning of one of `stops`."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        ),
        default=0,
    )


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = '{"name":'
_HARMONY_END = r"<\|(?:end|call|return|start)\|>"
_GEMMA_QUOTE = '<|"|>'

_FORMATS: tuple[tuple[tuple[str, ...], Parser], ...] = (
    (("<|channel|>", "<|call|>"), parse_harmony),
    (("<|tool_call>call:",), parse_gemma),
    (("[TOOL_CALLS]",), parse_mistral),
    (("<tool_call>", "<function="), parse_xml),
    (("<tool_call>",), parse_hermes),
    (('"parameters": ', "ipython"), parse_llama),
)

_MARKS: Mapping[Parser, tuple[str, ...]] = {
    parse_hermes: ("<tool_call>",),
    parse_xml: ("<tool_call>",),
    parse_gemma: ("<|tool_call>",),
    parse_mistral: ("[TOOL_CALLS]",),
    parse_llama: (),
}
"""The texts with which calls begin, in formats in which they may stand behind content. Llama's stand alone."""


def _collected(text: str, mark: str, parse: Callable[[str], tuple[tuple[str, Mapping[str, Any], str], int]]) -> Parsed:
    """The calls that begin with `mark`. `parse` takes what follows it, and returns a call and where that ends."""
    said: list[str] = []
    found: list[tuple[str, Mapping[str, Any], str]] = []
    rest = text
    while True:
        before, is_call, rest = rest.partition(mark)
        said.append(before)
        if not is_call:
            break
        try:
            call, end = parse(rest)
        except MalformedCallError as error:
            return Parsed(text, malformed=str(error))
        found.append(call)
        rest = rest[end:]
    if not found:
        return Parsed(text)
    behind = [part for part in said[1:] if part.strip()]
    return Parsed("\n".join((said[0].removesuffix("\n"), *behind)), numbered(found))


def _hermes_call(rest: str) -> tuple[tuple[str, Mapping[str, Any], str], int]:
    value, end = _json_at(rest)
    return checked_call(value), _behind(rest, end, "</tool_call>")


def _xml_call(rest: str, tools: Sequence[Tool]) -> tuple[tuple[str, Mapping[str, Any], str], int]:
    header = re.match(r"\s*<function=([^>\n]+)>\s*", rest)
    if header is None:
        raise MalformedCallError("a call begins with <function=name>; that is missing behind <tool_call>")
    place, types = header.end(), _types(header[1], tools)
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(rest, place):
        arguments[parameter[1]] = _typed(parameter[2], types.get(parameter[1]))
        place = parameter.end()
    place = _behind(rest, place, "</function>")
    call = checked_call({"name": header[1].strip(), "arguments": arguments})
    return call, _behind(rest, place, "</tool_call>")


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)


def _types(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    """The schemas of the parameters of the tool `name`, by their names."""
    for tool in tools:
        function: Any = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    if declared == "string":
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return _loads(text)
    except MalformedCallError:
        return text


_WORDS = {"True": True, "False": False, "None": None}
"""Values that are no text, as templates write them: as Python does."""


def _gemma_call(rest: str) -> tuple[tuple[str, Mapping[str, Any], str], int]:
    header = re.match(r"call:([^{\s]+)\s*(?=\{)", rest)
    if header is None:
        raise MalformedCallError("a call is written call:name{key:value}")
    try:
        value, place = _gemma_value(rest, header.end())
    except RecursionError as error:
        raise MalformedCallError(f"the call is nested deeper than {MAX_DEPTH} levels") from error
    _check_depth(value)
    call = checked_call({"name": header[1], "arguments": value})
    return call, _behind(rest, place, "<tool_call|>")


def _gemma_value(text: str, place: int) -> tuple[Any, int]:
    """The value at `place` and where it ends."""
    if text.startswith(_GEMMA_QUOTE, place):
        end = text.find(_GEMMA_QUOTE, place + len(_GEMMA_QUOTE))
        if end < 0:
            raise MalformedCallError(f"a text has no closing {_GEMMA_QUOTE}")
        return text[place + len(_GEMMA_QUOTE) : end], end + len(_GEMMA_QUOTE)
    if text.startswith("{", place):
        return _gemma_object(text, place + 1)
    if text.startswith("[", place):
        items: list[Any] = []
        place += 1
        while not text.startswith("]", place):
            item, place = _gemma_value(text, place)
            items.append(item)
            place = _separated(text, place, "]")
        return items, place + 1
    literal = re.compile(r"[^,\]}]*").match(text, place)
    assert literal is not None, "it matches nothing as well"
    word = literal[0].strip()
    if word in _WORDS:
        return _WORDS[word], literal.end()
    return _loads(word), literal.end()


def _gemma_object(text: str, place: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    key_of = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|([^:,{}\[\]]+)):', re.DOTALL)
    while not text.startswith("}", place):
        key = key_of.match(text, place)
        if key is None:
            raise MalformedCallError("arguments are written {key:value,key:value}; a key or the closing } is missing")
        found[key[2] if key[1] is None else key[1]], place = _gemma_value(text, key.end())
        place = _separated(text, place, "}")
    return found, place + 1


def _separated(text: str, place: int, end: str) -> int:
    if text.startswith(",", place) and not text.startswith(end, place + 1):
        return place + 1
    if text.startswith(end, place):
        return place
    raise MalformedCallError(f"a value is followed by a comma or by {end}")


def _behind(rest: str, place: int, close: str) -> int:
    """The place where `rest` goes on behind `close`, which is expected at `place`, behind space or none."""
    closed = re.compile(r"\s*" + re.escape(close)).match(rest, place)
    if closed is None:
        other = rest[place:].strip()[:40]
        raise MalformedCallError(f"a call is not closed: {close} is missing" + (f" before {other!r}" if other else ""))
    return closed.end()


def _may_be_llama_call(text: str) -> bool:
    """True as long as `text` may become a turn that is a call."""
    begun = text.lstrip()
    compact = "".join(begun.split())[: len(_LLAMA_CALL)]
    return begun.startswith(_PYTHON_TAG) or _PYTHON_TAG.startswith(begun) or _LLAMA_CALL.startswith(compact)


def _is_llama_call(value: object) -> bool:
    return isinstance(value, Mapping) and "name" in value and ("parameters" in value or "arguments" in value)


def checked_call(value: object) -> tuple[str, Mapping[str, Any], str]:
    """Name, arguments and id (empty if none) of a call given as JSON."""
    if not isinstance(value, Mapping):
        raise MalformedCallError(f'a call is a JSON object with "name" and "arguments", not {_kind(value)}')
    call = cast(Mapping[str, Any], value)
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError('a call needs the "name" of a tool, a text')
    arguments: Any = call["arguments"] if "arguments" in call else call.get("parameters", {})
    if isinstance(arguments, str):  # JSON inside of JSON, as OpenAI's API has it
        arguments = _loads(arguments)
    if not isinstance(arguments, Mapping):
        raise MalformedCallError(f"the arguments of {name} are {_kind(arguments)}; they must be a JSON object")
    given = call.get("id")
    return name, cast(Mapping[str, Any], arguments), given if isinstance(given, str) else ""


def _kind(value: object) -> str:
    kinds: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "something else")


def numbered(found: Sequence[tuple[str, Mapping[str, Any], str]]) -> tuple[Call, ...]:
    """Calls of names, arguments and ids; an id that a template would refuse is another."""
    return tuple(
        Call(name, arguments, given if re.fullmatch(r"[a-zA-Z0-9]{9}", given) else call_id(index))
        for index, (name, arguments, given) in enumerate(found)
    )


def call_id(index: int) -> str:
    """The id of a call of a turn: nine characters, as Mistral's templates ask for."""
    return f"call{index:05d}"


def _json_at(text: str) -> tuple[Any, int]:
    """The JSON value at the beginning of `text`, behind space or none, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text that a tokenizer takes
    except UnicodeEncodeError as error:
        raise MalformedCallError("the call has half a surrogate pair in a string; write whole characters") from error
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}" if text.strip() else "there is none"
        raise MalformedCallError(f"the call is no valid JSON: {what}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"the call is no valid JSON: {error}") from error
    return value, end


def _loads(text: str) -> Any:
    value, end = _json_at(text)
    if text[end:].strip():
        raise MalformedCallError("the call is no valid JSON: more follows the value")
    return value


def _check_depth(value: object, most: int = MAX_DEPTH) -> None:
    """Raise MalformedCallError if lists and objects are nested deeper than `most`: what reads the call next may refuse
    it, or recurse.
    """
    if not isinstance(value, Mapping | list):
        return
    if not most:
        raise MalformedCallError(f"the call is nested deeper than {MAX_DEPTH} levels")
    for part in cast(Mapping[str, object], value).values() if isinstance(value, Mapping) else cast(list[object], value):
        _check_depth(part, most - 1)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _no_constant(digits)


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)
"""Line breaks inside of strings are let pass, which models write; NaN, infinities and 1e999 are not."""
