"""The watch page and its data: versions, metrics, and the stream of what is new."""

from fastapi import APIRouter

from tunesmith.web.access import Rule

RULES: tuple[Rule, ...] = ()
"""The routes of this module, for the guard's table: a route without a rule is never reached."""


def watch_router() -> APIRouter:
    """A router with the page `/watch` and, under `/api/v1`, `versions`, `metrics` and `stream`.

    Routes find stores and shutdown by `services.ServicesOf`, and who is calling by `services.Caller`.
    """
    return APIRouter()
