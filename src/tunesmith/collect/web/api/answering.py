"""A request for answers while it is answered, in the form of whichever API: drawn, charged, stored and sent."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger
from tunesmith.collect.store.records import Rater
from tunesmith.collect.web.api import keys, openai
from tunesmith.collect.web.api.endpoint import Collected, Endpoint
from tunesmith.collect.web.api.metrics import Metrics, Timer
from tunesmith.collect.web.api.openai import Json, RefusedError, Sampled
from tunesmith.collect.web.arena import Contestant
from tunesmith.collect.web.logins import KeyUser
from tunesmith.collect.web.services import FAILED, STORE_FAILS, Services, error_body, status_of

T = TypeVar("T")

_log = get_logger(__name__)


class Answering:
    """A request of the API while it is answered: what is asked of each of `speakers`, and what has come."""

    def __init__(
        self,
        endpoint: Endpoint,
        metrics: Metrics,
        services: Services,
        caller: Rater,
        body: Sampled,
        speakers: list[Contestant],
        asked: list[dict[str, Any]],
    ) -> None:
        self.body = body
        self.model = body.model or endpoint.alias
        self.is_compared = len({one.name for one in speakers}) > 1
        self.version = None if self.is_compared else speakers[0].version
        self.collected = Collected(speakers, body.n or 1)
        self.asked = asked
        self._endpoint = endpoint
        self._metrics = metrics
        self._services = services
        self._caller = caller
        self._user = keys.user_for(caller, body.user)

    async def replies(self) -> AsyncGenerator[tuple[int, Json]]:
        """The number of a choice and a reply, as they come; each is collected."""
        with self._metrics.request() as timer:
            async with self._charged(timer), aclosing(self._endpoint.draw(self.asked)) as replies:
                async for place, reply in replies:
                    choice = self.collected.note(place, reply)
                    timer.note(reply)
                    yield choice, reply

    @asynccontextmanager
    async def _charged(self, timer: Timer) -> AsyncGenerator[None]:
        """Charge the key with the tokens of this block, also if its client goes."""
        try:
            yield
        finally:
            charge = partial(self._services.votes.charge, self._caller.id, timer.num_tokens)
            # Goes on when the waiting for it is cancelled.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, charge))

    async def keep(self, id: str, groups: list[list[int]], **more: Any) -> None:
        """Store the answers, so that feedback finds them: those of `groups` of requests, each under an id of its own.

        That of the first is `id`, of the others `id.1` and so on. `more` is stored beside the sampling parameters.
        """
        asked, caller = self.asked[0], self._caller
        options = {**asked["sampling"], **({"tools": asked["tools"]} if "tools" in asked else {}), **more}
        for number, places in enumerate(groups):
            kept = self.collected.kept(
                places,
                name=f"{id}.{number}" if number else id,
                rater_id=caller.id,
                model=self.model,
                options=options,
                user=self._user,
                episode=self.body.episode_id or "",
                created_at=time.time(),
            )
            by = caller.rater_id if isinstance(caller, KeyUser) else None
            await run_in_threadpool(self._services.votes.record, kept, by)

    @property
    def may_call(self) -> bool:
        """True if an answer may have calls of tools, and no text then."""
        return any("tools" in one for one in self.asked)

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        prompts = self.collected.prompts.values()
        ids = [token for one in prompts for token in one["prompt_ids"]]
        return openai.usage_of(ids, self.collected.answers.values())


class Form(ABC):
    """The answers of a request as its client reads them, under an id that begins with `kind`."""

    last = "[DONE]"
    """What a stream ends with; nothing if it is empty."""

    def __init__(self, answering: Answering, kind: str) -> None:
        self._answering = answering
        self._id = openai.new_id(kind)

    @abstractmethod
    async def whole(self) -> Json:
        """The response, once all answers have come and are stored."""

    @abstractmethod
    def events(self, replies: AsyncGenerator[tuple[int, Json]]) -> AsyncGenerator[Json]:
        """The events of a stream."""

    def failed(self, error: RefusedError) -> Json:
        """The last event of a stream that cannot go on."""
        return error_body(error.status_code, error.detail, error.code, error.param)


async def whole(request: HttpRequest, answering: Answering, form: Callable[[], Awaitable[Json]]) -> Response:
    """The response that `form()` gives once everything is drawn, which ends when the client goes."""

    async def work() -> Json:
        async with aclosing(answering.replies()) as replies:
            async for _ in replies:
                pass
        return await form()

    return JSONResponse(await _while_connected(request, work))


async def answered(request: HttpRequest, answering: Answering, form: Form) -> Response:
    """The response, whole or as a stream. Whatever is drawn ends when the client goes."""
    if not answering.body.stream:
        return await whole(request, answering, form.whole)
    replies = answering.replies()
    await anext(replies)  # what cannot be answered is refused by a status, and not in a stream

    async def texts() -> AsyncGenerator[str]:
        try:
            async with aclosing(replies):
                async for one in form.events(replies):
                    yield openai.event(one)
            if form.last:
                yield openai.event(form.last)
        except Exception as error:  # noqa: BLE001 - the status is sent, so the client learns of any error from here alone
            yield openai.event(form.failed(_refusal_of(error)))

    return StreamingResponse(texts(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _refusal_of(error: Exception) -> RefusedError:
    """What the client is told of an error in the middle of a stream. The log has the reasons that are not for them."""
    if isinstance(error, RefusedError):  # the engine failed
        return error
    if not isinstance(error, InputError):
        _log.error("a stream of the API failed", exc_info=error)
        return RefusedError(500, FAILED)
    status = status_of(error)
    if status != 503:
        return RefusedError(status, str(error))
    # The answer cannot be stored, so that no feedback would find it.
    _log.warning("the store cannot be used: %s", error)
    return RefusedError(status, STORE_FAILS)


async def _while_connected(request: HttpRequest, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `work()`, which is cancelled if the client goes."""
    task = asyncio.create_task(work())
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RefusedError(499, "the client went away")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
