"""Other processes: commands of Tunesmith, and contenders, each of which works only when a method of it is called.

Contenders have processes of their own, so that memory is counted apart, none inherits another's allocator, threads or
patched modules, and two of them can alternate. While one works the others block on a pipe.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from benchmarks.common import ROOT
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.runs.environment import peak_rss_since_reset_gb, reset_peak_rss

_LOG_LINES = 20
_PROGRAM = "import sys; from benchmarks.process import main; main(*sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Failure:
    """Answer of a contender that refuses its input."""

    message: str


class Contender:
    """A contender whose memory can be measured."""

    def peak(self) -> float:
        """Peak of resident memory in GB since the last call."""
        peak_gb = peak_rss_since_reset_gb()
        reset_peak_rss()
        return peak_gb


class Server:
    """The contender's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def next(self) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
        """The next call: method, arguments, options; None when the benchmark is done."""
        try:
            return self._connection.recv()
        except EOFError:  # its other end is closed
            return None

    def reply(self, answer: object) -> None:
        """Send `answer`, any record that can be pickled."""
        self._connection.send(answer)


class Process:
    """An object of the class `target` ("module:Class") in a process of its own, made from `settings`.

    `variables` are added to its environment; `python` runs it, by default the one that runs this.

    A class that owns its loop has a method `serve(server)` and answers calls itself.

    Example:
        with Process("benchmarks.contenders:Engine", settings, num_threads=2) as process:
            drawn = process.call("draw", work, seed=0)
    """

    def __init__(
        self,
        target: str,
        settings: object,
        *,
        num_threads: int,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        here, there = Pipe()
        self._connection = here
        self._name = target.rpartition(":")[2]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  see close
        self._process = subprocess.Popen(
            [python, "-c", _PROGRAM, target, str(there.fileno())],
            pass_fds=[there.fileno()],
            env=_environment(num_threads) | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        there.close()
        self._send(settings)
        self._answer()  # built, or why not

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """The answer of a method; a contender that takes longer than `timeout_s` is killed.

        Raises:
            InputError: it refuses its input.
            TrainingError: it raised anything else, ended, or took too long.
        """
        self._send((method, arguments, options))
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise TrainingError(f"no answer within {timeout_s:g} s; {self._ended()}")
        return self._answer()

    def close(self) -> None:
        """End the process; one that does not end within a minute is killed."""
        self._connection.close()
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


def main(target: str, descriptor: str) -> None:
    """Make the contender from the settings that come first, and answer calls until the benchmark is done."""
    connection = Connection(int(descriptor))
    server, settings = Server(connection), connection.recv()
    module, _, name = target.partition(":")
    try:
        contender = getattr(importlib.import_module(module), name)(settings)
        server.reply(None)
        if hasattr(contender, "serve"):
            contender.serve(server)
            return
        while (call := server.next()) is not None:
            method, arguments, options = call
            server.reply(getattr(contender, method)(*arguments, **options))
    except InputError as error:  # anything else ends the process, and its traceback is in the log
        server.reply(Failure(str(error)))


def tunesmith(
    *words: object, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """The JSON object that the command `tunesmith <words> --json` prints.

    Raises:
        TrainingError: it failed, or took longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tunesmith", *map(str, words), "--json"],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrainingError(f"`tunesmith {words[0]}` took longer than {timeout_s:g} s") from error
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-_LOG_LINES:])
        raise TrainingError(f"`tunesmith {words[0]}` ended with exit code {done.returncode}; it wrote last:\n{last}")
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _environment(num_threads: int) -> dict[str, str]:
    """The same for every contender. Threads by variable too: threads that a library starts know no other way."""
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    folders = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))  # another environment has neither
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, **threads, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
