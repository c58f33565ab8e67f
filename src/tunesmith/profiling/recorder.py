"""Records a few steps of a training: operators by torch's profiler with our spans in it, Python's stacks, counters.

On a GPU torch's profiler records launches, kernels and copies too; that has not been run on one.
"""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.profiler import ProfilerActivity, record_function

from tunesmith.core.errors import NativeUnavailableError
from tunesmith.core.log import get_logger
from tunesmith.core.trace import following, span, watching
from tunesmith.kernels import native
from tunesmith.profiling import request as requests
from tunesmith.profiling.chrome import RAW_TRACE, SPAN_MARK
from tunesmith.profiling.request import Request
from tunesmith.profiling.sampler.api import Sampler as GILSampler
from tunesmith.profiling.sampler.api import has_lock
from tunesmith.profiling.sampling import STACK_PERIOD_S, Sampler, Samples

_log = get_logger(__name__)

_FAILURES = (OSError, RuntimeError, ValueError, AssertionError)
"""What torch's profiler and the disk raise. Training goes on without the profile."""


class StepProfiler:
    """Profiles steps of the run in `run_dir`: its second to `num_steps + 1`-th, or those that a request asks for."""

    def __init__(self, run_dir: Path, num_steps: int = 0) -> None:
        self._run_dir = run_dir
        self._first = Request("", num_steps) if num_steps else None
        self._recording: Recording | None = None
        self.is_done = False
        """True once the profile that the run was started for is recorded."""
        with suppress(OSError):
            requests.withdraw(run_dir)  # of someone who waited for an earlier process

    def between_steps(self, num_done: int) -> None:
        """Begin, continue or end a profile; `num_done` steps have ended. Never raises.

        The time of the beginning and of the end is that of the stage `profile` in the open trace.
        """
        if self._recording is None:
            request, self._first = self._first or requests.take(self._run_dir), None
            if request is not None:
                with span("profile"):
                    self._begin(request, num_done)
        elif self._recording.next_step():
            self.is_done = self._recording.request.id == ""
            self._recording = None

    def close(self) -> None:
        """End a profile that is not complete, because the run ends."""
        if self._recording is not None:
            self._recording.end()
            self._recording = None

    def _begin(self, request: Request, num_done: int) -> None:
        try:
            self._recording = Recording(self._run_dir, request, num_done)
        except _FAILURES as error:
            _log.warning("cannot profile: %s", error)
            _answer(self._run_dir, request, {"problem": str(error)})


class Recording:
    """A profile that is being recorded: one step to warm up, then `request.num_steps`."""

    def __init__(self, run_dir: Path, request: Request, num_done: int) -> None:
        self.request = request
        self._run_dir = run_dir
        self._first_step = num_done + 1
        self._steps_left = 1 + request.num_steps
        self._problem = ""
        folder = run_dir / requests.FOLDER
        folder.mkdir(exist_ok=True)
        raw = folder / RAW_TRACE
        raw.unlink(missing_ok=True)
        self._raw = raw
        self._stack = ExitStack()
        self._sampler = Sampler(_open_gil(self._stack))
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=request.num_steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(raw)),
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        self._stack.enter_context(watching(_Marks()))
        self._stack.enter_context(following(self._sampler.gauge))
        self._sampler.start()

    def next_step(self) -> bool:
        """Begin the next step; True if all are recorded and written."""
        if self._steps_left > self.request.num_steps:  # the step that warmed up has called the kernels
            self._stack.enter_context(native.wrapped(_Kernel))
        self._steps_left -= 1
        if self._steps_left:
            try:
                self._profiler.step()
                return False
            except _FAILURES as error:
                self._problem = str(error)
        self.end()
        return True

    def end(self) -> None:
        """Write what is recorded, as the answer to the request."""
        samples = self._sampler.stop()
        self._stack.close()
        with span("profile"):
            self._write(samples)

    def _write(self, samples: Samples) -> None:
        try:
            self._profiler.stop()  # which writes the trace
        except _FAILURES as error:
            self._problem = self._problem or str(error)
        if not self._raw.is_file():
            self._problem = self._problem or "the run ended before a step was recorded"
        facts = {
            "run": self._run_dir.resolve().name,
            "process": os.getpid(),
            "main_thread": threading.main_thread().native_id,
            "first_step": self._first_step,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "num_threads": torch.get_num_threads(),
            "stack_period_s": STACK_PERIOD_S,
            **asdict(samples),
        }
        if self._problem:
            _log.warning("the profile is lost: %s", self._problem)
        _answer(self._run_dir, self.request, {"problem": self._problem} if self._problem else facts)


class _Marks:
    """Marks each span in the profile; a `core.trace.Watcher`."""

    def __init__(self) -> None:
        self._open = threading.local()

    def enter(self, path: str) -> None:
        mark = record_function(SPAN_MARK + path)
        mark.__enter__()
        self._marks().append(mark)

    def leave(self, path: str) -> None:
        self._marks().pop().__exit__(None, None, None)

    def _marks(self) -> list[record_function]:
        if not hasattr(self._open, "marks"):
            self._open.marks = []
        return self._open.marks


def _open_gil(stack: ExitStack) -> Callable[[], tuple[int, int]] | None:
    """A function as `Sampler` wants it, of a native thread that ends with `stack`; None where there is none."""
    try:
        thread = GILSampler()
    except NativeUnavailableError:
        return None
    stack.callback(thread.stop)

    def read() -> tuple[int, int]:
        samples = thread.take().get("")
        return (samples.num_blocked, samples.num_asks) if samples else (0, 0)

    return read if has_lock() else None


class _Kernel:
    """A C++ function that is an operator of the profile."""

    def __init__(self, function: Any) -> None:
        self.argtypes = function.argtypes
        self._function = function
        self._name = f"tunesmith::{function.__name__}"

    def __call__(self, *arguments: Any) -> Any:
        with _RecordFunctionFast(self._name):
            return self._function(*arguments)


def _answer(run_dir: Path, request: Request, facts: dict[str, object]) -> None:
    try:
        requests.answer(run_dir, request, facts)
    except OSError as error:
        _log.warning("the profile cannot be written: %s", error)
