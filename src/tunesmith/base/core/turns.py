"""A lock for calls of an object that may come from several threads, from within each other, or from another process."""

import os
import threading

from tunesmith.base.core.errors import InputError


class Turns:
    """A block that one thread at a time is in; others wait for their turn. `what` is the object that is called.

    A call from within a call, by a function that the first one calls, would wait for ever; and where an object
    `has_pipes` or sockets, a process that was forked has the same ones as its parent.

    Raises:
        InputError: for these two.
    """

    def __init__(self, what: str, *, has_pipes: bool = False) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._process = os.getpid() if has_pipes else None

    def __enter__(self) -> None:
        if self._thread == threading.get_ident():
            raise InputError(
                f"the {self._what} was called from within a call of it, by a function that it calls; call it when that "
                "call has returned, or make another one for this"
            )
        if self._process not in (None, os.getpid()):
            raise InputError(
                f"the {self._what} was opened by process {self._process}, and this is another one, {os.getpid()}, "
                "that was forked from it; open one in each process"
            )
        self._lock.acquire()
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None
        self._lock.release()
