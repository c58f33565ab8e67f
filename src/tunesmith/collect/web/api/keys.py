"""Keys of the API: their routes for admins, and their limits."""

import time
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from tunesmith.collect.store.inferences import DAY_S
from tunesmith.collect.store.records import KeySettings, Rater, Scope
from tunesmith.collect.web.access import Rule
from tunesmith.collect.web.api.openai import Json, RefusedError
from tunesmith.collect.web.logins import RateLimits
from tunesmith.collect.web.services import Caller, Services, ServicesOf

KEYS = "/v1/keys"

RULES: tuple[Rule, ...] = (
    Rule(("GET", "POST"), KEYS, "admin"),
    Rule(("DELETE",), f"{KEYS}/{{name}}", "admin"),
)

_MOST = 2**53


class KeyRequest(BaseModel):
    """A key that is wanted."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=200)]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)] = ("generate", "feedback")
    expires_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_day: Annotated[int, Field(ge=1, le=_MOST)] | None = None


class Limits:
    """The limits of keys. Requests of a minute are counted since the server began, tokens of a day in the database."""

    def __init__(self) -> None:
        self._rates: dict[int, RateLimits] = {}

    async def check(self, caller: Caller, services: ServicesOf) -> None:
        """Let a request for answers pass. Raises RefusedError if its key has used up what it may."""
        rate = caller.requests_per_minute
        if rate is not None:
            limits = self._rates.setdefault(rate, RateLimits(rate / 60, rate))
            if wait_s := limits.take(str(caller.id)):
                raise _used_up(f"this key may ask {rate:,} times a minute; try again in {wait_s} s", wait_s)
        most = caller.tokens_per_day
        if most is not None:
            used = (await run_in_threadpool(services.votes.reader.tokens_of_day)).get(caller.id, 0)
            if used >= most:
                wait_s = int(DAY_S - time.time() % DAY_S) + 1
                raise _used_up(
                    f"this key has used its {most:,} tokens of this day (UTC); {wait_s:,} s are left", wait_s
                )


def _used_up(detail: str, wait_s: int) -> RefusedError:
    return RefusedError(429, detail, "rate_limit_exceeded", retry_after=str(wait_s))


def router() -> APIRouter:
    """The routes of keys."""
    routes = APIRouter(tags=["API"])

    @routes.get(KEYS)
    def keys(services: ServicesOf) -> Json:
        """All keys, the oldest first, and the tokens that they have used today (UTC)."""
        reader = services.votes.reader
        used = reader.tokens_of_day()
        return {"data": [_shown(one, used.get(one.id, 0)) for one in reader.raters() if one.scopes is not None]}

    @routes.post(KEYS, status_code=201)
    def make(body: KeyRequest, caller: Caller, services: ServicesOf) -> Json:
        """Make a key. It is in this response alone: the server keeps its hash."""
        now = time.time()
        made = services.votes.add_rater(
            body.name,
            invited_by=caller.id,
            expires_at=None if body.expires_days is None else now + body.expires_days * DAY_S,
            now=now,
            key=KeySettings(body.scopes, body.requests_per_minute, body.tokens_per_day),
        )
        return {"key": made.token, **_shown(made.rater, 0)}

    @routes.delete(f"{KEYS}/{{name}}", status_code=204)
    def end(name: str, caller: Caller, services: ServicesOf) -> None:
        """End a key at once. Its name stays taken: what it did is kept under it."""
        found = _key_named(services, name)
        if found.id == caller.id:
            raise RefusedError(409, "this is your own key; end it with another one")
        services.votes.disable_rater(found.id)
        services.logins.forget()

    return routes


def _key_named(services: Services, name: str) -> Rater:
    found = [one for one in services.votes.reader.raters() if one.scopes is not None and one.name == name]
    if not found:
        raise RefusedError(404, f"there is no key {name!r}")
    return found[0]


def _shown(key: Rater, num_tokens: int) -> dict[str, Any]:
    return {
        "name": key.name,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "ended_at": key.disabled_at,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_day": key.tokens_per_day,
        "tokens_today": num_tokens,
    }
