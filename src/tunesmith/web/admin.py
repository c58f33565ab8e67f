"""Routes for admins: raters and invitations, rollback, statistics, export."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from fastapi.exceptions import HTTPException
from fastapi.responses import StreamingResponse

from tunesmith.store.vote_stats import VoteStats
from tunesmith.web.access import API
from tunesmith.web.messages import CommandReply, InviteReply, RaterReply, RaterRequest
from tunesmith.web.services import Caller, Services, ServicesOf

_DAY_S = 24 * 3600
_MAX_ID = 2**63 - 1
ExportKind = Literal["votes", "rankings", "demonstrations"]
Id = Annotated[int, Path(ge=0, le=_MAX_ID)]


def router() -> APIRouter:
    """Routes under `/api/v1`: `raters`, `versions/{version}/rollback`, `stats`, `export`."""
    routes = APIRouter(prefix=API, tags=["admin"])

    @routes.get("/raters")
    def raters(services: ServicesOf) -> list[RaterReply]:
        """All raters, oldest first."""
        return [RaterReply.model_validate(rater) for rater in services.votes.reader.raters()]

    @routes.post("/raters", status_code=201)
    def invite(body: RaterRequest, caller: Caller, services: ServicesOf) -> InviteReply:
        """Create a rater and an invitation for them."""
        _check_name(body.name, services)
        expires_at = time.time() + body.invite_days * _DAY_S
        new = services.votes.add_rater(body.name, body.role, invited_by=caller.rater_id, expires_at=expires_at)
        return InviteReply(rater=RaterReply.model_validate(new.rater), token=new.token, link=f"/join/{new.token}")

    @routes.delete("/raters/{rater_id}", status_code=204)
    def shut_out(rater_id: Id, caller: Caller, services: ServicesOf) -> None:
        """End a rater's access; their votes stay."""
        if rater_id == caller.rater_id:
            raise HTTPException(409, "this is your own access; ask another admin to end it")
        if all(rater.id != rater_id for rater in services.votes.reader.raters()):
            raise HTTPException(404, f"there is no rater {rater_id}")
        services.votes.disable_rater(rater_id)
        services.logins.forget()

    @routes.post("/versions/{version}/rollback", status_code=202)
    def roll_back(version: Id, caller: Caller, services: ServicesOf) -> CommandReply:
        """Ask the trainer to serve this version again."""
        known = [one.version for one in services.runs.versions()]
        if version not in known:
            raise HTTPException(404, f"there is no version {version}")
        return CommandReply(id=services.votes.command("rollback", str(version), caller.rater_id))

    @routes.get("/stats")
    def stats(services: ServicesOf) -> VoteStats:
        """Counts, agreement, biases and the raters' accuracy on known answers."""
        return services.votes.reader.stats(services.campaign().id)

    @routes.get("/export")
    def export(services: ServicesOf, kind: ExportKind = "votes") -> StreamingResponse:
        """Effective votes, rankings or written answers as JSON lines, oldest first."""
        return StreamingResponse(_lines(services, kind), media_type="application/x-ndjson")

    return routes


def _check_name(name: str, services: Services) -> None:
    if any(rater.name == name.strip() for rater in services.votes.reader.raters()):
        raise HTTPException(409, f"the name {name.strip()!r} is taken; choose another")


def _lines(services: Services, kind: ExportKind) -> Iterator[str]:
    campaign_id = services.campaign().id
    votes = services.votes.reader
    rows = {
        "votes": votes.export,
        "rankings": votes.export_rankings,
        "demonstrations": votes.export_demonstrations,
    }[kind]
    for row in rows(campaign_id):
        yield json.dumps(asdict(row)) + "\n"
