"""Threads for reward functions that may hang: a worker that can be abandoned, and an event loop for async ones."""

import asyncio
import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tunesmith.base.core.errors import RewardError

T = TypeVar("T")

_MAX_LEFT_BEHIND = 8
_SIGNALS_S = 0.2  # a signal that another thread received is handled when the main thread wakes up
_LOOP_ANSWERS_S = 1.0  # a loop that nobody blocks answers within this time on a busy machine too
Task = tuple[contextvars.Context, Callable[[], object], "Future[Any]"]


class HangError(Exception):
    """A call took longer than it may."""


class _LeftBehind:
    """Threads that hang. Each keeps its memory, so that there is an end to them."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        """Note a thread that hangs. Raises RewardError for the eighth that still does."""
        self._threads = [*(left for left in self._threads if left.is_alive()), thread]
        if len(self._threads) >= _MAX_LEFT_BEHIND:
            raise RewardError(
                f"{len(self._threads)} threads hang in reward functions, the last is {thread.name}; give the function "
                "a time limit of its own, or a larger timeout_s"
            )


class Worker:
    """Runs calls in one daemon thread, and leaves the thread behind when a call takes too long.

    All calls share the thread, because SQLite connections and the like belong to the thread that made them. Context
    variables are those of the caller. A call that never ends keeps its thread, but not the process.
    """

    def __init__(self, name: str) -> None:
        self._name = f"tunesmith-reward-{name}"
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left_behind = _LeftBehind()
        self._num_threads = 0

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Result of `call`. Raises HangError after `timeout_s` seconds, RewardError if 8 threads hang."""
        future = self.submit(call)
        thread = self._running()
        if ended(future, timeout_s):  # not `future.result(timeout_s)`: the call may raise a TimeoutError of its own
            return future.result()
        self._thread = None
        self._tasks.put(None)  # should the call end after all, so does its thread
        self._left_behind.add(thread)
        raise HangError(f"its thread {thread.name} is left behind and may still run")

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Future of `call`, which runs after all calls submitted before."""
        self._running()
        future: Future[T] = Future()
        self._tasks.put((contextvars.copy_context(), call, future))
        return future

    def _running(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():  # after a fork no thread is alive
            self._num_threads += 1
            self._tasks = queue.SimpleQueue()
            name = f"{self._name}-{self._num_threads}"
            self._thread = threading.Thread(target=serve, args=(self._tasks,), name=name, daemon=True)
            self._thread.start()
        return self._thread


def serve(tasks: "queue.SimpleQueue[Task | None]") -> None:
    """Make the calls of `tasks` in this thread, until None comes."""
    while (task := tasks.get()) is not None:
        context, call, future = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001 - whatever it is, an exit included, is for the thread that waits
            future.set_exception(error)


class EventLoop:
    """One asyncio loop in a thread of its own, started on first use.

    Clients of async services bind to the loop that first used them, so that one loop must serve all calls; and the
    caller may itself run inside a loop, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._left_behind = _LeftBehind()
        self._starting = threading.Lock()

    def run(self, coroutine: Coroutine[object, object, T], timeout_s: float | None) -> T:
        """Result of `coroutine`.

        Raises HangError if the loop does nothing for `timeout_s` seconds, because some `async def` blocks it; the loop
        is then left behind. None waits for ever.
        """
        future = self.submit(coroutine)
        loop, thread = self._running()
        while not ended(future, timeout_s):
            answer: Future[None] = Future()
            loop.call_soon_threadsafe(answer.set_result, None)
            if not ended(answer, max(timeout_s or 0.0, _LOOP_ANSWERS_S)):
                self._loop = self._thread = None
                loop.call_soon_threadsafe(_wind_up, loop)
                self._left_behind.add(thread)
                raise HangError("an `async def` blocks the event loop: it calls something that waits without `await`")
        return future.result()

    def submit(self, coroutine: Coroutine[object, object, T]) -> "Future[T]":
        """Future of `coroutine`, which runs concurrently with those submitted before."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running()[0])

    def _running(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        with self._starting:  # calls may come from several threads
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                arguments = {"target": _run_loop, "args": (self._loop,), "name": "tunesmith-rewards", "daemon": True}
                self._thread = threading.Thread(**arguments)
                self._thread.start()
            return self._loop, self._thread


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop that was left behind, should it go on after all, and with it its thread."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_later(_LOOP_ANSWERS_S, loop.stop)


def result_of(future: "Future[T]") -> T:
    """Result of `future`. Signals are handled while waiting."""
    ended(future, None)
    return future.result()


def ended(future: "Future[Any]", timeout_s: float | None) -> bool:
    """True once `future` has ended, False if it has not after `timeout_s` seconds; None waits for ever."""
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not ended.wait(max(0.0, min(end_s - time.monotonic(), _SIGNALS_S))):
        if time.monotonic() >= end_s:
            return False
    return True


async def within(coroutine: Coroutine[object, object, T], timeout_s: float | None) -> T:
    """Result of `coroutine`. Raises HangError after `timeout_s` seconds, whatever the coroutine does.

    `asyncio.wait_for` would wait on for a coroutine that does not let itself be cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody else asks for it
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if done:
        return task.result()
    task.cancel()
    raise HangError("it was cancelled")
