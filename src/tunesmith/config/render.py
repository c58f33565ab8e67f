"""A resolved recipe as YAML text that loads again to the same recipe, if wanted with the origin of each value."""

import re
from collections.abc import Iterator, Mapping
from typing import cast

import yaml

from tunesmith.config.merge import Origin
from tunesmith.config.sections import Section
from tunesmith.config.yaml_text import is_list, is_mapping, parse_value

_PLAIN = re.compile(r"^[A-Za-z0-9_./][A-Za-z0-9_./ -]*(?::[A-Za-z0-9_./-]+)*$")
_COMMENT_COLUMN = 48


def to_yaml(recipe: Section, provenance: Mapping[str, Origin] | None = None) -> str:
    """YAML of every key of `recipe`; with `provenance`, `# file my.yaml:7` and the like behind each value."""
    values = recipe.model_dump(mode="json")
    if "algorithm" in values:
        values = {"algorithm": values.pop("algorithm"), **values}
    return "".join(f"{line}\n" for line in _lines(values, "", "", provenance or {}))


def _lines(values: Mapping[str, object], indent: str, prefix: str, provenance: Mapping[str, Origin]) -> Iterator[str]:
    for name, value in values.items():
        path = prefix + name
        if is_mapping(value) and value and path not in provenance:
            yield f"{indent}{_text(name)}:"
            yield from _lines(value, indent + "  ", f"{path}.", provenance)
        elif is_list(value) and value and all(is_mapping(item) for item in value):
            yield f"{indent}{_text(name)}:"
            for index, item in enumerate(cast(list[dict[str, object]], value)):
                inner = list(_lines(item, indent + "    ", f"{path}.{index}.", provenance))
                yield f"{indent}  - {inner[0].lstrip()}"
                yield from inner[1:]
        else:
            line = f"{indent}{_text(name)}: {_flow(value)}"
            yield f"{line:<{_COMMENT_COLUMN}} # {provenance[path]}" if path in provenance else line


def _flow(value: object) -> str:
    if is_mapping(value):
        return "{" + ", ".join(f"{_text(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if is_list(value):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    return yaml.safe_dump(value, width=10**9).removesuffix("...\n").strip()


def _text(value: str) -> str:
    """`value` bare where every YAML reader takes it for that text, else in double quotes."""
    if (
        _PLAIN.match(value)
        and value == value.strip()
        and parse_value(value) == value
        and yaml.safe_load(value) == value
    ):
        return value
    return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
