"""`tunesmith demo --live`, and the server and the trainer of the live loop as child processes."""

import json
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.load import load_recipe
from tunesmith.config.schema import LiveRecipe
from tunesmith.core.errors import RunError
from tunesmith.live import loop as live
from tunesmith.live.loop import LiveResult

_LEAVE_S = 60.0
"""Seconds after which a process that was asked to end is killed."""

_TAIL = 2_000
"""Characters of a log that an error shows."""


@dataclass(frozen=True, slots=True)
class Child:
    """A `tunesmith` command in a child process; its stderr goes to `log`."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def require_alive(self) -> None:
        """Raise RunError, with the end of its log, if it has ended."""
        code = self.process.poll()
        if code is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
            raise RunError(f"the {self.name} ended with code {code}; {self.log} says:\n{tail}")

    def end(self) -> int:
        """Its exit code, after SIGTERM; it is killed if it does not leave."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def child(name: str, words: Sequence[str], log: Path) -> Iterator[Child]:
    """`tunesmith` with `words`, ended when the block ends. Its stdout can be read line by line."""
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunesmith", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    found = Child(name, process, log)
    try:
        yield found
    finally:
        found.end()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address, and the link that logs the first admin in, once."""

    url: str
    login_url: str
    child: Child


@contextmanager
def server(folder: Path, *, port: int = 0) -> Iterator[Served]:
    """`tunesmith serve` on `folder`, ended when the block ends. Raises RunError if it does not come up."""
    words = ["serve", "--dir", str(folder), "--port", str(port), "--json"]
    with child("server", words, folder / "serve.log") as found:
        assert found.process.stdout is not None
        line = found.process.stdout.readline()
        if not line:
            found.process.wait(_LEAVE_S)
            found.require_alive()
        facts = json.loads(line)
        yield Served(facts["url"], facts.get("login_url") or facts["url"], found)


def wait_until(deadline_s: float, watched: Sequence[Child], poll_s: float = 0.25) -> None:
    """Wait until the monotonic clock shows `deadline_s`. Raises RunError as soon as a watched process has ended."""
    while time.monotonic() < deadline_s:
        for one in watched:
            one.require_alive()
        time.sleep(poll_s)


@dataclass(frozen=True, slots=True)
class LiveDemo:
    """The folder of votes, versions and metrics, and what the trainer came to."""

    folder: Path
    result: LiveResult


def run_live_demo(out: Path, *, seed: int = 0, announce: Callable[[str], object], opens_page: bool = True) -> LiveDemo:
    """Serve the voting page and train until Ctrl-C. The folder is `live` below `out`; a later call continues it.

    `announce` is given the address that logs the person in. Raises RunError if the server does not come up.
    """
    folder = out / "live"
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_recipe("live", recipe="live_smollm2", overrides={"live.dir": str(folder), "run.seed": seed})
    assert isinstance(loaded.recipe, LiveRecipe)
    with server(folder) as served:
        announce(served.login_url)
        if opens_page:
            webbrowser.open(served.login_url)
        return LiveDemo(folder, live.run(loaded.recipe, provenance=loaded.provenance))
