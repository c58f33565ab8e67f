"""Routes of the API for admins: the data of one person, and the audit log."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from tunesmith.base.core.errors import UnknownPersonError
from tunesmith.collect.data.vote_files import jsonl_lines
from tunesmith.collect.store.records import AuditEntry, Person
from tunesmith.collect.web.access import Rule
from tunesmith.collect.web.api.openai import Json, RefusedError
from tunesmith.collect.web.arena import person_rows
from tunesmith.collect.web.services import Caller, Services, ServicesOf

PERSON_DATA, AUDIT = "/v1/person_data", "/v1/audit"

RULES: tuple[Rule, ...] = (
    Rule(("GET", "DELETE"), PERSON_DATA, "admin"),
    Rule(("GET",), AUDIT, "admin"),
)

MOST_ENTRIES = 500

Name = Annotated[str, Query(min_length=1, max_length=200)]
KeyName = Annotated[str, Query(max_length=200)]
Before = Annotated[int | None, Query(ge=0, le=2**53)]
Limit = Annotated[int, Query(ge=1, le=MOST_ENTRIES)]


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["API"])

    @routes.get(PERSON_DATA)
    def export(user: Name, caller: Caller, services: ServicesOf, key: KeyName = "") -> StreamingResponse:
        """What is stored of a rater or key, or with `key` of a user of that key, as JSON Lines."""
        person = _found(services, user, key)
        services.votes.note("data exported", person.as_detail, by=caller.id)
        rows = person_rows(services.votes.reader, services.settings.folder, person)
        return StreamingResponse(jsonl_lines(rows), media_type="application/x-ndjson")

    @routes.delete(PERSON_DATA)
    def delete(user: Name, caller: Caller, services: ServicesOf, key: KeyName = "") -> Json:
        """Remove what is stored of a person, and end their access; says how much of what."""
        person = _found(services, user, key)
        if person.rater_id == caller.id:
            raise RefusedError(409, "this is your own key; use another one")
        arena = services.arena
        talks = 0 if arena is None else arena.forget(person.rater_id)
        done = services.votes.delete_person(person, by=caller.id)
        services.logins.forget()
        talks += 0 if arena is None else arena.forget(done["id"])
        return {"deleted": done | {"conversations": talks}}

    @routes.get(AUDIT)
    def log(services: ServicesOf, before: Before = None, limit: Limit = 100) -> Json:
        """The newest entries of the audit log, or those before an entry."""
        found = services.votes.reader.audit(before, limit)
        return {"data": list(map(entry_row, found)), "has_more": len(found) == limit}

    return routes


def entry_row(entry: AuditEntry) -> dict[str, Any]:
    """An entry of the audit log as JSON."""
    detail = {name: value for name, value in entry.detail.items() if name != "id"}
    about = {"about": entry.about, "about_id": entry.detail["id"]} if "id" in entry.detail else {}
    facts = {"id": entry.id, "created_at": entry.created_at, "who": entry.who, "who_id": entry.rater_id}
    return {**facts, "kind": entry.kind, **about, "detail": detail}


def _found(services: Services, user: str, key: str) -> Person:
    try:
        return services.votes.reader.person(user, key)
    except UnknownPersonError as error:
        raise RefusedError(404, str(error), param="key" if key else "user") from None
