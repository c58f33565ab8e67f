"""A lock for calls of an object that may come from several threads, from within each other, or from another process."""

import os
import threading
from contextlib import AbstractContextManager

from tunesmith.base.core.errors import InputError


class Turns:
    """Lets one thread at a time call an object, `what`; others wait for their turn.

    A call from within a call, by a function that the first one calls, would wait for ever; and where an object
    `has_pipes` or sockets, a process that was forked has the same ones as its parent. Both are refused.
    """

    def __init__(self, what: str, *, has_pipes: bool = False) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._process = os.getpid() if has_pipes else None

    def next(self) -> AbstractContextManager[object]:
        """The block of a call, to be entered at once.

        It is the lock itself: Python handles no signal between taking a lock and the block, nor between the block and
        its release. A function of ours could be left by Ctrl-C there, and the object would refuse all later calls.

        Raises:
            InputError: the call comes from within another one, or from a process that was forked.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise InputError(
                f"the {self._what} was called from within a call of it, by a function that it calls; call it when that "
                "call has returned, or make another one for this"
            )
        if self._process not in (None, os.getpid()):
            raise InputError(
                f"the {self._what} was opened by process {self._process}, and this is another one, {os.getpid()}, "
                "that was forked from it; open one in each process"
            )
        return self._lock
