"""A terminal for commands that run in this process."""

import os
import pty
import re
import signal
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from tunesmith.apps.cli.main import main

_END = b"\x00"


class Terminal:
    """A pseudo-terminal that commands read from and write to."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        self._stdin = os.fdopen(os.dup(slave), "r")
        self._stdout = os.fdopen(slave, "w")
        self._interrupt_at: re.Pattern[bytes] | None = None
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, words: Sequence[str]) -> int:
        """The exit code of a command with this terminal as its stdin and stdout."""
        # A fixture cannot put them there: pytest's own capture begins after it.
        with patch("sys.stdin", self._stdin), patch("sys.stdout", self._stdout):
            return main(words)

    @property
    def shown(self) -> str:
        """Everything that was written, once it has arrived here."""
        self._stdout.write(_END.decode())
        self._stdout.flush()
        while not self._shown.endswith(_END):
            time.sleep(0.001)
        self._shown = self._shown[: -len(_END)]
        return self._shown.decode()

    def type(self, text: str) -> None:
        """Type `text` on the keyboard."""
        os.write(self._master, text.encode())

    def press_ctrl_c_at(self, pattern: str) -> None:
        """Press Ctrl-C once, as soon as `pattern` is shown."""
        self._interrupt_at = re.compile(pattern.encode())

    def close(self) -> None:
        """End the reader and free the terminal."""
        self._stdin.close()
        self._stdout.close()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the other side is closed
                return
            self._shown += data
            if self._interrupt_at and self._interrupt_at.search(self._shown):
                self._interrupt_at = None
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal without colours."""
    monkeypatch.setenv("TERM", "dumb")
    opened = Terminal()
    yield opened
    opened.close()
