"""JSON of OpenAI's API: requests as what the engine is asked, and what it drew as responses.

Fields that other servers know beside OpenAI's (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`return_token_ids`) have vLLM's names. A field that is not known is ignored, as those servers do; one that asks for
something that is not done here is refused.
"""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

from fastapi.exceptions import HTTPException, RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from tunesmith.base.core.seeds import LARGEST_SEED
from tunesmith.base.schema.records import Message
from tunesmith.collect.web.guard import is_deeper

MOST_CHOICES = 16
"""Answers to a request at most."""

MOST_TOP = 20
"""Most likely tokens beside each drawn one at most."""

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts or calls of a message, and texts of another list."""

MAX_TOOLS = 128
MAX_BIAS = 10_000
MAX_DEPTH = 32
"""Levels of the JSON of a call's arguments, as of a body."""

MAX_NAME = 200
"""Characters of `user` and `episode_id`."""

Json = Mapping[str, Any]

_NAMES = {"min_new_tokens": "min_tokens", "stop_strings": "stop"}

ONE_ANSWER: Mapping[str, Sequence[Any]] = {"n": (1,), "compare": (), "return_token_ids": (False,)}
"""For `refuse`: fields of chats in forms that have a single answer, and no ids in it."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_PARTS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[^\x00]*$")]


class RefusedError(HTTPException):
    """A request that is answered with an error in OpenAI's form, which has a `code` and the field `param` of it."""

    def __init__(
        self, status: int, detail: str, code: str | None = None, param: str | None = None, **headers: str
    ) -> None:
        super().__init__(status, detail, headers={name.replace("_", "-"): value for name, value in headers.items()})
        self.code = code
        self.param = param


class Part(BaseModel):
    """A part of a message's content."""

    type: str
    text: str = ""


Content = str | Annotated[list[Part], Field(max_length=MAX_PARTS)]


def text_of(content: Content | None, param: str) -> str:
    """The text of a message. Raises RefusedError, which names the field `param`, for parts that are no text."""
    parts = [] if content is None else [Part(type="text", text=content)] if isinstance(content, str) else content
    other = next((part.type for part in parts if part.type not in ("text", "input_text", "output_text")), None)
    if other is not None:
        raise RefusedError(400, f"a part of a message is {other!r}; the model reads text alone", param=param)
    return "".join(part.text for part in parts)


def _arguments_of(given: str | dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call: the object that their JSON is, or another text under an empty name.

    Raises ValueError for what cannot be stored.
    """
    if not isinstance(given, str):
        return given
    if is_deeper(given.encode("utf-8", "replace"), MAX_DEPTH):
        raise ValueError(f"the arguments are nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(given)
    except ValueError:
        return {"": given}
    _check_values(value, "the JSON of the arguments")
    return cast(dict[str, Any], value) if isinstance(value, dict) else {"": given}


def _checked_arguments(given: str) -> str:
    _arguments_of(given)
    return given


Arguments = Annotated[str, AfterValidator(_checked_arguments)]
"""JSON of the arguments of a call."""


class _Function(BaseModel):
    name: str
    arguments: Annotated[str | dict[str, Any], AfterValidator(_arguments_of)] = {}


class _ToolCall(BaseModel):
    id: str | None = None
    function: _Function


class ChatMessage(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MAX_PARTS)] | None = None
    tool_call_id: Name | None = None

    def as_message(self) -> Message:
        """The message as a chat template takes it. Raises RefusedError for parts that are no text."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content, "messages"),
        }
        if self.tool_calls:
            message["tool_calls"] = [_call_of(call) for call in self.tool_calls]
        if self.role == "tool":
            message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name))}
        return message


def _call_of(call: _ToolCall) -> Json:
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}


def _fields(given: Any) -> Iterable[tuple[str, Any]]:
    return cast(dict[str, Any], given).items() if isinstance(given, dict) else ()


def _is_ids(given: Any) -> bool:
    """True for what is a list of numbers, or is refused because it begins as one."""
    return isinstance(given, list) and type(next(iter(cast(list[Any], given)), None)) is int


def _check_values(given: Any, what: str) -> None:
    try:
        json.dumps(given, ensure_ascii=False, default=str, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds a lone surrogate, which is no character; remove it") from None
    except ValueError:
        raise ValueError(f"{what} holds a number that is not finite, which JSON does not have") from None


class Sampled(BaseModel):
    """Base of requests for text."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(max_length=1000)] = ""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIAS)] | None = None
    user: Name | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=100)] | None = None
    return_token_ids: bool | None = None
    episode_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def check_texts(cls, given: Any) -> Any:
        """Refuse what no database and no response can hold: answers are stored with their prompts. A model may have
        drawn a NUL, which JSON can hold. Ids, which may be millions, are checked by their type.
        """
        _check_values({name: one for name, one in _fields(given) if not _is_ids(one)}, "the request")
        return given

    @property
    def wants_usage(self) -> bool:
        """True if a stream is to end with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def asked(self, defaults: Json) -> dict[str, Any]:
        """The sampling part of a request for the engine; `defaults` are those of the model. Raises RefusedError."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, 1e-6),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "max_new_tokens": self.most_tokens,
            "stop_token_ids": self.stop_token_ids,
            "stop_strings": _stops(self.stop),
            "seed": None if self.seed is None else self.seed % LARGEST_SEED,
            "logit_bias": self.logit_bias,
        }
        sampling = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        penalties = {name: getattr(self, name) or 0.0 for name in ("presence_penalty", "frequency_penalty")}
        return {"sampling": sampling, "n": self.n or 1, **penalties, "names": self.names}

    @property
    def most_tokens(self) -> int | None:
        """The limit of an answer, None if there is none."""
        return self.max_tokens

    @property
    def names(self) -> Mapping[str, str]:
        """The request's names of what the engine calls otherwise, for messages of errors."""
        return {**_NAMES, "max_new_tokens": "max_tokens"}


class ChatRequest(Sampled):
    """A request of `/v1/chat/completions`. `compare: 2` asks for an answer of each of two versions, unnamed."""

    _form_names: Mapping[str, str] = PrivateAttr(default_factory=dict[str, str])

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    compare: Literal[2] | None = None

    @property
    def most_tokens(self) -> int | None:
        """See `Sampled.most_tokens`; the newer of OpenAI's two names comes first."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def names(self) -> Mapping[str, str]:
        """See `Sampled.names`; a chat that another form asks for has its names."""
        newer = {"max_new_tokens": "max_completion_tokens"} if self.max_completion_tokens else {}
        return {**super().names, "prompt": "messages", **newer, **self._form_names}

    def named(self, names: Mapping[str, str]) -> Self:
        """This chat with the names of another form in messages of errors."""
        self._form_names = names
        return self

    def asked(self, defaults: Json) -> dict[str, Any]:
        """See `Sampled.asked`."""
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise RefusedError(
                400, f"response_format {kind!r} is not offered; the model answers in text", param="response_format"
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise RefusedError(
                400, "tool_choice can be 'auto' or 'none': the model decides whether it calls", param="tool_choice"
            )
        asked = super().asked(defaults)
        asked["messages"] = [message.as_message() for message in self.messages]
        if self.tools and self.tool_choice != "none":
            asked["tools"] = self.tools
        if self.logprobs:
            asked["num_top"] = self.top_logprobs or 0
        return asked


def chat_of(body: Sampled, names: Json | None = None, **more: Any) -> ChatRequest:
    """The chat that a request of another API asks for: its sampling parameters, and the fields `more`; `names` are the
    names of that API. Raises RequestValidationError.
    """
    given = body.model_dump(include=set(Sampled.model_fields), exclude_none=True)
    given |= {name: value for name, value in more.items() if value is not None}
    try:
        chat = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return chat.named(names or {})


class Said:
    """Messages of a chat that are put together from another form, behind those of `before`."""

    def __init__(self, before: Sequence[Json] = ()) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        for message in before:
            self.add(message)

    def add(self, message: Json) -> None:
        """Add a message; its calls of tools are noted."""
        self.messages.append({name: value for name, value in message.items() if name != "tool_calls"})
        for call in message.get("tool_calls") or ():
            self.add_call(call)

    def add_call(self, call: Json) -> None:
        """Add a call of a tool to the last message if it is the assistant's, else to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)
        if "id" in call:
            self._names[call["id"]] = call["function"]["name"]

    def add_result(self, call_id: str, content: str) -> None:
        """Add what a tool returned, by the name of the tool that was called last under this id."""
        name = self._names.get(call_id)
        self.add({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})


def refuse(body: Sampled, offered: Mapping[str, Sequence[Any]]) -> None:
    """Raise RefusedError if a request has a field of `offered` with another value than those that are named there."""
    for name, values in offered.items():
        given = getattr(body, name, None)
        if given is not None and given not in values:
            allowed = f"it can be {' or '.join(json.dumps(value) for value in values)}" if values else "leave it out"
            shown = json.dumps(given, default=str)[:100]
            raise RefusedError(400, f"{name} {shown} is not offered; {allowed}", param=name)


class TextRequest(Sampled):
    """A request of `/v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PARTS)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[Json]:
        """The prompts, each as text or ids. Raises RefusedError."""
        for name, is_given in (("echo", self.echo), ("suffix", self.suffix), ("best_of", self.best_of)):
            if is_given and is_given != (self.n or 1):
                raise RefusedError(400, f"{name} is not offered; leave it out", param=name)
        given: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if given and isinstance(given[0], int):
            given = [given]
        if not given or len(given) * (self.n or 1) > MOST_CHOICES or not all(given):
            raise RefusedError(
                400, f"prompt and n ask for no answer, or more than {MOST_CHOICES} in a request", param="prompt"
            )
        return [{"text": one} if isinstance(one, str) else {"token_ids": one} for one in given]

    def asked(self, defaults: Json) -> dict[str, Any]:
        """See `Sampled.asked`."""
        return {**super().asked(defaults), **({} if self.logprobs is None else {"num_top": self.logprobs})}


def _stops(given: str | list[str] | None) -> list[str] | None:
    stops = [given] if isinstance(given, str) else given
    if stops is None:
        return None
    if len(stops) > MOST_CHOICES or not all(stops):
        raise RefusedError(400, f"stop is up to {MOST_CHOICES} texts that are not empty", param="stop")
    return stops


def new_id(kind: str) -> str:
    """A fresh id that begins with `kind`."""
    return f"{kind}{secrets.token_hex(16)}"


def message_of(answer: Json) -> dict[str, Any]:
    """The message of a whole answer, its calls in OpenAI's form."""
    said = cast(Json, answer.get("message") or {"content": answer["text"]})
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in said.get("tool_calls") or ()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said.get("content") or (None if calls else "")}
    if said.get("reasoning_content"):
        message["reasoning_content"] = said["reasoning_content"]
    return {**message, "refusal": None, **({"tool_calls": calls} if calls else {})}


def parts_of(message: Json) -> list[tuple[str, Any]]:
    """The kinds and contents of what a message consists of: `reasoning`, a `text`, and each `call`, in this order."""
    calls = [("call", call) for call in message.get("tool_calls") or ()]
    thought = [("reasoning", message["reasoning_content"])] if message.get("reasoning_content") else []
    return [*thought, *([("text", message["content"] or "")] if message["content"] or not calls else []), *calls]


def finish_of(answer: Json, message: Json) -> str:
    """The `finish_reason` of an answer."""
    return "tool_calls" if message.get("tool_calls") else answer["finish_reason"]


def usage_of(prompt_ids: Sequence[int], answers: Iterable[Json]) -> dict[str, int]:
    """Numbers of tokens."""
    drawn = sum(len(answer["token_ids"]) for answer in answers)
    return {"prompt_tokens": len(prompt_ids), "completion_tokens": drawn, "total_tokens": len(prompt_ids) + drawn}


def chat_scores(scores: Sequence[Json]) -> Json:
    """`logprobs` of a choice of a chat."""
    return {"content": token_scores(scores), "refusal": None}


def token_scores(scores: Sequence[Json]) -> list[Json]:
    """Each token's log-prob, and those of the most likely ones."""

    def shown(given: Sequence[int], logp: float) -> dict[str, Any]:
        return {"token": _text(given), "logprob": logp, "bytes": list(given)}

    return [
        {**shown(one["bytes"], one["logp"]), "top_logprobs": [shown(*other) for other in one["top"]]} for one in scores
    ]


def text_scores(scores: Sequence[Json], start: int = 0) -> Json:
    """`logprobs` of a choice of `/v1/completions`; `start` is the place of its first token in the text."""
    tokens = [_text(one["bytes"]) for one in scores]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one["logp"] for one in scores],
        "top_logprobs": [{_text(given): logp for given, logp in one["top"]} for one in scores],
        "text_offset": offsets,
    }


def _text(given: Sequence[int]) -> str:
    return bytes(given).decode("utf-8", "replace")


def event(body: Json | str) -> str:
    """One server-sent event of a stream, which is named by its `type` if it has one."""
    if isinstance(body, str):
        return f"data: {body}\n\n"
    named = f"event: {body['type']}\n" if "type" in body else ""
    return f"{named}data: {json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(',', ':'))}\n\n"


def envelope(kind: str, id: str, model: str, version: int | None) -> dict[str, Any]:
    """The fields that every response and every event of a stream begins with."""
    fingerprint = None if version is None else f"v{version}"
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }
