"""The server's side of the process that draws the answers of the arena, `apps/workflows/arena_worker.py`."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import RunError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Message
from tunesmith.collect.store.database import Closeable

MAX_WAITING = 64
"""Most answers that are asked for at a time."""

CANNOT_LOAD = "one of the two models cannot be used at the moment; the next try takes others"
"""Message of a page about a model that cannot be loaded: the reason names it, and is in the log of the server."""

_log = get_logger(__name__)
_END_S = 5.0

Json = Mapping[str, Any]


@dataclass(slots=True)
class Drawing:
    """An answer while it is drawn: the `text` so far, then the whole `answer` or an `error` for the page. `is_lost`:
    the model cannot be loaded, so another try needs another one.
    """

    text: str = ""
    answer: Json | None = None
    error: str = ""
    is_lost: bool = False


def command() -> list[str]:
    """The command line of the process."""
    return [sys.executable, "-m", "tunesmith.apps.workflows.arena_worker"]


class Drawer(Closeable):
    """Has answers drawn by one process, which is started when it is needed, and again after it has ended.

    Safe to call from any number of threads. What the process says on stderr is in the file `log`.
    """

    def __init__(self, log: Path) -> None:
        self._log_file = log
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._process: subprocess.Popen[str] | None = None
        self._open: dict[int, tuple[subprocess.Popen[str], Drawing]] = {}

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def draw(self, model: Json, messages: Sequence[Message], sampling: Json, *, as_text: bool = False) -> Drawing:
        """The answer of `model` (a section of a recipe) to a conversation, which goes on in the background. `as_text`:
        the model reads one text even if it has a chat template.

        Raises RunError if too many wait, or the process cannot be started.
        """
        request = {
            "model": model,
            "messages": [dict(one) for one in messages],
            "sampling": sampling,
            "as_text": as_text,
        }
        with self._lock:
            if len(self._open) >= MAX_WAITING:
                raise RunError(f"{MAX_WAITING} answers are being drawn; try again in a moment")
            process = self._running()
            assert process.stdin is not None
            id, drawing = next(self._ids), Drawing()
            self._open[id] = process, drawing
            try:
                process.stdin.write(json.dumps({"id": id, **request}) + "\n")
                process.stdin.flush()
            except OSError:  # it has just ended; its reader says so to all others
                del self._open[id]
                drawing.error = "the process that draws answers has ended; try again"
        return drawing

    def stop(self, drawings: Sequence[Drawing]) -> None:
        """End drawings that nobody waits for. Those that are over are left alone."""
        with self._lock:
            for id in [id for id, (_, drawing) in self._open.items() if any(drawing is one for one in drawings)]:
                process, _ = self._open.pop(id)
                assert process.stdin is not None
                with suppress(OSError):  # it has ended, and with it the drawing
                    process.stdin.write(json.dumps({"stop": id}) + "\n")
                    process.stdin.flush()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            try:
                with self._log_file.open("w", encoding="utf-8") as log:
                    # A session of its own: Ctrl-C is for the server, which ends the process.
                    self._process = subprocess.Popen(
                        command(),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        encoding="utf-8",
                        start_new_session=True,
                    )
            except OSError as error:
                raise RunError(f"the process that draws answers cannot be started ({error.strerror})") from error
            threading.Thread(target=self._read, args=(self._process,), name="arena", daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Note the replies of `process` until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            self._note(json.loads(line))
        code = process.wait()
        with self._lock:
            if self._process is not None and code != 0:
                _log.warning("the process that draws answers ended with code %d, see %s", code, self._log_file)
            for id in [id for id, (asked, _) in self._open.items() if asked is process]:
                self._open.pop(id)[1].error = f"the process that draws answers ended (code {code}); try again"

    def _note(self, reply: Json) -> None:
        with self._lock:
            if reply["id"] not in self._open:  # it was stopped
                return
            drawing = self._open[reply["id"]][1]
            if "text" in reply:
                drawing.text += reply["text"]
                return
            del self._open[reply["id"]]
            if "answer" in reply:
                drawing.answer = reply["answer"]
                return
            drawing.is_lost = reply["kind"] == "model"
            drawing.error = CANNOT_LOAD if drawing.is_lost else reply["error"]
            _log.warning("an answer cannot be drawn: %s", reply["error"])
