"""The check for keys that have no effect beside others.

A key that somebody set, and that another one makes meaningless, is refused by name: the run would not be the one that
was asked for, and nothing would say so. Defaults are never refused. A few keys, which papers and earlier recipes give
without effect, are a warning instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tunesmith.base.config.algorithms.live import LIVE_RULES
from tunesmith.base.config.keys import item_of, section_of
from tunesmith.base.config.merge import Origin, Problem
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.rules import COMMON, SAMPLING, Rule
from tunesmith.base.config.schema import SPECS
from tunesmith.base.config.sections import Section
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.core.log import get_logger

_log = get_logger(__name__)


_ASKED = ("file ", "command line", "argument ", "Python")
"""Beginnings of the origins of values that somebody set for this run, rather than a default, a level or a shipped
recipe."""


@dataclass(frozen=True, slots=True)
class Ineffective:
    """A key without effect as a problem, and whether it is one for a warning alone."""

    problem: Problem
    warns: bool


def ineffective(recipe: Recipe, origins: Mapping[str, Origin]) -> list[Ineffective]:
    """The keys of `recipe` that have another value than their default and no effect, with their origins."""
    values, defaults = dict(_leaves(recipe)), dict(_leaves(type(recipe)()))
    set_keys = [path for path, value in values.items() if value != defaults.get(path, _default(path, recipe))]
    found: list[Ineffective] = []
    for path in set_keys:
        rule = next((one for one in rules_of(recipe.algorithm) if one.covers(path) and one.holds(values)), None)
        if rule is not None:
            why = rule.why.format(section=path.partition(".")[0], **{"value": values[path]})
            message = f"is {_shown(values[path])}, which has no effect: {why}"
            found.append(Ineffective(Problem(path, message, origins.get(path, "")), rule.warns))
    return found


def check_effects(recipe: Recipe, origins: Mapping[str, Origin], *, only_warns: bool = False) -> None:
    """Raise ConfigError for keys that somebody set and that have no effect; log those that are a warning.

    `only_warns` is for recipes of which nobody knows whether a shipped recipe set a key, or who runs it.
    """
    asked = [one for one in ineffective(recipe, origins) if one.problem.origin.startswith(_ASKED)]
    if not only_warns and (problems := [str(one.problem) for one in asked if not one.warns]):
        raise ConfigError(*problems)
    for one in asked:
        _log.warning("%s", one.problem)


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        value, path = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _leaves(value, f"{path}.")
        elif section_of(item_of(info.annotation)):
            for index, item in enumerate(cast(tuple[Section, ...], value)):
                yield from _leaves(item, f"{path}.{index}.")
        else:
            yield path, value


def _default(path: str, recipe: Recipe) -> object:
    """The default of a key of an item of a list, which the default recipe may not have."""
    value: Any = recipe
    *parts, last = path.split(".")
    for part in parts:
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return type(cast(Section, value)).model_fields[last].get_default(call_default_factory=True)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value)


def rules_of(algorithm: str) -> tuple[Rule, ...]:
    """The rules for recipes of `algorithm`; where several hold, the first is told."""
    if algorithm not in SPECS:
        return (*LIVE_RULES, *COMMON)
    spec = SPECS[algorithm]
    return (*(SAMPLING if spec.draws else ()), *spec.rules, *COMMON)
