"""Checkpoints written by a thread of its own, from a copy of the tensors, while the next step runs.

The thread spends its time in the kernel, in SHA-256 and in copies, which all run beside Python. At most one checkpoint
is on its way: whoever begins the next one, or wants to know how it went, waits for it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tunesmith.core.errors import CheckpointError
from tunesmith.core.log import Once, get_logger
from tunesmith.runs.checkpoint import Checkpoint, prune, save

_SPARE = 2
"""A copy is made where so many would fit into the memory that is available."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The checkpoint of `step` is on disk; or it is not, `problem` says why, and the older ones are still there."""

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
        """Write `checkpoint` as it is now; `settle` says how it went, and comes before the next `begin`.

        In the background its tensors are copied, and may change once this returns. Where the copy would take more than
        half of the available memory, or if `in_background` is off, the checkpoint is written before this returns.
        """
        assert self._pending is None, "settle comes before the next begin"
        if in_background and not self._has_room(checkpoint.num_bytes):
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
        """How the checkpoint went that was begun, once it is on disk or given up; None if there is none to ask about.

        An error other than that of a disk is raised here.
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
        """Wait for the checkpoint on its way, and end the thread."""
        self._executor.shutdown(wait=True)

    def _write(self, checkpoint: Checkpoint) -> None:
        save(self._folder, checkpoint)
        prune(self._folder, self._keep)

    def _has_room(self, num_bytes: int) -> bool:
        return psutil.virtual_memory().available >= _SPARE * num_bytes


def snapshot(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, its tensors copied into memory of their own on the CPU."""
    tensors = {
        group: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for group, named in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)
