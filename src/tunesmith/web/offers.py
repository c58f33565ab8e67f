"""Brings the trainer's offers and versions from `runs.db` into `votes.db`, again and again while the server runs."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool

from tunesmith.core.errors import TunesmithError
from tunesmith.core.log import Once, get_logger
from tunesmith.store.records import PolicyVersion
from tunesmith.web.services import Services

POLL_S = 0.5
_BATCH = 200


class Copier:
    """Copies what is new since the last call. One call at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._versions: Sequence[PolicyVersion] = ()

    def copy(self) -> int:
        """Number of items that were made of new offers."""
        votes, runs = self._services.votes, self._services.runs
        campaign_id = self._services.campaign().id
        made, cursor = 0, votes.last_offer_id(campaign_id)
        while offers := runs.offers_after(cursor, _BATCH):
            made += votes.ingest(campaign_id, offers)
            cursor = offers[-1].id
        versions = runs.versions()
        if versions != self._versions:
            votes.copy_versions(versions)
            self._versions = versions
        return made


async def keep_copying(services: Services) -> None:
    """Copy every `POLL_S` until the server ends. What goes wrong is said once and tried again."""
    once = Once(get_logger(__name__))
    copier = Copier(services)
    while not await services.lifetime.sleep(POLL_S):
        try:
            await run_in_threadpool(copier.copy)
        except TunesmithError as error:
            once.warning(f"the trainer's offers cannot be read: {error}")
