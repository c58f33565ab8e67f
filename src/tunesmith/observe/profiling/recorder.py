"""Records a few steps of a training: operators by torch's profiler with our spans in it, Python's stacks, counters.

On a GPU torch's profiler records launches, kernels and copies too; that has not been run on one.
"""

import os
import threading
from collections.abc import Generator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.profiler import ProfilerActivity, record_function

from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import Watcher, span, watching
from tunesmith.engine.kernels import native
from tunesmith.observe.profiling import request as requests
from tunesmith.observe.profiling.chrome import RAW_TRACE, SPAN_MARK, STEP_MARK
from tunesmith.observe.profiling.request import Request
from tunesmith.observe.profiling.sampling import Sampler

_log = get_logger(__name__)

_FAILURES = (OSError, RuntimeError, ValueError, AssertionError)
"""Errors of torch's profiler and of the disk. Training goes on without the profile."""


class StepProfiler:
    """Profiles steps of the run in `run_dir`: `num_steps` after the first one, and those that are asked for."""

    def __init__(self, run_dir: Path, num_steps: int = 0) -> None:
        self._run_dir = run_dir
        self._first = self._own = Request("", num_steps) if num_steps else None
        self._request = Request("", 0)
        self._recording: Generator[None, bool | None, None] | None = None
        self.is_done = False
        """True once the profile that the run was started for is recorded."""
        requests.drop_old(run_dir)

    def between_steps(self, num_done: int) -> None:
        """Begin, continue or end a profile; `num_done` steps have ended. Never raises.

        The time of the beginning and of the end is that of the stage `profile` in the open trace.
        """
        if self._recording is not None:
            self._advance(self._recording, True)
            return
        request, self._first = self._first or requests.take(self._run_dir), None
        if request is not None:
            self._request, self._recording = request, _recording(self._run_dir, request, num_done)
            self._advance(self._recording, None)

    def close(self) -> None:
        """End a profile that is not complete, because the run ends."""
        if self._recording is not None:
            self._advance(self._recording, False)

    def _advance(self, recording: Generator[None, bool | None, None], goes_on: bool | None) -> None:
        """Take the recording to the next step or to its end. If it fails, answer with the reason."""
        try:
            recording.send(goes_on)
        except StopIteration:
            self._recording = None
            self.is_done = self._request == self._own
        except _FAILURES as error:
            self._recording = None
            _log.warning("no profile: %s", error)
            with suppress(OSError):
                requests.answer(self._run_dir, self._request, {"problem": str(error)})


def _recording(run_dir: Path, request: Request, num_done: int) -> Generator[None, bool | None, None]:
    """Record a profile: one step to warm up, then `request.num_steps`; `num_done` are before them.

    Yields before each step, and is sent False if the run ends there. The steps that are recorded are written as the
    answer to the request.
    """
    raw, steps = run_dir / requests.FOLDER / RAW_TRACE, list[str]()
    with span("profile"):
        raw.parent.mkdir(exist_ok=True)
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        profiler.prepare_trace()
    goes_on = yield
    profiler.start_trace()  # the step that warmed up has called the kernels; what never began cannot be stopped
    with ExitStack() as stack:
        sampler = Sampler()
        stack.callback(sampler.stop)
        stack.enter_context(native.wrapped(_Kernel))
        stack.enter_context(watching(_Marks()))
        stack.enter_context(watching(sampler))
        while goes_on and len(steps) < request.num_steps:
            name = f"step {num_done + 2 + len(steps)}"
            with record_function(STEP_MARK + name):
                goes_on = yield
            steps += [name] if goes_on else []  # the last one is not whole where the run ends
    with span("profile"):
        profiler.stop_trace()
        if not steps:
            raise OSError("the run ended before a step was recorded")
        profiler.export_chrome_trace(str(raw))
        facts = {
            "run": run_dir.resolve().name,
            "process": os.getpid(),
            "main_thread": threading.main_thread().native_id,
            "steps": steps,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "num_threads": torch.get_num_threads(),
            **asdict(sampler.samples),
        }
        requests.answer(run_dir, request, facts)


class _Marks(Watcher):
    """Marks each span in the profile."""

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


class _Kernel:
    """A C++ function that is an operator of the profile."""

    def __init__(self, function: Any) -> None:
        self.argtypes = function.argtypes
        self._function = function
        self._name = f"tunesmith::{function.__name__}"

    def __call__(self, *arguments: Any) -> Any:
        with _RecordFunctionFast(self._name):
            return self._function(*arguments)
