"""Anthropic's Messages API: its requests as chats, and what was drawn in its form."""

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tunesmith.collect.web.api import openai
from tunesmith.collect.web.api.answering import Answering, Form
from tunesmith.collect.web.api.openai import ChatRequest, Content, Json, Name, RefusedError, Said, Sampled
from tunesmith.collect.web.services import anthropic_error

_OFFERED: dict[str, Sequence[Any]] = {
    **openai.ONE_ANSWER,
    "thinking": ({"type": "disabled"},),
    "output_config": (),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
}
"""Values of fields that are known and not done here; see `openai.refuse`."""


class Block(BaseModel):
    """A block of a message's content: a text, a call (`tool_use`), or what a tool returned (`tool_result`)."""

    type: str
    text: str = ""
    id: Name = ""
    name: Name = ""
    input: dict[str, Any] = {}
    tool_use_id: Name = ""
    content: Content | None = None


class Turn(BaseModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=openai.MAX_PARTS)]

    def read(self, said: Said, calls: list[Json]) -> str | None:
        """The text of this turn, None if it has none; results of tools are added to `said`, and its calls to `calls`.
        Raises RefusedError for blocks that are no text.
        """
        blocks = [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        texts: list[str] = []
        for block in blocks:
            if block.type == "text":
                texts.append(block.text)
            elif block.type == "tool_use" and self.role == "assistant":
                calls.append({"id": block.id, "function": {"name": block.name, "arguments": block.input}})
            elif block.type == "tool_result" and self.role == "user":
                said.add_result(block.tool_use_id, openai.text_of(block.content, "messages"))
            elif block.type not in ("thinking", "redacted_thinking"):  # no template shows what was thought before
                reason = f"a block of the {self.role}'s message is {block.type!r}; the model reads text alone"
                raise RefusedError(400, reason, param="messages")
        return "".join(texts) if texts else None


def _add(said: Said, turns: Iterable[Turn]) -> None:
    """Add turns to messages of OpenAI's form. Those of one role that follow each other are one message, as with
    Anthropic, their texts separated by an empty line: templates want the roles to alternate.
    """
    for role, group in groupby(turns, key=attrgetter("role")):
        calls: list[Json] = []
        texts = [text for turn in group if (text := turn.read(said, calls)) is not None]
        if texts or calls:
            said.add({"role": role, "content": "\n\n".join(texts), "tool_calls": calls})


class Tool(BaseModel):
    """A tool that the client has. Those of Anthropic's servers have another `type`."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=openai.MAX_NAME)]
    description: str | None = None
    input_schema: dict[str, Any] = {}

    def as_function(self) -> Json:
        """The tool in OpenAI's form. Raises RefusedError for one that the client does not have."""
        if self.type not in (None, "custom"):
            reason = f"the tool {self.type!r} is one of Anthropic's servers and not offered; give an input_schema"
            raise RefusedError(400, reason, param="tools")
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class Choice(BaseModel):
    """Says whether tools are to be used."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False


class Metadata(BaseModel):
    """The person who asks."""

    user_id: Name | None = None


class CountRequest(Sampled):
    """A request of `/v1/messages/count_tokens`, and the part of one for an answer that says what is read."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Turn], Field(min_length=1, max_length=openai.MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=openai.MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    stop_sequences: openai.Texts | None = None
    metadata: Metadata | None = None

    def as_chat(self) -> ChatRequest:
        """The chat that is asked for. Raises RefusedError or RequestValidationError."""
        openai.refuse(self, _OFFERED)
        if self.messages[-1].role == "assistant":
            reason = "the last message is the assistant's, and the beginning of an answer cannot be given; leave it out"
            raise RefusedError(400, reason, param="messages")
        choice = self.tool_choice or Choice(type="auto")
        if choice.disable_parallel_tool_use:
            reason = "disable_parallel_tool_use is not offered: the model decides how often it calls; leave it out"
            raise RefusedError(400, reason, param="tool_choice")
        said = Said()
        if self.system:
            said.add({"role": "system", "content": openai.text_of(self.system, "system")})
        _add(said, self.messages)
        return openai.chat_of(
            self,
            names={"stop_strings": "stop_sequences"},
            messages=said.messages,
            tools=[tool.as_function() for tool in self.tools or ()],
            tool_choice=choice.type,
            stop=self.stop_sequences,
            user=self.metadata and self.metadata.user_id,
        )


class MessagesRequest(CountRequest):
    """A request of `/v1/messages`."""

    @model_validator(mode="after")
    def check_limit(self) -> Self:
        """Refuse a request without a limit, as Anthropic does."""
        if self.max_tokens is None:
            raise ValueError("max_tokens is missing; give the most tokens that the answer may have")
        return self


class MessageForm(Form):
    """An answer as Anthropic's message."""

    last = ""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering, "msg_")

    async def whole(self) -> Json:
        """See `Form.whole`."""
        await self._answering.keep(self._id, [[0]])
        answer = self._answering.collected.answers[0]
        message = openai.message_of(answer)
        blocks = [_block(kind, content) for kind, content in openai.parts_of(message)]
        return self._message(blocks, self._ended(answer, message))

    async def events(self, replies: AsyncGenerator[tuple[int, Json]]) -> AsyncGenerator[Json]:
        """See `Form.events`."""
        answering, index = self._answering, 0
        has_text = not answering.may_call
        yield {"type": "message_start", "message": self._message([], {"stop_reason": None, "stop_sequence": None})}
        if has_text:
            yield _start(0, _block("text", ""))
        async for _, reply in replies:
            if reply.get("thinking"):
                for one in _block_events(index, "reasoning", reply["thinking"]):
                    yield one
                index += 1
            if reply.get("text"):
                if not has_text:
                    has_text = True
                    yield _start(index, _block("text", ""))
                yield _delta(index, "text", reply["text"])
        await answering.keep(self._id, [[0]])
        answer = answering.collected.answers[0]
        message = openai.message_of(answer)
        if has_text:
            yield _stop(index)
        left = openai.parts_of(message)[index + has_text :]
        for place, (kind, content) in enumerate(left, start=index + has_text):
            for one in _block_events(place, kind, content):
                yield one
        yield {"type": "message_delta", "delta": self._ended(answer, message), "usage": self._usage}
        yield {"type": "message_stop"}

    def failed(self, error: RefusedError) -> Json:
        """See `Form.failed`."""
        return anthropic_error(error.status_code, error.detail)

    def _message(self, blocks: Sequence[Json], ended: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._answering.model,
            "content": blocks,
            **ended,
            "usage": self._usage,
        }

    def _ended(self, answer: Json, message: Json) -> Json:
        stop = answer.get("stop_string")
        if stop is None or stop not in (self._answering.body.stop or ()):  # or one of the model's settings
            stop = None
        reason = "max_tokens" if answer["finish_reason"] == "length" else "stop_sequence" if stop else "end_turn"
        return {"stop_reason": "tool_use" if message.get("tool_calls") else reason, "stop_sequence": stop}

    @property
    def _usage(self) -> Json:
        usage = self._answering.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }


def _block(kind: str, content: Any) -> Json:
    if kind == "text":
        return {"type": "text", "text": content}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": content, "signature": ""}
    function = content["function"]
    return {
        "type": "tool_use",
        "id": content["id"],
        "name": function["name"],
        "input": json.loads(function["arguments"]),
    }


def _block_events(index: int, kind: str, content: Any) -> Iterator[Json]:
    """The events of a block that is there as a whole."""
    block = _block(kind, content)
    empty: dict[str, Any] = {"input": {}} if kind == "call" else {block["type"]: ""}
    yield _start(index, {**block, **empty})
    yield _delta(index, kind, content["function"]["arguments"] if kind == "call" else content)
    yield _stop(index)


def _start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, kind: str, text: str) -> Json:
    names = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
    name, field = names.get(kind, ("input_json_delta", "partial_json"))
    return {"type": "content_block_delta", "index": index, "delta": {"type": name, field: text}}


def _stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}
