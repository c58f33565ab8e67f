"""OpenAI's Responses API: its requests as chats, and what was drawn in its form."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tunesmith.collect.store.records import Inference
from tunesmith.collect.web.api import openai
from tunesmith.collect.web.api.answering import Answering, Form
from tunesmith.collect.web.api.openai import ChatRequest, Content, Json, Name, RefusedError, Said, Sampled

_LOGPROBS = "message.output_text.logprobs"
_OFFERED: dict[str, Sequence[Any]] = {
    **openai.ONE_ANSWER,
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prompt": (),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
}
"""Values of fields that are known and not done here; see `openai.refuse`."""

_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of a failed response, by the status of its error."""

_STREAMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class Item(BaseModel):
    """An item of the input: a message, a call that the model made, or what its tool returned."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: openai.Arguments = "{}"
    output: Content | None = None

    def add_to(self, said: Said) -> None:
        """Add this item to messages of a chat. Raises RefusedError for one that is none of these."""
        if self.type == "message" and self.role:
            said.add({"role": self.role, "content": openai.text_of(self.content, "input")})
        elif self.type == "function_call" and self.call_id and self.name:
            said.add_call({"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}})
        elif self.type == "function_call_output" and self.call_id:
            said.add_result(self.call_id, openai.text_of(self.output, "input"))
        elif self.type in ("message", "function_call", "function_call_output"):
            needed = {"message": "role", "function_call": "call_id and name"}.get(self.type, "call_id")
            raise RefusedError(400, f"an item of input is a {self.type} without {needed}", param="input")
        elif self.type != "reasoning":  # no template shows what was thought before
            reason = f"an item of input is {self.type!r}; give messages, function calls and their outputs"
            raise RefusedError(400, reason, param="input")


class Tool(BaseModel):
    """A function of the client. Tools of OpenAI's servers have another `type`."""

    type: str
    name: Name = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_function(self) -> Json:
        """The tool in the form of chats. Raises RefusedError for one that the client does not have."""
        if self.type != "function" or not self.name:
            what = f"a tool is {self.type!r}" if self.type != "function" else "a function has no name"
            raise RefusedError(400, f"{what}; give tools of the type 'function', each with its name", param="tools")
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def shown(self) -> Json:
        """The tool as responses repeat it: `strict` says that the arguments fit the schema, which no one checks."""
        return {**self.model_dump(), "strict": False}


class ResponsesRequest(Sampled):
    """A request of `/v1/responses`."""

    model_config = ConfigDict(extra="allow")

    input: Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(max_length=openai.MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=openai.MOST_TOP)] | None = None
    include: openai.Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=openai.MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: Name | None = None
    store: bool | None = None

    def as_chat(self, before: Sequence[Json]) -> ChatRequest:
        """The chat that is asked for, behind the messages `before`. Raises RefusedError or RequestValidationError."""
        openai.refuse(self, _OFFERED)
        other = next((name for name in self.include or () if name != _LOGPROBS), None)
        if other is not None:
            raise RefusedError(400, f"include can have {_LOGPROBS!r}; {other!r} is not offered", param="include")
        said = Said(before)
        for item in [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            item.add_to(said)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return openai.chat_of(
            self,
            names={"max_new_tokens": "max_output_tokens", "prompt": "input"},
            messages=[*instructions, *said.messages],
            max_tokens=self.max_output_tokens,
            tools=[tool.as_function() for tool in self.tools or ()],
            tool_choice=self.tool_choice,
            logprobs=bool(self.include),
            top_logprobs=self.top_logprobs,
        )


def continued(answered: Inference | None) -> list[Json]:
    """The messages of an earlier response's conversation, and its answer. Raises RefusedError if it is none."""
    if answered is None or "conversation" not in answered.options:
        reason = "previous_response_id names no stored response of this key and user; send the conversation as input"
        raise RefusedError(400, reason, "previous_response_not_found", "previous_response_id")
    choice = answered.choices[0]
    return [*answered.options["conversation"], choice.message or {"role": "assistant", "content": choice.text}]


class ResponseForm(Form):
    """An answer as OpenAI's response. With `store: false` it is not stored: no other can go on from it, and it can get
    no feedback.
    """

    last = ""

    def __init__(self, answering: Answering, body: ResponsesRequest) -> None:
        super().__init__(answering, "resp_")
        self._body = body
        self._created_at = int(time.time())
        self._message_id, self._thought_id = openai.new_id("msg_"), openai.new_id("rs_")
        self._num_events = 0

    async def whole(self) -> Json:
        """See `Form.whole`."""
        await self._keep()
        return self._ended()

    async def events(self, replies: AsyncGenerator[tuple[int, Json]]) -> AsyncGenerator[Json]:
        """See `Form.events`."""
        index, empty = 0, self._message("", (), "in_progress")
        has_text = not self._answering.may_call
        scores: list[Json] = []  # of tokens before the text, as those of reasoning
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        for one in self._begun(0, empty) if has_text else ():
            yield one
        async for _, reply in replies:
            if reply.get("thinking"):
                for one in self._whole(index, self._thought(reply["thinking"])):
                    yield one
                index += 1
            text, scores = reply.get("text", ""), [*scores, *(reply.get("scores") or ())]
            if text and not has_text:
                has_text = True
                for one in self._begun(index, empty):
                    yield one
            if has_text and (text or scores):
                yield self._delta(index, empty, text, scores)
                scores = []
        await self._keep()
        ended = self._ended()
        for place, item in enumerate(ended["output"][index:], start=index):
            is_begun = has_text and place == index
            for one in self._done(place, item) if is_begun else self._whole(place, item, scores):
                yield one
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: RefusedError) -> Json:
        """See `Form.failed`. Responses have no codes of their own for most of what a client does wrong."""
        status, told = error.status_code, error.detail
        code = "server_error" if status >= 500 else _CODES.get(status)
        if code is None:
            given = super().failed(error)["error"]
            return self._event("error", code=given["code"] or given["type"], message=told, param=given["param"])
        failed = {**self._response("failed"), "error": {"code": code, "message": told}}
        return self._event("response.failed", response=failed)

    async def _keep(self) -> None:
        if self._body.store is not False:
            said = self._answering.asked[0]["messages"][1 if self._body.instructions else 0 :]
            await self._answering.keep(self._id, [[0]], conversation=said)

    def _ended(self) -> dict[str, Any]:
        """The response with what was drawn."""
        answer = self._answering.collected.answers[0]
        status = "incomplete" if answer["finish_reason"] == "length" else "completed"
        output: list[Json] = []
        for kind, content in openai.parts_of(openai.message_of(answer)):
            if kind == "text":
                output.append(self._message(content, self._answering.collected.scores.get(0, ()), status))
            elif kind == "reasoning":
                output.append(self._thought(content))
            else:
                named = {"id": openai.new_id("fc_"), "type": "function_call", "call_id": content["id"]}
                output.append({**named, **content["function"], "status": "completed"})
        usage = self._answering.usage
        return {
            **self._response(status),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self._answering.asked[0]["sampling"]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._answering.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "temperature": sampling.get("temperature", 1.0),
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.shown() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _message(self, text: str, scores: Sequence[Json], status: str) -> Json:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": openai.token_scores(scores)}
        named = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**named, "status": status, "content": [part]}

    def _thought(self, text: str) -> Json:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": self._thought_id, "type": "reasoning", "summary": [], "content": content}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _begun(self, index: int, item: Json) -> Iterator[Json]:
        """The events of the beginning of an item."""
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        begun = {**item, **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        if item["type"] != "function_call":
            part = {**item["content"][0], "text": ""}
            part |= {"logprobs": []} if "logprobs" in part else {}
            yield self._event("response.content_part.added", **_place(index, item), part=part)

    def _whole(self, index: int, item: Json, scores: Sequence[Json] = ()) -> Iterator[Json]:
        """The events of an item that is there as a whole."""
        yield from self._begun(index, item)
        yield self._delta(index, item, _text(item), scores)
        yield from self._done(index, item)

    def _delta(self, index: int, item: Json, text: str, scores: Sequence[Json]) -> Json:
        kind = f"response.{_STREAMS[item['type']]}.delta"
        more = {"logprobs": _short(scores)} if item["type"] == "message" else {}
        return self._event(kind, **_place(index, item), delta=text, **more)

    def _done(self, index: int, item: Json) -> Iterator[Json]:
        """The events of the end of an item."""
        kind, place = f"response.{_STREAMS[item['type']]}.done", _place(index, item)
        if item["type"] == "function_call":
            yield self._event(kind, **place, arguments=item["arguments"])
        else:
            scores = self._answering.collected.scores.get(0, ())
            more = {"logprobs": _short(scores)} if item["type"] == "message" else {}
            yield self._event(kind, **place, text=_text(item), **more)
            yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=index, item=item)


def _text(item: Json) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def _place(index: int, item: Json) -> dict[str, Any]:
    part = {} if item["type"] == "function_call" else {"content_index": 0}
    return {"item_id": item["id"], "output_index": index, **part}


def _short(scores: Sequence[Json]) -> list[Json]:
    """Log-probs as events have them: without the bytes."""

    def short(one: Json) -> dict[str, Any]:
        return {"token": one["token"], "logprob": one["logprob"]}

    tokens = openai.token_scores(scores)
    return [{**short(one), "top_logprobs": list(map(short, one["top_logprobs"]))} for one in tokens]
