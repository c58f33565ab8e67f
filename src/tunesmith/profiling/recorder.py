"""Records a few steps of a training: operators by torch's profiler with our spans in it, Python's stacks, counters.

On a GPU torch's profiler records launches, kernels and copies too; that has not been run on one.
"""

import os
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.profiler import ProfilerActivity, record_function

from tunesmith.core.log import get_logger
from tunesmith.core.trace import Watcher, span, watching
from tunesmith.kernels import native
from tunesmith.profiling import request as requests
from tunesmith.profiling.chrome import RAW_TRACE, SPAN_MARK, STEP_MARK
from tunesmith.profiling.request import Request
from tunesmith.profiling.sampling import Sampler

_log = get_logger(__name__)

_FAILURES = (OSError, RuntimeError, ValueError, AssertionError)
"""What torch's profiler and the disk raise. Training goes on without the profile."""


class StepProfiler:
    """Profiles steps of the run in `run_dir`: `num_steps` after the first one, and those that are asked for."""

    def __init__(self, run_dir: Path, num_steps: int = 0) -> None:
        self._run_dir = run_dir
        self._first = self._own = Request("", num_steps) if num_steps else None
        self._recording: Recording | None = None
        self.is_done = False
        """True once the profile that the run was started for is recorded."""
        with suppress(OSError):
            requests.withdraw(run_dir)  # of someone who waited for an earlier process

    def between_steps(self, num_done: int) -> None:
        """Begin, continue or end a profile; `num_done` steps have ended. Never raises.

        The time of the beginning and of the end is that of the stage `profile` in the open trace.
        """
        if self._recording is not None:
            with self._problems_told(self._recording.request):
                if self._recording.next_step():
                    self.is_done = self._recording.request == self._own
                    self._recording = None
            return
        request, self._first = self._first or requests.take(self._run_dir), None
        if request is not None:
            with self._problems_told(request), span("profile"):
                self._recording = Recording(self._run_dir, request, num_done)

    def close(self) -> None:
        """End a profile that is not complete, because the run ends."""
        if self._recording is not None:
            with self._problems_told(self._recording.request):
                self._recording.end()
            self._recording = None

    @contextmanager
    def _problems_told(self, request: Request) -> Generator[None, None, None]:
        """Drop the recording if it fails in the block, and answer with the reason."""
        try:
            yield
        except _FAILURES as error:
            _log.warning("no profile: %s", error)
            if self._recording is not None:
                self._recording.drop()
                self._recording = None
            with suppress(OSError):
                requests.answer(self._run_dir, request, {"problem": str(error)})


class Recording:
    """A profile that is being recorded: one step to warm up, then `request.num_steps`; `num_done` are before them."""

    def __init__(self, run_dir: Path, request: Request, num_done: int) -> None:
        self.request = request
        self._run_dir = run_dir
        self._next = num_done + 1
        self._step: record_function | None = None
        self._steps: list[str] = []
        folder = run_dir / requests.FOLDER
        folder.mkdir(exist_ok=True)
        self._raw = folder / RAW_TRACE
        self._stack = ExitStack()
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.prepare_trace()

    def next_step(self) -> bool:
        """Begin the next step; True if all are recorded and written."""
        if self._step is None:
            self._next += 1
            self._start()
        else:
            self._step.__exit__(None, None, None)
            self._steps.append(f"step {self._next}")
            self._next += 1
        if len(self._steps) == self.request.num_steps:
            self.end()
            return True
        self._step = record_function(f"{STEP_MARK}step {self._next}")
        self._step.__enter__()
        return False

    def _start(self) -> None:
        """Begin to record. The step that warmed up has called the kernels."""
        self._profiler.start_trace()
        self._sampler = Sampler()
        self._stack.callback(self._sampler.stop)
        self._stack.enter_context(native.wrapped(_Kernel))
        self._stack.enter_context(watching(_Marks()))
        self._stack.enter_context(watching(self._sampler))

    def drop(self) -> None:
        """Stop looking, and leave what is recorded."""
        self._stack.close()

    def end(self) -> None:
        """Write the steps that are recorded, as the answer to the request."""
        if self._step is None:
            self._start()  # torch's profiler stops only what has begun
        self._stack.close()
        with span("profile"):
            self._profiler.stop_trace()
            if not self._steps:
                raise OSError("the run ended before a step was recorded")
            self._profiler.export_chrome_trace(str(self._raw))
            facts = {
                "run": self._run_dir.resolve().name,
                "process": os.getpid(),
                "main_thread": threading.main_thread().native_id,
                "steps": self._steps,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "num_threads": torch.get_num_threads(),
                **asdict(self._sampler.samples),
            }
            requests.answer(self._run_dir, self.request, facts)


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
