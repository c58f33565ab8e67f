"""`tunesmith recipes ls | show | cp | keys` and `tunesmith validate`: shipped recipes, recipe keys, recipe checks."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import reporting, write_new
from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.levels import shown_keys
from tunesmith.base.config.load import load_recipe, read_algorithm, schema_of, shipped_names, shipped_text
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.core.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the recipes that come with Tunesmith."""

    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Print a recipe."""

    name: Annotated[str, Positional, flag("Name of a recipe.", "NAME")]


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Copy a recipe to a file of your own, to change it and give it to --config. Nothing is overwritten."""

    name: Annotated[str, Positional, flag("Name of a recipe.", "NAME")]
    dest: Annotated[str, Positional, flag("File or folder; NAME.yaml here if left out.", "[DEST]")] = ""


@dataclass(frozen=True, kw_only=True)
class KeysOptions:
    """List every key of a recipe, with type, default and meaning. Each is a flag of `tunesmith train` too."""

    algorithm: Annotated[str, Positional, flag(f"One of {', '.join(RECIPES)}.", "ALGORITHM")]
    json: Annotated[bool, flag("Print one JSON object.")] = False


def ls(words: Sequence[str]) -> None:
    """Run `tunesmith recipes ls`."""
    options = parse(ListOptions, words, "recipes ls")
    with reporting(as_json=options.json) as output:
        rows: list[dict[str, str]] = []
        for name in shipped_names():
            recipe = load_recipe(read_algorithm(name), recipe=name).recipe
            rows.append({"name": name, "algorithm": recipe.algorithm, "description": recipe.description})
        for row in rows:
            command = row["algorithm"] if row["algorithm"] == "live" else f"train {row['algorithm']}"
            output.say(f"{row['name']:<24} {command:<14} {row['description']}")
        output.finish({"recipes": rows})


def show(words: Sequence[str]) -> None:
    """Run `tunesmith recipes show`."""
    options = parse(ShowOptions, words, "recipes show")
    print(shipped_text(options.name), end="")


def cp(words: Sequence[str]) -> None:
    """Run `tunesmith recipes cp`."""
    options = parse(CopyOptions, words, "recipes cp")
    text = shipped_text(options.name)
    dest = Path(options.dest or ".").expanduser()
    if dest.is_dir():
        dest /= f"{options.name}.yaml"
    if dest.exists():
        raise InputError(f"{dest} exists and is kept; give another name")
    write_new(dest, text)
    print(dest)


def keys(words: Sequence[str]) -> None:
    """Run `tunesmith recipes keys`."""
    options = parse(KeysOptions, words, "recipes keys")
    name = options.algorithm
    if name in shipped_names():
        raise ConfigError(
            f"{name!r} is a recipe; `tunesmith recipes show {name}` prints it. Give one of {', '.join(RECIPES)} here"
        )
    with reporting(as_json=options.json) as output:
        found = shown_keys(schema_of(name))
        for _, keys_of_section in itertools.groupby(found, lambda key: key.path.partition(".")[0]):
            output.say("")
            for key in keys_of_section:
                output.say(f"--{key.path}\n    {key.type}; default {key.default}\n    {key.description}")
        output.finish({"keys": list(map(asdict, found))})


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Check recipes and list all that is wrong with them. Exit code 2 if anything is."""

    targets: Annotated[tuple[str, ...], Positional, flag("YAML files, or names of recipes.", "FILE|RECIPE")] = ()
    all: Annotated[bool, flag("Every recipe that comes with Tunesmith.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The problems of one recipe, none if it is valid; `algorithm` is empty if it is unknown."""

    name: str
    algorithm: str
    problems: tuple[str, ...]


def validate(words: Sequence[str]) -> None:
    """Run `tunesmith validate`."""
    options = parse(ValidateOptions, words, "validate")
    targets = [*options.targets, *(shipped_names() if options.all else [])]
    if not targets:
        raise InputError("nothing to check; give a file, the name of a recipe, or --all")
    with reporting(as_json=options.json) as output:
        verdicts = [check(target) for target in dict.fromkeys(targets)]
        for verdict in verdicts:
            output.say(f"{'wrong' if verdict.problems else 'ok':<6} {verdict.name}")
            for problem in verdict.problems:
                output.say(f"       {problem}")
        bad = [verdict for verdict in verdicts if verdict.problems]
        output.finish(
            {"num_checked": len(verdicts), "num_wrong": len(bad), "recipes": [asdict(verdict) for verdict in verdicts]}
        )
    if bad:
        raise InputError(f"{len(bad)} of {len(verdicts)} recipes {'is' if len(bad) == 1 else 'are'} wrong")


def check(target: str) -> Verdict:
    """The verdict on a shipped recipe, by name, or on a file."""
    algorithm = ""
    file = Path(target).expanduser()
    try:
        if target in shipped_names():
            algorithm = read_algorithm(target)
            load_recipe(algorithm, recipe=target)
        elif file.exists():
            algorithm = read_algorithm(file)
            load_recipe(algorithm, file=file)
        else:
            hint = did_you_mean(target, shipped_names())
            raise ConfigError(f"there is no file and no recipe {target!r}{hint}")
    except ConfigError as error:
        return Verdict(target, algorithm, error.problems)
    return Verdict(target, algorithm, ())
