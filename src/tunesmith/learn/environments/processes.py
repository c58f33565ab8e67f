"""Environments in processes of their own, which may crash and can be killed: `environment.processes`.

A process makes and holds several episodes, whose calls overlap. If it ends, the episodes in it are lost, and their
trajectories with them; later episodes begin in a new one.
"""

import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.child import Child
from tunesmith.base.core.errors import EnvironmentFailedError, InputError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Message
from tunesmith.learn.environments.calls import Calls, TimeLimitError
from tunesmith.learn.environments.contract import EnvironmentFactory, Episode, Reply, Said

_log = get_logger(__name__)

MOST_UNUSED = 4
"""Processes that may end, one after the other, before an episode in them has answered anything."""

_BEGIN_S = 300.0
"""Seconds in which a process has imported what it needs."""


class ProcessEndedError(Exception):
    """The process that held an episode has ended."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of `sources.opener`. `tools` and `environment_factory` are those that were given in Python.

    Example: `Setup(EnvironmentSection(source="./mine.py:Store", processes=2))`.
    """

    section: EnvironmentSection
    tools: tuple[Callable[..., Any] | str, ...] = ()
    environment_factory: EnvironmentFactory | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a process, as text: errors of libraries cannot always be sent."""

    kind: str
    text: str
    is_input: bool = False
    is_final: bool = False

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """The failure that `error` is."""
        is_input = isinstance(error, InputError)
        return Failure(type(error).__name__, str(error), is_input, isinstance(error, EnvironmentFailedError))

    def error(self) -> Exception:
        """The error again; what no part of Tunesmith raised has its name alone."""
        if self.is_input:
            return InputError(self.text)
        if self.is_final:
            return EnvironmentFailedError(self.text)
        return type(self.kind, (Exception,), {})(self.text)


class _Process:
    """A process, started at once, and the calls that it has not answered."""

    def __init__(self, setup: bytes) -> None:
        self._child = Child("tunesmith.learn.environments.process", setup, {"OMP_NUM_THREADS": "1"})
        self._awaited: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._why_killed = ""
        self.how_ended = "ended"
        self.is_over = False
        self.is_used = False
        self.num_episodes = 0
        started = threading.Event()
        threading.Thread(target=self._attend, args=(started,), name="tunesmith-environments", daemon=True).start()
        started.wait()

    def begin(self) -> None:
        """Wait until it can make episodes. Raises ProcessEndedError if it ended, EnvironmentFailedError if that takes
        too long, and InputError for what it can make none of.
        """
        try:
            _read(self._send("begin").result(_BEGIN_S))
        except TimeoutError:
            self.kill(f"took longer than {_BEGIN_S:g} s to begin")
            raise EnvironmentFailedError(f"a process of the environment {self._why_killed}") from None

    def call(self, limit_s: float, method: str, episode: int, argument: object = None) -> Any:
        """The result of a call of an episode, for which this is killed if it takes longer than `limit_s`.

        Raises what the call raises, as of `Failure.error`; and ProcessEndedError, TimeLimitError, and InputError for an
        argument that cannot be sent.
        """
        try:
            answer = self._send(method, episode, argument).result(limit_s)
        except TimeoutError:
            self.kill(f"was killed, because a call in it took longer than {limit_s:g} s")
            raise TimeLimitError(limit_s) from None
        return _read(answer)

    def has_ended(self) -> bool:
        """True if it has, also if that is noticed just now."""
        with self._sending:
            return self.is_over

    def kill(self, why: str) -> None:
        """End it at once."""
        self._why_killed = why
        self._child.close()

    def _send(self, method: str, episode: int = 0, argument: object = None) -> "Future[bytes]":
        number = next(self._numbers)
        message = number, method, episode, _pickled(argument, "a column of the prompts")
        answer: Future[bytes] = Future()
        with self._sending:
            if self.is_over:
                raise ProcessEndedError(f"the process that held the episode {self.how_ended}")
            self._awaited[number] = answer
            with suppress(OSError):  # it has ended, which the other thread sees
                self._child.send(message)
        return answer

    def _attend(self, started: threading.Event) -> None:
        """Start it, and receive answers until it ends: Linux ends it with the thread that started it."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            try:
                self._child.start()
            finally:
                started.set()
            while True:
                number, answer = self._child.receive()
                self._awaited.pop(number).set_result(answer)
        with self._sending:
            how = self._child.end()
            self.how_ended, self.is_over = self._why_killed or how, True
        for answer in self._awaited.values():
            answer.set_exception(ProcessEndedError(f"the process that held the episode {self.how_ended}"))


class Processes:
    """Makes episodes in `section.processes` processes, in the one that holds the fewest; those that ended are replaced.

    Raises:
        InputError: what was given in Python cannot be sent.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = _pickled(setup, "what was given as tools or environment_factory")
        self.timeout_s = setup.section.timeout_s
        self._processes: list[_Process | None] = [None] * setup.section.processes
        self._num_unused = [0] * setup.section.processes
        self._lock = threading.Lock()
        self._keys = itertools.count()
        weakref.finalize(self, _kill_all, self._processes)

    def __call__(self, calls: Calls) -> Episode:
        """An episode. Raises as `open`."""
        return ProcessEpisode(self)

    def open(self) -> "tuple[_Process, int, Any]":
        """The process in which an episode has been made, its number, and its tools.

        Raises:
            EnvironmentFailedError: processes end before it is made, again and again.
            InputError: it cannot be made.
        """
        key = next(self._keys)
        while True:
            process = self._next()
            try:
                process.begin()
                return process, key, process.call(self.timeout_s, "open", key)
            except ProcessEndedError:  # by itself, or for what another episode did
                continue
            except BaseException:
                self.release(process)
                raise

    def release(self, process: _Process) -> None:
        """Note that `process` holds an episode less."""
        with self._lock:
            process.num_episodes -= 1

    def _next(self) -> _Process:
        """The process that the next episode is to be made in."""
        with self._lock:
            running = [
                process if process is not None and not process.is_over else self._started(place, process)
                for place, process in enumerate(self._processes)
            ]
            self._processes[:] = running
            found = min(running, key=lambda one: one.num_episodes)
            found.num_episodes += 1
            return found

    def _started(self, place: int, before: _Process | None) -> _Process:
        """A process in place of the one `before`."""
        if before is not None:
            _log.warning("a process of the environment %s; another is started", before.how_ended)
            self._num_unused[place] = 0 if before.is_used else self._num_unused[place] + 1
        if before is not None and self._num_unused[place] >= MOST_UNUSED:
            raise EnvironmentFailedError(
                f"a process of the environment {before.how_ended}, as did the {MOST_UNUSED - 1} before it, and no "
                "episode in them had answered a call; their messages are above: correct the environment, or see it "
                "fail with environment.processes: 0"
            )
        return _Process(self._setup)

    def close(self) -> None:
        """End all processes."""
        _kill_all(self._processes)


class ProcessEpisode:
    """An episode in a process. If that ended between two trajectories, it begins anew in another."""

    environment = None
    """See `contract.instance_in`: it is in the process."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._process, self._key, self.tools = processes.open()

    def reset(self, row: Mapping[str, object]) -> str | Sequence[Message] | None:
        """See `Episode.reset`."""
        if self._process.has_ended():
            self._process, self._key, self.tools = self._processes.open()
        opening, self.tools = self._called("reset", dict(row))
        return opening

    def step(self, said: Said) -> Reply:
        """See `Episode.step`."""
        return self._called("step", said)

    def reward(self) -> float | None:
        """See `Episode.reward`."""
        return self._called("reward")

    def close(self) -> None:
        """See `Episode.close`. What an ended process held ended with it."""
        self._processes.release(self._process)
        with suppress(ProcessEndedError):
            self._called("close")

    def _called(self, method: str, argument: object = None) -> Any:
        result = self._process.call(self._processes.timeout_s, method, self._key, argument)
        self._process.is_used = True
        return result


def _pickled(value: object, what: str) -> bytes:
    """`value` as bytes. Raises InputError if it has none."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{what} cannot be sent to a process ({error}); give functions and classes that a module has at its top, "
            "and plain values, or set environment.processes: 0"
        ) from error


def _read(answer: bytes) -> Any:
    """The result that an answer is. Raises the error that it is."""
    result = pickle.loads(answer)
    if isinstance(result, Failure):
        raise result.error()
    return result


def _kill_all(processes: Sequence[_Process | None]) -> None:
    for process in processes:
        if process is not None:
            process.kill("was ended with the run")
