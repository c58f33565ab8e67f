"""Docker's health check: exit code 0 if a `tunesmith` runs, and each `tunesmith serve` answers on its port.

A training has no port: it is healthy while its process lives. Only the standard library, so that the check is cheap.
"""

import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_PORTS = {"serve": "8000", "watch": "8001"}
_TIMEOUT_S = 5


def commands(processes: Path = Path("/proc")) -> list[list[str]]:
    """The words after `tunesmith` in the command line of each process that runs it."""
    found: list[list[str]] = []
    for file in processes.glob("[0-9]*/cmdline"):
        try:
            words = file.read_text(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        places = [place for place, word in enumerate(words[:3]) if Path(word).name == "tunesmith"]
        if places:
            found.append(words[places[0] + 1 :])
    return found


def port_of(words: Sequence[str]) -> str | None:
    """The port on which a command answers; None if it has none, or took a free one that only its output names."""
    if not words or words[0] not in _PORTS:
        return None
    port = _PORTS[words[0]]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--port":
            port = after
        elif word.startswith("--port="):
            port = word.partition("=")[2]
    return None if port == "0" else port


def problem() -> str:
    """What is wrong, empty if nothing is."""
    running = commands()
    if not running:
        return "no tunesmith runs"
    for port in filter(None, map(port_of, running)):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=_TIMEOUT_S).close()
        except OSError as error:
            return f"port {port} does not answer: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(problem() or 0)
