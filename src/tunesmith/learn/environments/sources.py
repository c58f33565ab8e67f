"""The episodes that a recipe's `environment` names, or that are given from Python."""

from collections.abc import Callable, Sequence
from typing import Any

from tunesmith.base.config.sections import BUILTIN_TOOLS, EnvironmentSection
from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Episode
from tunesmith.learn.environments.dialects import episode_of
from tunesmith.learn.environments.episodes import Open
from tunesmith.learn.environments.packages import as_factory, source_factory
from tunesmith.learn.environments.tools.calculator import calculator
from tunesmith.learn.environments.tools.python import Limits, PythonTool
from tunesmith.learn.environments.tools.search import FileSearch
from tunesmith.learn.rewards.functions import load_named

Tool = Callable[..., Any]


def opener(
    section: EnvironmentSection,
    *,
    tools: Sequence[Tool] = (),
    environment_factory: Callable[[], object] | None = None,
) -> Open | None:
    """Makes episodes of the recipe's `section`, or of what is given in its place; None if there is neither.

    Raises:
        InputError: a source leads nowhere, or a tool has no schema.
    """
    functions = [*(tool_of(name, section) for name in section.tools), *tools]
    factory: Callable[[], object] | None = None
    if environment_factory is not None:
        factory = as_factory(environment_factory, {})
    elif section.source is not None:
        factory = source_factory(section.source, section.arguments)
    if factory is None and not functions:
        return None

    def open_episode(calls: Calls) -> Episode:
        make = factory
        made = None if make is None else calls.run(lambda: calls.wait(make()))
        return episode_of(made, functions, calls)

    return open_episode


def tool_of(source: str, section: EnvironmentSection) -> Tool:
    """The tool that a recipe names. Raises InputError for a name that leads nowhere, or to what cannot be called, and
    for `python` on a machine that cannot lock it in.
    """
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
    found = load_named(source)
    if not callable(found):
        raise InputError(f"tool {source!r} is of type {type(found).__name__}; name a function")
    return found
