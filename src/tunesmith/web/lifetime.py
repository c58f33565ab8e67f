"""Tells what runs for long, such as a stream of events, that the server is about to end."""

import asyncio


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
