"""Workers as processes of this machine: pipes for messages, memory files for weights."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

from safetensors.torch import save

from tunesmith.core.errors import ServerError
from tunesmith.rollout.workers.messages import Handle, Lost, Message, Reply, Setup, Tensors


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
    """A process with all libraries loaded, which is forked for each worker; it ends with this one, and they with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tunesmith.rollout.workers.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    @property
    def has_ended(self) -> bool:
        """True if it can fork no more workers."""
        return self._process.poll() is not None

    def fork(self, connection: Connection) -> int:
        """The id of a new worker's process, which has the other end of `connection`.

        Raises:
            ServerError: the launcher ended.
        """
        try:
            socket.send_fds(self._control, [b"x"], [connection.fileno()])
            answer = self._control.recv(8)
        except OSError:
            answer = b""
        if not answer:
            raise ServerError("the process that starts rollout workers ended; its messages are above")
        return int.from_bytes(answer, "little")


@cache
def _launcher(owner: int, generation: int) -> Launcher:
    """The launcher of the process `owner`, which all its engines share."""
    return Launcher()


class LocalTransport:
    """Workers as processes of this machine. They end with this process, however that ends."""

    def __init__(self) -> None:
        self._generation = 0
        self._owner = os.getpid()
        self._is_closed = False
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._handles: dict[int, int] = {}  # of the processes: an id may be another process's later
        self._files: dict[str, int] = {}  # descriptors of published tensors, by path
        _launcher(os.getpid(), 0)  # its imports take seconds, which pass meanwhile

    def start(self, worker: int, setup: Setup) -> None:
        """See `Transport`."""
        while _launcher(os.getpid(), self._generation).has_ended:
            self._generation += 1
        ours, theirs = Pipe()
        with theirs:
            pid = _launcher(os.getpid(), self._generation).fork(theirs)
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
