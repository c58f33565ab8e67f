"""Reward functions by name: `./file.py:name`, `package.module:name`, or a built-in. No model is loaded, nor torch."""

import ast
import difflib
import dis
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, ModuleType
from typing import Any

from tunesmith.base.config.judge import is_judge
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.learn.rewards.builtin import BUILTINS, RewardFunction
from tunesmith.learn.rewards.calling import last_line_of

_FORMS = "`./file.py:name` or `package.module:name`"


def load_function(source: str) -> RewardFunction:
    """The function that `./file.py:name` or `package.module:name` names; see `load_named`. Raises RewardError also if
    the name is not something to call.
    """
    return check_callable(load_named(source), source)


def load_named(source: str, kind: str = "reward") -> Any:
    """The object that `./file.py:name` or `package.module:name` names.

    The file or module is executed; its folder, or the current one, is added to the end of the import path as Python
    does for a script. Raises RewardError, which says its `kind`, if it does not exist, fails to import, has no such
    name (the closest one is suggested).
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise RewardError(f"{kind} {source!r} names no function; write {_FORMS}")
    module = _load_file(Path(place), f"{kind} {source!r}") if _is_file(place) else _import(place, f"{kind} {source!r}")
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise RewardError(f"{kind} {source!r}: {place} has no `{part}`{_suggestion(part, function, kind)}")
        function = getattr(function, part)
    return function


def file_of(source: str) -> Path | None:
    """The file of the function that `load_function(source)` has loaded; None of a module that has none to read."""
    place = source.rpartition(":")[0]
    if _is_file(place):
        return Path(place).expanduser().resolve()
    file = getattr(sys.modules.get(place), "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def builtin_function(name: str, arguments: Mapping[str, object]) -> RewardFunction:
    """The built-in reward `name`. Raises RewardError for an argument that it does not have, or lacks."""
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


def function_of(section: RewardSource) -> tuple[RewardFunction, str | None]:
    """(The function that `section` names, its name if it is a built-in). Raises RewardError if there is none."""
    if section.source in BUILTINS:
        return builtin_function(section.source, section.arguments), section.source
    return load_function(section.source), None


def check_callable(function: object, source: str) -> RewardFunction:
    """`function` if it can serve as a reward. Raises RewardError for a class, and for what cannot be called."""
    if inspect.isclass(function):
        raise RewardError(f"reward {source!r} is a class; name a function, or an object that can be called")
    if not callable(function):
        raise RewardError(
            f"reward {source!r} is of type {type(function).__name__}, which cannot be called; name a function"
        )
    return function


def is_function(source: str) -> bool:
    """True if the `source` of a recipe has the form of a function's; False for a built-in, a model and a judge."""
    is_model = Path(source).is_dir() or (":" not in source and not source.endswith(".py"))
    return source not in BUILTINS and not is_model and not is_judge(source)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_file(path: Path, what: str) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise RewardError(f"{what}: the file {path} does not exist; write {_FORMS}")
    name = f"tunesmith_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{what}: {path} is no Python file; write {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up by name
    with _importing(file.parent, f"{what}: {path}"):
        spec.loader.exec_module(module)
    return module


def _import(name: str, what: str) -> ModuleType:
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise RewardError(f"{what}: {name!r} is no module path; write {_FORMS}")
    with _importing(Path.cwd(), f"{what}: module {name}"):
        if importlib.util.find_spec(top) is not None:
            return importlib.import_module(name)
    raise RewardError(f"{what}: there is no module `{top}`; for a file write `./{top}.py:...`")


def add_to_path(folder: Path) -> None:
    """Let modules of `folder` be imported, behind all that are installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def _importing(folder: Path, what: str) -> Generator[None, None, None]:
    """Import code of the user's with `folder` at the end of the import path, so that it hides no installed package."""
    add_to_path(folder)
    try:
        yield
    except (Exception, SystemExit) as error:  # the file is the user's: whatever it raises is reported as its failure
        raise RewardError(f"{what} fails to import: {type(error).__name__}: {error}{last_line_of(error)}") from error


def _suggestion(name: str, module: object, kind: str) -> str:
    members = getattr(module, "__dict__", {})
    offered = [k for k, v in members.items() if callable(v) and not inspect.isclass(v) and not k.startswith("_")]
    if kind == "environment":  # as a rule a class of the file's own
        own = [k for k, v in members.items() if getattr(v, "__module__", None) == getattr(module, "__name__", "")]
        offered = [key for key in own if not key.startswith("_")]
    close = difflib.get_close_matches(name, offered, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; it has {', '.join(f'`{key}`' for key in offered[:8])}" if offered else "; it has no function"


_FIXED = (str, int, float, bool, type(None), bytes)


def identity_of(function: object) -> str:
    """A short hash of the source code of a function, or of the class of an object that serves as a reward.

    Comments and spaces do not count. A function is also told by its defaults, by what `functools.partial` gives it and
    by the variables that it closes over, as far as these are texts, numbers or tuples of them that it does not set.
    Modules that it uses do not count. A lambda, and a function without source, is told by its byte code.
    """
    return hashlib.sha256(repr(_described(function)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _described(value: object) -> object:
    if isinstance(value, functools.partial):
        partial: Any = value
        return (
            "partial",
            _described(partial.func),
            _constants(enumerate(partial.args)),
            _constants(partial.keywords.items()),
        )
    if inspect.ismethod(value):
        return "method", _described(value.__func__), _described(type(value.__self__))
    if inspect.isfunction(value):
        code = value.__code__
        written = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_DEREF"}
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        closed = [(name, cell.cell_contents) for name, cell in cells if name not in written and _is_set(cell)]
        defaults = [*enumerate(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
        return _source_of(value) or _code(code), _constants(defaults), _constants(closed)
    if inspect.isclass(value):
        return _source_of(value) or f"{value.__module__}.{value.__qualname__}"
    if inspect.isbuiltin(value):
        return f"{value.__module__}.{value.__qualname__}"
    return "object", _described(type(value))


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _constants(named: Iterable[tuple[object, object]]) -> list[tuple[object, object]]:
    """Names and values, as far as the values cannot change; functions among them are described."""
    found: list[tuple[object, object]] = []
    for name, value in named:
        if isinstance(value, _FIXED) or (isinstance(value, tuple) and all(isinstance(one, _FIXED) for one in value)):
            found.append((name, value))
        elif inspect.isfunction(value):
            found.append((name, _described(value)))
    return found


def _source_of(value: Any) -> str | None:
    """The source of a function or class without comments and spaces; None of a lambda, whose source is a whole line."""
    if getattr(value, "__name__", "") == "<lambda>":
        return None
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(value))))
    except (OSError, TypeError, SyntaxError):
        return None


def _code(code: CodeType) -> object:
    constants = [_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars
