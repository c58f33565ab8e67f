"""Routes of the API: OpenAI's of models, chats, completions and responses, Anthropic's of messages, vLLM's of token
ids, and TensorZero's of feedback.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from tunesmith.base.schema.records import Text
from tunesmith.collect.store.inferences import Speaker, conversation_of
from tunesmith.collect.store.records import Feedback, Rater
from tunesmith.collect.web.access import Rule
from tunesmith.collect.web.api import keys, openai, people
from tunesmith.collect.web.api.answering import Answering, Form, answered, whole
from tunesmith.collect.web.api.anthropic import CountRequest, MessageForm, MessagesRequest
from tunesmith.collect.web.api.endpoint import Endpoint
from tunesmith.collect.web.api.metrics import Metrics
from tunesmith.collect.web.api.openai import ChatRequest, Json, RefusedError, Sampled, TextRequest
from tunesmith.collect.web.api.responses import ResponseForm, ResponsesRequest, continued
from tunesmith.collect.web.logins import KeyUser
from tunesmith.collect.web.services import Caller, Services, ServicesOf

MAX_BODY = 8 * 1024 * 1024
"""Bytes of a conversation."""

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
FEEDBACK = "/v1/feedback"

RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/health", "public"),
    Rule(("GET",), "/metrics", "key"),
    Rule(("GET",), "/v1/models", "generate"),
    Rule(("GET",), "/v1/models/{name:path}", "generate"),
    *(
        Rule(("POST",), path, "generate", max_body=MAX_BODY)
        for path in (CHAT, TEXT, RESPONSES, MESSAGES, COUNT, GENERATE)
    ),
    Rule(("GET", "POST"), FEEDBACK, "feedback", max_body=MAX_BODY),
    *keys.RULES,
    *people.RULES,
)
"""Rules of the API, for the guard's table."""

_MOST_FEEDBACK = 1000

_BEGIN = 10_000
"""Characters or token ids by which prompts without names of user and conversation are told apart."""


class GenerateSampling(Sampled):
    """`sampling_params` of vLLM's token route: OpenAI's fields, and `logprobs`, which are given in any case."""

    logprobs: Annotated[int, Field(ge=0, le=openai.MOST_TOP)] | None = None


class GenerateRequest(BaseModel):
    """A request of `/inference/v1/generate`: token ids in, token ids out."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(max_length=1000)] = ""
    token_ids: Annotated[openai.TokenIds, Field(min_length=1)]
    sampling_params: GenerateSampling = GenerateSampling()
    stream: bool | None = None


class FeedbackRequest(BaseModel):
    """Feedback on an answer or a conversation, with TensorZero's names. `id` is another name of `inference_id`."""

    model_config = ConfigDict(extra="forbid")

    metric_name: Annotated[str, Field(min_length=1, max_length=200)]
    value: bool | float | str | dict[str, Any] | None
    inference_id: Annotated[str, Field(max_length=200)] | None = None
    id: Annotated[str, Field(max_length=200)] | None = None
    episode_id: Annotated[str, Field(max_length=200)] | None = None
    choice: Annotated[int, Field(ge=0, lt=openai.MOST_CHOICES)] = 0
    tags: dict[str, str] = {}

    def as_feedback(self) -> Feedback:
        """The feedback for the store."""
        return Feedback(
            metric=self.metric_name,
            value=self.value,
            inference=self.inference_id or self.id or "",
            choice=self.choice,
            episode=self.episode_id or "",
            tags=self.tags,
        )


def routers(endpoint: Endpoint) -> list[APIRouter]:
    """The routers of models and metrics, of answers, of feedback, of keys, and of people's data."""
    metrics, limited = Metrics(endpoint), Depends(keys.Limits().check)
    answers = APIRouter(tags=["API"], dependencies=[limited])
    _add_answers(answers, endpoint, metrics)
    _add_other_forms(answers, endpoint, metrics)
    return [_models(endpoint, metrics), answers, _feedback(metrics), keys.router(), people.router()]


def _models(endpoint: Endpoint, metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["API"])

    def shown(name: str) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": metrics.begun_at, "owned_by": "tunesmith"}
        context = endpoint.context(name)
        return facts if context is None else {**facts, "max_model_len": context}

    @routes.get("/health")
    def health() -> Json:
        """Say that the server answers; needs no key."""
        return {"status": "ok"}

    @routes.get("/metrics")
    def metrics_text() -> PlainTextResponse:
        """Figures of the API for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type=metrics.media_type)

    @routes.get("/v1/models")
    def models() -> Json:
        """The models that can be asked for: the served one by its alias first, then each by its name."""
        names = dict.fromkeys((endpoint.alias, *(one.name for one in endpoint.models())))
        return {"object": "list", "data": [shown(name) for name in names]}

    @routes.get("/v1/models/{name:path}")
    def model(name: str) -> Json:
        """One of the models."""
        endpoint.model(name)
        return shown(name)

    return routes


def _add_answers(routes: APIRouter, endpoint: Endpoint, metrics: Metrics) -> None:
    @routes.post(CHAT)
    async def chat(request: HttpRequest, body: ChatRequest, caller: Caller, services: ServicesOf) -> Response:
        """Answer a conversation, whole or as a stream."""
        answering = await run_in_threadpool(_chat, endpoint, metrics, services, caller, lambda: body)
        return await answered(request, answering, ChatForm(answering))

    @routes.post(TEXT)
    async def complete(request: HttpRequest, body: TextRequest, caller: Caller, services: ServicesOf) -> Response:
        """Continue texts or token ids, whole or as a stream."""
        answering = await run_in_threadpool(_continuing, endpoint, metrics, services, caller, body, body.prompts)
        return await answered(request, answering, TextForm(answering))

    @routes.post(GENERATE)
    async def generate(request: HttpRequest, body: GenerateRequest, caller: Caller, services: ServicesOf) -> Response:
        """Continue token ids: ids, log-probs and the reason of the end, as vLLM's token server has it."""
        if body.stream or body.sampling_params.stream:
            raise RefusedError(400, "this route does not stream; leave stream out", param="stream")
        sampled = body.sampling_params.model_copy(update={"model": body.model})
        given = [{"token_ids": body.token_ids}]
        answering = await run_in_threadpool(_continuing, endpoint, metrics, services, caller, sampled, lambda: given)
        return await whole(request, answering, TokenForm(answering).whole)


def _add_other_forms(routes: APIRouter, endpoint: Endpoint, metrics: Metrics) -> None:
    @routes.post(RESPONSES)
    async def respond(request: HttpRequest, body: ResponsesRequest, caller: Caller, services: ServicesOf) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API, whole or as a stream."""
        before: list[Json] = []
        if body.previous_response_id is not None:
            # Of this user alone, also for a key: what is deleted of one may not stay in a conversation of another.
            name, speaker = body.previous_response_id, Speaker(caller.id, keys.user_for(caller, body.user))
            found = await run_in_threadpool(services.votes.reader.inference, name)
            is_theirs = found is not None and speaker.may_see(found.rater_id, found.user)
            before = continued(found if is_theirs else None)
        answering = await run_in_threadpool(_chat, endpoint, metrics, services, caller, lambda: body.as_chat(before))
        return await answered(request, answering, ResponseForm(answering, body))

    @routes.post(MESSAGES)
    async def message(request: HttpRequest, body: MessagesRequest, caller: Caller, services: ServicesOf) -> Response:
        """Answer a conversation in the form of Anthropic's Messages API, whole or as a stream."""
        answering = await run_in_threadpool(_chat, endpoint, metrics, services, caller, body.as_chat)
        return await answered(request, answering, MessageForm(answering))

    @routes.post(COUNT)
    async def count(body: CountRequest, caller: Caller, services: ServicesOf) -> Json:
        """The number of tokens that the model would read."""
        answering = await run_in_threadpool(_chat, endpoint, metrics, services, caller, body.as_chat)
        async with aclosing(endpoint.draw([{**one, "n": 0} for one in answering.asked])) as replies:
            numbers = [len(reply["begun"]["prompt_ids"]) async for _, reply in replies]
        return {"input_tokens": sum(numbers)}


def _chat(
    endpoint: Endpoint, metrics: Metrics, services: Services, caller: Rater, asked_for: Callable[[], ChatRequest]
) -> Answering:
    """The conversation `asked_for()` that is to be answered; for a thread, since it may be long. Raises RefusedError or
    RequestValidationError.
    """
    body = asked_for()
    said = tuple(message.as_message() for message in body.messages)
    conversation = _conversation(caller, body, said)
    speakers = endpoint.two(body.model) if body.compare else [endpoint.model(body.model, conversation)]
    if body.compare and (body.n or 1) > 1:
        raise RefusedError(400, "compare gives two answers; leave n out", param="n")
    if body.compare and speakers[0] == speakers[1]:  # two requests with the same seed would be the same answer
        body, speakers = body.model_copy(update={"n": 2}), speakers[:1]
    asked = [{"model": one.model, "as_text": one.as_text, **body.asked(one.sampling)} for one in speakers]
    return Answering(endpoint, metrics, services, caller, body, speakers, asked)


def _continuing(
    endpoint: Endpoint,
    metrics: Metrics,
    services: Services,
    caller: Rater,
    body: Sampled,
    prompts: Callable[[], Sequence[Json]],
) -> Answering:
    """The texts or token ids that are to be continued; for a thread, as `_chat`. Raises RefusedError."""
    given = prompts()
    begin = next(iter(given[0].values()))[:_BEGIN]
    speaker = endpoint.model(body.model, _conversation(caller, body, str(begin)))
    asked = [{"model": speaker.model, **body.asked(speaker.sampling), **prompt} for prompt in given]
    return Answering(endpoint, metrics, services, caller, body, [speaker] * len(given), asked)


def _conversation(caller: Rater, body: Sampled, prompt: Text) -> str:
    """The name of the conversation that a request belongs to."""
    return conversation_of(caller.id, body.episode_id or "", keys.user_for(caller, body.user), prompt)


def _feedback(metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["API"])

    @routes.post(FEEDBACK)
    def give(body: FeedbackRequest, caller: Caller, services: ServicesOf) -> Json:
        """Say what an answer is worth. The response is sent when it is on disk; a repeat changes nothing, and null
        withdraws what was said of the same metric.
        """
        stored = services.votes.give_feedback(services.campaign().id, body.as_feedback(), _speaker(caller))
        metrics.feedback(stored)
        return {"feedback_id": stored.name, "revision": stored.revision, "is_repeat": stored.is_repeat}

    @routes.get(FEEDBACK)
    def given(
        caller: Caller, services: ServicesOf, after: Annotated[int, Query(ge=0, le=2**53)] = 0, limit: int = 100
    ) -> Json:
        """Feedback of the caller's key, or of a user of it, in the order in which it came, with ids above `after`."""
        limit, speaker = min(max(limit, 1), _MOST_FEEDBACK), _speaker(caller)
        found = services.votes.reader.feedback_after(after, limit)
        shown = [
            {
                "id": one.id,
                "feedback_id": one.name,
                "inference_id": one.inference or None,
                "episode_id": one.episode or None,
                "choice": one.choice,
                "metric_name": one.metric,
                "value": one.value,
                "tags": one.tags,
                "user": one.user or None,
                "revision": one.revision,
                "created_at": one.created_at,
            }
            for one in found
            if speaker.may_see(one.key_id, one.user)
        ]
        return {"data": shown, "after": found[-1].id if found else after, "has_more": len(found) == limit}

    return routes


def _speaker(caller: Rater) -> Speaker:
    return Speaker(caller.id, caller.user if isinstance(caller, KeyUser) else None)


class ChatForm(Form):
    """Answers of a chat in OpenAI's form."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering, "chatcmpl-")

    async def whole(self) -> Json:
        """The response, once all answers have come and are stored."""
        answering = self._answering
        await answering.keep(self._id, [list(range(len(answering.asked)))])
        choices = [self._choice(number, answer) for number, answer in sorted(answering.collected.answers.items())]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": answering.usage, **self._prompt_ids()}

    def _choice(self, number: int, answer: Json) -> Json:
        message, scores = openai.message_of(answer), self._answering.collected.scores.get(number)
        return {
            "index": number,
            "message": message,
            "logprobs": openai.chat_scores(scores) if scores else None,
            "finish_reason": openai.finish_of(answer, message),
            **self._ids(answer),
        }

    async def events(self, replies: AsyncGenerator[tuple[int, Json]]) -> AsyncGenerator[Json]:
        """The events of a stream."""
        answering = self._answering
        for number in range(len(answering.asked) * answering.collected.n):
            yield {**self._event(number, {"role": "assistant", "content": ""}), **self._prompt_ids()}
        async for number, reply in replies:
            if "begun" not in reply:
                text, scores = reply.get("text", ""), reply.get("scores")
                ids = self._ids(reply)
                if reply.get("thinking"):
                    yield self._event(number, {"reasoning_content": reply["thinking"]})
                if text or scores or ids:
                    yield self._event(number, {"content": text}, scores=scores, **ids)
        await answering.keep(self._id, [list(range(len(answering.asked)))])
        for number, answer in sorted(answering.collected.answers.items()):
            message = openai.message_of(answer)
            if calls := message.get("tool_calls"):
                yield self._event(number, {"tool_calls": [{"index": place, **one} for place, one in enumerate(calls)]})
            yield self._event(number, {}, openai.finish_of(answer, message))
        if answering.body.wants_usage:
            yield {**self._envelope("chat.completion.chunk"), "choices": [], "usage": answering.usage}

    def _event(
        self, number: int, delta: Json, finish: str | None = None, scores: Sequence[Json] | None = None, **more: Any
    ) -> Json:
        logprobs = openai.chat_scores(scores) if scores else None
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _ids(self, reply: Json) -> Json:
        wants = self._answering.body.return_token_ids
        return {"token_ids": reply["token_ids"]} if wants and "token_ids" in reply else {}

    def _prompt_ids(self) -> Json:
        begun = self._answering.collected.prompts.get(0)
        return {"prompt_token_ids": begun["prompt_ids"]} if self._answering.body.return_token_ids and begun else {}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return openai.envelope(kind, self._id, self._answering.model, self._answering.version)


class TextForm(Form):
    """Continuations of texts in OpenAI's form."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering, "cmpl-")
        self._lengths: dict[int, int] = {}

    async def whole(self) -> Json:
        """The response, once all answers have come and are stored."""
        answering = self._answering
        await self._keep()
        choices = [
            self._choice(number, answer["text"], answering.collected.scores.get(number), answer)
            for number, answer in sorted(answering.collected.answers.items())
        ]
        return {**self._envelope(), "choices": choices, "usage": answering.usage}

    async def events(self, replies: AsyncGenerator[tuple[int, Json]]) -> AsyncGenerator[Json]:
        """The events of a stream."""
        answering = self._answering
        async for number, reply in replies:
            text, scores = reply.get("text", ""), reply.get("scores")
            if text or scores:
                yield {**self._envelope(), "choices": [self._choice(number, text, scores)]}
        await self._keep()
        for number, answer in sorted(answering.collected.answers.items()):
            yield {**self._envelope(), "choices": [self._choice(number, "", None, answer)]}
        if answering.body.wants_usage:
            yield {**self._envelope(), "choices": [], "usage": answering.usage}

    def _choice(self, number: int, text: str, scores: Any, answer: Json | None = None) -> Json:
        start = self._lengths.get(number, 0)
        self._lengths[number] = start + len(text)
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": openai.text_scores(scores, start) if scores else None,
            "finish_reason": None if answer is None else answer["finish_reason"],
        }
        if answer is not None and self._answering.body.return_token_ids:
            begun = self._answering.collected.prompts[number // self._answering.collected.n]
            choice |= {"token_ids": answer["token_ids"], "prompt_token_ids": begun["prompt_ids"]}
        return choice

    async def _keep(self) -> None:
        await self._answering.keep(self._id, [[place] for place in range(len(self._answering.asked))])

    def _envelope(self) -> dict[str, Any]:
        return openai.envelope("text_completion", self._id, self._answering.model, self._answering.version)


class TokenForm:
    """Continuations of token ids in vLLM's form. Log-probs are those of the model at the temperature of the request,
    which a trainer computes again.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._id = openai.new_id("generate-")

    async def whole(self) -> Json:
        """The response, once all answers have come and are stored."""
        collected = self._answering.collected
        await self._answering.keep(self._id, [[0]])
        choices = [
            {
                "index": number,
                "token_ids": answer["token_ids"],
                "finish_reason": answer["finish_reason"],
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logp}
                        for token, logp in zip(answer["token_ids"], answer["logps"], strict=True)
                    ]
                },
            }
            for number, answer in sorted(collected.answers.items())
        ]
        return {"request_id": self._id, "prompt_token_ids": collected.prompts[0]["prompt_ids"], "choices": choices}
