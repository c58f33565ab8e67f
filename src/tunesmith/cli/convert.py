"""`tunesmith convert trl-config`: a config of TRL's command line as a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import reporting, write_new
from tunesmith.config import trl_config, yaml_text
from tunesmith.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Print a config of TRL's command line as a recipe. Comments say which fields it does not follow, and why."""

    file: Annotated[str, Positional, flag("YAML file of `trl grpo | dpo | sft | reward --config`.", "FILE")]
    algorithm: Annotated[
        Literal["", "grpo", "dpo", "sft", "reward"], flag("Trainer; by default the one that the fields fit.")
    ] = ""
    out: Annotated[str, flag("Write the recipe to this file; nothing is overwritten.", "FILE")] = ""
    json: Annotated[bool, flag("Print one JSON object.")] = False


def trl_config_(words: Sequence[str]) -> None:
    """Run `tunesmith convert trl-config`."""
    options = parse(ConvertOptions, words, "convert trl-config")
    file = Path(options.file).expanduser()
    given = yaml_text.parse(yaml_text.read(file), str(file)).data
    if not yaml_text.is_mapping(given):
        raise ConfigError(f"{file} holds no fields; give the YAML file of a TRL command")
    algorithm = options.algorithm or trl_config.algorithm_of(given)
    converted = trl_config.convert(given, algorithm)
    kinds = {"not needed": converted.not_needed, "not possible": converted.not_possible}
    notes = [f"# {kind}: {name}: {why}\n" for kind, found in kinds.items() for name, why in found.items()]
    text = f"# From {file.name}, a config of TRL.\n{''.join(notes)}{yaml_text.to_yaml(converted.recipe, changed=True)}"
    if options.out:
        out = Path(options.out).expanduser()
        write_new(out, text)
        text = str(out)
    with reporting(as_json=options.json) as output:
        output.say(text.removesuffix("\n"))
        output.finish(
            {
                "algorithm": algorithm,
                "recipe": converted.recipe.model_dump(mode="json", exclude_defaults=True),
                "not_needed": converted.not_needed,
                "not_possible": converted.not_possible,
            }
        )
