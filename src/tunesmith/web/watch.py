"""The watch page and its data: versions, metrics, and the stream of what is new."""

import threading
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import StringConstraints

from tunesmith.store.vote_watch import VoteWatch
from tunesmith.web.access import API, Rule
from tunesmith.web.pages import page
from tunesmith.web.services import Caller, Services, ServicesOf
from tunesmith.web.watch_data import WatchData
from tunesmith.web.watch_stream import events

RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/watch", "rater", is_page=True),
    Rule(("GET",), f"{API}/versions", "rater"),
    Rule(("GET",), f"{API}/metrics/names", "rater"),
    Rule(("GET",), f"{API}/metrics", "rater"),
    Rule(("GET",), f"{API}/stream", "rater"),
)
"""The routes of this module, for the guard's table: a route without a rule is never reached."""

MAX_NAMES = 64
"""Metrics of one request."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Names = Annotated[list[Name], Query(alias="name", min_length=1, max_length=MAX_NAMES)]
After = Annotated[int, Query(ge=0, le=2**62)]
Points = Annotated[int, Query(ge=10, le=5_000)]
LastEventId = Annotated[str | None, Header(max_length=64)]


class _Watched:
    """The data of one app, made at the first request, and how many streams each rater has open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: WatchData | None = None
        self._streams: Counter[int] = Counter()

    def data(self, services: Services) -> WatchData:
        with self._lock:
            if self._data is None:
                self._data = WatchData(services.runs, VoteWatch(services.settings.votes_path))
            return self._data

    async def stream(self, services: Services, rater_id: int, cursor: int) -> AsyncGenerator[str]:
        """Events for one of the rater's streams, which counts while it lasts."""
        self._streams[rater_id] += 1
        try:
            async for text in events(self.data(services), services.lifetime, cursor):
                yield text
        finally:
            self._streams[rater_id] -= 1

    def has_room(self, services: Services, rater_id: int) -> bool:
        return self._streams[rater_id] < services.settings.limits.streams_per_rater


def watch_router() -> APIRouter:
    """A router with the page `/watch` and, under `/api/v1`, `versions`, `metrics`, `metrics/names` and `stream`."""
    routes, watched = APIRouter(tags=["watch"]), _Watched()

    @routes.get("/watch", include_in_schema=False)
    def watch(caller: Caller, services: ServicesOf) -> HTMLResponse:
        return page(services, "watch.html", caller, here="/watch")

    @routes.get(f"{API}/versions")
    def versions(services: ServicesOf) -> JSONResponse:
        """The versions of the policy, oldest first, with win rates against the base as far as they are known."""
        return JSONResponse(watched.data(services).versions())

    @routes.get(f"{API}/metrics/names")
    def names(services: ServicesOf) -> JSONResponse:
        """All metrics, how the page draws them, and the cursor from which the stream goes on."""
        return JSONResponse(watched.data(services).names())

    @routes.get(f"{API}/metrics")
    def metrics(services: ServicesOf, name: Names, after: After = 0, points: Points = 1_000) -> JSONResponse:
        """Points of one or more metrics with an id above `after`, thinned to about `points` each."""
        return JSONResponse(watched.data(services).series(name, after, points))

    # Left out of the schema: a stream has no end, so what tests all routes by the schema would wait for ever.
    @routes.get(f"{API}/stream", include_in_schema=False)
    async def stream(
        caller: Caller, services: ServicesOf, after: After = 0, last_event_id: LastEventId = None
    ) -> StreamingResponse:
        if not watched.has_room(services, caller.rater_id):
            raise HTTPException(429, "you have too many streams open; close some pages")
        cursor = _cursor(last_event_id, after)
        return StreamingResponse(
            watched.stream(services, caller.rater_id, cursor),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    return routes


def _cursor(last_event_id: str | None, after: int) -> int:
    """Where a client goes on: what its browser says it has had, else what its page asked for."""
    text = last_event_id or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else after
