"""The trainer's part of the live folder: versions as model folders, checkpoints, logs, and both stores.

live/
  runs.db           written by the trainer alone     votes.db          written by the server alone
  recipe.yaml       resolved configuration           metrics.jsonl     one object per update
  versions/v000012/ the model, Hugging Face layout   final             link to the version that is served
  checkpoints/      where an update went on from     result.json       what the trainer came to
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tunesmith.config.load import load_recipe
from tunesmith.config.schema import LiveRecipe
from tunesmith.core.errors import RunError
from tunesmith.core.log import get_logger
from tunesmith.live.state import State
from tunesmith.models.export import ModelCard, save_final
from tunesmith.runs import checkpoint
from tunesmith.runs.checkpoint import Checkpoint
from tunesmith.runs.folder import RunFolder
from tunesmith.runs.lock import RunLock
from tunesmith.store.runs import RunStore
from tunesmith.store.vote_reader import VoteReader
from tunesmith.trainers import restart

_log = get_logger(__name__)

_KEPT_CHECKPOINTS = 2

_FIXED = ("model", "prompts", "algorithm", "schema_version", "run.seed")
"""Sections and keys that a folder keeps for good: weights, held-out prompts and random streams follow from them."""


@dataclass(frozen=True, slots=True)
class LiveFolder:
    """The folder with both stores open: `runs` to write, `votes` to read."""

    path: Path
    runs: RunStore
    votes: VoteReader

    @property
    def log(self) -> RunFolder:
        """Its append-only files."""
        return RunFolder(self.path)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def version_path(self, version: int) -> Path:
        """Folder of the weights of a version."""
        return self.path / "versions" / f"v{version:06d}"

    def kept_versions(self) -> list[int]:
        """Numbers of the versions whose weights are here, oldest first."""
        found = (self.path / "versions").glob("v[0-9]*")
        return sorted(int(path.name[1:]) for path in found if (path / "README.md").is_file())

    def save_version(self, state: State, version: int, figures: Mapping[str, object]) -> Path:
        """The folder of the policy's weights as they are, whole or absent."""
        card = ModelCard(
            base_model=state.cfg.model.name,
            algorithm=f"live votes ({state.cfg.live.update})",
            title=f"{self.path.name}, version {version}",
            metrics=figures,
            recipe=state.cfg.model_dump(mode="json"),
        )
        return save_final(state.policy.module, state.tokenizer, self.version_path(version), card)

    def link_final(self, version: int) -> None:
        """Let `final` name the version that is served; for the base model there is none."""
        final, aside = self.path / "final", self.path / ".final-new"
        aside.unlink(missing_ok=True)
        if version == 0:
            final.unlink(missing_ok=True)
            return
        aside.symlink_to(self.version_path(version).relative_to(self.path), target_is_directory=True)
        os.replace(aside, final)

    def save(self, found: Checkpoint) -> None:
        """Write a checkpoint and remove the older ones. Raises CheckpointError if the disk refuses."""
        checkpoint.save(self.checkpoints, found)
        checkpoint.prune(self.checkpoints, _KEPT_CHECKPOINTS)

    def prune(self, keep: int, serving: int) -> None:
        """Remove the weights of all versions but the newest `keep` and the one that is served."""
        for version in self.kept_versions()[:-keep]:
            if version != serving:
                shutil.rmtree(self.version_path(version), ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None if none was ever written.

        Raises:
            RunError: if there are checkpoints and none is whole.
        """
        checkpoint.remove_unfinished(self.checkpoints)
        found = checkpoint.newest(self.checkpoints)
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
    """The folder `cfg.live.dir`, made if it is missing, locked for this trainer, with both stores open.

    Raises:
        RunError: if it cannot be written, is in use by another trainer, or was begun with another model, other prompts
            or another seed.
    """
    path = Path(cfg.live.dir)
    try:
        (path / "versions").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {path} ({error.strerror or error}); choose another folder with --dir") from error
    with ExitStack() as stack:
        stack.enter_context(RunLock(path))
        check_recipe(cfg, path)
        write_recipe(cfg, path)
        RunFolder(path).write_json("provenance.json", dict(provenance or {}))
        runs = stack.enter_context(RunStore.open(path / "runs.db"))
        votes = VoteReader.open(path / "votes.db")
        stack.callback(votes.close)
        yield LiveFolder(path, runs, votes)


def write_recipe(cfg: LiveRecipe, path: Path) -> None:
    """Write `recipe.yaml`, all of it or nothing. Raises RunError if the folder cannot be written."""
    text, aside = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True), path / ".recipe-new"
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path / "recipe.yaml")
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}); choose another folder with --dir") from error


def check_recipe(cfg: LiveRecipe, path: Path) -> None:
    """Raise RunError if the folder was begun with what may not change: model, prompts, seed."""
    file = path / "recipe.yaml"
    if not file.is_file():
        return
    earlier = load_recipe("live", file=file).recipe.model_dump(mode="json")
    changes = restart.changed_keys(earlier, cfg.model_dump(mode="json"))
    refused = {key: change for key, change in changes.items() if key.startswith(_FIXED)}
    if refused:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in refused.items())
        raise RunError(
            f"{path} was begun with another recipe:\n{lines}\ntake these back, or choose another folder with --dir"
        )
    for key, (before, after) in changes.items():
        _log.info("%s: %s -> %s", key, before, after)
