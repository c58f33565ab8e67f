"""Laying recipe, file and command line over the defaults, keeping the origin of each value and all problems."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from pydantic.fields import FieldInfo

from tunesmith.base.config.keys import holds_text, item_of, leaves, nearest, section_of, takes_truth, type_in_words
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.sections import Section
from tunesmith.base.config.yaml_text import Document, is_list, is_mapping, parse_value

Origin = str
"""Origin of a value: `default`, `recipe ppo_sentiment:7`, `file my.yaml:7`, `command line --model`."""

Tree = dict[str, object]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with one key; `path` is empty if it is about the whole file."""

    path: str
    message: str
    origin: Origin = ""

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.message}{origin}" if self.path else f"{self.message}{origin}"


@dataclass(slots=True)
class Layers:
    """The sparse tree of everything set so far over the defaults of `schema`."""

    schema: type[Recipe]
    tree: Tree = field(default_factory=dict[str, object])
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])
    problems: list[Problem] = field(default_factory=list[Problem])

    def add_document(self, document: Document, name: str) -> None:
        """Lay the data of a YAML document over the tree; `name` is its name in origins, `recipe x` or `file x.yaml`."""
        if document.data is None:
            return
        if not is_mapping(document.data):
            self.problems.append(Problem("", f"a recipe is a mapping of sections, not {_kind(document.data)}", name))
            return
        lines = {".".join(map(str, path)): line for path, line in document.lines.items()}
        self._merge(self.schema, document.data, self.tree, "", _Source(name, lines))

    def add_override(self, path: str, value: object, origin: Origin) -> None:
        """Lay one value at a dotted path over the tree, for example `reward.0.weight`.

        Text for a field that is no text is read as YAML (`1e-6`, `[2, 8]`, `null`, JSON).
        """
        keys = [key.replace("-", "_") for key in path.split(".")]
        self._merge(self.schema, self._nest(self.schema, keys, value), self.tree, "", _Source(origin))

    def _nest(self, schema: type[Section], keys: Sequence[str], value: object) -> Tree:
        """`{a: {b: value}}` for the keys a, b; the index in a list of sections, `{reward: {0: ...}}`, is an integer."""
        name, *rest = keys
        if not rest:
            return {name: value}
        info = schema.model_fields.get(name)
        item = section_of(item_of(info.annotation)) if info else None
        nested = section_of(info.annotation) if info else None
        if item and rest[0].isdigit():
            return {name: {int(rest[0]): self._nest(item, rest[1:], value) if rest[1:] else value}}
        if nested:
            return {name: self._nest(nested, rest, value)}
        return {name: {".".join(rest): value}} if info and _is_mapping(info.annotation) else {".".join(keys): value}

    # Key by key and not by pydantic, which sees one finished tree: it could name neither the file and line of a value,
    # nor the key that was meant by an unknown one, and would not know which values were set and which are defaults.
    def _merge(self, schema: type[Section], values: Tree, into: Tree, prefix: str, source: "_Source") -> None:
        for name, value in values.items():
            path = prefix + name
            info = schema.model_fields.get(name)
            if info is None:
                self._unknown(path, source)
                continue
            annotation = info.annotation
            nested, item = section_of(annotation), section_of(item_of(annotation))
            if nested:
                self._merge_section(nested, value, cast(Tree, into.setdefault(name, {})), path, source)
            elif item and is_mapping(value) and any(isinstance(index, int) for index in value):
                items = into.setdefault(name, [one.model_dump() for one in cast(tuple[Section, ...], info.default)])
                self._merge_items(item, cast(dict[int, object], value), cast(list[object], items), path, source)
            elif item:
                into[name] = self._list_of_sections(item, source.read(value, annotation), path, source)
            else:
                self._merge_leaf(info, source.read(value, annotation), into, path, source)

    def _merge_leaf(self, info: FieldInfo, value: object, into: Tree, path: str, source: "_Source") -> None:
        name = path.rpartition(".")[2]
        self.origins[path] = source.origin(path)
        if isinstance(value, bool) and not takes_truth(info.annotation):
            # pydantic would read true as 1, so that a flag whose value was forgotten trained with a learning rate of 1.
            problem = f"{str(value).lower()} given; must be {type_in_words(info)}"
            self.problems.append(Problem(path, problem, source.origin(path)))
        elif _is_mapping(info.annotation) and is_mapping(value):
            below = into.get(name)
            into[name] = {**below, **value} if is_mapping(below) else value
        else:
            into[name] = value

    def _merge_section(self, schema: type[Section], value: object, into: Tree, path: str, source: "_Source") -> None:
        """A mapping goes in key by key; a bare value sets the section's `SHORTHAND`, the other keys stay."""
        value = source.read_section(value)
        if value is None:
            return
        if not is_mapping(value):
            if schema.SHORTHAND is None:
                self.problems.append(
                    Problem(path, f"is a section; give one of its keys, not {_kind(value)}", source.origin(path))
                )
                return
            value = {schema.SHORTHAND: value}
            source = replace(source, shorthand=path)
        self._merge(schema, value, into, path + ".", source)

    def _merge_items(
        self, schema: type[Section], items: Mapping[int, object], into: list[object], path: str, source: "_Source"
    ) -> None:
        for index, value in items.items():
            if index > len(into):
                count = f"{len(into)} item{'s' if len(into) != 1 else ''}"
                self.problems.append(
                    Problem(f"{path}.{index}", f"the list has {count}; indices start at 0", source.origin(path))
                )
                continue
            if index == len(into):
                into.append({})
            self._merge_section(schema, value, cast(Tree, into[index]), f"{path}.{index}", source)

    def _list_of_sections(self, schema: type[Section], value: object, path: str, source: "_Source") -> list[object]:
        """A list replaces the list below it; a bare value is a list of one."""
        for known in [known for known in self.origins if known.startswith(path + ".")]:
            del self.origins[known]
        result: list[object] = []
        for index, item in enumerate(value if is_list(value) else [value]):
            into: Tree = {}
            self._merge_section(schema, item, into, f"{path}.{index}", source)
            result.append(into)
        if not result:
            self.origins[path] = source.origin(path)
        return result

    def _unknown(self, path: str, source: "_Source") -> None:
        section = _section_at(self.schema, path)
        found = nearest(path, [_as_pattern(key.path, path) for key in leaves(self.schema)] + section)
        hint = f"did you mean {found}?" if found else f"allowed here: {', '.join(section)}"
        self.problems.append(Problem(path, f"unknown key; {hint}", source.origin(path)))


@dataclass(frozen=True, slots=True)
class _Source:
    """The origin of values: a file with the line of each key, or a flag, whose values may still be text.

    `shorthand` is the path of a section that was given as a bare value.
    """

    name: Origin
    lines: Mapping[str, int] | None = None
    shorthand: str | None = None

    def origin(self, path: str) -> Origin:
        line = (self.lines or {}).get(self.shorthand or path)
        return f"{self.name}:{line}" if line else self.name

    def read_section(self, value: object) -> object:
        is_json = self.lines is None and isinstance(value, str) and value.lstrip().startswith("{")
        return parse_value(str(value)) if is_json else value

    def read(self, value: object, annotation: object) -> object:
        if self.lines is None:
            if isinstance(value, str) and not holds_text(annotation) and not _is_list_of_bare_words(value, annotation):
                value = parse_value(value)
            if is_mapping(value) and _is_mapping(annotation):
                value = {key: _scalar(item) for key, item in value.items()}
        # A bare value where a list is meant becomes a list of one.
        return value if item_of(annotation) is None or value is None or is_list(value) else [value]


def _is_mapping(annotation: object) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _is_list_of_bare_words(value: str, annotation: object) -> bool:
    """True for text that is one item of a list of texts or sections, as `./my.py:fn`; `[a, b]` is read as YAML."""
    item = item_of(annotation)
    return bool(section_of(item) or holds_text(item)) and not value.lstrip().startswith("[")


def _scalar(value: object) -> object:
    """Text as a number, boolean or text, for a value of a free mapping."""
    read = parse_value(value) if isinstance(value, str) else value
    return value if is_mapping(read) or is_list(read) else read


def _section_at(schema: type[Section], path: str) -> list[str]:
    """Full paths of the siblings of the unknown key `path`; where an index is missing, those of the first entry."""
    prefix = ""
    parts = path.split(".")
    for part, behind in itertools.pairwise(parts):
        info = schema.model_fields.get(part)
        item = section_of(item_of(info.annotation)) if info else None
        nested = section_of(info.annotation) or item if info else None
        if nested:
            schema, prefix = nested, f"{prefix}{part}." + ("0." if item and not behind.isdigit() else "")
        elif part.isdigit():
            prefix += f"{part}."
        else:
            break
    return [prefix + name for name in schema.model_fields]


def _as_pattern(known: str, given: str) -> str:
    """`known` with the list index of `given`, so that `reward.2.wieght` suggests `reward.2.weight`."""
    index = next((part for part in given.split(".") if part.isdigit()), "0")
    return known.replace(".0.", f".{index}.")


def _kind(value: object) -> str:
    if is_mapping(value):
        return "a mapping"
    return "a list" if is_list(value) else f"the value {value!r}"
