"""`tunesmith validate`: are these recipes right? All that is wrong is listed, not only the first thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import reporting
from tunesmith.core.errors import ConfigError, InputError


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
    """What was found in one recipe: nothing, if it is right. `algorithm` is empty where it cannot be told."""

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
    from tunesmith.config.load import algorithm_of, resolve
    from tunesmith.config.suggest import did_you_mean
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
