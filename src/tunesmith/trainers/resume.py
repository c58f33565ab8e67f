"""Going on with a run: its own recipe, the few keys that may change, and its newest whole checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.load import Resolved, load_recipe, read_algorithm
from tunesmith.config.schema import AnyRecipe, DPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from tunesmith.core.errors import RunError
from tunesmith.core.log import get_logger
from tunesmith.data.demonstrations import DemonstrationLike
from tunesmith.data.pairs import PreferenceLike
from tunesmith.data.prompts import PromptLike
from tunesmith.rewards.sources import RewardLike
from tunesmith.runs.environment import package_versions
from tunesmith.runs.folder import RunFolder
from tunesmith.runs.lock import RunLock
from tunesmith.trainers import dpo, grpo, ppo, restart, reward, setup, sft

_log = get_logger(__name__)

_NUMERIC_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run was given as Python objects and needs again; None for what its recipe names."""

    prompts: Sequence[PromptLike] | None = None
    rewards: Sequence[RewardLike] | None = None
    pairs: Sequence[PreferenceLike] | None = None
    demonstrations: Sequence[DemonstrationLike] | None = None


def resume(
    run_dir: Path,
    *,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, str] | None = None,
    inputs: Inputs | None = None,
    progress: bool = True,
) -> setup.RunResult:
    """Go on with the run in `run_dir`; its folder, metrics and summary.

    Raises:
        RunError: if the folder holds no run, is in use, has ended, or if `overrides` change what may not change.
    """
    with RunLock(checked_folder(run_dir)):  # refuses a folder in use before anything is loaded
        old, resolved = _recipes(run_dir, overrides or {}, origins or {})
    changes = restart.changed_keys(old.model_dump(mode="json"), resolved.recipe.model_dump(mode="json"))
    restart.check_changes(changes, run_dir)
    inputs = inputs or Inputs()
    _check_inputs(run_dir, inputs)
    _check_unfinished(run_dir, old, resolved.recipe)
    _note_resume(run_dir, changes)
    return _run(with_threads(resolved.recipe, run_dir), run_dir, inputs, progress)


def checked_folder(run_dir: Path) -> Path:
    """`run_dir`, if it is the folder of a training run. Raises RunError."""
    if not run_dir.is_dir():
        raise RunError(f"there is no run folder {run_dir}; `tunesmith runs ls` lists runs")
    if not (run_dir / "recipe.yaml").is_file() or not (run_dir / "environment.json").is_file():
        raise RunError(f"{run_dir} is no run folder: it has no recipe.yaml and environment.json")
    return run_dir


def with_threads(recipe: AnyRecipe, run_dir: Path) -> AnyRecipe:
    """`recipe` with the number of threads that the run began with: sums depend on it in their last bits."""
    num_threads = recipe.run.num_threads or _facts(run_dir)["num_cores"]
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"num_threads": num_threads})})


def _facts(run_dir: Path) -> Mapping[str, Any]:
    """What `environment.json` says of the beginning of the run. Raises RunError if it was damaged."""
    try:
        facts = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
        return {name: facts[name] for name in ("num_cores", "given_in_python", "packages")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{run_dir}/environment.json cannot be read ({error}); put it back from a copy, or start a new run"
        ) from error


def _recipes(run_dir: Path, overrides: Mapping[str, object], origins: Mapping[str, str]) -> tuple[AnyRecipe, Resolved]:
    file = run_dir / "recipe.yaml"
    algorithm = read_algorithm(file)
    old = load_recipe(algorithm, file=file).recipe
    return old, load_recipe(algorithm, file=file, overrides=overrides, origins=origins)


def _check_inputs(run_dir: Path, inputs: Inputs) -> None:
    """Refuse to replace Python objects that the run was made from by what the recipe's defaults name."""
    for name in _facts(run_dir)["given_in_python"]:
        if getattr(inputs, name) is None:
            argument = "reward" if name == "rewards" else name
            raise RunError(
                f"{run_dir} was given its {name} as Python objects; go on from Python, with "
                f'`train.resume("{run_dir}", {argument}=...)`'
            )


def _check_unfinished(run_dir: Path, old: AnyRecipe, new: AnyRecipe) -> None:
    if (run_dir / "result.json").is_file() and old.run.steps == new.run.steps:
        raise RunError(f"{run_dir} has ended; to train it further, give more steps: --run.steps N")


def _note_resume(run_dir: Path, changes: Mapping[str, tuple[object, object]]) -> None:
    """Write to `resumes.jsonl` what changed since the run began, and warn of packages that may change its numbers."""
    began = _facts(run_dir)["packages"]
    now = package_versions()
    versions = {name: (began.get(name), now[name]) for name in _NUMERIC_PACKAGES if began.get(name) != now[name]}
    for name, (before, after) in versions.items():
        _log.warning("the run began with %s %s and goes on with %s: its numbers may differ", name, before, after)
    for path, (before, after) in changes.items():
        _log.info("%s: %s -> %s", path, before, after)
    RunFolder(run_dir).append("resumes.jsonl", [{"changes": dict(changes), "packages": versions}])


def _run(recipe: AnyRecipe, run_dir: Path, inputs: Inputs, progress: bool) -> setup.RunResult:
    if isinstance(recipe, RewardRecipe):
        return reward.run(recipe, pairs=inputs.pairs, progress=progress, resume=run_dir)
    if isinstance(recipe, SFTRecipe):
        return sft.run(recipe, demonstrations=inputs.demonstrations, progress=progress, resume=run_dir)
    if isinstance(recipe, DPORecipe):
        return dpo.run(recipe, pairs=inputs.pairs, progress=progress, resume=run_dir)
    prompts, rewards = inputs.prompts, inputs.rewards
    if isinstance(recipe, PPORecipe):
        return ppo.run(recipe, prompts=prompts, rewards=rewards, progress=progress, resume=run_dir)
    return grpo.run(recipe, prompts=prompts, rewards=rewards, progress=progress, resume=run_dir)
