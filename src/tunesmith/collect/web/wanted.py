"""Runs as pages ask for them: a recipe and keys as text, resolved and checked as on the command line."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.config.comparison import COMPARISON, comparison_options, read_comparison
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.levels import LEVELS
from tunesmith.base.config.load import DEFAULT, FLAGS, Resolved, load_recipe, parse_overrides, schema_of
from tunesmith.base.config.schema import RECIPES, SPECS
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.runs.listing import read_object, read_recipe
from tunesmith.collect.web.allowed import Allowed, leaves_of, not_allowed

ALGORITHMS = tuple(SPECS)
"""Algorithms that a page can start; the live loop is started beside its server."""

STARTED = (*ALGORITHMS, COMPARISON)
"""All that a page can start: trainings, and comparisons of algorithms, whose settings are flags instead of keys."""

_NOT_COPIED = ("algorithm", "schema_version", "level", "run.dir")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run that somebody wants: an algorithm, a shipped recipe or none, and keys with their values as text; or with
    `resume` the run of that name, which goes on with these keys.
    """

    algorithm: str
    recipe: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    resume: str = ""

    def words(self, root: Path) -> list[str]:
        """The words of the command line; every key is a single one, so that none can be taken for another flag."""
        settings = [f"--{key}={value}" for key, value in self.settings]
        if self.algorithm == COMPARISON:
            place = f"--resume={root / self.resume}" if self.resume else f"--out={root}"
            return ["compare-algorithms", *(word.removesuffix("=true") for word in settings), place]
        if self.resume:
            return ["resume", str(root / self.resume), *settings]
        recipe = [f"--recipe={self.recipe}"] if self.recipe else []
        return ["train", self.algorithm, *recipe, *settings, f"--run.dir={root}"]


def command(words: Sequence[str]) -> list[str]:
    """The command line of this Tunesmith with `words`."""
    return [sys.executable, "-m", "tunesmith", *words]


def check(wanted: Wanted, allowed: Allowed) -> None:
    """Raise ConfigError for all that is wrong with what is wanted, and RunError for a comparison that there is not."""
    if wanted.algorithm != COMPARISON:
        resolve(wanted, allowed)
        return
    if wanted.resume and wanted.settings:
        raise ConfigError("a comparison goes on with its own settings; leave the number of steps out")
    path = allowed.root / wanted.resume
    options = read_comparison(path) if wanted.resume else comparison_options(dict(wanted.settings))
    if not allowed.has_model(options.model):
        raise ConfigError(str(not_allowed("model", options.model)))


def presets(wanted: Wanted) -> dict[str, object]:
    """The value of each key that is not given, by recipe and level; `required` for what must be given."""
    found: dict[str, object] = {key.path: key.default for key in leaves(RECIPES[wanted.algorithm])}
    given = {key: value for key, value in wanted.settings if key == "level" and value in LEVELS}
    with suppress(ConfigError):  # it lacks what is required
        recipe = load_recipe(wanted.algorithm, recipe=wanted.recipe or None, overrides=given).recipe
        values = dict(leaves_of(recipe.model_dump()))
        # Lists of sections that have no item have no keys, but in the schema.
        found = {key: value for key, value in found.items() if ".0." not in key or key in values} | values
    if found["run.steps"] in (None, "null"):
        found["run.steps"] = (
            "100" if "rollout" in RECIPES[wanted.algorithm].model_fields else "all epochs over the data"
        )
    return {key: value for key, value in found.items() if value not in (None, "null", "", '""')}


def resolve(wanted: Wanted, allowed: Allowed) -> Resolved:
    """The recipe of a run that is wanted.

    Raises:
        ConfigError: for all that is wrong with it, as on the command line, and for what a page may not name.
    """
    # The command line reads these otherwise than `parse_overrides` does: --reward, --steps.
    flags = {*schema_of(wanted.algorithm).model_fields, *FLAGS} - {"level", "description"}
    if bare := [key for key, _ in wanted.settings if key.replace("-", "_") in flags]:
        raise ConfigError(*(f"{key}: give the key of a value, such as model.name" for key in bare))
    given = parse_overrides(wanted.algorithm, [f"--{key}={value}" for key, value in wanted.settings])
    given.values.setdefault("run.dir", str(allowed.root))
    resolved = load_recipe(
        wanted.algorithm,
        recipe=wanted.recipe or None,
        file=allowed.root / wanted.resume / "recipe.yaml" if wanted.resume else None,
        overrides=given.values,
        origins=given.origins,
    )
    if problems := allowed.problems(resolved.recipe):
        raise ConfigError(*map(str, problems))
    return resolved


def wanted_like(run: Path) -> Wanted:
    """The run in the folder `run` once more: its algorithm, its level, and the keys that were set beyond that."""
    recipe, origins = read_recipe(run), read_object(run / "provenance.json")
    level = recipe.get("level")
    given = (DEFAULT, f"level {level}")
    settings = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in leaves_of(recipe)
        if key not in _NOT_COPIED and _origin(key, origins) not in given
    ]
    if level is not None:
        settings.insert(0, ("level", str(level)))
    return Wanted(str(recipe.get("algorithm", "")), settings=tuple(settings))


def _origin(key: str, origins: Mapping[str, object]) -> object:
    """The origin of a key, or of the mapping that it is in."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key)
