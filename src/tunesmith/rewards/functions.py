"""Python functions as rewards: found by `file.py:name`, `package.module:name` or built-in name, and called as TRL calls
them.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tunesmith.core.errors import RewardError
from tunesmith.rewards.builtin import BUILTINS, RewardFunction
from tunesmith.rewards.sample import Sample

_FORMS = "`./file.py:name` or `package.module:name`"
_SEARCH_S = 10.0
_OWN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


def load_function(source: str) -> RewardFunction:
    """The function that `./file.py:name` or `package.module:name` names.

    The file or module is executed; its folder, or the current one, is added to the end of the import path as Python
    does for a script. Raises RewardError if it does not exist, fails to import, has no such name (the closest one is
    suggested), or if the name is not something to call.
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise RewardError(f"reward {source!r} names no function; write {_FORMS}")
    module = _load_file(Path(place), source) if place.endswith(".py") or "/" in place else _import(place, source)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise RewardError(f"reward {source!r}: {place} has no `{part}`{_suggestion(part, function)}")
        function = getattr(function, part)
    return check_callable(function, source)


def builtin_function(name: str, arguments: Mapping[str, object]) -> RewardFunction:
    """The built-in reward `name` with its arguments. Raises RewardError for an argument that it does not have, or
    lacks.
    """
    factory = BUILTINS[name]
    parameters = inspect.signature(factory).parameters
    for argument in arguments:
        if argument not in parameters:
            allowed = ", ".join(f"`{p}`" for p in parameters) or "none"
            close = difflib.get_close_matches(argument, list(parameters), n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise RewardError(f"the reward `{name}` has no argument `{argument}`; it takes {allowed}{hint}")
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise RewardError(f"the reward `{name}` needs `{parameter.name}`; give it in `arguments`")
    return factory(**arguments)


def check_callable(function: object, source: str) -> RewardFunction:
    """`function` if it can serve as a reward. Raises RewardError for a class, and for what cannot be called."""
    if inspect.isclass(function):
        raise RewardError(f"reward {source!r} is a class; name a function, or an object that can be called")
    if not callable(function):
        raise RewardError(
            f"reward {source!r} is of type {type(function).__name__}, which cannot be called; name a function"
        )
    return function


def function_name(function: RewardFunction) -> str:
    """`__name__`, also of the function inside a partial; the class name of an object that can be called."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


class _CallError(RewardError):
    """The user's function raised."""


class FunctionReward:
    """A Python function as a reward, called as TRL calls it.

    `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, <columns>=)`: each is a list
    with one entry per completion, the last three are what `extras` holds. For a conversational prompt, `prompts` holds
    message lists and `completions` holds `[{"role": "assistant", "content": text}]`. A row without a column gives None.
    A function without `**kwargs` receives what it names alone.
    """

    def __init__(self, function: RewardFunction, name: str | None = None) -> None:
        self.name = name or function_name(function)
        self._function = function
        self._parameters = _parameters(function)
        self.is_async = _is_async(function)

    def score(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> list[float | None]:
        """One number or None per sample. Raises RewardError that names the function and the sample.

        If the function raises, it is called again with one sample at a time, for some seconds at most, to find the one.
        """
        try:
            return self._checked(self._call(samples, extras), samples)
        except _CallError:
            for sample in _for_a_while(samples):
                self._call([sample], extras)
            raise

    async def score_async(
        self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None
    ) -> list[float | None]:
        """As `score`, of an `async def` function."""
        try:
            return self._checked(await self._call_async(samples, extras), samples)
        except _CallError:
            for sample in _for_a_while(samples):
                await self._call_async([sample], extras)
            raise

    def _call(self, samples: Sequence[Sample], extras: Mapping[str, object] | None) -> object:
        arguments = self._arguments(samples, extras or {})
        try:
            return self._function(**arguments)
        except Exception as error:  # the function is the user's: whatever it raises is reported as its failure
            raise self._raised(error, samples) from error

    async def _call_async(self, samples: Sequence[Sample], extras: Mapping[str, object] | None) -> object:
        arguments = self._arguments(samples, extras or {})
        try:
            return await self._function(**arguments)  # type: ignore[misc]
        except Exception as error:  # as in `_call`
            raise self._raised(error, samples) from error

    def _arguments(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> dict[str, object]:
        names = {name: None for sample in samples for name in sample.prompt.columns if name not in _OWN_COLUMNS}
        arguments: dict[str, object] = {
            "prompts": [_prompt(sample) for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [list(sample.completion.token_ids) for sample in samples],
            **{name: [sample.prompt.columns.get(name) for sample in samples] for name in names},
            **extras,
        }
        if self._parameters is None:
            return arguments
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        for parameter in self._parameters:
            if parameter.kind in variadic:
                continue
            if parameter.default is parameter.empty and parameter.name not in arguments:
                raise RewardError(
                    f"reward `{self.name}` needs `{parameter.name}`, but the prompts have no such column; "
                    f"they offer {', '.join(f'`{name}`' for name in arguments)}"
                )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters):
            return arguments
        named = {parameter.name for parameter in self._parameters}
        return {name: value for name, value in arguments.items() if name in named}

    def _raised(self, error: Exception, samples: Sequence[Sample]) -> "_CallError":
        place = _last_line_of(error)
        which = samples[0] if len(samples) == 1 else f"{len(samples)} completions together, from {samples[0]}"
        return _CallError(f"reward `{self.name}` raised {type(error).__name__}: {error}{place}; scoring {which}")

    def _checked(self, output: object, samples: Sequence[Sample]) -> list[float | None]:
        if isinstance(output, str | bytes | Mapping) or not isinstance(output, Iterable):
            raise RewardError(
                f"reward `{self.name}` returned an object of type {type(output).__name__}; it must "
                "return a list with one number or None for each completion"
            )
        values = list(output)
        if len(values) != len(samples):
            where = samples[min(len(values), len(samples) - 1)]
            raise RewardError(
                f"reward `{self.name}` returned {len(values)} scores for {len(samples)} completions; it must return "
                f"one for each. Missing or extra from {where}"
            )
        return [self._number(value, sample) for value, sample in zip(values, samples, strict=True)]

    def _number(self, value: object, sample: Sample) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardError(
                f"reward `{self.name}` returned {value!r} for {sample}; it must be a finite number, or None where the "
                "reward does not apply"
            )
        return number


def _is_async(function: RewardFunction) -> bool:
    """True for `async def`, also inside a partial or as the `__call__` of an object."""
    if isinstance(function, functools.partial):
        return _is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _for_a_while(samples: Sequence[Sample]) -> Iterator[Sample]:
    """The samples, until `_SEARCH_S` seconds are over: a function that asks a slow service is not called for all of
    them.
    """
    end_s = time.monotonic() + _SEARCH_S
    for sample in samples:
        if time.monotonic() > end_s:
            return
        yield sample


def _prompt(sample: Sample) -> object:
    content = sample.prompt.content
    return content if isinstance(content, str) else [dict(message) for message in content]


def _completion(sample: Sample) -> object:
    text = sample.completion.text
    return [{"role": "assistant", "content": text}] if sample.prompt.is_conversational else text


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    """The parameters that are given by name, None if the function does not tell (some written in C do not)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    return [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def _last_line_of(error: Exception) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})" if trace else ""


def _load_file(path: Path, source: str) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise RewardError(f"reward {source!r}: the file {path} does not exist; write {_FORMS}")
    name = f"tunesmith_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {source!r}: {path} is no Python file; write {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    _add_to_import_path(file.parent)
    sys.modules[name] = module  # dataclasses and pickles look their module up by name
    loader = spec.loader
    _run(lambda: loader.exec_module(module), f"reward {source!r}: {path}")
    return module


def _import(name: str, source: str) -> ModuleType:
    _add_to_import_path(Path.cwd())
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise RewardError(f"reward {source!r}: {name!r} is no module path; write {_FORMS}")
    if importlib.util.find_spec(top) is None:
        raise RewardError(f"reward {source!r}: there is no module `{top}`; for a file write `./{top}.py:...`")
    return _run(lambda: importlib.import_module(name), f"reward {source!r}: module {name}")


def _run(load: Callable[[], ModuleType | None], what: str) -> ModuleType:
    try:
        return load()  # type: ignore[return-value]
    except Exception as error:  # the file is the user's: whatever it raises is reported as its failure
        raise RewardError(f"{what} fails to import: {type(error).__name__}: {error}{_last_line_of(error)}") from error


def _add_to_import_path(folder: Path) -> None:
    """At the end, so that the folder's files hide no installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _suggestion(name: str, module: object) -> str:
    members = getattr(module, "__dict__", {})
    offered = [k for k, v in members.items() if callable(v) and not inspect.isclass(v) and not k.startswith("_")]
    close = difflib.get_close_matches(name, offered, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; it has {', '.join(f'`{key}`' for key in offered[:8])}" if offered else "; it has no function"
