"""Workers as processes of this machine: pipes for messages, memory files for weights."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

from safetensors.torch import save

from tunesmith.base.core import child
from tunesmith.base.core.errors import ServerError
from tunesmith.base.core.log import get_logger
from tunesmith.engine.rollout.workers.messages import Handle, Lost, Message, Reply, Setup, Tensors

_log = get_logger(__name__)

_TRIES = 3
"""Processes that start workers which may end without having started one, before the run does."""

_FORK_S = 300.0
"""Seconds in which one has imported its libraries and forked."""


class Transport(Protocol):
    """Starts workers, by number, and carries messages to them. A worker has one message at a time."""

    def start(self, worker: int, setup: Setup) -> None:
        """Start `worker`, or start it again."""
        ...

    def send(self, worker: int, message: Message) -> None:
        """Send a message. If the worker ended, `receive` will say so."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """The replies that have arrived, after `timeout_s` at most."""
        ...

    def interrupt(self, worker: int) -> bool:
        """Ask for an early end of a draw, which is then answered by `Refused`. False if a transport cannot do this."""
        ...

    def kill(self, worker: int) -> None:
        """End the worker at once, whatever it does."""
        ...

    def publish(self, tensors: Tensors) -> Handle:
        """Store a copy of `tensors` for all workers."""
        ...

    def discard(self, handle: Handle) -> None:
        """Free what was published; workers that have it may keep it."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...

    def pid(self, worker: int) -> int:
        """The id of the worker's process, on its machine."""
        ...


class Launcher:
    """A process with all libraries loaded, which is forked for each worker; it ends with this one, and they with it.

    If it was killed, or hangs, it is started again; the engine then replaces the workers that ended with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def begin(self) -> None:
        """Start it: its imports take seconds, which pass meanwhile."""
        with self._lock:
            self._started()

    def fork(self, connection: Connection) -> int:
        """The id of a new worker's process, which has the other end of `connection`.

        Raises:
            ServerError: it ended several times, one after the other.
        """
        ended = ""
        with self._lock:
            for _ in range(_TRIES):
                try:
                    socket.send_fds(self._started(), [b"x"], [connection.fileno()])
                    answer = self._started().recv(8)
                except OSError:
                    answer = b""
                if answer:
                    return int.from_bytes(answer, "little")
                ended = self._end()
                _log.warning("the process that starts rollout workers %s; it is started again", ended)
        raise ServerError(f"the process that starts rollout workers {ended}, {_TRIES} times; its messages are above")

    def _started(self) -> socket.socket:
        if self._running is None:
            self._running = child.start("tunesmith.engine.rollout.workers.process")
            self._running[1].settimeout(_FORK_S)
        return self._running[1]

    def _end(self) -> str:
        """The way it ended; one that hangs is killed."""
        assert self._running is not None
        (process, control), self._running = self._running, None
        control.close()
        try:
            return child.how_it_ended(process.wait(0.5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"gave no answer for {_FORK_S:g} s"


@cache
def _launcher(owner: int) -> Launcher:
    """The launcher of the process `owner`, which all its engines share."""
    return Launcher()


class LocalTransport:
    """Workers as processes of this machine. They end with this process, however that ends."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._is_closed = False
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._handles: dict[int, int] = {}  # of the processes: an id may be another process's later
        self._files: dict[str, int] = {}  # descriptors of published tensors, by path
        _launcher(self._owner).begin()

    def start(self, worker: int, setup: Setup) -> None:
        """See `Transport`."""
        ours, theirs = Pipe()
        with theirs:
            pid = _launcher(self._owner).fork(theirs)
        self._forget(worker)
        self._pids[worker], self._connections[worker] = pid, ours
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which `receive` will find
            self._handles[worker] = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            ours.send(setup)

    def send(self, worker: int, message: Message) -> None:
        """See `Transport`."""
        if worker in self._connections:
            with contextlib.suppress(OSError):
                self._connections[worker].send(message)

    def receive(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """See `Transport`."""
        ready = wait(self._connections.values(), timeout_s)
        if self._is_closed:  # by another thread, at the end of the process
            return []
        return [(worker, self._reply(worker)) for worker, one in list(self._connections.items()) if one in ready]

    def interrupt(self, worker: int) -> bool:
        """See `Transport`."""
        self._signal(worker, signal.SIGUSR1)
        return True

    def kill(self, worker: int) -> None:
        """See `Transport`."""
        self._signal(worker, signal.SIGKILL)

    def publish(self, tensors: Tensors) -> Handle:
        """See `Transport`. The copy is in memory that belongs to no folder, so that it is freed however this ends."""
        content = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
        descriptor = os.memfd_create("tunesmith-weights")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._files[path] = descriptor
        return path

    def discard(self, handle: Handle) -> None:
        """See `Transport`."""
        os.close(self._files.pop(handle))

    def close(self) -> None:
        """See `Transport`. In a process that was forked since, nothing: the workers are its parent's."""
        if self._owner != os.getpid():
            return
        self._is_closed = True
        for worker in list(self._connections):
            self.kill(worker)
            self._forget(worker)
        for path in list(self._files):
            self.discard(path)

    def pid(self, worker: int) -> int:
        """See `Transport`."""
        return self._pids[worker]

    def _reply(self, worker: int) -> Reply:
        try:
            return self._connections[worker].recv()
        except (EOFError, OSError):
            self._forget(worker)
            return Lost()

    def _forget(self, worker: int) -> None:
        """Close what is left of an earlier process of `worker`."""
        if worker in self._connections:
            self._connections.pop(worker).close()
        if worker in self._handles:
            os.close(self._handles.pop(worker))

    def _signal(self, worker: int, number: signal.Signals) -> None:
        if worker in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[worker], number)
