"""Removing runs: nothing but run folders goes, nothing that a process uses, nothing that a link leads to."""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import RunError
from tunesmith.runs.run_list import find_runs, folder_bytes, is_run
from tunesmith.runs.run_lock import RunLock, holder_of, is_locked


@dataclass(frozen=True, slots=True)
class Removal:
    """Folders that will go, and the bytes of the files in them. `runs` are all runs that this touches."""

    folders: Sequence[Path]
    runs: Sequence[Path]
    num_bytes: int


def plan_removal(runs: Sequence[Path], root: Path, *, checkpoints_only: bool) -> Removal:
    """What removing `runs`, with the runs inside of them, takes away; nothing is removed yet.

    Raises:
        RunError: for a folder that is no run, a link, a folder that does not lie below `root`, or a run in use.
    """
    inside: list[Path] = []
    for run in runs:
        _check(run, root)
        inside += find_runs(run)
    touched = sorted(set(inside))
    for run in touched:
        if is_locked(run):
            raise RunError(f"{run} is in use by {holder_of(run) or 'another process'}; stop it first")
    if checkpoints_only:
        folders = [run / "checkpoints" for run in touched if _is_folder(run / "checkpoints")]
    else:
        chosen = set(runs)
        folders = sorted(run for run in chosen if not chosen.intersection(run.parents))
    return Removal(folders, touched, sum(map(folder_bytes, folders)))


def remove(removal: Removal) -> None:
    """Remove the folders of `removal`; every run that it touches is locked meanwhile.

    Raises:
        RunError: if a run came into use since, or a file cannot be removed.
    """
    with ExitStack() as locks:
        for run in removal.runs:
            locks.enter_context(RunLock(run))
        for folder in removal.folders:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise RunError(
                    f"{error.filename or folder} cannot be removed ({error.strerror or error}); some files of {folder} "
                    "may be gone already"
                ) from error


def _check(run: Path, root: Path) -> None:
    if run.is_symlink():
        raise RunError(f"{run} is a link; give the run folder itself")
    if not is_run(run):
        raise RunError(f"{run} is no run folder: it has no recipe.yaml; nothing was removed")
    if root.resolve() not in run.resolve().parents:
        raise RunError(f"{run} does not lie below {root}; name the folder that holds it with --dir")
    if Path.cwd().is_relative_to(run.resolve()):
        raise RunError(f"{run} holds the current folder; go elsewhere first")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not os.path.islink(path)
