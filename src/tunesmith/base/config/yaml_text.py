"""Read and write the YAML of recipes: plain data with the line of each key, in the YAML 1.2 core schema.

PyYAML follows YAML 1.1, where `1e-6` is a string, `no` is false, `010` is 8 and `12:30` is 750. Here those are
0.000001, "no", 10 and "12:30". Tags are refused, so no object is ever built from a file.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, cast

import yaml

from tunesmith.base.config.sections import Section
from tunesmith.base.core.errors import ConfigError

MAX_BYTES = 1_000_000
"""A recipe of this project has about 2,000 bytes."""

_MAX_NODES = 20_000
_MAX_DEPTH = 30
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)

Path_ = tuple[str | int, ...]
"""Keys and list indices that lead from the root to a value."""


class _CoreLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """A SafeLoader that tells nulls, booleans, integers and floats apart as YAML 1.2 does, and knows no other types."""

    yaml_implicit_resolvers: ClassVar[dict[Any, list[tuple[str, re.Pattern[str]]]]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        None: [(_TAG + "null", _NULL), (_TAG + "bool", _BOOL), (_TAG + "int", _INT), (_TAG + "float", _FLOAT)]
    }


@dataclass(frozen=True, slots=True)
class Document:
    """The data of a YAML text and the line (from 1) of each key or list item."""

    data: object
    lines: dict[Path_, int]


def is_mapping(value: object) -> TypeGuard[dict[str, object]]:
    """True for the mappings that `parse` makes, whose keys are text."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    """True for a list or tuple."""
    return isinstance(value, list | tuple)


def read(file: Path) -> str:
    """The text of `file`; ConfigError if it is missing, no regular file, larger than `MAX_BYTES`, or not UTF-8."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a YAML file")
    if not file.exists():
        raise ConfigError(f"{file} does not exist; `tunesmith recipes cp NAME {file}` makes a recipe to start from")
    if not file.is_file():
        raise ConfigError(f"{file} is not a regular file; give a YAML file")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size:,} bytes; a recipe has at most {MAX_BYTES:,}")
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); give a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def parse(text: str, name: str) -> Document:
    """The data of `text`, called `name` in errors.

    ConfigError, in one line with line and column, if it is no YAML, uses tags, repeats a key, or grows past a fixed
    number of values when its aliases are expanded.
    """
    try:
        node = _composed(text)
        builder = _Builder(name)
        return Document(None if node is None else builder.build(node, (), 0), builder.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply; a recipe has at most {_MAX_DEPTH} levels") from error


@functools.lru_cache(maxsize=16)  # a run's diagnosis, its report and its listing read the same recipe
def _composed(text: str) -> yaml.Node | None:
    return cast(yaml.Node | None, yaml.compose(text, Loader=_CoreLoader))  # pyright: ignore[reportUnknownMemberType]


def parse_value(text: str) -> object:
    """The value of one command-line word: a YAML scalar, a list as `[2, 8]`, or JSON; what is no YAML stays text."""
    try:
        return parse(text, "value").data
    except ConfigError:
        return text


class _Builder:
    """Turns composed nodes into data, remembering lines and counting what aliases expand to."""

    def __init__(self, name: str) -> None:
        self.lines: dict[Path_, int] = {}
        self._name = name
        self._num_nodes = 0

    def build(self, node: yaml.Node, path: Path_, depth: int) -> object:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise self._error(
                node, f"too large: more than {_MAX_NODES:,} values or {_MAX_DEPTH} levels once aliases are expanded"
            )
        self.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise self._error(node, f"tag {node.tag!r} is not allowed; a recipe holds plain values")

    def _mapping(self, node: yaml.MappingNode, path: Path_, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be plain text")
            self._scalar(key_node)  # for its tag alone: `1` and `true` are good names of keys
            key = str(key_node.value)
            if key in values:
                raise self._error(key_node, f"the key {key!r} is given twice; keep one")
            self.lines[(*path, key)] = _line(key_node)
            values[key] = self.build(value_node, (*path, key), depth + 1)
        return values

    def _scalar(self, node: yaml.ScalarNode) -> object:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        if kind == "null" and _NULL.match(text):
            return None
        if kind == "bool" and _BOOL.match(text):
            return text.lower() == "true"
        try:
            if kind == "int":
                return int(text.replace("_", ""))
            if kind == "float":
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError as error:
            raise self._error(node, f"{text[:40]!r} is no number that can be read") from error
        raise self._error(node, f"tag {node.tag!r} is not allowed; a recipe holds plain values")

    def _error(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._name}:{_line(node)}: {problem}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


_PLAIN = re.compile(r"^[A-Za-z0-9_./][A-Za-z0-9_./ -]*(?::[A-Za-z0-9_./-]+)*$")
_COMMENT_COLUMN = 48


def to_yaml(recipe: Section, provenance: Mapping[str, str] | None = None, *, changed: bool = False) -> str:
    """YAML of every key of `recipe`, or of the `changed` ones alone; with `provenance`, `# file my.yaml:7` and the like
    behind each value.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=changed)
    if algorithm := getattr(recipe, "algorithm", None):
        values = {"algorithm": algorithm, **values}
    return "".join(f"{line}\n" for line in _lines(values, "", "", provenance or {}))


def _lines(values: Mapping[str, object], indent: str, prefix: str, provenance: Mapping[str, str]) -> Iterator[str]:
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
    if _PLAIN.match(value) and value == value.strip() and parse_value(value) == yaml.safe_load(value) == value:
        return value
    return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
