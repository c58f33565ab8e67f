"""`tunesmith runs ls | show | rm`: the runs on disk. Nothing here loads torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.errors import CheckpointError, InputError
from tunesmith.base.core.log import visible

if TYPE_CHECKING:
    from tunesmith.base.runs.listing import RunFacts

_HIGHLIGHTS = (
    "model.name",
    "optimizer.learning_rate",
    "prompts.source",
    "pairs.source",
    "demonstrations.source",
    "reward",
    "run.steps",
    "run.seed",
)
_COLUMNS = ("run", "algorithm", "status", "steps", "figure", "minutes", "size", "started")
_MAX_FINDINGS = 20


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List runs, newest first. Runs inside of a demo's folder are listed too."""

    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Show a run: recipe, last metrics, findings, checkpoints, and how to go on."""

    run: Annotated[str, Positional, flag("A path, a name, or the letters at its end.", "RUN")]
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    """Remove runs with all that is in them. A run that a process uses is kept, and no link is followed."""

    runs: Annotated[tuple[str, ...], Positional, flag("Paths, names, or the letters at their ends.", "RUN")] = ()
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    checkpoints_only: Annotated[bool, flag("Keep the runs, remove what `tunesmith resume` needs.")] = False
    yes: Annotated[bool, flag("Do not ask.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint on disk; `problem` says what is damaged, and is empty if nothing is."""

    step: int
    num_bytes: int
    problem: str


def ls(words: Sequence[str]) -> None:
    """Run `tunesmith runs ls`."""
    options = parse(ListOptions, words, "runs ls")
    from tunesmith.base.runs.listing import list_runs

    with reporting(as_json=options.json) as output:
        runs = list_runs(options.dir.expanduser())
        if runs:
            output.table([[name.upper() for name in _COLUMNS], *map(_cells, runs)])
        else:
            output.say(f"no runs in {_shown(str(options.dir))}")
        output.finish({"dir": options.dir, "runs": [_as_row(run) for run in runs]})


def show(words: Sequence[str]) -> None:
    """Run `tunesmith runs show`."""
    options = parse(ShowOptions, words, "runs show")
    from tunesmith.base.runs.listing import next_commands, read_object, read_recipe, read_rows, read_run, resolve_run

    with reporting(as_json=options.json) as output:
        path = resolve_run(options.run, options.dir.expanduser())
        run, recipe = read_run(path), read_recipe(path)
        origins = read_object(path / "provenance.json")
        changed = {key: str(origin) for key, origin in origins.items() if origin != "default"}
        metrics = (read_rows(path / "metrics.jsonl") or [{}])[-1]
        findings = read_rows(path / "findings.jsonl")
        checkpoints = _checkpoints(path)
        output.say(f"{_shown(str(run.path))}\n")
        for name, value in zip(_COLUMNS[1:], _cells(run)[1:], strict=True):
            if value:
                output.say(f"{name:<12} {value}")
        for name, value in (
            ("name", run.labels.title),
            ("tags", ", ".join(run.labels.tags)),
            ("note", run.labels.note),
        ):
            if value:
                output.say(f"{name:<12} {_shown(value)}")
        _say_recipe(recipe, changed, output)
        _say_metrics(metrics, output)
        _say_findings(findings, output)
        _say_checkpoints(checkpoints, output)
        steps = next_commands(run, has_checkpoint=any(not one.problem for one in checkpoints))
        output.say("\n" + "\n".join(f"{what:<12} {_shown(command)}" for what, command in steps.items()))
        output.finish(
            {
                **_as_row(run),
                "recipe": recipe,
                "changed": changed,
                "last_metrics": metrics,
                "findings": findings,
                "checkpoints": list(map(asdict, checkpoints)),
                "next": steps,
            }
        )


def rm(words: Sequence[str]) -> None:
    """Run `tunesmith runs rm`."""
    options = parse(RemoveOptions, words, "runs rm")
    if not options.runs:
        raise InputError("no run is named; give one or more, as `tunesmith runs ls` shows them")
    from tunesmith.base.runs.listing import plan_removal, remove, resolve_run

    root = options.dir.expanduser()
    with reporting(as_json=options.json) as output:
        runs = [resolve_run(name, root) for name in dict.fromkeys(options.runs)]
        removal = plan_removal(runs, root, checkpoints_only=options.checkpoints_only)
        names = [str(folder) for folder in removal.folders]
        what = f"{', '.join(map(_shown, names)) or 'nothing'} ({_size(removal.num_bytes)})"
        if names and not options.yes and not _agrees(what):
            raise InputError("nothing was removed")
        remove(removal)
        output.say(f"removed {what}: {removal.num_bytes:,} bytes freed")
        output.finish({"removed": names, "freed_bytes": removal.num_bytes})


def _agrees(what: str) -> bool:
    """True if a person at the terminal says yes; InputError where there is none."""
    if not sys.stdin.isatty():
        raise InputError(f"this would remove {what}; give --yes to do so, because there is no terminal to ask on")
    sys.stderr.write(f"remove {what}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _cells(run: "RunFacts") -> tuple[str, ...]:
    total = "?" if run.total_steps is None else str(run.total_steps)
    figure = "" if run.figure is None else f"{run.figure_name} {run.figure:.4g}"
    return (
        _shown(run.name),
        _shown(run.algorithm),
        run.status,
        "" if run.algorithm == "demo" else f"{run.num_steps}/{total}",
        figure,
        "" if run.minutes is None else f"{run.minutes:.1f}",
        _size(run.num_bytes),
        f"{run.started:%Y-%m-%d %H:%M}" if run.started else "",
    )


def _as_row(run: "RunFacts") -> dict[str, object]:
    return {**asdict(run), "started": run.started.isoformat() if run.started else None}


def _checkpoints(path: Path) -> list[CheckpointFacts]:
    """The checkpoints of the run, newest first, every file of them checked."""
    from tunesmith.base.runs.listing import folder_bytes
    from tunesmith.base.runs.manifest import list_steps, step_folder, verify

    found: list[CheckpointFacts] = []
    for step in reversed(list_steps(path / "checkpoints")):
        folder, problem = step_folder(path / "checkpoints", step), ""
        try:
            verify(folder)
        except CheckpointError as error:
            problem = str(error)
        found.append(CheckpointFacts(step, folder_bytes(folder), problem))
    return found


def _say_recipe(recipe: Mapping[str, object], changed: Mapping[str, str], output: Output) -> None:
    output.say("\nrecipe")
    if not recipe:
        output.say("  recipe.yaml cannot be read")
    for path in dict.fromkeys((*_HIGHLIGHTS, *changed)):
        value = _value_at(recipe, path)
        if value is None:
            continue
        origin = f"  # {_shown(changed[path])}" if path in changed else ""
        output.say(f"  {_shown(path)}: {_shown(_brief(value))}{origin}")


def _value_at(tree: object, path: str) -> object:
    for part in path.split("."):
        if is_mapping(tree):
            tree = tree.get(part)
        elif is_list(tree) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _brief(value: object) -> str:
    """`value` in one line; of records that name a source, such as rewards, the sources alone."""
    if is_list(value):
        return ", ".join(_brief(item) for item in value)
    if is_mapping(value):
        return str(value.get("source", value))
    return str(value)


def _say_metrics(metrics: Mapping[str, object], output: Output) -> None:
    from tunesmith.base.runs.folder import MEASURED

    # Of what was measured on the machine, the rates are worth a look; the rest is for `tunesmith diagnose`.
    shown = {name: value for name, value in metrics.items() if "/" not in name or not name.startswith(MEASURED)}
    if not shown:
        return
    output.say("\nlast metrics")
    for name, value in shown.items():
        output.say(f"  {_shown(name):<34} {value:.6g}" if isinstance(value, float) else f"  {_shown(name):<34} {value}")


def _say_findings(findings: Sequence[Mapping[str, object]], output: Output) -> None:
    if not findings:
        return
    output.say(f"\nfindings: {len(findings)}")
    for row in findings[-_MAX_FINDINGS:]:
        names = ("step", "name", "severity", "message")
        step, name, severity, message = (_shown(str(row.get(key, "?"))) for key in names)
        output.say(f"  step {step}  {severity}  {name}: {message}")
    if len(findings) > _MAX_FINDINGS:
        output.say(f"  the last {_MAX_FINDINGS}; all are in findings.jsonl")


def _say_checkpoints(checkpoints: Sequence[CheckpointFacts], output: Output) -> None:
    output.say("\ncheckpoints" if checkpoints else "\ncheckpoints: none")
    for one in checkpoints:
        state = f"damaged: {_shown(one.problem)}" if one.problem else "whole"
        output.say(f"  step {one.step:<8} {_size(one.num_bytes):<10} {state}")


def _shown(text: str) -> str:
    """`text` in one line, its control characters escaped."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _size(num_bytes: int) -> str:
    """Bytes as `1.2 GB` (powers of 1000)."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
