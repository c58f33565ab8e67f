"""The trainer's part of the live folder: versions as model folders, checkpoints, logs, and both stores.

live/
  runs.db           written by the trainer alone     votes.db          written by the server alone
  recipe.yaml       resolved configuration           metrics.jsonl     one object per update
  versions/v000012/ the model, Hugging Face layout   final             link to the served version
  checkpoints/      state after an update            result.json       result of the last trainer
  trial.json        the version that is tried
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.load import load_recipe, origins_of
from tunesmith.base.core.errors import RunError
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs import checkpoint
from tunesmith.base.runs.checkpoint import Checkpoint
from tunesmith.base.runs.folder import TRIAL, RunFolder
from tunesmith.base.runs.lock import RunLock
from tunesmith.base.schema.records import Finding
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.learn.trainers import restart
from tunesmith.observe.profiling.stage import Stage
from tunesmith.observe.profiling.watchdog import watched

_log = get_logger(__name__)

_KEPT_CHECKPOINTS = 2

_NOTE = "Data of a person who had it deleted since was among what this version was trained on."

_FIXED = ("model", "prompts", "algorithm", "schema_version", "run.seed")
"""Sections and keys that cannot change in a folder: weights, held-out prompts and random streams depend on them."""


@dataclass(frozen=True, slots=True)
class LiveFolder:
    """The folder with both stores open: `runs` to write, `votes` to read; `stage` says what the trainer does now."""

    path: Path
    runs: RunStore
    votes: VoteReader
    stage: Stage

    @property
    def files(self) -> RunFolder:
        """Logs, checkpoints and JSON files."""
        return RunFolder(self.path)

    def beat(self, num_updates: int, state: str) -> None:
        """Note in `runs.db`, and in the record of the stage, that the trainer is alive and what it does."""
        self.runs.beat(state)
        self.stage.beat(num_updates, state)

    def version_path(self, version: int) -> Path:
        """Folder of the weights of a version."""
        return self.path / "versions" / f"v{version:06d}"

    def kept_versions(self) -> list[int]:
        """Numbers of the versions whose weights are kept, oldest first."""
        found = (self.path / "versions").glob("v[0-9]*")
        return sorted(int(path.name[1:]) for path in found if (path / "README.md").is_file())

    def note_deleted(self, version: int) -> None:
        """Note beside the weights of a version, once, that it learnt from data that was deleted since."""
        card = self.version_path(version) / "README.md"
        text = card.read_text(encoding="utf-8")
        if _NOTE not in text:
            aside = card.with_suffix(".new")
            aside.write_text(f"{text.rstrip()}\n\n{_NOTE}\n", encoding="utf-8")
            os.replace(aside, card)

    def link_final(self, version: int) -> None:
        """Point the link `final` to the served version; remove it for the base model."""
        final, aside = self.path / "final", self.path / ".final-new"
        aside.unlink(missing_ok=True)
        if version == 0:
            final.unlink(missing_ok=True)
            return
        aside.symlink_to(self.version_path(version).relative_to(self.path), target_is_directory=True)
        os.replace(aside, final)

    def announce_trial(self, version: int, share: float) -> None:
        """Tell the server, by a file, which version is tried on which share of the conversations; 0: none is."""
        if version:
            self.files.write_json(TRIAL, {"version": version, "share": share})
        else:
            (self.path / TRIAL).unlink(missing_ok=True)

    def save(self, found: Checkpoint, keep: int = _KEPT_CHECKPOINTS) -> None:
        """Write a checkpoint, and of all leave the newest `keep`. Raises CheckpointError if it cannot be written."""
        checkpoint.save(self.files.checkpoints, found)
        checkpoint.prune(self.files.checkpoints, keep)

    def prune(self, keep: int, serving: int) -> None:
        """Remove the weights of all versions except the newest `keep` and the served one."""
        for version in self.kept_versions()[:-keep]:
            if version != serving:
                shutil.rmtree(self.version_path(version), ignore_errors=True)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint; None if there are none. Raises RunError if none of them is whole."""
        found = restart.newest(self.files)
        for reason in found.skipped:
            _log.warning("passed over a damaged checkpoint: %s", reason)
        if found.checkpoint is None and found.skipped:
            raise RunError(
                f"{self.path} has no checkpoint that can be used; put one back from a copy, or remove the checkpoints "
                "folder to start again from the base model"
            )
        return found.checkpoint


@contextmanager
def open_folder(cfg: LiveRecipe, provenance: Mapping[str, str] | None = None) -> Iterator[LiveFolder]:
    """The folder `cfg.live.dir`, created if missing, locked for this trainer, with both stores open.

    Raises:
        RunError: if it cannot be written, is in use by another trainer, or was started with another model, other
            prompts or another seed.
    """
    path, recipe = Path(cfg.live.dir), cfg.model_dump(mode="json")
    with ExitStack() as stack:
        try:
            (path / "versions").mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(path))
            check_recipe(recipe, path)
            aside = path / ".recipe-new"
            aside.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
            os.replace(aside, path / "recipe.yaml")
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"cannot write {path} ({reason}); choose another folder with --dir") from error
        RunFolder(path).write_json("provenance.json", dict(origins_of(cfg) if provenance is None else provenance))
        runs = stack.enter_context(RunStore.open(path / "runs.db"))
        votes = stack.enter_context(closing(VoteReader.open(cfg.live.database or path / "votes.db")))
        stage = stack.enter_context(watched(path, cfg.run.hang_after_s, lambda found: _find(path, found)))
        yield LiveFolder(path, runs, votes, stage)


def _find(path: Path, finding: Finding) -> None:
    """Record a finding and log it."""
    RunFolder(path).append("findings.jsonl", [asdict(finding)])
    _log.warning("update %d, %s: %s", finding.step, finding.name, finding.message)


def check_recipe(recipe: Mapping[str, object], path: Path) -> None:
    """Raise RunError if the folder was started with another model, other prompts or another seed."""
    file = path / "recipe.yaml"
    if not file.is_file():
        return
    earlier = load_recipe("live", file=file).recipe.model_dump(mode="json")
    changes = restart.changed_keys(earlier, recipe)
    refused = {key: change for key, change in changes.items() if key.startswith(_FIXED)}
    if refused:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in refused.items())
        raise RunError(
            f"{path} was started with another recipe:\n{lines}\ntake these back, or choose another folder with --dir"
        )
    for key, (before, after) in changes.items():
        _log.info("%s: %s -> %s", key, before, after)
