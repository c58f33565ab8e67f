"""Calls of environments that may raise or hang, each within a time limit, in threads that end with the process."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tunesmith.base.core.errors import EnvironmentFailedError
from tunesmith.learn.rewards.threads import EventLoop

T = TypeVar("T")

MOST_HANGING = 32
"""Threads that may hang at a time: each keeps its memory."""


class TimeLimitError(Exception):
    """A call took longer than it may."""


class Calls:
    """Makes calls of `timeout_s` seconds at most. Coroutines run in one event loop, which clients of services bind to.

    Raises EnvironmentFailedError once `MOST_HANGING` threads hang.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = EventLoop()
        self._hanging: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`. Raises TimeLimitError, after which the call may still run, and what the call raises."""
        future: Future[T] = Future()
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        thread = threading.Thread(target=_run, args=(call, future), name="tunesmith-environment", daemon=True)
        thread.start()
        if ended.wait(self.timeout_s):
            return future.result()
        self._left(thread)
        raise TimeLimitError(f"it took longer than {self.timeout_s:g} s")

    def wait(self, result: Any) -> Any:
        """`result`, or that of the coroutine that it is."""
        if not inspect.isawaitable(result):
            return result

        async def awaited() -> Any:
            return await asyncio.wait_for(result, self.timeout_s)

        return self._loop.submit(awaited()).result()

    def _left(self, thread: threading.Thread) -> None:
        with self._lock:
            self._hanging = [one for one in self._hanging if one.is_alive()]
            self._hanging.append(thread)
            if len(self._hanging) >= MOST_HANGING:
                raise EnvironmentFailedError(
                    f"{len(self._hanging)} calls of the environment hang at the same time, each beyond the time limit "
                    f"of {self.timeout_s:g} s; give its calls a limit of their own, or raise environment.timeout_s"
                )


def _run(call: Callable[[], T], future: "Future[T]") -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - an exit too is for the thread that waits
        future.set_exception(error)
