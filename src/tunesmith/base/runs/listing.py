"""Find, resolve, summarise and remove run folders. Reads files alone; a damaged file costs a figure, not the list."""

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from tunesmith.base.config.comparison import COMPARISON
from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.config.yaml_text import parse as parse_yaml
from tunesmith.base.config.yaml_text import read as read_yaml
from tunesmith.base.core.errors import ConfigError, RunError
from tunesmith.base.runs.labels import Labels, read_labels
from tunesmith.base.runs.lock import RunLock, holder_of, is_locked
from tunesmith.base.runs.manifest import list_steps

RunStatus = Literal["running", "finished", "stopped", "failed"]
"""`stopped` has a checkpoint to resume from, `failed` has none."""

FIGURES = ("eval/accuracy", "eval/reward", "eval/rewards/accuracies", "reward", "accuracy", "eval/loss", "loss")
"""The first of these that a run measured says how well it did."""

_MAX_DEPTH = 3
_STAMP = re.compile(r"(\d{8}-\d{6})-")
# Folders inside of a run that hold no other runs.
_PARTS = frozenset({"checkpoints", "final", "refused", "tensorboard", "profile"})
_REMOVED = ".removed-"
_MAX_JSON_BYTES = 10_000_000

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Summary of a run; unknown values are None.

    `name` is the path below the folder that was searched; `figure` is the last value of the metric `figure_name`.
    """

    path: Path
    name: str
    algorithm: str
    model: str
    status: RunStatus
    num_steps: int
    total_steps: int | None
    figure_name: str | None
    figure: float | None
    minutes: float | None
    num_bytes: int
    started: datetime | None
    labels: Labels


def is_run(folder: Path) -> bool:
    """True for a real folder, no link, with the recipe of a run."""
    return not folder.is_symlink() and folder.is_dir() and (folder / "recipe.yaml").is_file()


def find_runs(folder: Path) -> list[Path]:
    """Run folders at `folder` and up to three levels below, those inside of other runs too; no link is followed."""
    found = [folder] if is_run(folder) else []
    return found + sorted(_below(folder, 1))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        children = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for child in children:
        if child.name.startswith(_REMOVED):
            continue
        if child.name in _PARTS and is_run(folder):
            continue
        if (child / "recipe.yaml").is_file():
            yield child
        if depth < _MAX_DEPTH:
            yield from _below(child, depth + 1)


def list_runs(folder: Path) -> list[RunFacts]:
    """The runs below `folder`, newest first.

    Raises:
        RunError: if there is no such folder.
    """
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; name the one that holds the runs with --dir")
    runs = [read_run(path, folder) for path in find_runs(folder)]
    return sorted(runs, key=lambda run: (run.started or datetime.min, run.name), reverse=True)


def resolve_run(given: str, folder: Path) -> Path:
    """The run that `given` names: a path, or the name of a run below `folder`, or the end of one name alone.

    Raises:
        RunError: if there is none, or more than one.
    """
    path = Path(given).expanduser()
    if is_run(path):
        return path
    if path.is_symlink():
        raise RunError(f"{path} is a link; give the run folder itself")
    runs = {str(run.relative_to(folder)): run for run in find_runs(folder) if run != folder} if folder.is_dir() else {}
    if given in runs:
        return runs[given]
    matches = [name for name in runs if Path(name).name == given or Path(name).name.endswith(f"-{given}")]
    if len(matches) == 1:
        return runs[matches[0]]
    if matches:
        raise RunError(f"{given!r} names {len(matches)} runs below {folder}: {', '.join(sorted(matches))}; give one")
    if path.is_dir() or (folder / given).is_dir():
        raise RunError(f"{given} is no run folder: it has no recipe.yaml")
    raise RunError(
        f"there is no run {given!r}{did_you_mean(given, runs)}; give a path, or a name that `tunesmith runs ls --dir "
        f"{folder}` shows, or the letters at its end"
    )


def read_run(path: Path, root: Path | None = None) -> RunFacts:
    """The facts of the run in `path`, named as seen from `root`."""
    recipe, result, rows = read_recipe(path), read_object(path / "result.json"), read_rows(path / "metrics.jsonl")
    figure_name, figure = _figure(rows)
    minutes = number(result.get("minutes"))
    spent_s = sum(number(row.get("time/step_s")) or 0.0 for row in rows)
    return RunFacts(
        path=path,
        name=path.name if root is None or path == root else str(path.relative_to(root)),
        algorithm="demo" if "demo" in recipe else str(recipe.get("algorithm", "?")),
        model=str(model.get("name", "")) if is_mapping(model := recipe.get("model")) else "",
        status=run_status(path, recipe),
        num_steps=int(number(rows[-1].get("step")) or 0) if rows else 0,
        total_steps=_total_steps(path, recipe, result),
        figure_name=figure_name,
        figure=figure,
        minutes=minutes if minutes is not None else spent_s / 60 if rows else None,
        num_bytes=folder_bytes(path),
        started=_started(path),
        labels=read_labels(path),
    )


def next_commands(run: RunFacts, *, has_checkpoint: bool) -> dict[str, str]:
    """Commands that make sense for the run now, by name; `has_checkpoint` if it has one that can be used."""
    commands: dict[str, str] = {}
    path = shlex.quote(str(run.path))
    if run.algorithm == COMPARISON and run.status != "running":
        return {"report": str(run.path / "report.html"), "go on": f"tunesmith compare-algorithms --resume {path}"}
    if run.algorithm == "demo":
        return {"report": str(run.path / "report.html")} if run.status == "finished" else {"again": "tunesmith demo"}
    if run.status in ("stopped", "failed"):
        again = f"tunesmith train {run.algorithm} --config {shlex.quote(str(run.path / 'recipe.yaml'))}"
        commands |= {"go on": f"tunesmith resume {path}"} if has_checkpoint else {"start again": again}
    if run.status == "finished":
        commands["report"] = str(run.path / "report.html")
        commands["use it"] = (
            f"tunesmith train ppo --reward {path}"
            if run.algorithm == "reward"
            else f"tunesmith chat {path} --against base"
        )
    if run.num_steps:
        commands["why slow"] = f"tunesmith diagnose {path}"
    if run.status == "running":
        commands["wait"] = f"tunesmith runs show {path}"
    return commands


def read_recipe(path: Path) -> Row:
    """The recipe of the run in `path`; empty if it cannot be read."""
    try:
        data = parse_yaml(read_yaml(path / "recipe.yaml"), "recipe.yaml").data
    except ConfigError:
        return {}
    return data if is_mapping(data) else {}


def read_object(file: Path) -> Row:
    """The JSON object in `file`; empty if there is none or it cannot be read."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            return {}
        data: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if is_mapping(data) else {}


def read_rows(file: Path) -> list[Row]:
    """The objects of a JSONL file; lines that cannot be read, such as one that a crash cut off, are left out."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return [row for line in lines if (row := object_in(line)) is not None]
    except OSError:
        return []


def object_in(line: str | bytes) -> Row | None:
    """The JSON object in `line`; None if there is none."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if is_mapping(row) else None


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in and below `folder`; links count as themselves."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a running trainer may have removed it a moment ago
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes


def run_status(path: Path, recipe: Row) -> RunStatus:
    """The state of the run in `path` with this recipe."""
    if any(is_locked(run) for run in find_runs(path)):
        return "running"
    if (path / "result.json").is_file():
        return "finished"
    # A comparison goes on wherever it was; its trainings have the checkpoints.
    can_go_on = list_steps(path / "checkpoints") or recipe.get("algorithm") == COMPARISON
    return "stopped" if can_go_on else "failed"


def _total_steps(path: Path, recipe: Row, result: Row) -> int | None:
    """The steps that were asked for last: by the recipe, or when the run was resumed."""
    run = recipe.get("run")
    steps = run.get("steps") if is_mapping(run) else None
    for row in read_rows(path / "resumes.jsonl"):
        if is_mapping(changes := row.get("changes")) and isinstance(change := changes.get("run.steps"), list):
            steps = change[-1]
    found = steps if steps is not None else result.get("steps")
    return int(found) if isinstance(found, int | float) else None


def _figure(rows: Sequence[Row]) -> tuple[str | None, float | None]:
    for name in FIGURES:
        for row in reversed(rows):
            if (value := number(row.get(name))) is not None:
                return name, value
    return None, None


def _started(path: Path) -> datetime | None:
    """The time in the folder's name, or that of its recipe."""
    if stamp := _STAMP.match(path.name):
        with suppress(ValueError):
            return datetime.strptime(stamp[1], "%Y%m%d-%H%M%S")
    try:
        return datetime.fromtimestamp((path / "recipe.yaml").stat().st_mtime)
    except (OSError, ValueError, OverflowError):
        return None


def number(value: object) -> float | None:
    """`value` as a finite float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


@dataclass(frozen=True, slots=True)
class Removal:
    """Folders to delete and their size in bytes. `runs` are all runs that this affects."""

    folders: Sequence[Path]
    runs: Sequence[Path]
    num_bytes: int


def plan_removal(runs: Sequence[Path], root: Path, *, checkpoints_only: bool) -> Removal:
    """The folders that removing `runs`, and the runs inside of them, would delete; nothing is removed yet.

    Raises:
        RunError: for a folder that is no run, a link, a folder that is not below `root`, or a run in use.
    """
    inside: list[Path] = []
    for run in runs:
        _check_removable(run, root)
        inside += find_runs(run)
    touched = sorted(set(inside))
    for run in touched:
        if is_locked(run):
            raise RunError(f"{run} is in use by {holder_of(run) or 'another process'}; stop it first")
    if checkpoints_only:
        found = [run / "checkpoints" for run in touched]
        folders = [folder for folder in found if folder.is_dir() and not folder.is_symlink()]
    else:
        chosen = set(runs)
        folders = sorted(run for run in chosen if not chosen.intersection(run.parents))
    return Removal(folders, touched, sum(map(folder_bytes, folders)))


def remove(removal: Removal) -> None:
    """Delete the folders of `removal`, holding the lock of every affected run.

    A folder gets a hidden name first, so that a run is there whole or not at all, also if this is killed; what an
    earlier removal left is deleted too.

    Raises:
        RunError: if a run came into use, or was begun in one of the folders, since, or a file cannot be removed.
    """
    with ExitStack() as locks:
        for run in removal.runs:
            locks.enter_context(RunLock(run))
        new = {run for folder in removal.folders for run in find_runs(folder)}.difference(removal.runs)
        if new:
            raise RunError(f"{min(new)} was begun meanwhile; nothing was removed")
        for folder in removal.folders:
            for rest in folder.parent.glob(f"{_REMOVED}*"):
                shutil.rmtree(rest, ignore_errors=True)
            aside = folder.with_name(f"{_REMOVED}{folder.name[:100]}-{os.getpid()}")
            try:
                folder.rename(aside)
                shutil.rmtree(aside)
            except OSError as error:
                where = f"; the rest of {folder} is in {aside}" if aside.exists() else ""
                raise RunError(
                    f"{error.filename or folder} cannot be removed ({error.strerror or error}){where}"
                ) from error


def _check_removable(run: Path, root: Path) -> None:
    if run.is_symlink():
        raise RunError(f"{run} is a link; give the run folder itself")
    if not is_run(run):
        raise RunError(f"{run} is no run folder: it has no recipe.yaml; nothing was removed")
    if root.resolve() not in run.resolve().parents:
        raise RunError(f"{run} is not below {root}; name the folder that holds it with --dir")
    if Path.cwd().is_relative_to(run.resolve()):
        raise RunError(f"{run} holds the current folder; go elsewhere first")
