"""Routes of voting: the next presentations, votes, rankings, written answers."""

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query

from tunesmith.store.records import Progress
from tunesmith.web.access import API
from tunesmith.web.messages import (
    MAX_PREFETCH,
    DemonstrationRequest,
    GuidelinesReply,
    NextReply,
    PresentationReply,
    RankingRequest,
    ReceiptReply,
    VoteRequest,
    safe_html,
)
from tunesmith.web.services import Caller, ServicesOf

PresentationToken = Annotated[str, Path(min_length=1, max_length=200)]
RequestKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Identifies this request: a retry with the same key returns the first response.",
    ),
]


def router() -> APIRouter:
    """Routes under `/api/v1`: `next`, `progress`, `guidelines`, and those of one presentation."""
    routes = APIRouter(prefix=API, tags=["votes"])
    one = "/presentations/{token}"

    @routes.get("/next")
    def show_next(
        caller: Caller, services: ServicesOf, count: Annotated[int, Query(ge=1, le=MAX_PREFETCH)] = 2
    ) -> NextReply:
        """Presentations to judge next: those that this rater holds, then fresh ones; none if nothing is left."""
        campaign_id = services.campaign().id
        shown = services.votes.next_presentations(caller.rater_id, campaign_id, count)
        progress = services.votes.reader.progress(caller.rater_id, campaign_id)
        return NextReply(presentations=[PresentationReply.of(one) for one in shown], progress=progress)

    @routes.put(f"{one}/vote")
    def vote(
        token: PresentationToken, body: VoteRequest, caller: Caller, services: ServicesOf, key: RequestKey = None
    ) -> ReceiptReply:
        """Vote, or change the vote. The response is sent when the vote is on disk; a retry changes nothing."""
        return ReceiptReply.model_validate(
            services.votes.vote(token, caller.rater_id, body.verdict, body.reason, body.dwell_ms, key)
        )

    @routes.delete(f"{one}/vote")
    def withdraw(token: PresentationToken, caller: Caller, services: ServicesOf) -> ReceiptReply:
        """Undo a vote or a ranking: the presentation is open again."""
        return ReceiptReply.model_validate(services.votes.withdraw(token, caller.rater_id))

    @routes.put(f"{one}/ranking")
    def rank(
        token: PresentationToken, body: RankingRequest, caller: Caller, services: ServicesOf, key: RequestKey = None
    ) -> ReceiptReply:
        """Rank the answers, or change the ranking."""
        return ReceiptReply.model_validate(services.votes.rank(token, caller.rater_id, body.ranks, body.dwell_ms, key))

    @routes.put(f"{one}/demonstration")
    def demonstrate(
        token: PresentationToken,
        body: DemonstrationRequest,
        caller: Caller,
        services: ServicesOf,
        key: RequestKey = None,
    ) -> ReceiptReply:
        """Write a better answer, in addition to the vote."""
        return ReceiptReply.model_validate(services.votes.demonstrate(token, caller.rater_id, body.text, key))

    @routes.get("/progress")
    def progress(caller: Caller, services: ServicesOf) -> Progress:
        """Counts of this rater and the campaign."""
        return services.votes.reader.progress(caller.rater_id, services.campaign().id)

    @routes.get("/guidelines")
    def guidelines(services: ServicesOf) -> GuidelinesReply:
        """The campaign's guidelines for raters."""
        text = services.campaign().settings.guidelines
        return GuidelinesReply(text=text, html=safe_html(text) or "")

    return routes
