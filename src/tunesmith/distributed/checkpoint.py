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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tunesmith.core.errors import CheckpointError

VERSION = 1
_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of one checkpoint: groups of tensors by file name, and JSON state."""

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, object]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int | None = None) -> Path:
    """The folder of the checkpoint, written so that a crash at any moment leaves either all of it or nothing.

    With `keep`, older checkpoints beyond that number are removed once the new one is in place.
    """
    final = folder / f"{_PREFIX}{checkpoint.step:06d}"
    aside = folder / f"tmp-{checkpoint.step:06d}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, tensors in checkpoint.tensors.items():
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, aside / f"{name}.safetensors")
    _write_json(aside / "state.json", dict(checkpoint.state))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(aside.iterdir())}
    _write_json(aside / "manifest.json", {"version": VERSION, "step": checkpoint.step, "files": files})
    for path in [*aside.iterdir(), aside]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    _sync(folder)
    if keep is not None:
        for old in list_steps(folder)[:-keep]:
            shutil.rmtree(folder / f"{_PREFIX}{old:06d}")
    return final


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in `folder`, oldest first; folders that are still being written do not count."""
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*")]
    return sorted(int(name) for name in names if name.isdigit())


def load(path: Path) -> Checkpoint:
    """The verified contents of the checkpoint folder `path`.

    Raises:
        CheckpointError: if a file is missing, cut short or altered, or the version is another release's.
    """
    manifest = verify(path)
    tensors = {
        name.removesuffix(".safetensors"): load_file(path / name)
        for name in manifest["files"]
        if name.endswith(".safetensors")
    }
    return Checkpoint(manifest["step"], tensors, json.loads((path / "state.json").read_text()))


def verify(path: Path) -> dict:
    """The manifest of the checkpoint folder `path`, once every file was found to match it.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no readable manifest.json ({error}); use an older checkpoint") from error
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {manifest.get('version')}, this release reads version {VERSION}; "
            "use the release that wrote it"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"{file} is missing or cut short; use an older checkpoint")
        if _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} does not match its SHA-256 in manifest.json; use an older checkpoint")
    return manifest


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
