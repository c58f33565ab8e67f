"""`tunesmith profile` and `tunesmith diagnose`: where the time of a training goes, and why it is slow."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import Positional, check_ranges, flag, parse, parse_known
from tunesmith.apps.cli.output import Output, reporting, wants_progress
from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.core.errors import InputError, ProfiledError
from tunesmith.base.core.log import visible

if TYPE_CHECKING:
    from tunesmith.base.config.recipe import Recipe
    from tunesmith.observe.reports.chart import Table

_SHOWN = {"stages": None, "operators": 12, "functions": 6}
"""Tables that are printed, and how many rows of them."""

_MAX_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Record a few steps of a training: timeline, operators by stage, flame graph of Python, in RUN/profile/.

    `tunesmith profile ALGORITHM` starts a run with the flags of `tunesmith train ALGORITHM`, lets one step warm up,
    records the next ones, and ends. `--attach RUN` records a training that runs, which goes on. `--compare A B` shows
    two profiles side by side.
    """

    attach: Annotated[str | None, flag("Record the next steps of this running training.", "RUN")] = None
    compare: Annotated[tuple[str, str] | None, flag("Runs, or profiles' folders, to compare.", "RUN")] = None
    steps: Annotated[int, flag("Steps to record.", "N")] = 2
    html: Annotated[Path | None, flag("Write the page of a comparison.", "FILE")] = None
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    timeout_s: Annotated[float, flag("Seconds to wait for the steps of --attach.", "S")] = 1800.0
    json: Annotated[bool, flag("Print one JSON object.")] = False


def profile(words: Sequence[str]) -> None:
    """Run `tunesmith profile`."""
    is_new = bool(words) and not words[0].startswith("-")
    if is_new:
        options, rest = parse_known(ProfileOptions, words[1:], "profile")
    else:
        options, rest = parse(ProfileOptions, words, "profile"), []
    if [is_new, options.attach is not None, options.compare is not None].count(True) != 1:
        raise InputError("give one of ALGORITHM, --attach RUN and --compare A B, as in `tunesmith profile grpo`")
    check_ranges(options, steps=(1, _MAX_STEPS), timeout_s=(0, math.inf))
    with reporting(as_json=options.json) as output:
        if options.compare:
            _compare(options.compare, options, output)
        elif options.attach:
            _say_profile(_attached(options.attach, options), output)
        else:
            _say_profile(_recorded(words[0], rest, options.steps), output)


def _recorded(algorithm: str, words: Sequence[str], num_steps: int) -> Path:
    """The folder of a new run that was profiled and has ended."""
    from tunesmith.apps.cli.train import parse_train, resolve
    from tunesmith.base.config.schema import SPECS

    if algorithm not in SPECS:
        raise InputError(
            f"there is no algorithm {visible(algorithm)!r}{did_you_mean(algorithm, SPECS)}; there are "
            f"{', '.join(SPECS)}"
        )
    flags, keys = parse_train(algorithm, words)
    if flags.dry_run:
        raise InputError(f"--dry-run is a flag of `tunesmith train {algorithm}`; leave it out to record a profile")
    resolved = resolve(algorithm, flags, keys)
    from tunesmith.learn.trainers.run import run

    recipe = _short(resolved.recipe, num_steps)
    try:
        done = run(recipe, provenance=resolved.provenance, progress=wants_progress(), profile_steps=num_steps)
    except ProfiledError as recorded:
        return recorded.run_dir
    return done.run_dir  # without a profile; what is done with it next says why


def _short(recipe: "Recipe", num_steps: int) -> "Recipe":
    """`recipe` for a run with one step more than the profile sees: the last one evaluates, which is not typical."""
    name = recipe.run.name or f"profile-{recipe.algorithm}"
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 1 + num_steps + 1, "name": name})})


def _attached(given: str, options: ProfileOptions) -> Path:
    """The folder of the running training `given`, after its next steps are recorded."""
    from tunesmith.base.config.load import read_algorithm
    from tunesmith.base.runs.listing import resolve_run
    from tunesmith.observe.profiling.request import ask, wait

    run_dir = resolve_run(given, options.dir.expanduser())
    if read_algorithm(run_dir / "recipe.yaml") == "live":
        raise InputError(f"{visible(str(run_dir))} is a live loop, which cannot be profiled; give a training")
    request = ask(run_dir, options.steps)
    if wants_progress():
        sys.stderr.write(f"waiting for {1 + options.steps} steps of {run_dir}; the first one warms up\n")
    wait(run_dir, request, options.timeout_s)
    return run_dir


def _say_profile(run_dir: Path, output: Output) -> None:
    """Make the files of the recorded profile, print its tables and where it is."""
    from tunesmith.observe.profiling.profile import finish
    from tunesmith.observe.reports.profile_page import profile_tables, write_profile_page

    found = finish(run_dir)
    page = write_profile_page(found)
    names = f"{len(found.steps)} steps" if len(found.steps) > 1 else found.steps[0][0]
    output.say(f"{names} of {visible(found.run)}, {found.step_s:.3f} s each on {found.device}")
    _say_tables(profile_tables(found), output)
    output.say(f"\npage     {page}\ntrace    {found.folder / 'trace.json.gz'} (open it in https://ui.perfetto.dev)")
    output.say(f"compare  tunesmith profile --compare {shlex.quote(str(run_dir))} OTHER_RUN")
    output.finish({**found.to_json(), "run_dir": run_dir, "folder": found.folder, "page": page})


def _say_tables(tables: Mapping[str, "Table"], output: Output) -> None:
    for name, num_rows in _SHOWN.items():
        if name in tables:
            output.say("")
            output.table([tables[name].columns, *tables[name].rows[:num_rows]])


def _compare(names: tuple[str, str], options: ProfileOptions, output: Output) -> None:
    from tunesmith.observe.profiling.profile import compare, read_profile
    from tunesmith.observe.reports.profile_page import comparison_tables, write_profile_comparison

    before, after = (read_profile(_place(name, options.dir.expanduser())) for name in names)
    found = compare(before, after)
    output.say(f"A  {visible(str(before.folder))}\nB  {visible(str(after.folder))}")
    _say_tables(comparison_tables(found), output)
    if options.html is not None:
        output.say(f"\npage  {write_profile_comparison(options.html, found)}")
    output.finish({**found.to_json(), "page": options.html})


def _place(given: str, folder: Path) -> Path:
    """The folder of a profile, as given, or of the run that `given` names."""
    from tunesmith.base.runs.listing import resolve_run
    from tunesmith.observe.profiling.profile import FIGURES

    path = Path(given).expanduser()
    return path if (path / FIGURES).is_file() else resolve_run(given, folder)


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """Say why a run is slow, while it trains or afterwards: causes by what they cost, evidence, what to change."""

    run: Annotated[str, Positional, flag("A path, a name, or the letters at its end.", "RUN")]
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    hang: Annotated[bool, flag("Say where the process that trains hangs, and what it waits for.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def diagnose(words: Sequence[str]) -> None:
    """Run `tunesmith diagnose`. Reads files; nothing here loads torch."""
    options = parse(DiagnoseOptions, words, "diagnose")
    from tunesmith.base.runs.listing import resolve_run
    from tunesmith.observe.profiling.diagnosis import as_json, as_text, diagnoses
    from tunesmith.observe.profiling.hang import report

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
