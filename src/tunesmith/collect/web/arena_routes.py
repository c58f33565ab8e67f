"""Routes of the arena and of the leaderboard."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path
from fastapi import Request as HttpRequest
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.web.access import API, Rule
from tunesmith.collect.web.arena import MAX_TURNS, Arena, Conversation
from tunesmith.collect.web.messages import PassageReply, Reply, Request, VoteRequest, passages
from tunesmith.collect.web.services import Caller, Services, ServicesOf, page
from tunesmith.collect.web.watch import KEEP_ALIVE_S, event, stream_of
from tunesmith.collect.web.watch_data import Cached, Json, Standings

if TYPE_CHECKING:
    from tunesmith.collect.statistics.rater_report import CrowdReport

POLL_S = 0.05
"""Seconds between looks at the answers that are drawn."""

MAX_MESSAGE = 20_000
"""Characters of a message."""

ONE = f"{API}/arena/{{conversation}}"

RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/arena", "rater", is_page=True),
    Rule(("GET",), "/leaderboard", "rater", is_page=True),
    Rule(("GET",), f"{API}/leaderboard", "rater"),
    Rule(("GET",), f"{API}/arena/models", "admin"),
    Rule(("POST",), f"{API}/arena", "rater"),
    Rule(("GET",), ONE, "rater"),
    Rule(("POST",), f"{ONE}/turns", "rater", max_body=8 * MAX_MESSAGE),
    Rule(("DELETE",), f"{ONE}/turns/{{number}}", "rater"),
    Rule(("PUT",), f"{ONE}/first", "rater"),
    Rule(("GET",), f"{ONE}/stream", "rater"),
    Rule(("PUT",), f"{ONE}/turns/{{number}}/vote", "rater"),
)
"""Rules of this module's routes, for the guard's table."""

ConversationId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Number = Annotated[int, Path(ge=0, lt=MAX_TURNS)]


class BeginRequest(Request):
    """A new conversation; an admin may say by name which models answer."""

    names: Annotated[tuple[Annotated[str, Field(max_length=1_000)], ...], Field(max_length=100)] = ()


class SayRequest(Request):
    """A message, as turn `number` of the conversation, counted from 0."""

    number: Annotated[int, Field(ge=0, lt=MAX_TURNS)]
    text: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE)]


class FirstRequest(Request):
    """The turn from which on the models read the conversation, counted from 0."""

    number: Annotated[int, Field(ge=0, lt=MAX_TURNS)]


class TurnReply(Reply):
    """A turn. `answers`, from left to right, are empty until both are whole; `names` until there was a vote. `obstacle`
    says why there can be none. The conversation goes on with the answer `kept`.
    """

    text: str
    answers: list[PassageReply]
    can_vote: bool
    obstacle: str
    verdict: str
    kept: int
    names: list[str]


class ConversationReply(Reply):
    """A conversation, which the models read from turn `first` on."""

    id: str
    turns: list[TurnReply]
    first: int


def routers(arena: Arena, votes: VoteWatch, crowd: "Callable[[], CrowdReport]") -> list[APIRouter]:
    """The routers of the pages, of conversations and their answers, and of the leaderboard of `votes`, whose raters are
    described by `crowd`.
    """
    return [_pages(Cached(Standings(votes, crowd), max_age_s=1.0)), _conversations(arena), _answers(arena)]


def _pages(board: Cached[list[Json]]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/arena", include_in_schema=False)
    def show_arena(request: HttpRequest, caller: Caller, services: ServicesOf) -> HTMLResponse:
        may_choose = services.studio is not None and caller.is_admin
        return page(request, "arena.html", max_message=MAX_MESSAGE, may_choose=may_choose)

    @routes.get("/leaderboard", include_in_schema=False)
    def show_board(request: HttpRequest) -> HTMLResponse:
        places = board()
        base = next((one["name"] for one in places if one["low"] == one["high"] == 0.5), "")
        return page(request, "leaderboard.html", places=places, base=base)

    @routes.get(f"{API}/leaderboard", tags=["arena"])
    def leaderboard() -> list[Json]:
        """Versions and models that votes compare, the strongest first, with their chance to win against the base."""
        return board()

    return routes


def _conversations(arena: Arena) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/arena", tags=["arena"])

    @routes.get("/models")
    def models() -> list[str]:
        """Names of the models that may answer."""
        return [one.name for one in arena.contestants()]

    @routes.post("", status_code=201)
    def begin(body: BeginRequest, caller: Caller, services: ServicesOf) -> ConversationReply:
        """Begin a conversation with two models; which they are is known after a vote."""
        if body.names and not caller.is_admin:
            raise HTTPException(403, "only an admin may choose the models")
        return reply(arena.begin(caller.id, body.names), services)

    @routes.get("/{conversation}")
    def show(conversation: ConversationId, caller: Caller, services: ServicesOf) -> ConversationReply:
        """A conversation of the caller."""
        return reply(arena.get(conversation, caller.id), services)

    @routes.post("/{conversation}/turns", status_code=202)
    def say(conversation: ConversationId, body: SayRequest, caller: Caller, services: ServicesOf) -> ConversationReply:
        """Say something. The response is sent when it is on disk; a retry changes nothing. `stream` has the answers."""
        found = arena.get(conversation, caller.id)
        arena.say(found, body.number, body.text)
        return reply(found, services)

    @routes.delete("/{conversation}/turns/{number}")
    def take_back(
        conversation: ConversationId, number: Number, caller: Caller, services: ServicesOf
    ) -> ConversationReply:
        """Take back the last message, before it is answered: the answers are not drawn further."""
        found = arena.get(conversation, caller.id)
        arena.take_back(found, number)
        return reply(found, services)

    @routes.put("/{conversation}/first")
    def begin_at(
        conversation: ConversationId, body: FirstRequest, caller: Caller, services: ServicesOf
    ) -> ConversationReply:
        """Have the models read the conversation from a later turn on, while the last message is not answered."""
        found = arena.get(conversation, caller.id)
        arena.begin_at(found, body.number)
        return reply(found, services)

    return routes


def _answers(arena: Arena) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/arena", tags=["arena"])

    @routes.put("/{conversation}/turns/{number}/vote")
    def vote(
        conversation: ConversationId, number: Number, body: VoteRequest, caller: Caller, services: ServicesOf
    ) -> ConversationReply:
        """Vote on the answers to the last turn. The response, which names the models, is sent when the vote is on disk;
        a retry changes nothing. `skip` undoes it.
        """
        found = arena.get(conversation, caller.id)
        given = body.verdict, body.reason, body.dwell_ms
        arena.vote(found, number, *given, services.votes, services.campaign().id)
        return reply(found, services)

    # Not in the schema: the response takes as long as the answers, which would block clients that try all routes.
    @routes.get("/{conversation}/stream", include_in_schema=False)
    async def stream(
        conversation: ConversationId, request: HttpRequest, caller: Caller, services: ServicesOf
    ) -> StreamingResponse:
        """The answers to the last turn while they are drawn: `text` events, then `done` with the conversation, or
        `failed`; to ask again is to try again.
        """
        found = await run_in_threadpool(arena.get, conversation, caller.id)
        return stream_of(_events(arena, found, services), request)

    return routes


async def _events(arena: Arena, conversation: Conversation, services: Services) -> AsyncGenerator[str]:
    sent, quiet_s = ["", ""], 0.0
    while not services.shutdown.is_set():
        progress = await run_in_threadpool(arena.progress, conversation)
        quiet_s += POLL_S
        if quiet_s >= KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        for side, text in enumerate(progress.texts):
            if len(text) > len(sent[side]):
                yield event("text", {"side": side, "text": text[len(sent[side]) :]})
                sent[side] = text
        if progress.error:
            yield event("failed", {"detail": progress.error})
            return
        if progress.is_over:
            found = await run_in_threadpool(reply, conversation, services)
            yield event("done", found.model_dump(mode="json"))
            return
        await asyncio.sleep(POLL_S)


def reply(conversation: Conversation, services: Services) -> ConversationReply:
    """The conversation as its rater may see it, which names no model before the vote."""
    is_markdown = services.campaign().settings.answer_style == "markdown"
    turns = [
        TurnReply(
            text=turn.text,
            answers=[one for answer in turn.answers for one in passages(answer["text"], is_markdown=is_markdown)],
            can_vote=bool(turn.answers) and not turn.obstacle and not turn.verdict,
            obstacle=turn.obstacle,
            verdict=turn.verdict,
            kept=turn.kept,
            names=[side.name for side in turn.sides] if turn.is_revealed else [],
        )
        for turn in conversation.turns
    ]
    return ConversationReply(id=conversation.id, turns=turns, first=conversation.first)
