"""uvicorn's HTTP protocol with one more limit: the head of a request must arrive in time."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with_deadline(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class that hangs up on a client who begins a request, or a connection, and does not go on.

    uvicorn itself waits for ever, so a few hundred silent clients would use up all connections.
    """

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # pyright: ignore[reportArgumentType]
            self._start()

        def data_received(self, data: bytes) -> None:
            self._start()
            super().data_received(data)
            # A request is under way: its body and its answer have limits of their own.
            if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
                self._stop()

        def on_response_complete(self) -> None:
            # From here on uvicorn's own limit for idle connections counts, until the next request begins.
            self._stop()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(head_timeout_s, self.transport.close)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedProtocol
