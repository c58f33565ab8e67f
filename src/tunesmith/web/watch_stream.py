"""The stream of what is new, as server-sent events.

One stream carries all topics: `metrics` as they come, and `state`, `versions` and `votes` whole whenever they change.
Only `metrics` events have an id, the cursor behind them, with which a client goes on after a break. Nothing is kept for
a client but its cursor: what it has not read yet stays in the database, so a slow one costs no memory.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from tunesmith.core.errors import TunesmithError
from tunesmith.web.lifetime import Lifetime
from tunesmith.web.watch_data import MAX_ROWS, Json, News, WatchData

POLL_S = 0.5
"""How often the files are looked at."""

KEEP_ALIVE_S = 15.0
"""After this long without an event a comment is sent, so that what stands between sees a living connection."""

RETRY_MS = 2_000
"""How long a browser waits before it connects again."""


@dataclass(slots=True)
class Client:
    """What one client has: metrics up to `cursor`, and the topics as they were last sent."""

    cursor: int
    sent: dict[str, Json] = field(default_factory=dict[str, Json])


async def events(
    data: WatchData, lifetime: Lifetime, cursor: int, poll_s: float = POLL_S, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncGenerator[str]:
    """Events for one client from `cursor` on, until the server ends or the client goes."""
    client, quiet_s = Client(cursor), 0.0
    yield f"retry: {RETRY_MS}\n\n"
    while not lifetime.is_ending:
        text, is_behind = await run_in_threadpool(next_events, data, client)
        quiet_s = 0.0 if text else quiet_s + poll_s
        if quiet_s >= keep_alive_s:
            text, quiet_s = ": still here\n\n", 0.0
        if text:
            yield text
        if not is_behind and await lifetime.sleep(poll_s):
            return


def next_events(data: WatchData, client: Client) -> tuple[str, bool]:
    """The events that `client` lacks, empty if none, and whether there are more; `client` then has them."""
    parts: list[str] = []
    try:
        news = data.news(client.cursor)
        topics = {"state": data.state(), "versions": data.versions(), "votes": data.votes_per_minute()}
    except TunesmithError as error:
        # A file that cannot be read now, such as one being replaced, is no reason to end the stream.
        return _changed(client, {"state": {"kind": "none", "doing": str(error), "step": None, "age_s": None}}), False
    if news.rows:
        parts.append(event("metrics", _rows(news), str(news.cursor)))
    elif news.is_reset:
        parts.append(event("reset", {}, str(news.cursor)))
    client.cursor = news.cursor
    return "".join(parts) + _changed(client, topics), len(news.rows) >= MAX_ROWS


def _changed(client: Client, topics: dict[str, Json]) -> str:
    """Events of those topics that are not as they were last sent. A state that only grew older is not news."""
    parts: list[str] = []
    for name, topic in topics.items():
        known = {key: value for key, value in topic.items() if key != "age_s"}
        if client.sent.get(name) != known:
            client.sent[name] = known
            parts.append(event(name, topic))
    return "".join(parts)


def _rows(news: News) -> Json:
    """`rows` of (id, step, time, place in `names`, value): a name stands there once."""
    places: dict[str, int] = {}
    rows = [[one.id, one.step, one.time, places.setdefault(one.name, len(places)), one.value] for one in news.rows]
    return {"cursor": news.cursor, "names": list(places), "rows": rows}


def event(name: str, data: Json, id: str = "") -> str:
    """One event in the format of the HTML standard, section 9.2. JSON without line ends needs a single data line."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    lines = [f"event: {name}", *([f"id: {id}"] if id else []), f"data: {text}"]
    return "\n".join(lines) + "\n\n"
