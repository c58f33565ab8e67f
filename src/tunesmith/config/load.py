"""Loading a recipe: default < recipe < file < command line, validated once, with the origin of each value kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.config import recipes
from tunesmith.config.keys import item_of, section_of
from tunesmith.config.merge import Layers, Origin, Problem
from tunesmith.config.schema import RECIPES, AnyRecipe, LiveRecipe, Recipe
from tunesmith.config.sections import Section
from tunesmith.config.suggest import did_you_mean
from tunesmith.config.yaml_text import Document, is_mapping, parse, read
from tunesmith.core.errors import ConfigError

DEFAULT: Origin = "default"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A validated recipe and the origin of each leaf key, for example `optimizer.learning_rate: file my.yaml:7`."""

    recipe: AnyRecipe
    provenance: dict[str, Origin]


def load_recipe(
    algorithm: str,
    *,
    recipe: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, Origin] | None = None,
) -> Resolved:
    """The recipe for `tunesmith train <algorithm>`, merged default < `recipe` (a shipped name) < `file` < `overrides`.

    `overrides` maps dotted paths to values; text for a field that is no text is read as YAML. `origins` says in words
    where an override came from; without an entry it is `command line --<path>`. An empty `run.name` takes the name of
    the file or recipe. ConfigError names all unknown keys and bad values, with path, origin and what is allowed.
    """
    resolved, problems = resolve(algorithm, recipe=recipe, file=file, overrides=overrides, origins=origins)
    if resolved is None:
        raise ConfigError(in_words(problems))
    return resolved


def load_live(
    *,
    recipe: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, Origin] | None = None,
) -> tuple[LiveRecipe, dict[str, Origin]]:
    """The recipe of `tunesmith live` and the origin of each key; arguments and errors as in `load_recipe`."""
    resolved = load_recipe("live", recipe=recipe, file=file, overrides=overrides, origins=origins)
    found: object = resolved.recipe
    assert isinstance(found, LiveRecipe)
    return found, resolved.provenance


def resolve(
    algorithm: str,
    *,
    recipe: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, Origin] | None = None,
) -> tuple[Resolved | None, list[Problem]]:
    """As `load_recipe`, but problems are returned, and None if there are any. Unreadable files raise."""
    layers = Layers(schema_of(algorithm))
    for name, label, document in _documents(recipe, file):
        _expect_algorithm(algorithm, name, document)
        layers.add_document(document, label)
    given = dict(overrides or {})
    for path in sorted(given, key=lambda path: path.count(".")):
        layers.add_override(path, given[path], (origins or {}).get(path, f"command line --{path}"))
    default_name = file.stem if file else recipe or algorithm
    if not _run_of(layers).get("name"):
        _run_of(layers)["name"] = default_name
        layers.origins["run.name"] = "name of the file" if file else "name of the recipe" if recipe else DEFAULT
    return _validated(layers)


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
    own = {name: set(schema.model_fields) - shared for name, schema in RECIPES.items() if name != "live"}
    most = max(len(set(data) & sections) for sections in own.values())
    fitting = [algorithm for algorithm, sections in own.items() if most and len(set(data) & sections) == most]
    if len(fitting) != 1:
        raise ConfigError(f"{name}: add `algorithm: {' | '.join(RECIPES)}` to say which trainer it is for")
    return fitting[0]


def read_algorithm(file: Path) -> str:
    """The algorithm of the recipe in `file`; ConfigError if it cannot be read or told."""
    return algorithm_of(parse(read(file), str(file)), str(file))


def schema_of(algorithm: str) -> type[AnyRecipe | LiveRecipe]:
    """The schema of an algorithm; ConfigError with the allowed names if there is none."""
    if algorithm not in RECIPES:
        raise ConfigError(
            f"there is no algorithm {algorithm!r}{did_you_mean(algorithm, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    return RECIPES[algorithm]


def in_words(problems: list[Problem]) -> str:
    """One line for one problem, else a count and a line for each."""
    if len(problems) == 1:
        return str(problems[0])
    return "\n".join([f"{len(problems)} problems in the recipe", *(f"  {problem}" for problem in problems)])


def _documents(recipe: str | None, file: Path | None) -> list[tuple[str, Origin, Document]]:
    documents: list[tuple[str, Origin, Document]] = []
    if recipe is not None:
        documents.append((f"recipe {recipe}", f"recipe {recipe}", parse(recipes.text(recipe), f"recipe {recipe}")))
    if file is not None:
        documents.append((str(file), f"file {file}", parse(read(file), str(file))))
    return documents


def _expect_algorithm(algorithm: str, name: str, document: Document) -> None:
    if is_mapping(document.data) and "algorithm" in document.data:
        found = algorithm_of(document, name)
        if found != algorithm:
            raise ConfigError(f"{name} is for `tunesmith train {found}`, not for `tunesmith train {algorithm}`")


def _run_of(layers: Layers) -> dict[str, object]:
    return cast(dict[str, object], layers.tree.setdefault("run", {}))


def _validated(layers: Layers) -> tuple[Resolved | None, list[Problem]]:
    schema = cast(type[AnyRecipe], layers.schema)
    problems = list(layers.problems)
    try:
        recipe = schema.model_validate(layers.tree)
    except ValidationError as error:
        problems += [_as_problem(details, layers) for details in _own_errors(error.errors(include_url=False))]
        recipe = None
    if recipe is None or problems:
        return None, list(dict.fromkeys(problems))
    return Resolved(recipe, _provenance(recipe, layers.origins)), []


def _own_errors(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """`errors` without those that follow from another: a list whose only item is wrong is not also too short."""
    return [
        error
        for error in errors
        if error["type"] != "too_short"
        or not any(other["loc"][: len(error["loc"])] == error["loc"] for other in errors if other is not error)
    ]


def _as_problem(details: ErrorDetails, layers: Layers) -> Problem:
    """What was given, what is allowed, and where it came from, for one error of pydantic."""
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


def _provenance(recipe: Section, origins: Mapping[str, Origin], prefix: str = "") -> dict[str, Origin]:
    """The origin of each leaf of `recipe`, in the order of the schema."""
    found: dict[str, Origin] = {}
    for name, info in type(recipe).model_fields.items():
        path, value = prefix + name, getattr(recipe, name)
        if isinstance(value, Section):
            found |= _provenance(value, origins, f"{path}.")
        elif section_of(item_of(info.annotation)):
            for index, item in enumerate(cast(tuple[Section, ...], value)):
                found |= _provenance(item, origins, f"{path}.{index}.")
        else:
            found[path] = origins.get(path, DEFAULT)
    return found
