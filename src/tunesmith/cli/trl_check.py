"""`tunesmith trl-check`: what of a script for TRL becomes faster by another import."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import reporting

if TYPE_CHECKING:
    from tunesmith.integrations.trl_check import Report


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Say what of a training script for TRL becomes faster by another import, what stays as it is, and why.

    The script is read and never run. TRL need not be installed.
    """

    script: Annotated[Path, Positional, flag("The training script.", "SCRIPT.py")]
    config: Annotated[Path | None, flag("YAML file that the script reads by TrlParser.", "FILE")] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


def trl_check(words: Sequence[str]) -> None:
    """Run `tunesmith trl-check`."""
    options = parse(CheckOptions, words, "trl-check")
    from tunesmith.integrations.trl_check import check

    with reporting(as_json=options.json) as output:
        report = check(options.script, options.config)
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
