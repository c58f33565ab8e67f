"""Calls of user code as a reward: every sample gets an outcome, whatever the code does, and errors name the sample."""

import asyncio
import copy
import functools
import inspect
import itertools
import math
import os
import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, cast

from tunesmith.base.core.errors import RewardError
from tunesmith.learn.rewards.builtin import RewardFunction
from tunesmith.learn.rewards.outcome import LARGEST, Logged, Outcome, Policy, Reward, Sample, SampleError, Scored
from tunesmith.learn.rewards.threads import HangError, Worker, within

_SEARCH_S = 10.0
RETRY_S = 60.0
_MAX_SHOWN = 60


class _RaisedError(SampleError):
    """The user's function raised."""


class _HungError(SampleError):
    """The user's function did not return in time."""


class CalledReward(ABC):
    """Code of the user's as a reward. A subclass says with which arguments it is called.

    If a call with several samples raises, the code is called again with one sample at a time: under `fail` for at most
    10 seconds, to name the sample; otherwise for at most 60, so that the failing samples alone follow the policy. A
    call that hangs is not repeated. What a failed call logged does not count.
    """

    def __init__(self, name: str, function: Callable[..., object], policy: Policy | None, *, is_async: bool) -> None:
        self.name = name
        self.policy = policy or Policy()
        self.is_async = is_async
        self._function = function
        self._worker = Worker(name)

    def score(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> list[float | None]:
        """One number or None per sample, whatever the policy. Raises RewardError naming function and sample."""
        return self.outcomes(samples, extras).numbers()

    def outcomes(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """An outcome for each sample, of a function that is not async. Errors as in `outcomes_async`."""
        assert not self.is_async, "an async function has `outcomes_async`"
        try:
            self.outcomes_async(samples, extras).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a function that is not async waits for nothing")

    async def outcomes_async(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """An outcome for each sample. Waits for nothing if the function is not async.

        Raises RewardError if no call can be made, such as for a missing column.
        """
        columns = list({name: None for sample in samples for name in sample.prompt.columns})
        extras = extras or {}
        try:
            return await self._call(samples, columns, extras)
        except SampleError as error:
            failure = error
        is_fatal = self.policy.on_error == "fail"
        can_search = isinstance(failure, _RaisedError) if is_fatal else not isinstance(failure, _HungError)
        scored = Scored([failure] * len(samples), Logged(len(samples)))
        if len(samples) == 1 or not can_search:
            return scored
        end_s = time.monotonic() + (_SEARCH_S if is_fatal else RETRY_S)
        for place, sample in enumerate(samples):
            if time.monotonic() > end_s:
                break
            try:
                one = await self._call([sample], columns, extras)
                scored.outcomes[place] = one.outcomes[0]
                scored.logged.add(one.logged, [place])
            except SampleError as error:
                scored.outcomes[place] = error
            if is_fatal and isinstance(scored.outcomes[place], SampleError):
                return scored
        if any(isinstance(outcome, SampleError) for outcome in scored.outcomes):
            return scored
        if is_fatal:
            return Scored([failure] * len(samples), scored.logged)
        return Scored(scored.outcomes, scored.logged, retried=failure)

    def begin(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> "Future[Scored] | None":
        """The outcomes of a call that is made elsewhere and has begun; None if this process must make it."""
        return None

    def hung(self, samples: Sequence[Sample], error: HangError) -> Scored:
        """The outcomes of a call that never returned."""
        return Scored([self._hung(error, samples)] * len(samples), Logged(len(samples)))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise RewardError if the code needs a column that prompts with `columns` do not have."""
        return

    @abstractmethod
    def _arguments(
        self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]
    ) -> dict[str, object]:
        """Keyword arguments of a call. `columns` are those of all samples, also where a call has some of them."""

    async def _call(self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]) -> Scored:
        """The outcomes of one call with all `samples`. Raises SampleError if it fails as a whole."""
        logged, timeout_s = Logged(len(samples)), self.policy.timeout_s
        extras = {**extras, "log_extra": logged.extra, "log_metric": logged.metric}
        arguments = self._arguments(samples, columns, extras)
        try:
            if self.is_async:
                output = await within(self._invoke_async(arguments, samples), timeout_s)
            elif timeout_s is None:
                output = self._invoke(arguments, samples)
            else:
                output = self._worker.run(lambda: self._invoke(arguments, samples), timeout_s)
        except HangError as error:
            raise self._hung(error, samples) from error
        return Scored(self._checked(output, samples), logged)

    def _invoke(self, arguments: Mapping[str, object], samples: Sequence[Sample]) -> object:
        try:
            with _same_directory():
                return _read(self._function(**arguments), len(samples))
        except (Exception, SystemExit) as error:  # the user's code: whatever it raises is reported as its failure
            raise self._raised(error, samples) from error

    async def _invoke_async(self, arguments: Mapping[str, object], samples: Sequence[Sample]) -> object:
        try:
            with _same_directory():
                return _read(await self._function(**arguments), len(samples))  # type: ignore[misc]
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # as in `_invoke`
            raise self._raised(error, samples) from error

    def _raised(self, error: BaseException, samples: Sequence[Sample]) -> _RaisedError:
        kind = f"raised {type(error).__name__}"
        what = f": {error}" if isinstance(error, RewardError) else f" {kind}: {error}{last_line_of(error)}"
        return _RaisedError(f"reward `{self.name}`{what}; scoring {_which(samples)}", kind)

    def _hung(self, error: HangError, samples: Sequence[Sample]) -> _HungError:
        limit = "" if self.policy.timeout_s is None else f" within timeout_s, {self.policy.timeout_s:g} seconds"
        return _HungError(f"reward `{self.name}` did not return{limit} ({error}); scoring {_which(samples)}", "hung")

    def _checked(self, output: object, samples: Sequence[Sample]) -> list[Outcome]:
        if not isinstance(output, list):
            no_order = ", which has no order" if isinstance(output, set | frozenset) else ""
            raise SampleError(
                f"reward `{self.name}` returned an object of type {type(output).__name__}{no_order}; it must "
                f"return a list with one number or None for each completion; scoring {_which(samples)}",
                "returned no list",
            )
        if len(output) != len(samples):
            where = samples[min(len(output), len(samples) - 1)]
            raise SampleError(
                f"reward `{self.name}` returned {len(output)} scores for {len(samples)} completions; it must return "
                f"one for each. Missing or extra from {where}",
                "returned a list of the wrong length",
            )
        return [self._number(value, sample) for value, sample in zip(output, samples, strict=True)]

    def _number(self, value: object, sample: Sample) -> Outcome:
        if value is None:
            return None
        number = _as_float(value)
        if abs(number) <= LARGEST:  # false for NaN too
            return number
        return SampleError(
            f"reward `{self.name}` returned {_shown(value)} for {sample}; it must be a finite number of at most "
            "1e18 in size, or None where the reward does not apply",
            "returned no finite number",
        )


class ObjectReward(CalledReward):
    """An object with `name` and `score(samples)` as a reward."""

    def __init__(self, reward: Reward, policy: Policy | None = None) -> None:
        def score(samples: Sequence[Sample]) -> object:
            return reward.score(samples)

        super().__init__(reward.name, score, policy, is_async=is_async(reward.score))

    def _arguments(
        self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]
    ) -> dict[str, object]:
        return {"samples": [_own(sample) for sample in samples]}


@contextmanager
def _same_directory() -> Iterator[None]:
    """Goes back to the working directory in which it was entered: functions that run code may change it, and the run's
    own files have relative paths.
    """
    before = None
    with suppress(OSError):  # it was removed before
        before = os.getcwd()
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.chdir(before)


def is_async(function: Callable[..., object]) -> bool:
    """True for `async def`, also inside a partial or as the `__call__` of an object."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def last_line_of(error: BaseException) -> str:
    """Source line of `error` as ` (file.py, line 3)`, or nothing if it is unknown."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}, line {trace.tb_lineno})"


def _read(output: object, num_samples: int) -> object:
    """`output` as a list if it is any kind of list. Iterators run the user's code, so they are read under its guard."""
    if isinstance(output, str | bytes | Mapping | set | frozenset) or not isinstance(output, Iterable):
        return output
    if isinstance(output, Iterator):
        return list(itertools.islice(output, num_samples + 1))  # it may never end
    return list(output)


def _as_float(value: object) -> float:
    """The number that `value` is, NaN if it is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return math.nan


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    shorten = reprlib.Repr()
    shorten.maxother = shorten.maxstring = _MAX_SHOWN
    return shorten.repr(value)


def _which(samples: Sequence[Sample]) -> str:
    return str(samples[0]) if len(samples) == 1 else f"{len(samples)} completions together, from {samples[0]}"


_UNCHANGEABLE = frozenset({str, int, float, bool, type(None), bytes, complex})


def own_copy(value: Any) -> Any:
    """`value` for code of the user's, which may change it: lists and mappings in it are copies, texts and numbers as
    they are. What cannot be copied, such as an open file, is passed as it is.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is list or kind is tuple:
        return kind(own_copy(item) for item in value)
    if kind is dict:
        return {key: own_copy(item) for key, item in cast(dict[Any, Any], value).items()}
    try:
        return copy.deepcopy(value)
    except (TypeError, ValueError, RuntimeError):  # what copies of locks, files and tensors with a graph raise
        return value


def _own(sample: Sample) -> Sample:
    """`sample` with a prompt of its own."""
    prompt = sample.prompt
    content = prompt.content
    if not isinstance(content, str):
        content = tuple(own_copy(dict(message)) for message in content)
    return replace(sample, prompt=replace(prompt, content=content, columns=own_copy(dict(prompt.columns))))


_OWN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


def function_name(function: RewardFunction) -> str:
    """`__name__`, also of the function inside a partial; the class name of an object that can be called."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


class FunctionReward(CalledReward):
    """A Python function as a reward, called as TRL calls it.

    `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, <columns>=)`: each is a list
    with one entry per completion, the last three are functions and what `extras` holds. For a conversational prompt,
    `prompts` holds message lists and `completions` holds `[{"role": "assistant", "content": text}]`. A row without a
    column gives None. Lists and mappings in columns are copies, which the function may change. A function without
    `**kwargs` receives what it names alone.

    With an environment there is also `environments=`, the instances that the trajectories were played with. A function
    that names it is not asked about trajectories that the environment broke: it does not apply to them.
    """

    _NO_INSTANCES: ClassVar[str] = (
        "no environment is in this process; give one as environment_factory or environment.source, and leave "
        "environment.processes at 0"
    )

    def __init__(self, function: RewardFunction, name: str | None = None, policy: Policy | None = None) -> None:
        super().__init__(name or function_name(function), function, policy, is_async=is_async(function))
        self._parameters = _parameters(function)
        self._names_environments = ENVIRONMENTS in {parameter.name for parameter in self._parameters or ()}

    async def outcomes_async(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """See `CalledReward.outcomes_async`."""
        asked = [place for place, sample in enumerate(samples) if not (self._names_environments and sample.is_broken)]
        if len(asked) == len(samples):
            return await super().outcomes_async(samples, extras)
        scored = Scored([None] * len(samples), Logged(len(samples)))
        if asked:
            found = await super().outcomes_async([samples[place] for place in asked], extras)
            for place, outcome in zip(asked, found.outcomes, strict=True):
                scored.outcomes[place] = outcome
            scored.logged.add(found.logged, asked)
            scored.retried = found.retried
        return scored

    def _arguments(
        self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]
    ) -> dict[str, object]:
        has_instances = any(_instance(sample) is not None for sample in samples)
        offered = _offered((*columns, ENVIRONMENTS) if has_instances else columns, extras)
        self._check_offered(offered)
        named = {parameter.name for parameter in self._parameters or ()}
        wanted = [name for name in offered if name not in _IF_NAMED or name in named]
        if self._parameters is not None and all(one.kind is not one.VAR_KEYWORD for one in self._parameters):
            wanted = [name for name in offered if name in named]
        return {
            name: extras[name] if name in extras else [_argument(name, sample) for sample in samples] for name in wanted
        }

    def check_columns(self, columns: Sequence[str]) -> None:
        """See `CalledReward.check_columns`."""
        self._check_offered(_offered(columns, dict.fromkeys(_EXTRAS)))

    def _check_offered(self, offered: Sequence[str]) -> None:
        for parameter in self._parameters or ():
            is_needed = parameter.kind is not parameter.VAR_KEYWORD and parameter.default is parameter.empty
            if is_needed and parameter.name not in offered:
                if parameter.name == ENVIRONMENTS:
                    raise RewardError(f"reward `{self.name}` needs `{ENVIRONMENTS}`, but {self._NO_INSTANCES}")
                raise RewardError(
                    f"reward `{self.name}` needs `{parameter.name}`, but the prompts have no such column; "
                    f"they offer {', '.join(f'`{name}`' for name in offered)}"
                )


ENVIRONMENTS = "environments"
"""TRL's argument for the instances of an environment; without one a column may have this name."""

_EXTRAS = ("trainer_state", "log_extra", "log_metric")
_IF_NAMED = ("trajectories",)
"""Arguments that TRL does not give; so a function with `**kwargs` has them only if it names them."""


def _offered(columns: Sequence[str], extras: Mapping[str, object]) -> list[str]:
    """Names of the arguments that a function can have."""
    others = (name for name in columns if name not in _OWN_COLUMNS)
    return list(dict.fromkeys((*_PARTS, *others, *extras)))


def _argument(name: str, sample: Sample) -> object:
    """The entry of a sample in the argument `name`, which the function may change."""
    if name == ENVIRONMENTS and (instance := _instance(sample)) is not None:
        return instance
    part = _PARTS.get(name)
    return own_copy(sample.prompt.columns.get(name)) if part is None else part(sample)


def _instance(sample: Sample) -> object | None:
    """The environment that a trajectory was played with, if it is in this process."""
    trajectory = sample.completion.trajectory
    return None if trajectory is None else trajectory.environment


def _prompt(sample: Sample) -> object:
    content = sample.prompt.content
    return content if isinstance(content, str) else [own_copy(dict(message)) for message in content]


def _completion(sample: Sample) -> object:
    text, trajectory = sample.completion.text, sample.completion.trajectory
    if trajectory is not None:
        return [own_copy(dict(message)) for message in trajectory.messages]
    return [{"role": "assistant", "content": text}] if sample.prompt.is_conversational else text


_PARTS: Mapping[str, Callable[[Sample], object]] = MappingProxyType(
    {
        "prompts": _prompt,
        "completions": _completion,
        "completion_ids": lambda sample: list(sample.completion.token_ids),
        "trajectories": lambda sample: sample.completion.trajectory,
    }
)
"""Arguments that every function is offered, and their entry for a sample."""


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    """The parameters that are given by name, None if the function does not tell (some written in C do not)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    return [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
