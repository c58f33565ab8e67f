"""Keys of the API: their routes for admins, their limits, and tokens for their users."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.concurrency import run_in_threadpool

from tunesmith.collect.store.campaigns import rater_named
from tunesmith.collect.store.content import check_values
from tunesmith.collect.store.inferences import DAY_S
from tunesmith.collect.store.records import KeySettings, Rater, Scope
from tunesmith.collect.web.access import Rule
from tunesmith.collect.web.api.openai import Json, RefusedError
from tunesmith.collect.web.logins import KeyUser, RateLimits, user_of
from tunesmith.collect.web.services import Caller, Services, ServicesOf

KEYS, USER_TOKENS = "/v1/keys", "/v1/user_tokens"

RULES: tuple[Rule, ...] = (
    Rule(("GET", "POST"), KEYS, "admin"),
    Rule(("DELETE",), f"{KEYS}/{{name}}", "admin"),
    Rule(("POST",), USER_TOKENS, "key"),
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


class UserTokenRequest(BaseModel):
    """A token that is wanted for a user of the key."""

    model_config = ConfigDict(extra="forbid")

    user: Annotated[str, Field(min_length=1, max_length=200)]
    expires_s: Annotated[int, Field(ge=1, le=30 * DAY_S)] = 3600
    scopes: Annotated[tuple[Literal["generate", "feedback"], ...], Field(min_length=1)] = ("generate", "feedback")

    @field_validator("user")
    @classmethod
    def check_user(cls, given: str) -> str:
        """Refuse what no database can hold."""
        check_values(given, "the user")  # a ValueError
        return given


def user_for(caller: Rater, given: str | None) -> str:
    """Whom a request is for: that of the caller's token if it is one, else the one whom a key names. Raises
    RefusedError if a token's request names another one.
    """
    if not isinstance(caller, KeyUser):
        return given or ""
    if given not in (None, "", caller.user):
        raise RefusedError(403, "user is another one than that of the token; leave it out", param="user")
    return caller.user


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
    """The routes of keys, and of tokens for their users."""
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
        services.votes.disable_rater(found.id, by=caller.id)
        services.logins.forget()

    @routes.post(USER_TOKENS, status_code=201)
    def sign(body: UserTokenRequest, caller: Caller, services: ServicesOf) -> Json:
        """A token for one user of the key, for a browser: it asks and gives feedback as that user alone."""
        scopes = caller.scopes or ()
        if "admin" not in scopes and not set(body.scopes) <= set(scopes):
            raise RefusedError(403, f"this key is for {', '.join(scopes)}; its users may do no more", param="scopes")
        expires_at = int(time.time()) + body.expires_s
        rater_id = services.votes.rater_of_user(caller.id, body.user)
        token = services.logins.sessions.sign_user(user_of(caller, body.user, rater_id, body.scopes), expires_at)
        return {"token": token, "user": body.user, "scopes": body.scopes, "expires_at": expires_at}

    return routes


def _key_named(services: Services, name: str) -> Rater:
    found = rater_named((one for one in services.votes.reader.raters() if one.scopes is not None), name)
    if found is None:
        raise RefusedError(404, f"there is no key {name!r}")
    return found


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
