"""Checkpoints that are whole or not there: written aside, synced to disk, listed in a SHA-256 manifest, renamed into
place.

checkpoints/step-000010/
  manifest.json          version, step, and size and SHA-256 of every other file
  state.json             numbers and strings
  <name>.safetensors     one file for each group of tensors
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tunesmith.core import faults
from tunesmith.core.errors import CheckpointError
from tunesmith.runs.manifest import VERSION, list_steps, seal, step_folder, verify

_ASIDE = "tmp-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of one checkpoint: groups of tensors by file name, and JSON state.

    `score` says how good it is, more is better; None where nothing was measured.
    """

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, object]
    score: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole, None if there is none, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    skipped: Sequence[str]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """The folder of the checkpoint, written so that a crash at any moment leaves either all of it or nothing.

    Raises:
        CheckpointError: if it cannot be written, as on a full disk; what was written of it is removed.
    """
    final = step_folder(folder, checkpoint.step)
    aside = folder / f"{_ASIDE}{checkpoint.step:06d}-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(aside, checkpoint)
        if final.exists():
            shutil.rmtree(final)
        faults.reach("checkpoint/written")
        aside.rename(final)
        faults.reach("checkpoint/renamed")
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} to {folder} ({error}); make room for "
            f"{checkpoint.num_bytes / 1e9:.2f} GB, or choose another run.dir"
        ) from error
    return final


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the highest score."""
    steps = list_steps(folder)
    scores = {step: score for step in steps if (score := _score(folder, step)) is not None}
    best = max(scores, key=lambda step: (scores[step], step), default=None)
    for step in steps[:-keep]:
        if step != best:
            shutil.rmtree(step_folder(folder, step), ignore_errors=True)
            faults.reach("checkpoint/pruned")


def remove_unfinished(folder: Path) -> list[str]:
    """Remove what a crash left of checkpoints that were being written; their names."""
    left = sorted(folder.glob(f"{_ASIDE}*"))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def newest(folder: Path) -> Found:
    """The newest checkpoint in `folder` that is whole; damaged ones are passed over, each with its reason."""
    skipped: list[str] = []
    for step in reversed(list_steps(folder)):
        try:
            return Found(load(step_folder(folder, step)), skipped)
        except CheckpointError as error:
            skipped.append(str(error))
    return Found(None, skipped)


def load(path: Path) -> Checkpoint:
    """The verified contents of the checkpoint folder `path`.

    Raises:
        CheckpointError: if a file is missing, cut short or altered, or the version is another release's.
    """
    manifest = verify(path)
    try:
        tensors = {
            name.removesuffix(".safetensors"): load_file(path / name)
            for name in manifest["files"]
            if name.endswith(".safetensors")
        }
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an older checkpoint") from error
    return Checkpoint(manifest["step"], tensors, state, manifest.get("score"))


def _write(aside: Path, checkpoint: Checkpoint) -> None:
    """All files of `checkpoint` in the folder `aside`, the manifest last, synced to disk."""
    for name, tensors in checkpoint.tensors.items():
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, aside / f"{name}.safetensors")
        faults.reach("checkpoint/tensors")
    _write_json(aside / "state.json", dict(checkpoint.state))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(aside.iterdir())}
    faults.reach("checkpoint/manifest")
    manifest = {"version": VERSION, "step": checkpoint.step, "score": checkpoint.score, "files": files}
    _write_json(aside / "manifest.json", {**manifest, "seal": seal(manifest)})
    for path in [*aside.iterdir(), aside]:
        _sync(path)


def _score(folder: Path, step: int) -> float | None:
    try:
        score = json.loads((step_folder(folder, step) / "manifest.json").read_text()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score if isinstance(score, float) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
