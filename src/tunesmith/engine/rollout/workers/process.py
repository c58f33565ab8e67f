"""The program of local workers: a process that loads the libraries once, and is forked for each worker."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from safetensors.torch import load_file

from tunesmith.base.core.child import serve
from tunesmith.engine.rollout.workers.messages import Message, Reply, Setup
from tunesmith.engine.rollout.workers.worker import Worker


def main() -> None:
    """Fork a worker for each descriptor that arrives at the socket whose number is the first argument, and answer with
    the process's id; end when the other side closes the socket.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then tells its workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(Connection(descriptors[0]))
        os.close(descriptors[0])
        control.sendall(pid.to_bytes(8, "little"))


def _serve(connection: Connection) -> None:
    """Answer messages until the other side closes the connection, or this process's parent ends; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        serve(_prepared, connection)
    except BaseException:  # noqa: BLE001 - a forked process must not return into its parent's loop
        traceback.print_exc()
    os._exit(1)


def _prepared(setup: Setup) -> Callable[[Message], Reply]:
    worker = Worker(setup, load_file)
    signal.signal(signal.SIGUSR1, lambda *_: worker.interrupt())
    return worker.answer


if __name__ == "__main__":
    main()
