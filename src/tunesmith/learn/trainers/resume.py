"""Resuming a run from its folder: its recipe, the keys that may change, and its newest whole checkpoint."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from tunesmith.base.config.load import Resolved, load_recipe, read_algorithm
from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import other_folder, package_versions
from tunesmith.base.runs.folder import RUN_ID, RunFolder
from tunesmith.base.runs.listing import read_object
from tunesmith.base.runs.lock import RunLock, only_start
from tunesmith.base.runs.manifest import list_steps
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.distributed.launch import as_started, leads
from tunesmith.engine.rollout.products import with_weights
from tunesmith.learn.trainers import restart
from tunesmith.learn.trainers.api import Inputs, Listener
from tunesmith.learn.trainers.run import run
from tunesmith.learn.trainers.setup import RunResult

_log = get_logger(__name__)

_NUMERIC_PACKAGES = ("torch", "transformers", "numpy")


def resume(
    run_dir: Path,
    *,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, str] | None = None,
    inputs: Inputs | None = None,
    progress: bool = True,
    listener: Listener | None = None,
) -> RunResult:
    """Continue the run in `run_dir`; returns its folder, metrics and summary. `listener` is told of its events.

    Raises:
        RunError: if the folder holds no run, is in use, has ended, or if `overrides` change what may not change.
    """
    # Refuses a folder in use before anything is loaded; of several ranks the first one has the lock.
    with RunLock(checked_folder(run_dir)) if leads() else nullcontext():
        old, recipe = _recipes(run_dir, overrides or {}, origins or {})
    changes = _checked_changes(run_dir, old, recipe)
    inputs = inputs or Inputs()
    _check_inputs(run_dir, inputs)
    if _has_ended(run_dir, changes):
        done = read_object(run_dir / "result.json").get("steps")
        raise RunError(
            f"{run_dir} has ended after step {done}; to train it further, give more steps: --steps N, or in Python "
            "steps=N"
        )
    if leads():
        _note_resume(run_dir, changes)
    recipe = as_begun(recipe, run_dir, old.scale.ranks)
    return run(recipe, inputs, progress=progress, resume=run_dir, listener=listener)


def start_or_resume(
    resolved: Resolved,
    inputs: Inputs | None = None,
    *,
    run_id: str | None = None,
    progress: bool = True,
    listener: Listener | None = None,
) -> RunResult:
    """The result of the run with this id below `run.dir`, which is started, or resumed if it has a checkpoint.

    A run that has ended is only read. It goes on with other numbers of ranks, and with more steps. Without an id a new
    run is started.

    Raises:
        InputError: for an id that cannot end the name of a folder.
        RunError: if another process is at work on the run, or `resolved` differs from its recipe in what may not
            change.
    """
    start = partial(run, inputs=inputs, provenance=resolved.provenance, progress=progress, listener=listener)
    if run_id is None:
        return start(resolved.recipe)
    if not re.fullmatch(r"\w+", run_id):
        raise InputError(f"{run_id!r} is no id of a run; use letters, digits and _")
    recipe = as_started(resolved.recipe)
    with only_start(Path(recipe.run.dir), run_id) if leads() else nullcontext():
        return _start_or_resume(recipe, run_id, start, inputs, progress=progress, listener=listener)


def _start_or_resume(
    recipe: Recipe,
    run_id: str,
    start: Callable[[Recipe], RunResult],
    inputs: Inputs | None,
    *,
    progress: bool,
    listener: Listener | None,
) -> RunResult:
    # All ranks of torchrun find the same: a checkpoint needs the work of all of them, so none is new.
    begun = [path for path in Path(recipe.run.dir).glob(f"*-{run_id}") if list_steps(path / "checkpoints")]
    if not begun:
        before = os.environ.get(RUN_ID, "")
        os.environ[RUN_ID] = run_id
        try:
            return start(recipe)
        finally:
            os.environ[RUN_ID] = before
    run_dir = max(begun)  # names begin with the time
    old, _ = _recipes(run_dir, {}, {})
    changes = _checked_changes(run_dir, old, recipe)
    if _has_ended(run_dir, changes):
        _log.info("%s has ended", run_dir)
        metrics, summary = RunFolder(run_dir).read_metrics(), read_object(run_dir / "result.json")
        return RunResult(run_dir, metrics, summary, recipe.model.trust_remote_code)
    new = {key: after for key, (_, after) in changes.items()}
    return resume(run_dir, overrides=new, inputs=inputs, progress=progress, listener=listener)


def checked_folder(run_dir: Path) -> Path:
    """`run_dir`, if it is the folder of a training run. Raises RunError."""
    if not run_dir.is_dir():
        raise RunError(f"there is no run folder {run_dir}; `tunesmith runs ls` lists runs")
    if not (run_dir / "recipe.yaml").is_file() or not (run_dir / "environment.json").is_file():
        raise RunError(f"{run_dir} is no run folder: it has no recipe.yaml and environment.json")
    return run_dir


def as_begun(recipe: Recipe, run_dir: Path, num_ranks: int = 1) -> Recipe:
    """`recipe` with the number of threads that the run, and each of its `num_ranks`, began with: sums depend on it in
    their last bits. And with the weights that `rollout.weights: auto` chose: another measurement may differ.
    """
    setup = read_object(run_dir / "setup.json")
    chosen = setup.get("rollout_weights")
    if isinstance(recipe, SamplingRecipe) and recipe.rollout.weights == "auto" and chosen in get_args(Weights):
        _log.info("rollout.weights is auto: %s, as when the run began", chosen)
        recipe = with_weights(recipe, cast(Weights, chosen))
    began = setup.get("num_threads")
    known = began if isinstance(began, int) else max(1, _facts(run_dir)["num_cores"] // num_ranks)
    num_threads = recipe.run.num_threads or known
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"num_threads": num_threads})})


def _facts(run_dir: Path) -> Mapping[str, Any]:
    """Facts of `environment.json` from the start of the run. Raises RunError if it is damaged."""
    try:
        facts = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
        return {name: facts[name] for name in ("num_cores", "given_in_python", "packages")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{run_dir}/environment.json cannot be read ({error}); put it back from a copy, or start a new run"
        ) from error


def _recipes(run_dir: Path, overrides: Mapping[str, object], origins: Mapping[str, str]) -> tuple[Recipe, Recipe]:
    """The run's recipe, and the one that it goes on with."""
    file = run_dir / "recipe.yaml"
    algorithm = read_algorithm(file)
    old = load_recipe(algorithm, file=file).recipe
    return old, as_started(load_recipe(algorithm, file=file, overrides=overrides, origins=origins).recipe)


def _checked_changes(run_dir: Path, old: Recipe, recipe: Recipe) -> dict[str, tuple[object, object]]:
    """(old, new) of each key in which the recipes differ. Raises RunError if one of them may not change."""
    changes = restart.changed_keys(old.model_dump(mode="json"), recipe.model_dump(mode="json"))
    restart.check_changes(changes, run_dir)
    return changes


def _has_ended(run_dir: Path, changes: Mapping[str, tuple[object, object]]) -> bool:
    """True if the run has made all its steps, and is not given more."""
    if not (run_dir / "result.json").is_file():
        return False
    _, wanted = changes.get("run.steps", (None, None))
    done = read_object(run_dir / "result.json").get("steps")
    return not isinstance(wanted, int) or (isinstance(done, int) and wanted <= done)


def _check_inputs(run_dir: Path, inputs: Inputs) -> None:
    """Refuse to replace the Python objects that the run was started with by the recipe's defaults."""
    missing = [name for name in _facts(run_dir)["given_in_python"] if getattr(inputs, name) is None]
    if missing:
        arguments = ", ".join(f"{'reward' if name == 'rewards' else name}=..." for name in missing)
        raise RunError(
            f"{run_dir} was given its {' and '.join(missing)} as Python objects; go on from Python, with "
            f'`train.resume("{run_dir}", {arguments})`'
        )


def _note_resume(run_dir: Path, changes: Mapping[str, tuple[object, object]]) -> None:
    """Write to `resumes.jsonl` what changed since the run began, and warn of packages that may change its numbers."""
    if elsewhere := other_folder(read_object(run_dir / "environment.json").get("folder")):
        _log.info("%s", elsewhere)
    began = _facts(run_dir)["packages"]
    now = package_versions()
    versions = {name: (began.get(name), now[name]) for name in _NUMERIC_PACKAGES if began.get(name) != now[name]}
    for name, (before, after) in versions.items():
        _log.warning("the run began with %s %s and goes on with %s: its numbers may differ", name, before, after)
    for path, (before, after) in changes.items():
        _log.info("%s: %s -> %s", path, before, after)
    RunFolder(run_dir).append("resumes.jsonl", [{"changes": dict(changes), "packages": versions}])
