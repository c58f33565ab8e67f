"""Python functions as rewards: found by `file.py:name`, `package.module:name` or built-in name, and called as TRL calls
them.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tunesmith.core.errors import RewardError
from tunesmith.rewards.builtin import BUILTINS
from tunesmith.rewards.calling import CalledReward, is_async, last_line_of
from tunesmith.rewards.exchange import RewardFunction
from tunesmith.rewards.outcome import Policy
from tunesmith.rewards.sample import Sample

_FORMS = "`./file.py:name` or `package.module:name`"
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
    module = _load_file(Path(place), source) if _is_file(place) else _import(place, source)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise RewardError(f"reward {source!r}: {place} has no `{part}`{_suggestion(part, function)}")
        function = getattr(function, part)
    return check_callable(function, source)


def file_of(source: str) -> Path | None:
    """The file of the function that `load_function(source)` has loaded; None of a module that has none to read."""
    place = source.rpartition(":")[0]
    if _is_file(place):
        return Path(place).expanduser().resolve()
    file = getattr(sys.modules.get(place), "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


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


class FunctionReward(CalledReward):
    """A Python function as a reward, called as TRL calls it.

    `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, <columns>=)`: each is a list
    with one entry per completion, the last three are functions and what `extras` holds. For a conversational prompt,
    `prompts` holds message lists and `completions` holds `[{"role": "assistant", "content": text}]`. A row without a
    column gives None. A function without `**kwargs` receives what it names alone.
    """

    def __init__(self, function: RewardFunction, name: str | None = None, policy: Policy | None = None) -> None:
        super().__init__(name or function_name(function), function, policy, is_async=is_async(function))
        self._parameters = _parameters(function)

    def _arguments(
        self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]
    ) -> dict[str, object]:
        arguments: dict[str, object] = {
            "prompts": [_prompt(sample) for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [list(sample.completion.token_ids) for sample in samples],
            **{
                name: [sample.prompt.columns.get(name) for sample in samples]
                for name in columns
                if name not in _OWN_COLUMNS
            },
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


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


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
    except (Exception, SystemExit) as error:  # the file is the user's: whatever it raises is reported as its failure
        raise RewardError(f"{what} fails to import: {type(error).__name__}: {error}{last_line_of(error)}") from error


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
