"""Load a recipe: default < recipe < level < file < command line, validated once, with the origin of each value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.base.config.effects import check_effects
from tunesmith.base.config.keys import did_you_mean, item_of, section_of
from tunesmith.base.config.levels import LEVELS, Level, settings_of
from tunesmith.base.config.merge import Layers, Origin, Problem
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.schema import RECIPES, SPECS
from tunesmith.base.config.sections import Section
from tunesmith.base.config.yaml_text import Document, is_mapping, parse, read
from tunesmith.base.core.errors import ConfigError

DEFAULT: Origin = "default"
_SUFFIX = ".yaml"


def shipped_names() -> list[str]:
    """Names of the recipes that come with Tunesmith, sorted."""
    files = resources.files("tunesmith.base.config").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def shipped_text(name: str) -> str:
    """The YAML text of the shipped recipe `name`; ConfigError with the allowed names if there is none."""
    known = shipped_names()
    if name not in known:
        if name.endswith((_SUFFIX, ".yml")) or "/" in name:
            raise ConfigError(f"{name!r} is no shipped recipe; a file of your own goes to --config")
        raise ConfigError(f"there is no recipe {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return resources.files("tunesmith.base.config").joinpath("recipes", name + _SUFFIX).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A validated recipe and the origin of each leaf key, for example `optimizer.learning_rate: file my.yaml:7`."""

    recipe: Recipe
    provenance: dict[str, Origin]


def load_recipe(
    algorithm: str,
    *,
    recipe: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, Origin] | None = None,
) -> Resolved:
    """The recipe for `tunesmith train <algorithm>`, merged default < `recipe` (a shipped name) < level < `file` <
    `overrides`. The level is the key `level` of the topmost of them that has one.

    `overrides` maps dotted paths to values; text for a field that is no text is read as YAML. `origins` describes
    the source of an override; without an entry it is `command line --<path>`. An empty `run.name` takes the name of
    the file or recipe. ConfigError names all unknown keys and bad values, with path, origin and what is allowed; and
    keys of `file` and `overrides` that have no effect beside others (`effects.py`).
    """
    layers, given = Layers(schema_of(algorithm)), dict(overrides or {})
    shipped = None if recipe is None else parse(shipped_text(recipe), f"recipe {recipe}")
    own = None if file is None else parse(read(file), str(file))
    if shipped is not None:
        _expect_algorithm(algorithm, f"recipe {recipe}", shipped)
        layers.add_document(shipped, f"recipe {recipe}")
    if level := _level_of(given, own and own.data, shipped and shipped.data):
        for path, value in settings_of(level, layers.schema).items():
            layers.add_override(path, value, f"level {level}")
    if own is not None:
        _expect_algorithm(algorithm, str(file), own)
        layers.add_document(own, f"file {file}")
    for path in sorted(given, key=lambda path: path.count(".")):
        layers.add_override(path, given[path], (origins or {}).get(path, f"command line --{path}"))
    run = cast(dict[str, object], layers.tree.setdefault("run", {}))
    if not run.get("name"):
        run["name"] = file.stem if file else recipe or algorithm
        layers.origins["run.name"] = "name of the file" if file else "name of the recipe" if recipe else DEFAULT
    resolved = _validated(layers)
    if file is None or not _is_record(file):
        check_effects(resolved.recipe, resolved.provenance)
    return resolved


def _is_record(file: Path) -> bool:
    """True for the recipe that a run has written with all its keys, which were checked when it began."""
    return file.name == "recipe.yaml" and (file.parent / "provenance.json").is_file()


def _level_of(*layers: object) -> Level | None:
    """The level that the first of `layers` with that key names; one that there is not is left to the validation."""
    named = next((layer["level"] for layer in layers if is_mapping(layer) and "level" in layer), None)
    return next((level for level in LEVELS if level == named), None)


def algorithm_of(document: Document, name: str) -> str:
    """The algorithm a recipe document is for: its key `algorithm`, else the one that has most of its sections."""
    data = document.data if is_mapping(document.data) else {}
    if "algorithm" in data:
        given = str(data["algorithm"])
        if given not in RECIPES:
            raise ConfigError(
                f"{name}: algorithm is {given!r}; allowed: {', '.join(RECIPES)}{did_you_mean(given, RECIPES)}"
            )
        return given
    if "live" in data:
        return "live"  # it has the sections of others too
    shared = set(Recipe.model_fields)
    own = {name: set(spec.recipe.model_fields) - shared for name, spec in SPECS.items()}
    most = max(len(set(data) & sections) for sections in own.values())
    fitting = [algorithm for algorithm, sections in own.items() if most and len(set(data) & sections) == most]
    if len(fitting) > 1:  # settings of an algorithm say more than sections of its data
        fitting = [algorithm for algorithm in fitting if algorithm in data]
    if len(fitting) != 1:
        raise ConfigError(f"{name}: add `algorithm: {' | '.join(RECIPES)}` to say which trainer it is for")
    return fitting[0]


def read_algorithm(recipe: Path | str) -> str:
    """The algorithm of a recipe, a file or a shipped name; ConfigError if it cannot be read or determined."""
    text = read(recipe) if isinstance(recipe, Path) else shipped_text(recipe)
    return algorithm_of(parse(text, str(recipe)), str(recipe))


def schema_of(algorithm: str) -> type[Recipe]:
    """The schema of an algorithm; ConfigError with the allowed names if there is none."""
    if algorithm not in RECIPES:
        raise ConfigError(
            f"there is no algorithm {algorithm!r}{did_you_mean(algorithm, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    return RECIPES[algorithm]


def _expect_algorithm(algorithm: str, name: str, document: Document) -> None:
    if is_mapping(document.data) and "algorithm" in document.data:
        found = algorithm_of(document, name)
        if found != algorithm:
            raise ConfigError(f"{name} is for `tunesmith train {found}`, not for `tunesmith train {algorithm}`")


def _validated(layers: Layers) -> Resolved:
    problems = list(layers.problems)
    try:
        recipe = layers.schema.model_validate(layers.tree)
        if not problems:
            return Resolved(recipe, origins_of(recipe, layers.origins, others=DEFAULT))
    except ValidationError as error:
        problems += [_as_problem(details, layers) for details in _own_errors(error.errors(include_url=False))]
    raise ConfigError(*dict.fromkeys(map(str, problems)))


def _own_errors(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """`errors` without those that follow from another: a list whose only item is wrong is not also too short."""
    return [
        error
        for error in errors
        if error["type"] != "too_short"
        or not any(other["loc"][: len(error["loc"])] == error["loc"] for other in errors if other is not error)
    ]


def _as_problem(details: ErrorDetails, layers: Layers) -> Problem:
    """One error of pydantic as a problem: the value given, the values allowed, and its origin."""
    location = [str(part) for part in details["loc"]]
    path = ".".join(location)
    while path and path not in layers.origins and "." in path:
        path = path.rpartition(".")[0]
    origin = layers.origins.get(path, "")
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return Problem(".".join(location), "is required", origin)
    if not origin or details["type"] == "value_error":
        below = [known for key, known in layers.origins.items() if key.startswith(path + ".")]
        return Problem(".".join(location), message, origin or ", ".join(dict.fromkeys(below)))
    given = details["input"]
    rule = message.partition(", unable to parse")[0].replace("Input should be", "must be").replace("Input is", "is")
    expected = str(details.get("ctx", {}).get("expected", ""))
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")] if expected else []
    return Problem(path, f"{given!r} given; {rule[:1].lower()}{rule[1:]}{did_you_mean(str(given), choices)}", origin)


def origins_of(
    recipe: Section,
    origins: Mapping[str, Origin] = MappingProxyType({}),
    prefix: str = "",
    *,
    others: Origin = "Python",
) -> dict[str, Origin]:
    """The origin of each leaf of `recipe`, in the order of the schema: that in `origins`, else `others` if the value
    was set, else `default`.
    """
    found: dict[str, Origin] = {}
    for name, info in type(recipe).model_fields.items():
        path, value = prefix + name, getattr(recipe, name)
        own = others if name in recipe.model_fields_set else DEFAULT
        if isinstance(value, Section):
            found |= origins_of(value, origins, f"{path}.", others=own)
        elif section_of(item_of(info.annotation)):
            for index, item in enumerate(cast(tuple[Section, ...], value)):
                found |= origins_of(item, origins, f"{path}.{index}.", others=own)
        else:
            found[path] = origins.get(path, own)
    return found


FLAGS: Mapping[str, str] = {
    "steps": "run.steps",
    "tools": "environment.tools",
    "seed": "run.seed",
    "report_to": "run.report_to",
}
"""Short flags and the key that each one sets."""


@dataclass(slots=True)
class Overrides:
    """Values by dotted path, and the flag that each one came from, for `load_recipe`."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])

    def put(self, path: str, value: object, flag: str) -> None:
        """Set the key at `path` to `value`, which `--flag` gave."""
        self.values[path] = value
        self.origins[path] = f"command line --{flag}"


def parse_overrides(algorithm: str, words: Sequence[str]) -> Overrides:
    """The overrides in `words`; ConfigError for a word that belongs to no flag, or a flag without a value.

    A flag given again replaces the first value, or adds to it where the key is a list (`--reward a --reward b`). A flag
    without a value is true: `--ppo.whiten-rewards`.
    """
    schema = schema_of(algorithm)
    overrides = Overrides()
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"{word!r} belongs to no flag; values are given as --key value")
        flag, equals, value = word[2:].partition("=")
        position += 1
        if not equals:
            value, position = _value_at(words, position)
        path = flag.replace("-", "_")
        path = FLAGS.get(path, path)
        overrides.put(path, _with_earlier(schema, path, overrides.values.get(path), value), flag)
    return overrides


def _value_at(words: Sequence[str], position: int) -> tuple[str | bool, int]:
    """The value at `position` and the position after it; the words of a `[2, 8]` that the shell split are joined."""
    if position >= len(words) or (words[position].startswith("--") and len(words[position]) > 2):
        return True, position
    value = words[position]
    while value.startswith("[") and value.count("[") > value.count("]") and position + 1 < len(words):
        position += 1
        value = f"{value} {words[position]}"
    return value, position + 1


def _with_earlier(schema: type[Section], path: str, earlier: object, value: object) -> object:
    info = _field_annotation(schema, path)
    if earlier is None or item_of(info) is None:
        return value
    items: list[object] = [*earlier] if isinstance(earlier, list) else [earlier]  # pyright: ignore[reportUnknownVariableType]
    return [*items, value]


def _field_annotation(schema: type[Section], path: str) -> object:
    annotation: object = schema
    for name in path.split("."):
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}
        annotation = fields[name].annotation if name in fields else None
    return annotation
