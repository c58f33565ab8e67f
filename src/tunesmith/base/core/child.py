"""A child process that answers calls: started when it is needed, killed, and started again after its end."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_END_S = 10.0


def start(module: str, env: Mapping[str, str] | None = None) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A process that runs `python -m module N`, with the other end of the returned socket as descriptor N.

    Modules are found where this process finds them. It is in a session of its own, because Ctrl-C is for this one, and
    what it prints goes to stderr, because this one may print JSON. Variables of `env` are set unless they are already.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env={**(env or {}), **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return process, ours


def how_it_ended(code: int) -> str:
    """Words for an exit code, such as `was ended by SIGSEGV`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_with_parent() -> None:
    """Have this process killed when its parent ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with(process: int) -> None:
    """Have this process end when that of the id `process`, which may not be its parent, does, where it can (Linux)."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        ended = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([ended], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="tunesmith leader", daemon=True).start()


def serve(prepare: Callable[[Any], Callable[[Any], object]], connection: Connection | None = None) -> None:
    """The program of a `Child`: answers calls by the function `prepare(setup)`, until the parent is gone.

    An answer that is a Future is sent once it has ended, and other calls are answered meanwhile. Another process than
    one of `start` gives its `connection`.
    """
    end_with_parent()
    connection = connection or Connection(int(sys.argv[1]))
    sending = threading.Lock()

    def send(answer: object) -> None:
        with sending:
            connection.send(answer)

    def send_ended(answer: "Future[object]") -> None:
        with suppress(ConnectionError):  # the parent is gone, which the loop sees too
            send(answer.result())

    try:
        answer = prepare(connection.recv())
        while True:
            answered = answer(connection.recv())
            if isinstance(answered, Future):
                cast("Future[object]", answered).add_done_callback(send_ended)
            else:
                send(answered)
    except (EOFError, ConnectionError):
        os._exit(0)  # a thread of a call that hung would keep the process


class Child:
    """A process of the program `module`, which is sent `setup`, and then one call after the other.

    The first call starts it, and so does the next one after its end. It ends with this process. A process that is
    forked from this one does not own it, and cannot end it.
    """

    def __init__(self, module: str, setup: object, env: Mapping[str, str] | None = None) -> None:
        self._module, self._setup, self._env = module, setup, env
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_late = False
        self.is_closed = False
        """True after `close`: nobody waits for an answer any more."""

    def start(self) -> None:
        """Start it unless it was. Raises OSError if it cannot be started, or ends at once."""
        if self._connection is None:
            self._process, ours = start(self._module, self._env)
            self._connection = Connection(ours.detach())
            self._connection.send(self._setup)

    def send(self, call: object) -> None:
        """Send a call. Raises OSError if the process has ended, or cannot be started."""
        self.start()
        assert self._connection is not None
        self._connection.send(call)

    def receive(self, limit_s: float | None = None) -> Any:
        """The answer to the last call. Raises EOFError or OSError if the process ended, or gave none in time."""
        if self._connection is None:
            raise EOFError
        self._is_late = not self._connection.poll(limit_s)
        if self._is_late:
            raise EOFError
        return self._connection.recv()

    def end(self) -> str:
        """Kill it; how it had ended before, such as `was ended by SIGSEGV`."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is None or connection is None:
            return "has not begun"
        connection.close()
        is_late, self._is_late = self._is_late, False
        try:
            # It closes its connection a little before its end.
            return how_it_ended(process.wait(0.1 if is_late else _END_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "gave no answer in time"

    def close(self) -> None:
        """Kill it; the thread that waits for its answer, if there is one, sees it end."""
        self.is_closed = True
        process = self._process  # the thread that waits may `end` it at the same time
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
