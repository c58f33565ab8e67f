"""SIGTERM and SIGINT: the first asks a run to save and leave, the second ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WATCHED = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """The signal that asked the run to stop; None before one came."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: remember the first, leave at the second."""
        name = signal.Signals(number).name
        if self.signal is not None:
            restore = _SHOW_CURSOR if sys.stderr.isatty() else ""
            os.write(2, f"{restore}\nsecond {name}: leaving without saving\n".encode())
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        os.write(2, f"\n{name}: finishing this step, then saving; once more to leave at once\n".encode())


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """A `StopRequest` that SIGTERM and SIGINT go to while the block runs.

    Python delivers signals to the main thread alone; in another thread, handlers stay as they are.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.note) for number in _WATCHED}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
