"""What a piece of work did, by part of the model: from the events of torch.profiler.

A part is known by the function that does it, which is wrapped while the profile runs. What the backward pass does
belongs to the part whose forward pass made it necessary; autograd numbers both alike. A call is an operator of torch or
a function in C++ that nothing else called: what Python, or autograd, pays a dispatch for. On a GPU each kernel of it is
a launch besides.
"""

import ctypes
import importlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from tunesmith.kernels.native import Choice, Kernels

STEP, _SCOPE, _NATIVE = "step", "part:", "native:"
OTHER = "other"

PARTS = (
    ("linear maps", ("tunesmith.models.decoder:module_outputs", "tunesmith.rollout.runner:Runner._linear")),
    (
        "output layer",
        (
            "tunesmith.models.decoder:Decoder.logp_entropy",
            "tunesmith.models.logprob:head_logp_entropy",
            "tunesmith.rollout.runner:Runner.logits",
        ),
    ),
    (
        "attention",
        (
            "tunesmith.models.decoder:attend_packed",
            "tunesmith.rollout.runner:attend",
            "tunesmith.rollout.device.decode_step:attend",
        ),
    ),
    ("norms", ("tunesmith.models.decoder:add_rms_norm",)),
    ("activation", ("tunesmith.models.decoder:gated",)),
    ("sampler", ("tunesmith.rollout.sampler:Sampler.draw",)),
    ("loss", ("tunesmith.trainers.objective:Objective.of",)),
    (
        "optimizer",
        (
            "tunesmith.models.optimizer:MasterAdamW.step",
            "tunesmith.models.optimizer:_Slot._collect",
        ),
    ),
)
"""Each part of a model, and the functions that do its work."""

PART_NAMES = (*(name for name, _ in PARTS), OTHER)

_BACKWARD = "autograd::engine::evaluate_function"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost call: which part it belongs to, when it began after the step, how long it took, in microseconds."""

    part: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One step: its calls, how long it took under the profiler, and the kernels that it launched on a GPU."""

    calls: tuple[Call, ...]
    wall_us: float
    num_launches: int = 0

    def num_calls(self, part: str | None = None) -> int:
        """Calls of a part, or of all."""
        return sum(part in (None, call.part) for call in self.calls)

    def milliseconds(self, part: str) -> float:
        """Time inside the calls of a part."""
        return sum(call.duration_us for call in self.calls if call.part == part) / 1e3

    @property
    def between_ms(self) -> float:
        """Time outside of any call: Python, autograd's own work, and the profiler's."""
        return max(0.0, self.wall_us - sum(call.duration_us for call in self.calls)) / 1e3


class RecordedKernels(Kernels):
    """Kernels whose functions in C++ show in a profile, which sees operators of torch alone."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._recorded: dict[str, _RecordedLibrary] = {}

    def library(self, op: str, device: torch.device) -> ctypes.CDLL | None:
        """As of `Kernels`, each function of it under its name."""
        library = super().library(op, device)
        if library is None:
            return None
        if op not in self._recorded:
            self._recorded[op] = _RecordedLibrary(library)
        return self._recorded[op]  # type: ignore[return-value]


class _RecordedLibrary:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> "_RecordedFunction":
        function = _RecordedFunction(getattr(self._library, name), _NATIVE + name)
        setattr(self, name, function)
        return function


class _RecordedFunction:
    def __init__(self, function: Any, name: str) -> None:
        self._function, self._name = function, name
        self.argtypes, self.restype = function.argtypes, function.restype

    def __call__(self, *arguments: Any) -> Any:
        self._function.argtypes, self._function.restype = self.argtypes, self.restype
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return self._function(*arguments)
        with record_function(self._name):
            return self._function(*arguments)


@contextmanager
def parts_named() -> Generator[None, None, None]:
    """While this is open, what the functions of PARTS do shows under the name of their part."""
    changed: list[tuple[Any, str, Any]] = []
    try:
        for part, places in PARTS:
            for place in places:
                owner, name, function = _found(place)
                changed.append((owner, name, function))
                setattr(owner, name, _under(_SCOPE + part, function))
        yield
    finally:
        for owner, name, function in changed:
            setattr(owner, name, function)


def _found(place: str) -> tuple[Any, str, Any]:
    """The module or class, the name in it, and what stands there now."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    return owner, name, getattr(owner, name)


def _under(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(label):
            return function(*arguments, **options)

    return run


def profiled(work: Callable[[], object]) -> Profile:
    """What `work` did inside the first span under the name STEP."""
    with parts_named(), _profiler() as recorded:
        work()
    events = _events(recorded)
    step = next(event for event in events if event.name == STEP)
    return _step(events, step.time_range.start, step.time_range.end)


def profiled_between(work: Callable[[], object], place: str, first: int) -> Profile | None:
    """What `work` did from the call number `first` of the function at `place` to the next one; None if there were none.

    The profiler runs for that time alone: with torch's kernels a step of an engine is some hundred thousand events.
    """
    with parts_named():  # the named function is inside of the counted one, so that its name is in the profile
        owner, name, function = _found(place)
        between = _Between(function, first)
        try:
            setattr(owner, name, between.method())
            work()
        finally:
            setattr(owner, name, function)
    if between.num_calls <= first:
        return None
    events = _events(between.recorded)
    return _step(events, min(event.time_range.start for event in events), max(e.time_range.end for e in events))


class _Between:
    """Profiles from one call of a function to the next."""

    def __init__(self, function: Callable[..., Any], first: int) -> None:
        self._function, self._first = function, first
        self.num_calls = 0
        self.recorded = _profiler()

    def method(self) -> Callable[..., Any]:
        """A function to stand in a class, which binds functions alone."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._first:
                self.recorded.start()
            if self.num_calls == self._first + 1:
                self.recorded.stop()
            return self._function(*arguments, **options)

        return run


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _events(recorded: profile) -> list[FunctionEvent]:
    return [event for event in recorded.events() or () if event.device_type.name == "CPU"]


def _step(events: Iterable[FunctionEvent], start_us: float, end_us: float) -> Profile:
    inside = [event for event in events if start_us <= event.time_range.start and event.time_range.end <= end_us]
    found = _Parts(inside)
    calls = [
        Call(found.of(event), event.time_range.start - start_us, event.time_range.elapsed_us())
        for event in inside
        if _is_call(event) and not any(_is_call(parent) for parent in _parents(event))
    ]
    launches = sum(event.name.startswith(_LAUNCHES) for event in inside)
    return Profile(tuple(sorted(calls, key=lambda call: call.start_us)), end_us - start_us, launches)


def _is_call(event: FunctionEvent) -> bool:
    return event.name.startswith(("aten::", "tunesmith::", "mkldnn::", _NATIVE))


def _parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent


@dataclass(slots=True)
class _Parts:
    """To which part an event belongs."""

    events: Sequence[FunctionEvent]
    _by_number: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        # An operator that autograd does not record carries the number of the next one that it does, which has it last.
        for event in sorted(self.events, key=lambda event: event.time_range.start):
            part = _named(event)
            if part is not None and event.sequence_nr >= 0:
                self._by_number[event.sequence_nr] = part

    def of(self, event: FunctionEvent) -> str:
        """The outermost part around it, or that of the forward pass whose backward pass it is."""
        part = _named(event)
        if part is not None:
            return part
        numbers = [one.sequence_nr for one in _parents(event) if one.name.startswith(_BACKWARD)]
        return next((self._by_number[number] for number in numbers if number in self._by_number), OTHER)


def _named(event: FunctionEvent) -> str | None:
    names = [one.name for one in _parents(event) if one.name.startswith(_SCOPE)]
    return names[-1].removeprefix(_SCOPE) if names else None
