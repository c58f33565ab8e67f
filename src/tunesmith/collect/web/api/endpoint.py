"""The models of the API by name, drawn by the process of `drawing`, and the record of each answer for the store."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from random import SystemRandom
from typing import Any, cast

from starlette.concurrency import run_in_threadpool

from tunesmith.base.core.errors import RunError
from tunesmith.base.core.log import get_logger
from tunesmith.collect.store.records import MODEL_SOURCE, Choice, Inference
from tunesmith.collect.web.api.openai import Json, RefusedError
from tunesmith.collect.web.arena import Contestant
from tunesmith.collect.web.drawing import Drawer

MAX_OPEN = 256
"""Requests that are drawn or wait; the next one is told to come again."""

_RETRY_S = 5
_STATUS = {"context": 400, "prompt": 400, "model": 503, "engine": 500}
_CODES = {"context": "context_length_exceeded"}

_log = get_logger(__name__)


class Endpoint:
    """Answers by the models of `contestants()`, of which the first also answers to the name `alias`. For the event loop
    of a server.

    `tried(served)` is a version that answers a share of the conversations in the place of the first, if there is one.
    """

    def __init__(
        self,
        drawer: Drawer,
        contestants: Callable[[], Sequence[Contestant]],
        alias: str,
        max_open: int = MAX_OPEN,
        *,
        tried: Callable[[Contestant], tuple[Contestant, float] | None] = lambda served: None,
    ) -> None:
        self.alias = alias
        self._contestants = contestants
        self._tried = tried
        self._drawer = drawer
        self._max_open = max_open
        self._random = SystemRandom()
        self._contexts: dict[str, int] = {}

    def warm(self) -> None:
        """Have the served model loaded, so that the first request need not wait for it."""
        found = self.models()
        if not found:
            return
        model = found[0].model
        with suppress(RunError):
            request = {"model": model, "text": "Hello", "sampling": {"max_new_tokens": 1}}
            self._drawer.ask(request, lambda reply: self._note(model, reply))

    def _note(self, model: Json, reply: Json) -> None:
        if reply.get("kind") == "model":
            _log.warning("the model cannot be used: %s", reply["error"])
        if "begun" in reply:
            self._contexts[json.dumps(model, sort_keys=True)] = reply["begun"]["context"]

    def context(self, name: str) -> int | None:
        """The longest prompt and answer of the model of this name, in tokens; None before it was loaded."""
        return self._contexts.get(json.dumps(self.model(name).model, sort_keys=True))

    @property
    def num_open(self) -> int:
        """Requests that are drawn or wait."""
        return self._drawer.num_open

    def models(self) -> list[Contestant]:
        """The models that can be asked for by name, the served one first."""
        return list(self._contestants())

    def model(self, name: str, conversation: str = "") -> Contestant:
        """The model of this name; for `alias` and for no name the served one, or, for a share of the conversations, the
        same ones as long as it lasts, one that is tried. Raises RefusedError if there is none.
        """
        found = self.models()
        tried = self._tried(found[0]) if found else None
        if name in ("", self.alias):
            chosen = found[:1]
            if tried is not None and conversation and place_of(conversation, tried[0].name) < tried[1]:
                chosen = [tried[0]]
        else:
            chosen = [one for one in (*found, *(tried or ())[:1]) if one.name == name]
        if not found:
            raise RefusedError(503, "there is no model yet: start `tunesmith live`", retry_after=str(_RETRY_S))
        if not chosen:
            names = ", ".join(dict.fromkeys((self.alias, *(one.name for one in found))))
            raise RefusedError(404, f"there is no model {name!r}; there are {names}", "model_not_found", "model")
        return chosen[0]

    def two(self, name: str) -> list[Contestant]:
        """The model of this name and another one, in random order; twice the same if there is no other. Versions that
        were gone back from are not compared.
        """
        first, found = self.model(name), self.models()
        served = found[0].version or 0
        others = [one for one in found if one != first and (one.version or 0) <= served] or [first]
        sides = [first, others[0]]
        self._random.shuffle(sides)
        return sides

    async def draw(self, requests: Sequence[Json]) -> AsyncGenerator[tuple[int, Json]]:
        """The replies to requests, each with the place of its request; see `apps/workflows/model_worker.py`.

        The requests end when the generator is closed. Raises RefusedError if one cannot be answered.
        """
        if self.num_open + len(requests) > self._max_open:
            reason = f"{self._max_open} requests are answered now; try again in {_RETRY_S} s"
            raise RefusedError(429, reason, "rate_limit_exceeded", retry_after=str(_RETRY_S))
        loop = asyncio.get_running_loop()
        come: asyncio.Queue[tuple[int, Json]] = asyncio.Queue()
        ids: list[int] = []

        def hear(place: int, reply: Json) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(come.put_nowait, (place, reply))

        try:
            for place, request in enumerate(requests):
                ids.append(await run_in_threadpool(self._ask, request, lambda reply, place=place: hear(place, reply)))
            num_left = len(requests)
            while num_left:
                place, reply = await come.get()
                self._note(requests[place]["model"], reply)
                if "error" in reply:
                    raise _refused(reply, requests[place].get("names", {}))
                if "done" in reply:
                    num_left -= 1
                else:
                    yield place, reply
        finally:
            for id in ids:
                loop.run_in_executor(None, self._drawer.stop, id)

    def _ask(self, request: Json, on_reply: Callable[[Json], None]) -> int:
        try:
            return self._drawer.ask(request, on_reply)
        except RunError as error:
            raise RefusedError(503, str(error), retry_after="1") from None


def place_of(conversation: str, name: str) -> float:
    """A number in [0, 1) that is spread evenly over conversations, and anew for each version of this `name`."""
    digest = blake2b(f"{name}\0{conversation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _with_call_ids(answer: Json) -> Json:
    """The answer with an id of each call, which the client is told and the store keeps: its result names it."""
    message = cast(Json, answer.get("message") or {})
    calls: list[Json] = [{"id": f"call_{secrets.token_hex(12)}", **call} for call in message.get("tool_calls") or ()]
    if not calls:
        return answer
    return {**answer, "message": {**message, "tool_calls": calls}}


def _refused(reply: Json, names: Mapping[str, str]) -> RefusedError:
    """The error of a request, in its own `names` of what the engine calls otherwise."""
    kind = reply["kind"]
    if kind in ("model", "engine"):
        _log.warning("a request of the API failed: %s", reply["error"])
    reason = reply["error"] if kind != "model" else "the model cannot be used at the moment; the server's log says why"
    for name in names.keys() - {"prompt"}:
        reason = reason.replace(name, names[name])
    param = names.get("prompt", "prompt") if kind == "context" else None
    return RefusedError(_STATUS[kind], reason, _CODES.get(kind), param)


@dataclass(slots=True)
class Collected:
    """The replies to requests for `n` answers each of `speakers`, one for each request.

    A choice is numbered by the place of its request and its sample. `prompts` are what was read, by place.
    """

    speakers: Sequence[Contestant]
    n: int
    prompts: dict[int, Json] = field(default_factory=dict[int, Json])
    answers: dict[int, Json] = field(default_factory=dict[int, Json])
    scores: dict[int, list[Json]] = field(default_factory=dict[int, list[Json]])

    def note(self, place: int, reply: Json) -> int:
        """Take a reply; returns the choice that it is of."""
        if "begun" in reply:
            self.prompts[place] = reply["begun"]
            return place * self.n
        choice = place * self.n + reply["sample"]
        self.scores.setdefault(choice, []).extend(reply.get("scores", ()))
        if "answer" in reply:
            self.answers[choice] = _with_call_ids(reply["answer"])
        return choice

    def as_choice(self, choice: int) -> Choice:
        """An answer as the store takes it."""
        answer, speaker = self.answers[choice], self.speakers[choice // self.n]
        source = speaker.name if speaker.version is not None else f"{MODEL_SOURCE}{speaker.name}"
        return Choice(
            answer["text"],
            tuple(answer["token_ids"]),
            tuple(answer["logps"]),
            tuple(answer["drawn_logps"]),
            answer["finish_reason"],
            speaker.version,
            source,
            answer["message"],
        )

    def kept(self, places: Sequence[int], **facts: Any) -> Inference:
        """The record of the answers to these requests, which read the same prompt."""
        prompt = self.prompts[places[0]]
        content = prompt["prompt"]
        numbers = [place * self.n + sample for place in places for sample in range(self.n)]
        return Inference(
            prompt=content if isinstance(content, str) else tuple(content),
            prompt_ids=tuple(prompt["prompt_ids"]),
            choices=tuple(map(self.as_choice, numbers)),
            **facts,
        )
