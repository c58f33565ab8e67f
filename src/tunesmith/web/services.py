"""What routes work with: the stores, the logins and the lifetime of the server, and who is calling."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

import jinja2
from fastapi import Depends, Request

from tunesmith.core.errors import TunesmithError
from tunesmith.store.records import Campaign, CampaignSettings
from tunesmith.store.runs import RunReader
from tunesmith.store.votes import VoteStore
from tunesmith.web.guard import identity_of
from tunesmith.web.logins import Identity, Logins
from tunesmith.web.settings import ServerSettings


class Lifetime:
    """Made with the app, ended by the server when a signal asks for it. Used in the event loop only."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()

    @property
    def is_ending(self) -> bool:
        """True once the server is about to end: streams return, and no new ones are begun."""
        return self._ending.is_set()

    def end(self) -> None:
        """Wake everybody who sleeps here."""
        self._ending.set()

    async def sleep(self, seconds: float) -> bool:
        """True if the server is about to end, at once when it is; False after `seconds`."""
        try:
            await asyncio.wait_for(self._ending.wait(), seconds)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Services:
    """Made once with the app. `votes` is written here; `runs` is read, and may be of a file that is not there yet."""

    settings: ServerSettings
    votes: VoteStore
    runs: RunReader
    logins: Logins
    lifetime: Lifetime
    templates: jinja2.Environment

    def campaign(self) -> Campaign:
        """The campaign that is voted on: the newest open one; where there is none, a new one with the defaults."""
        for campaign in reversed(self.votes.reader.campaigns()):
            if campaign.closed_at is None:
                return campaign
        return self.votes.set_campaign(CampaignSettings())


def services_of(request: Request) -> Services:
    """The services of the app that this request came to."""
    return request.app.state.services


def caller_of(request: Request) -> Identity:
    """Who is calling. The guard let them in, so there is somebody on every route that is not public."""
    identity = identity_of(request.scope)
    if identity is None:
        raise TunesmithError(f"{request.url.path} needs a caller, but its rule in the table of routes is public")
    return identity


ServicesOf = Annotated[Services, Depends(services_of)]
"""Type of a route's parameter that receives the services."""

Caller = Annotated[Identity, Depends(caller_of)]
"""Type of a route's parameter that receives who is calling."""
