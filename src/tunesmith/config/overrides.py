"""Words of a command line as overrides: `--a.b value`, `--a.b=value`, and a repeated flag for a list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunesmith.config.keys import item_of
from tunesmith.config.load import schema_of
from tunesmith.config.merge import Origin
from tunesmith.config.sections import Section
from tunesmith.core.errors import ConfigError

FLAGS: Mapping[str, str] = {"steps": "run.steps", "seed": "run.seed", "report_to": "run.report_to"}
"""Short flags and the key that each one sets."""


@dataclass(slots=True)
class Overrides:
    """Values by dotted path, and the flag that each one came from, for `load_recipe`."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])


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
        overrides.origins[path] = f"command line --{flag}"
        overrides.values[path] = _with_earlier(schema, path, overrides.values.get(path), value)
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
