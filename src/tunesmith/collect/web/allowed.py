"""The files, models and Python functions that recipes from a page may name: those that are built in, what lies in the
folder of the runs, and what the admin who started the server allowed.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.merge import Problem
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.sections import BUILTIN_REWARDS, SELF, TINY_FAMILIES
from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.prompts import ARITHMETIC, FILMS
from tunesmith.collect.data.sources import data_path, is_data_source

MODEL_NAMES = ("smollm2", "scratch", *(f"tiny:{family}" for family in TINY_FAMILIES))
"""Models that are built in."""

MODEL = "model.name"
DATA = (
    *(
        f"{section}.{name}"
        for section in ("prompts", "pairs", "demonstrations")
        for name in ("source", "heldout_source")
    ),
    "pairs.sources.*.source",
    "pairs.heldout_sources.*.source",
)
REWARDS = ("reward.*.source",)

FIXED: Mapping[str, object] = {
    "model.trust_remote_code": False,
    "rollout.server_url": None,
    "rollout.server_folder": None,
    "rollout.vllm_options": {},
    "scale.address": None,
    "live.database": None,
    "environment.source": None,
    "environment.arguments": {},
    "environment.tools": (),
    "environment.search_folder": None,
    "environment.allow_unconfined": False,
}
"""Keys that a page may not set: they run code, write files, or connect to other machines."""


class Allowed:
    """Names that a recipe from a page may contain, besides what is built in: all below `root` but the folder
    `private`, and `words`: files and folders with all in them, and names as they are written in a recipe.
    """

    def __init__(self, root: Path, private: Path, words: Sequence[str] = ()) -> None:
        self.root = root
        self.words = frozenset(words)
        self._private = private.resolve()
        self._places = tuple(Path(place).resolve() for place in (root, *words))

    def problems(self, recipe: Recipe) -> list[Problem]:
        """Names in `recipe` that are not allowed, by key; empty if there are none."""
        return [found for key, value in leaves_of(recipe.model_dump()) if (found := self._problem(key, value))]

    def _problem(self, key: str, value: object) -> Problem | None:
        pattern = re.sub(r"\.\d+\.", ".*.", key)
        if pattern == "run.dir" and value != str(self.root):
            return Problem(key, f"{value!r} given; runs that are started here go to {self.root}")
        if pattern in FIXED and value != FIXED[pattern]:
            return Problem(key, f"{value!r} given; only a run that is started from a terminal may set this")
        if (names_model(pattern) or pattern in (*DATA, *REWARDS)) and not self._may_name(pattern, str(value)):
            names = (
                MODEL_NAMES if names_model(pattern) else BUILTIN_REWARDS if pattern in REWARDS else (FILMS, ARITHMETIC)
            )
            return not_allowed(key, value, (*names, *self.words))
        return None

    def has_model(self, name: str) -> bool:
        """True if a page may name this model."""
        return self._may_name(MODEL, name)

    def _may_name(self, pattern: str, name: str) -> bool:
        if not name or name in self.words:
            return True
        if "*" in name:
            return False
        if names_model(pattern):
            return name in MODEL_NAMES or (pattern != MODEL and name == SELF) or self._has(name)
        if pattern in REWARDS:
            # With a colon or `.py` it names a Python function, wherever that is.
            return name in BUILTIN_REWARDS or (":" not in name and not name.endswith(".py") and self._has(name))
        if pattern.startswith("prompts.") and name in (FILMS, ARITHMETIC):
            return True
        has_split = not is_data_source(name) and not os.path.lexists(name)  # a split of a folder: `folder:train`
        return self._has(name.rpartition(":")[0] if has_split else name)

    def _has(self, name: str) -> bool:
        """True if `name` is an existing file or folder in one of the places, links followed."""
        if not name or name.startswith("~"):
            return False
        try:
            path = (data_path(name) if is_data_source(name) else Path(name)).resolve(strict=True)
        except (OSError, ValueError, RuntimeError, DataError):
            return False
        return not path.is_relative_to(self._private) and any(path.is_relative_to(place) for place in self._places)


def names_model(key: str) -> bool:
    """True if the key names a model: that which is trained, or a further one, such as a teacher."""
    return key == MODEL or key.endswith(".model")


def not_allowed(key: str, value: object, names: Iterable[str] = MODEL_NAMES) -> Problem:
    """The problem of a value that a page may not name, though it may name `names`."""
    hint = did_you_mean(str(value), names) or "; start `tunesmith studio` with --allow to permit it"
    return Problem(key, f"{value!r} is not allowed here, nor built in{hint}")


def leaves_of(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted keys of a recipe and their values; a mapping of options is one value."""
    if is_mapping(value) and prefix not in FIXED:
        for name, item in value.items():
            yield from leaves_of(item, f"{prefix}.{name}" if prefix else name)
    elif is_list(value) and any(is_mapping(item) for item in value):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{prefix}.{index}")
    else:
        yield prefix, value
