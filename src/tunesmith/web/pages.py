"""The pages: templates that their scripts fill."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse

from tunesmith.web.logins import Identity
from tunesmith.web.messages import safe_html
from tunesmith.web.services import Caller, Services, ServicesOf


def router() -> APIRouter:
    """The pages `/`, `/vote`, `/raters`, `/login` and `/join/{invite}`."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def start() -> RedirectResponse:
        return RedirectResponse("/vote", 303)

    @routes.get("/vote")
    def vote(caller: Caller, services: ServicesOf) -> HTMLResponse:
        campaign = services.campaign()
        guidelines = safe_html(campaign.settings.guidelines) or ""
        return page(services, "vote.html", caller, here="/vote", guidelines=guidelines)

    @routes.get("/raters")
    def raters(caller: Caller, services: ServicesOf) -> HTMLResponse:
        return page(services, "raters.html", caller, here="/raters")

    @routes.get("/login")
    def log_in(services: ServicesOf) -> HTMLResponse:
        return page(services, "login.html", None)

    @routes.get("/join/{invite}")
    def join(invite: str, services: ServicesOf) -> HTMLResponse:
        return page(services, "join.html", None)

    return routes


def page(services: Services, template: str, caller: Identity | None, **context: object) -> HTMLResponse:
    """A rendered template. `caller` decides which links the navigation bar has."""
    return HTMLResponse(services.templates.get_template(template).render(caller=caller, **context))
