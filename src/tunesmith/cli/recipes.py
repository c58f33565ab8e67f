"""`tunesmith recipes ls | show | cp | keys`: the recipes that come with Tunesmith, and the keys of a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import reporting
from tunesmith.config import recipes
from tunesmith.core.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the recipes that come with Tunesmith."""

    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Print a recipe."""

    name: Annotated[str, Positional, flag("Name of a recipe.", metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Copy a recipe to a file of your own, to change it and give it to --config. Nothing is overwritten."""

    name: Annotated[str, Positional, flag("Name of a recipe.", metavar="NAME")]
    dest: Annotated[str, Positional, flag("File or folder; NAME.yaml here if left out.", metavar="[DEST]")] = ""


@dataclass(frozen=True, kw_only=True)
class KeysOptions:
    """List every key of a recipe, with type, default and meaning. Each is a flag of `tunesmith train` too."""

    algorithm: Annotated[str, Positional, flag("sft, reward, dpo, ppo, grpo or live.", metavar="ALGORITHM")]
    json: Annotated[bool, flag("Print one JSON object.")] = False


def ls(words: Sequence[str]) -> None:
    """Run `tunesmith recipes ls`."""
    options = parse(ListOptions, words, "recipes ls")
    from tunesmith.config.load import algorithm_of, load_recipe
    from tunesmith.config.yaml_text import parse as parse_yaml

    with reporting(as_json=options.json) as output:
        rows: list[dict[str, str]] = []
        for name in recipes.names():
            algorithm = algorithm_of(parse_yaml(recipes.text(name), name), name)
            recipe = load_recipe(algorithm, recipe=name).recipe
            rows.append({"name": name, "algorithm": algorithm, "description": recipe.description})
        for row in rows:
            command = row["algorithm"] if row["algorithm"] == "live" else f"train {row['algorithm']}"
            output.say(f"{row['name']:<24} {command:<14} {row['description']}")
        output.finish({"recipes": rows})


def show(words: Sequence[str]) -> None:
    """Run `tunesmith recipes show`."""
    options = parse(ShowOptions, words, "recipes show")
    print(recipes.text(options.name), end="")


def cp(words: Sequence[str]) -> None:
    """Run `tunesmith recipes cp`."""
    options = parse(CopyOptions, words, "recipes cp")
    text = recipes.text(options.name)
    dest = Path(options.dest or ".").expanduser()
    if dest.is_dir():
        dest /= f"{options.name}.yaml"
    try:
        with dest.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{dest} exists and is kept; give another name") from None
    except OSError as error:
        raise InputError(f"{dest} cannot be written: {error.strerror}") from error
    print(dest)


def keys(words: Sequence[str]) -> None:
    """Run `tunesmith recipes keys`."""
    options = parse(KeysOptions, words, "recipes keys")
    from tunesmith.config.keys import leaves
    from tunesmith.config.load import schema_of

    name = options.algorithm
    if name in recipes.names():
        raise ConfigError(
            f"{name!r} is a recipe; `tunesmith recipes show {name}` prints it. Give sft, reward, dpo, ppo or grpo here"
        )
    with reporting(as_json=options.json) as output:
        found = list(leaves(schema_of(name)))
        section = ""
        for key in found:
            if key.path.partition(".")[0] != section:
                section = key.path.partition(".")[0]
                output.say("")
            output.say(f"--{key.path}\n    {key.type}; default {key.default}\n    {key.description}")
        output.finish({"keys": [{slot: getattr(key, slot) for slot in key.__slots__} for key in found]})
