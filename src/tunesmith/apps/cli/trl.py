"""`tunesmith convert trl-config` and `tunesmith trl-check`: configs and scripts for TRL."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import reporting, write_new
from tunesmith.base.config import trl_config, yaml_text
from tunesmith.base.core.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.integrations.trl_check import Report


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Print a config of TRL's command line as a recipe. Comments say which fields it does not follow, and why."""

    file: Annotated[str, Positional, flag("YAML file of `trl grpo | dpo | sft | reward --config`.", "FILE")]
    algorithm: Annotated[
        Literal["", "grpo", "dpo", "sft", "reward"], flag("Trainer; by default the one that the fields fit.")
    ] = ""
    out: Annotated[str, flag("Write the recipe to this file; nothing is overwritten.", "FILE")] = ""
    json: Annotated[bool, flag("Print one JSON object.")] = False


def convert(words: Sequence[str]) -> None:
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


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Say what of a training script for TRL becomes faster by another import, what stays as it is, and why.

    The script is read and never run. TRL need not be installed.
    """

    script: Annotated[Path, Positional, flag("The training script.", "SCRIPT.py")]
    config: Annotated[Path | None, flag("YAML file that the script reads by TrlParser.", "FILE")] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


def check(words: Sequence[str]) -> None:
    """Run `tunesmith trl-check`."""
    options = parse(CheckOptions, words, "trl-check")
    from tunesmith.integrations import trl_check

    with reporting(as_json=options.json) as output:
        report = trl_check.check(options.script, options.config)
        output.say("\n".join(_lines(report)))
        output.finish(asdict(report))


def _lines(report: "Report") -> list[str]:
    from tunesmith.integrations.trl_support import WORKS

    lines: list[str] = []
    for use in report.uses:
        lines.append(f"{use.trainer}, {use.where}")
        lines += [f"  faster   {work:<10} {WORKS[work]}" for work in use.faster]
        for left in use.left:
            mark = "TRL's" if left.is_certain else "unknown"
            lines.append(f"  {mark:<8} {', '.join(left.works):<10} {left.setting} ({left.where}): {left.why}")
    for change in report.changes:
        lines += ["", f"change, {change.where}", f"  - {change.old}", *(f"  + {line}" for line in change.new)]
    if report.newest_version:
        lines += ["", f"written for TRL {report.newest_version} or older; TRL 1.16 lacks"]
        lines += [f"  {one.name} ({one.where}, until {one.last_version}): {one.instead}" for one in report.gone]
    return [*lines, "", *(f"note: {note}" for note in report.notes)]
