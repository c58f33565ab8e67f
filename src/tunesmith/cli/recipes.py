"""`tunesmith recipes ls | show | cp | keys` and `tunesmith validate`: shipped recipes, recipe keys, recipe checks."""

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


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Check recipes and list all that is wrong with them. Exit code 2 if anything is."""

    targets: Annotated[
        tuple[str, ...], Positional, flag("YAML files, or names of recipes.", metavar="FILE|RECIPE")
    ] = ()
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
    from tunesmith.config import recipes

    targets = [*options.targets, *(recipes.names() if options.all else [])]
    if not targets:
        raise InputError("nothing to check; give a file, the name of a recipe, or --all")
    with reporting(as_json=options.json) as output:
        verdicts = [check(target) for target in dict.fromkeys(targets)]
        for verdict in verdicts:
            output.say(f"{'wrong' if verdict.problems else 'ok':<6} {verdict.name}")
            for problem in verdict.problems:
                output.say(f"       {problem}")
        bad = [verdict for verdict in verdicts if verdict.problems]
        rows = [{slot: getattr(verdict, slot) for slot in verdict.__slots__} for verdict in verdicts]
        output.finish({"num_checked": len(verdicts), "num_wrong": len(bad), "recipes": rows})
    if bad:
        raise InputError(f"{len(bad)} of {len(verdicts)} recipes {'is' if len(bad) == 1 else 'are'} wrong")


def check(target: str) -> Verdict:
    """The verdict on a shipped recipe, by name, or on a file."""
    from tunesmith.config import recipes
    from tunesmith.config.keys import did_you_mean
    from tunesmith.config.load import algorithm_of, resolve
    from tunesmith.config.yaml_text import parse as parse_yaml
    from tunesmith.config.yaml_text import read

    algorithm = ""
    file = Path(target).expanduser()
    try:
        if target in recipes.names():
            algorithm = algorithm_of(parse_yaml(recipes.text(target), f"recipe {target}"), f"recipe {target}")
            problems = resolve(algorithm, recipe=target)[1]
        elif file.exists():
            algorithm = algorithm_of(parse_yaml(read(file), target), target)
            problems = resolve(algorithm, file=file)[1]
        else:
            hint = did_you_mean(target, recipes.names())
            raise ConfigError(f"there is no file and no recipe {target!r}{hint}")
    except ConfigError as error:
        return Verdict(target, algorithm, (str(error),))
    return Verdict(target, algorithm, tuple(map(str, problems)))
