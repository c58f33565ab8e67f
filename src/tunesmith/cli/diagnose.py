"""`tunesmith diagnose RUN`: why training is slow, and what to change. Reads files; nothing here loads torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import reporting
from tunesmith.core.log import visible


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """Say why a run is slow, while it trains or afterwards: causes by what they cost, evidence, what to change."""

    run: Annotated[str, Positional, flag("A path, a name, or the letters at its end.", "RUN")]
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    hang: Annotated[bool, flag("Say where the process that trains hangs, and what it waits for.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def diagnose(words: Sequence[str]) -> None:
    """Run `tunesmith diagnose`."""
    options = parse(DiagnoseOptions, words, "diagnose")
    from tunesmith.profiling.diagnosis import as_json, as_text, diagnoses
    from tunesmith.profiling.hang import report
    from tunesmith.runs.listing import resolve_run

    with reporting(as_json=options.json) as output:
        path = resolve_run(options.run, options.dir.expanduser())
        if options.hang:
            hang = report(path)
            output.say(visible("\n".join(hang.lines())))
            output.finish(hang.to_json())
            return
        found = diagnoses(path)
        output.say(visible("\n\n".join(map(as_text, found))))
        output.finish(as_json(found))
