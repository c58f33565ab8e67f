"""The manifest of a checkpoint folder: which files belong to it, and whether they are as they were written.

It is read without torch, so that a list of runs costs nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import CheckpointError

VERSION = 1
"""Version of the layout of a checkpoint folder."""

STEP_PREFIX = "step-"


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in `folder`, oldest first; folders that are still being written do not count."""
    names = [path.name.removeprefix(STEP_PREFIX) for path in folder.glob(f"{STEP_PREFIX}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of `step` below `folder`."""
    return folder / f"{STEP_PREFIX}{step:06d}"


def sha256_of(file: Path) -> str:
    """SHA-256 of the contents of `file`."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(manifest: Mapping[str, object]) -> str:
    """SHA-256 of the manifest itself, so that a flipped bit in it is detected too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint folder `path`, once every file was found to match it.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version, expected_seal = manifest["version"], manifest.pop("seal", None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no readable manifest.json ({error}); use an older checkpoint") from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version}, this release reads version {VERSION}; use the release that wrote it"
        )
    if expected_seal != seal(manifest) or step_folder(path.parent, manifest["step"]) != path:
        raise CheckpointError(f"{path}/manifest.json was altered; use an older checkpoint")
    for name, expected in manifest["files"].items():
        _verify_file(path / name, expected)
    return manifest


def _verify_file(file: Path, expected: Mapping[str, object]) -> None:
    try:
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"{file} is missing or cut short; use an older checkpoint")
        found = sha256_of(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); use an older checkpoint") from error
    if found != expected["sha256"]:
        raise CheckpointError(f"{file} does not match its SHA-256 in manifest.json; use an older checkpoint")
