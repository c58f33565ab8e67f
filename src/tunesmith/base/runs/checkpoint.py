"""Atomic checkpoints: written to a temporary folder, synced to disk, listed in a SHA-256 manifest, renamed into place.

checkpoints/step-000010/
  manifest.json          version, step, and size and SHA-256 of every other file
  state.json             numbers and strings
  <name>.safetensors     one file for each group of tensors
  *.distcp, .metadata    instead, of several ranks: the parts that each wrote, by torch.distributed.checkpoint
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tunesmith.base.core import faults
from tunesmith.base.core.errors import CheckpointError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.system import sync
from tunesmith.base.runs.manifest import VERSION, list_steps, seal, sha256_of, step_folder, verify

_ASIDE = "tmp-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of one checkpoint: tensors by file name, JSON state, and a score (higher is better, None if unknown).

    `parts`: the folder in which several ranks wrote other tensors (`engine/distributed/shards.py`).
    """

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, object]
    score: float | None = None
    parts: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())


@dataclass(frozen=True, slots=True)
class Found:
    """The newest intact checkpoint, None if there is none, and why newer ones were skipped."""

    checkpoint: Checkpoint | None
    skipped: Sequence[str]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically: a crash leaves either all of it or nothing. Returns its folder.

    Raises:
        CheckpointError: if it cannot be written, as on a full disk; the partial files are removed.
    """
    final = step_folder(folder, checkpoint.step)
    aside = checkpoint.parts or aside_folder(folder, checkpoint.step)
    try:
        if checkpoint.parts is None:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        _write(aside, checkpoint)
        if final.exists():
            shutil.rmtree(final)
        faults.reach("checkpoint/written")
        aside.rename(final)
        faults.reach("checkpoint/renamed")
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} to {folder} ({error}); free "
            f"{checkpoint.num_bytes / 1e9:.2f} GB, or choose another run.dir"
        ) from error
    return final


def aside_folder(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written until it is whole."""
    return folder / f"{_ASIDE}{step:06d}-{os.getpid()}"


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the highest score."""
    steps = list_steps(folder)
    scores = {step: score for step in steps if (score := _score(folder, step)) is not None}
    best = max(scores, key=lambda step: (scores[step], step), default=None)
    for step in steps[:-keep]:
        if step != best:
            shutil.rmtree(step_folder(folder, step), ignore_errors=True)
            faults.reach("checkpoint/pruned")


def remove_unfinished(folder: Path) -> None:
    """Remove partial checkpoints that a crash left behind."""
    for path in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)


def newest(folder: Path) -> Found:
    """The newest intact checkpoint in `folder`; damaged ones are skipped, each with its reason."""
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
    parts = path if ".metadata" in manifest["files"] else None
    return Checkpoint(manifest["step"], tensors, state, manifest.get("score"), parts)


def _write(aside: Path, checkpoint: Checkpoint) -> None:
    """All files of `checkpoint` in the folder `aside`, the manifest last, synced to disk."""
    for name, tensors in checkpoint.tensors.items():
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, aside / f"{name}.safetensors")
        faults.reach("checkpoint/tensors")
    _write_json(aside / "state.json", dict(checkpoint.state))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(aside.iterdir())}
    faults.reach("checkpoint/manifest")
    manifest = {"version": VERSION, "step": checkpoint.step, "score": checkpoint.score, "files": files}
    _write_json(aside / "manifest.json", {**manifest, "seal": seal(manifest)})
    for path in [*aside.iterdir(), aside]:
        sync(path)


def _score(folder: Path, step: int) -> float | None:
    try:
        score = json.loads((step_folder(folder, step) / "manifest.json").read_text()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score if isinstance(score, float) else None


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


_SPARE = 2
"""A copy is made only if this many would fit into available memory."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Outcome of writing the checkpoint of `step`; `problem` is empty on success. Older ones are kept on failure."""

    step: int
    problem: str = ""


class CheckpointWriter:
    """Writes checkpoints into `folder` and keeps the newest `keep` and the best. One thread uses it; close it."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._once = Once(get_logger(__name__))

    def begin(self, checkpoint: Checkpoint, *, in_background: bool) -> None:
        """Start writing `checkpoint`; `settle` returns the outcome and must be called before the next `begin`.

        In the background the tensors are copied first and may change after this returns. If the copy would take more
        than half of the available memory, or `in_background` is off, the call blocks until the checkpoint is written.
        """
        assert self._pending is None, "settle comes before the next begin"
        if in_background and psutil.virtual_memory().available < _SPARE * checkpoint.num_bytes:
            in_background = False
            self._once.warning(
                f"a copy of the checkpoint takes {checkpoint.num_bytes / 1e9:.2f} GB, more than half of the memory "
                "that is available: checkpoints are written before training goes on"
            )
        future = self._executor.submit(self._write, snapshot(checkpoint) if in_background else checkpoint)
        self._pending = checkpoint.step, future
        if not in_background:
            future.exception()  # waits; `settle` raises it

    def settle(self) -> Settled | None:
        """Wait for the checkpoint that was begun and return its outcome; None if none was begun.

        Errors other than CheckpointError are raised here.
        """
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except CheckpointError as error:
            return Settled(step, str(error))
        return Settled(step)

    def close(self) -> None:
        """Wait for a pending checkpoint, and end the thread."""
        self._executor.shutdown(wait=True)

    def _write(self, checkpoint: Checkpoint) -> None:
        save(self._folder, checkpoint)
        prune(self._folder, self._keep)


def snapshot(checkpoint: Checkpoint) -> Checkpoint:
    """A copy of the checkpoint with its tensors in CPU memory."""
    tensors = {
        group: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for group, named in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)
