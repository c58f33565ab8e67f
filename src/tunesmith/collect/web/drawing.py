"""The server's side of the process that draws answers, `apps/workflows/model_worker.py`."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import RunError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Message
from tunesmith.base.schema.weights import Weights
from tunesmith.collect.store.database import Closeable

MAX_WAITING = 64
"""Most answers of the arena that are drawn at a time."""

CANNOT_LOAD = "one of the two models cannot be used at the moment; the next try takes others"
"""Message of a page about a model that cannot be loaded: the reason names it, and is in the log of the server."""

TOO_LONG = (
    "the conversation is longer than a model's context; leave out its oldest turns, change the message, or begin a new "
    "conversation"
)
"""Message for people in place of numbers of tokens, which they cannot set."""

_log = get_logger(__name__)
_END_S = 5.0

Json = Mapping[str, Any]

OnReply = Callable[[Json], None]
"""Called with each reply to a request, by the thread that reads them; the last one is `done` or an `error`."""


@dataclass(slots=True)
class Drawing:
    """An answer of the arena while it is drawn: the `text` so far, then the whole `answer` or an `error` for the page.
    `is_lost`: the model cannot be loaded, so another try needs another one.
    """

    id: int = -1
    text: str = ""
    answer: Json | None = None
    error: str = ""
    is_lost: bool = False

    def note(self, reply: Json) -> None:
        """Take a reply of the process."""
        self.text += reply.get("text", "")
        self.answer = reply.get("answer", self.answer)
        if "error" not in reply:
            return
        self.is_lost = reply["kind"] == "model"
        told: Json = {"model": CANNOT_LOAD, "context": TOO_LONG}
        self.error = told.get(reply["kind"], reply["error"])
        _log.warning("an answer cannot be drawn: %s", reply["error"])


def command(*, stays: bool, weights: Weights = "model") -> list[str]:
    """The command line of the process, which `stays` or ends when nothing is asked for a while."""
    flags = [*(["--stay"] if stays else []), *(["--int8"] if weights == "int8" else [])]
    return [sys.executable, "-m", "tunesmith.apps.workflows.model_worker", *flags]


@dataclass(slots=True)
class _Process:
    """A process, and who is told its replies."""

    popen: subprocess.Popen[str]
    listeners: dict[int, OnReply] = field(default_factory=dict[int, OnReply])


class Drawer(Closeable):
    """Has answers drawn by one process, which is started when it is needed, and again after it has ended.

    Safe to call from any number of threads. What the process says on stderr is in the file `log`. With `stays` it keeps
    its models also while nothing is asked; `weights` are those that it draws with.
    """

    def __init__(self, log: Path, *, stays: bool = False, weights: Weights = "model") -> None:
        self._log_file = log
        self._stays = stays
        self._weights: Weights = weights
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._process: _Process | None = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.popen.terminate()
            try:
                process.popen.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()

    @property
    def num_open(self) -> int:
        """Requests that are drawn or wait."""
        process = self._process
        return 0 if process is None else len(process.listeners)

    def ask(self, request: Json, on_reply: OnReply) -> int:
        """Send a request, without its `id`, as the process takes it; returns its id. `on_reply` may be called before
        that. Raises RunError if the process cannot be started, or has just ended.
        """
        with self._lock:
            process, id = self._running(), next(self._ids)
            process.listeners[id] = on_reply
            if not _send(process, {"id": id, **request}):
                del process.listeners[id]
                raise RunError("the process that draws answers has ended; try again")
        return id

    def stop(self, id: int) -> None:
        """End a request that nobody waits for; there is no further reply. Harmless if it is over."""
        with self._lock:
            process = self._process
            if process is not None and process.listeners.pop(id, None) is not None:
                _send(process, {"stop": id})

    def draw(self, model: Json, messages: Sequence[Message], sampling: Json, *, as_text: bool = False) -> Drawing:
        """The answer of `model` (a section of a recipe) to a conversation, which goes on in the background. `as_text`:
        the model reads one text even if it has a chat template.

        Raises RunError if too many wait, or the process cannot be started.
        """
        if self.num_open >= MAX_WAITING:
            raise RunError(f"{MAX_WAITING} answers are being drawn; try again in a moment")
        drawing = Drawing()
        request = {
            "model": model,
            "messages": [dict(one) for one in messages],
            "sampling": sampling,
            "as_text": as_text,
        }
        drawing.id = self.ask(request, drawing.note)
        return drawing

    def _running(self) -> _Process:
        if self._process is None or self._process.popen.poll() is not None:
            try:
                with self._log_file.open("w", encoding="utf-8") as log:
                    # A session of its own: Ctrl-C is for the server, which ends the process.
                    popen = subprocess.Popen(
                        command(stays=self._stays, weights=self._weights),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        encoding="utf-8",
                        start_new_session=True,
                    )
            except OSError as error:
                raise RunError(f"the process that draws answers cannot be started ({error.strerror})") from error
            self._process = _Process(popen)
            threading.Thread(target=self._read, args=(self._process,), name="drawing", daemon=True).start()
        return self._process

    def _read(self, process: _Process) -> None:
        """Hand out the replies of `process` until it ends."""
        assert process.popen.stdout is not None
        for line in process.popen.stdout:
            reply: Json = json.loads(line)
            has_ended = "done" in reply or "error" in reply
            with self._lock:
                listeners = process.listeners
                listener = listeners.pop(reply["id"], None) if has_ended else listeners.get(reply["id"])
            if listener is not None:  # else it was stopped
                listener(reply)
        code = process.popen.wait()
        with self._lock:
            if self._process is not None and code != 0:
                _log.warning("the process that draws answers ended with code %d, see %s", code, self._log_file)
            left, process.listeners = dict(process.listeners), {}
        for id, listener in left.items():
            reason = f"the process that draws answers ended (code {code}); try again"
            listener({"id": id, "error": reason, "kind": "engine"})


def _send(process: _Process, message: Json) -> bool:
    """False if the process has ended."""
    assert process.popen.stdin is not None
    with suppress(OSError):
        process.popen.stdin.write(json.dumps(message) + "\n")
        process.popen.stdin.flush()
        return True
    return False
