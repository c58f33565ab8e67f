"""`tunesmith resume`: continue a run from its newest intact checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.cli.options import Positional, flag, parse_known
from tunesmith.cli.output import reporting, wants_progress


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Continue a run from its newest intact checkpoint, exactly: the same weights, metrics and tokens follow.

    The learning rate, the number of steps, alarms and logging may change: --optimizer.learning-rate 3e-5. Any other
    difference is refused and printed.
    """

    run: Annotated[Path, Positional, flag("Folder of the run.", metavar="RUN")]
    steps: Annotated[str | None, flag("Steps of the whole run, those already done included.", metavar="N")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def resume(words: Sequence[str]) -> None:
    """Run `tunesmith resume`."""
    options, unknown = parse_known(ResumeOptions, words, "resume")
    from tunesmith.cli.train import report
    from tunesmith.config.load import parse_overrides, read_algorithm
    from tunesmith.trainers.resume import checked_folder
    from tunesmith.trainers.resume import resume as resume_run

    with reporting(as_json=options.json) as output:
        run_dir = checked_folder(options.run)
        overrides = parse_overrides(read_algorithm(run_dir / "recipe.yaml"), unknown)
        if options.steps is not None:
            overrides.values["run.steps"] = options.steps
            overrides.origins["run.steps"] = "command line --steps"
        result = resume_run(run_dir, overrides=overrides.values, origins=overrides.origins, progress=wants_progress())
        report(result, output)
