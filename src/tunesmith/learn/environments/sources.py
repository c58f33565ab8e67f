"""The episodes that a recipe's `environment` names, or that are given from Python."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.base.config.sections import BUILTIN_TOOLS, EnvironmentSection
from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.calls import Open
from tunesmith.learn.environments.contract import EnvironmentFactory
from tunesmith.learn.environments.dialects import ByName, opened
from tunesmith.learn.environments.packages import as_factory, source_factory
from tunesmith.learn.environments.processes import Processes, Setup
from tunesmith.learn.environments.tools.calculator import calculator
from tunesmith.learn.environments.tools.python import Limits, PythonTool
from tunesmith.learn.environments.tools.search import FileSearch
from tunesmith.learn.rewards.functions import load_named

Tool = Callable[..., Any]


def opener(
    section: EnvironmentSection,
    *,
    tools: Sequence[Tool | str] = (),
    environment_factory: EnvironmentFactory | None = None,
) -> Open | None:
    """Makes episodes of the recipe's `section`, or of what is given in its place, in processes if it wants them; None
    if there is neither.

    Raises:
        InputError: a source leads nowhere, both a source and a factory are given, a tool is none, or what is given
            cannot be sent to a process.
    """
    functions = [tool_of(one, section) for one in (*section.tools, *tools)]
    factory: Callable[[], object] | None = None
    if environment_factory is not None:
        if section.source is not None:
            raise InputError(
                f"environment.source is {section.source}, and an environment_factory is given; give one of them"
            )
        factory = _given_factory(environment_factory, section.arguments)
    elif section.source is not None:
        factory = source_factory(section.source, section.arguments)
    elif section.arguments:
        raise InputError("environment.arguments are those of environment.source, which is not set; set it")
    if factory is None and not functions:
        return None
    if section.processes:
        return Processes(Setup(section, tuple(tools), environment_factory))
    return partial(opened, factory, functions)


def _given_factory(given: EnvironmentFactory, arguments: Mapping[str, Any]) -> Callable[[], object]:
    """Makes what is given from Python in place of a source. Raises InputError for what can make nothing."""
    named = given if isinstance(given, Mapping) else {"": given}
    for name, one in named.items():
        if not isinstance(name, str):
            raise InputError(
                f"environment_factory has the key {name!r} of type {type(name).__name__}; give texts, as the prompts' "
                "column `environment` has them"
            )
        if not callable(one):
            of_name = f"[{name!r}]" if name else ""
            raise InputError(
                f"environment_factory{of_name} is of type {type(one).__name__}; give a class, or a function that makes "
                "one"
            )
    if not isinstance(given, Mapping):
        return as_factory(given, arguments)
    if not given:
        raise InputError("environment_factory is empty; give a factory for each name in the prompts' `environment`")
    by_name = ByName({name: as_factory(one, arguments) for name, one in given.items()})
    return lambda: by_name


def tool_of(source: Tool | str, section: EnvironmentSection) -> Tool:
    """The tool that `source` is or names. Raises InputError for a name that leads nowhere, for what has no name or
    cannot be called, and for `python` on a machine that cannot lock it in.
    """
    if not isinstance(source, str):
        if not callable(source) or not hasattr(source, "__name__"):
            raise InputError(f"the tool {source!r} is of type {type(source).__name__}; give a function, or a method")
        return source
    if source == "calculator":
        return calculator
    if source == "python":
        return PythonTool(
            Limits(time_s=min(5.0, section.timeout_s / 2)), allow_unconfined=section.allow_unconfined
        ).python
    if source == "search":
        if section.search_folder is None:
            raise InputError("the tool `search` needs a folder; set environment.search_folder")
        return FileSearch(section.search_folder).search
    if ":" not in source:
        raise InputError(f"tool {source!r} is none of {', '.join(BUILTIN_TOOLS)}, nor `./file.py:name`")
    found = load_named(source, "tool")
    if not callable(found):
        raise InputError(f"tool {source!r} is of type {type(found).__name__}; name a function")
    return found
