"""Routes of a live loop or a run that is watched: versions, metrics, and a stream of server-sent events.

One stream carries all topics: `metrics` as they are written, and `state`, `versions` and `votes` in full whenever they
change. Only `metrics` events have an id, their cursor, with which a client resumes after a disconnection. The server
buffers nothing for a client: what it has not read is read from the run's metrics, so a slow client costs no memory.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from tunesmith.base.core.errors import TunesmithError
from tunesmith.collect.web.access import Access, Rule
from tunesmith.collect.web.logins import bearer_of
from tunesmith.collect.web.services import ServicesOf, caller_of, is_set_within, services_of
from tunesmith.collect.web.watch_data import Json, News, WatchData


def rules(base: str, access: Access) -> tuple[Rule, ...]:
    """Rules of the routes of `router(base)`, for the guard's table."""
    return tuple(
        Rule(("GET",), f"{base}/{name}", access) for name in ("versions", "metrics/names", "metrics", "stream")
    )


MAX_NAMES = 64
"""Most metrics of one request."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Names = Annotated[list[Name], Query(alias="name", min_length=1, max_length=MAX_NAMES)]
After = Annotated[int, Query(ge=0, le=2**62)]
Points = Annotated[int, Query(ge=10, le=5_000)]
LastEventId = Annotated[str | None, Header(max_length=64)]

POLL_S = 0.5
"""Seconds between polls of the files."""

KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a comment is sent, so that proxies keep the connection open."""

RETRY_MS = 2_000
"""Milliseconds after which a browser reconnects."""


def router(base: str, data_of: Callable[..., WatchData]) -> APIRouter:
    """A router with `versions`, `metrics`, `metrics/names` and `stream` under `base`, of the data that the dependency
    `data_of` finds for a request.
    """
    routes = APIRouter(prefix=base, tags=["watch"])

    @routes.get("/versions")
    def versions(data: Annotated[WatchData, Depends(data_of)]) -> JSONResponse:
        """The versions of the policy, oldest first, with win rates against the base as far as they are known."""
        return JSONResponse(data.versions())

    @routes.get("/metrics/names")
    def names(data: Annotated[WatchData, Depends(data_of)]) -> JSONResponse:
        """All metrics, how the page draws them, and the cursor from which the stream goes on."""
        return JSONResponse(data.names())

    @routes.get("/metrics")
    def metrics(
        data: Annotated[WatchData, Depends(data_of)], name: Names, after: After = 0, points: Points = 1_000
    ) -> JSONResponse:
        """Points of one or more metrics with an id above `after`, thinned to about `points` each."""
        return JSONResponse(data.series(name, after, points))

    # Not in the schema: the response never ends, which would block clients that try all routes.
    @routes.get("/stream", include_in_schema=False)
    async def stream(
        data: Annotated[WatchData, Depends(data_of)],
        request: Request,
        services: ServicesOf,
        after: After = 0,
        last_event_id: LastEventId = None,
    ) -> StreamingResponse:
        return stream_of(events(data, services.shutdown, _cursor(last_event_id, after)), request)

    return routes


def stream_of(texts: AsyncGenerator[str], request: Request) -> StreamingResponse:
    """The response that sends server-sent events until they end, or the login does.

    Raises HTTPException 429 if the rater has as many streams open as one rater may.
    """
    services, caller = services_of(request), caller_of(request)
    login = bearer_of(request), request.cookies.get(services.logins.sessions.cookie, "")
    num_open = services.num_streams
    if num_open[caller.id] >= services.settings.limits.streams_per_rater:
        raise HTTPException(429, "you have too many streams open; close some pages")

    async def counted() -> AsyncGenerator[str]:
        num_open[caller.id] += 1
        try:
            async for text in texts:
                if await services.logins.identify(*login) is None:
                    return
                yield text
        finally:
            num_open[caller.id] -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _cursor(last_event_id: str | None, after: int) -> int:
    """The resume position: the browser's Last-Event-ID if valid, else the `after` parameter of the page."""
    text = last_event_id or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else after


@dataclass(slots=True)
class Client:
    """State of one client: metrics are sent up to `cursor`; the topics as they were last sent."""

    cursor: int
    sent: dict[str, Json] = field(default_factory=dict[str, Json])


async def events(
    data: WatchData, shutdown: asyncio.Event, cursor: int, poll_s: float = POLL_S, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncGenerator[str]:
    """Events for one client from `cursor` on, until the server shuts down or the client disconnects."""
    client, quiet_s = Client(cursor), 0.0
    yield f"retry: {RETRY_MS}\n\n"
    while not shutdown.is_set():
        text, is_behind = await run_in_threadpool(next_events, data, client)
        quiet_s = 0.0 if text else quiet_s + poll_s
        if quiet_s >= keep_alive_s:
            text, quiet_s = ": still here\n\n", 0.0
        if text:
            yield text
        if not is_behind and await is_set_within(shutdown, poll_s):
            return


def next_events(data: WatchData, client: Client) -> tuple[str, bool]:
    """New events for `client`, empty if none, and whether there are more; updates `client`."""
    parts: list[str] = []
    try:
        news = data.news(client.cursor)
        topics = {"state": data.state(), "versions": data.versions(), "votes": data.votes_per_minute()}
    except TunesmithError as error:
        # A temporary error, such as a file that is being replaced, does not end the stream.
        return _changed(client, {"state": {"kind": "none", "doing": str(error), "step": None, "age_s": None}}), False
    if news.rows:
        parts.append(event("metrics", _rows(news), str(news.cursor)))
    elif news.is_reset:
        parts.append(event("reset", {}, str(news.cursor)))
    client.cursor = news.cursor
    return "".join(parts) + _changed(client, topics), news.is_behind


def _changed(client: Client, topics: dict[str, Json]) -> str:
    """Events of the topics that changed since they were last sent; the age of a state does not count."""
    parts: list[str] = []
    for name, topic in topics.items():
        known = {key: value for key, value in topic.items() if key != "age_s"}
        if client.sent.get(name) != known:
            client.sent[name] = known
            parts.append(event(name, topic))
    return "".join(parts)


def _rows(news: News) -> Json:
    """`rows` of (id, step, time, index into `names`, value): each name is sent once."""
    places: dict[str, int] = {}
    rows = [[one.id, one.step, one.time, places.setdefault(one.name, len(places)), one.value] for one in news.rows]
    return {"cursor": news.cursor, "names": list(places), "rows": rows}


def event(name: str, data: Json, id: str = "") -> str:
    """One server-sent event (HTML standard, section 9.2). JSON without line breaks needs a single data line."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    lines = [f"event: {name}", *([f"id: {id}"] if id else []), f"data: {text}"]
    return "\n".join(lines) + "\n\n"
