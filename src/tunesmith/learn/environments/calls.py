"""Calls of environments that may raise or hang: within a time limit, those of an episode in a thread of its own."""

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tunesmith.base.core.errors import EnvironmentFailedError
from tunesmith.learn.environments.contract import Episode
from tunesmith.learn.rewards.threads import EventLoop, Task, ended, serve

T = TypeVar("T")

MOST_HANGING = 256
"""Threads that may hang at a time: each keeps its memory."""


class TimeLimitError(Exception):
    """A call took longer than it may."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"it took longer than {timeout_s:g} s")


class Shared:
    """The state that the calls of all episodes share: the time limit, one event loop, to which clients of services
    bind, and the threads that hang.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.loop = EventLoop()
        self._hanging: list[threading.Thread] = []
        self._lock = threading.Lock()

    def leave(self, thread: threading.Thread) -> None:
        """Note a thread that hangs. Raises EnvironmentFailedError if too many still do."""
        with self._lock:
            self._hanging = [*(one for one in self._hanging if one.is_alive()), thread]
            if len(self._hanging) > MOST_HANGING:
                raise EnvironmentFailedError(
                    f"{len(self._hanging)} calls of the environment hang at the same time, each beyond the time limit "
                    f"of {self.timeout_s:g} s; give its calls a limit of their own, raise environment.timeout_s, or "
                    "set environment.processes, which are ended with what hangs in them"
                )


class Calls:
    """Makes the calls of one episode, from its construction to its end, in one daemon thread: connections of SQLite and
    the like belong to the thread that made them. A call that never ends keeps the thread, but not the process.

    `shared` may be a time limit in seconds, for an episode alone.
    """

    def __init__(self, shared: Shared | float) -> None:
        shared = shared if isinstance(shared, Shared) else Shared(shared)
        self.timeout_s = shared.timeout_s
        self._shared = shared
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=serve, args=(self._tasks,), name="tunesmith-environment", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`. Raises what it raises, and TimeLimitError, after which it may still run: the episode is
        not to be called again.
        """
        future = self.submit(call)
        if ended(future, self.timeout_s):
            return future.result()
        self._shared.leave(self._thread)
        raise TimeLimitError(self.timeout_s)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """The future of `call`, which is made after those before it."""
        future: Future[T] = Future()
        self._tasks.put((contextvars.copy_context(), call, future))
        return future

    def wait(self, result: Any) -> Any:
        """`result`, or that of the coroutine that it is."""
        if not inspect.isawaitable(result):
            return result

        async def awaited() -> Any:
            return await asyncio.wait_for(result, self.timeout_s)

        return self._shared.loop.submit(awaited()).result()

    def end(self) -> None:
        """End the thread, once the call in it has ended."""
        self._tasks.put(None)


Open = Callable[[Calls], Episode]
"""Makes an episode, called in the thread of the given `Calls`, which waits for its coroutines too."""
