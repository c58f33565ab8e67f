"""Contenders of a benchmark, each in a process of its own that works when it is asked.

So memory is counted apart, no contender inherits another's allocator, threads or patched modules, and two of them can
alternate. While one works the others block on a pipe.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from tunesmith.core.errors import InputError, TrainingError

_LOG_LINES = 20
_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = "import sys; from benchmarks.process import main; main(*sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a contender answers to something that it cannot use."""

    message: str


class Server:
    """The contender's end of the pipe: `next` waits for a request, `reply` answers it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def next(self) -> Any:
        """The next request; None when the benchmark is done."""
        try:
            return self._connection.recv()
        except EOFError:  # its other end is closed
            return None

    def reply(self, answer: object) -> None:
        """Send `answer`, any record that can be pickled."""
        self._connection.send(answer)


class Contender(Protocol):
    """Something that is measured: `handle` does the work that a request asks for."""

    def handle(self, request: Any) -> object:
        """The answer to one request."""
        ...


class Process:
    """A contender in a process of its own.

    Example:
        with Process("benchmarks.contenders:serve_engine", settings, num_threads=2) as process:
            run = process.ask(Draw(...))
    """

    def __init__(self, target: str, settings: object, *, num_threads: int) -> None:
        here, there = Pipe()
        self._connection = here
        self._name = target.rpartition(":")[2].removeprefix("serve_")
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  see close
        command = [sys.executable, "-c", _PROGRAM, target, str(there.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[there.fileno()],
            env=_environment(os.environ, num_threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        there.close()
        self._send(settings)
        self._answer()  # built, or why not

    def ask(self, request: object, *, timeout_s: float | None = None) -> Any:
        """The contender's answer to `request`; one that takes longer than `timeout_s` is killed.

        Raises:
            InputError: if it refuses what it was given.
            TrainingError: if it raised anything else, ended, or took too long.
        """
        self._send(request)
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise TrainingError(f"no answer within {timeout_s:g} s; {self._ended()}")
        return self._answer()

    def close(self) -> None:
        """End the process; one that does not end within a minute is killed."""
        self._connection.close()  # the contender finds no further request
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise TrainingError(self._ended()) from error

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise TrainingError(self._ended()) from error
        if isinstance(answer, Failure):
            self.close()
            raise InputError(answer.message)
        return answer

    def _ended(self) -> str:
        self._log.seek(0)
        lines = self._log.read().splitlines()[-_LOG_LINES:]
        code = self._process.wait()
        return f"the process of {self._name} ended with exit code {code}; it wrote last:\n" + "\n".join(lines)


def serve(build: Callable[[Any], Contender], settings: object, server: Server) -> None:
    """Build a contender and let it answer until the benchmark is done."""
    contender = build(settings)
    server.reply(None)
    while (request := server.next()) is not None:
        server.reply(contender.handle(request))


def main(target: str, descriptor: str) -> None:
    """Run the function `module:name` of `target` with the settings that come first and a `Server`."""
    connection = Connection(int(descriptor))
    settings = connection.recv()
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(settings, Server(connection))
    except InputError as error:  # anything else ends the process, and its traceback is in the log
        connection.send(Failure(str(error)))


def _environment(outer: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The same for every contender. Threads by variable too: threads that a library starts know no other way."""
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join(filter(None, (str(_ROOT), outer.get("PYTHONPATH"))))  # where `benchmarks` is imported from
    return {**outer, **threads, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
