"""What a run must find unchanged when it goes on, what may change, and what its session keeps in a checkpoint."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from tunesmith.core.errors import CheckpointError, RunError
from tunesmith.models.lora import trained_parameters
from tunesmith.models.optimizer import MasterAdamW, OptimizerState
from tunesmith.runs import checkpoint
from tunesmith.runs.checkpoint import Checkpoint, Found, remove_unfinished
from tunesmith.runs.folder import RunFolder


class Counter(Protocol):
    """Something that counts on from step to step, such as the controller of the KL coefficient."""

    def state_dict(self) -> Mapping[str, float]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict()`."""
        ...


@dataclass(frozen=True, slots=True)
class Resumable:
    """What training changes, from which a checkpoint is made and into which one is restored.

    Of a module with adapters these alone are in it: its base is in `identity`, and is loaded again by its name.
    `identity` are hashes of what the run was made from, which a resumed run must find unchanged.
    """

    modules: Mapping[str, nn.Module]
    optimizer: MasterAdamW
    counters: Mapping[str, Counter]
    num_steps: int
    identity: Mapping[str, str]

    def contents(self) -> tuple[dict[str, Mapping[str, torch.Tensor]], dict[str, object]]:
        """Tensors by file name and name, and JSON values. The tensors are the live ones."""
        optimizer = self.optimizer.state_dict()
        tensors: dict[str, Mapping[str, torch.Tensor]] = {
            name: trained_parameters(module) for name, module in self.modules.items()
        }
        tensors["optimizer"] = optimizer.tensors
        values: dict[str, object] = {name: dict(counter.state_dict()) for name, counter in self.counters.items()}
        return tensors, {**values, "optimizer": dict(optimizer.scalars)}

    @torch.no_grad()
    def restore(self, found: Checkpoint) -> None:
        """Take over the contents of a checkpoint.

        Raises:
            CheckpointError: if it belongs to another model.
        """
        values: Any = found.state
        for name, module in self.modules.items():
            parameters, saved = trained_parameters(module), found.tensors.get(name, {})
            if {key: p.shape for key, p in parameters.items()} != {key: t.shape for key, t in saved.items()}:
                raise CheckpointError(
                    f"the checkpoint's `{name}` has other parameters; resume with the run's own recipe"
                )
            for key, parameter in parameters.items():
                parameter.copy_(saved[key])
        self.optimizer.load_state_dict(OptimizerState(found.tensors["optimizer"], values["optimizer"]))
        for name, counter in self.counters.items():
            counter.load_state_dict(values[name])


MAY_CHANGE = frozenset(
    {
        "description",
        "optimizer.learning_rate",
        "optimizer.head_learning_rate",
        "optimizer.max_refused_steps",
        "rollout.unload_during_update",
        "run.steps",
        "run.log_every",
        "run.sample_every",
        "run.checkpoint_every",
        "run.checkpoint_in_background",
        "run.keep_checkpoints",
        "run.report_to",
    }
)
"""Keys that a resumed run may be given anew, and every key of `alarms`: rate, length, logging. Nothing else keeps what
the run has done meaningful."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session keeps in a checkpoint besides the trainer's state."""

    identity: Mapping[str, str]
    log_sizes: Mapping[str, int]
    generators: Mapping[str, object]
    facts: Mapping[str, object]
    minutes: float
    num_findings: int

    @classmethod
    def from_checkpoint(cls, found: Checkpoint) -> Self:
        """The session's part of a checkpoint."""
        values: Any = found.state["session"]
        return cls(**values)


def newest(folder: RunFolder) -> Found:
    """The newest whole checkpoint of a run; what was left of unfinished ones is removed first."""
    remove_unfinished(folder.checkpoints)
    return checkpoint.newest(folder.checkpoints)


def check_identity(saved: Mapping[str, str], found: Mapping[str, str], run_dir: Path) -> None:
    """Raise RunError if a model, the data, a reward or the device is not that of the checkpoint.

    What an older release did not record is not compared.
    """
    changed = [name for name in saved if saved[name] != found.get(name)]
    if changed:
        parts = ", ".join(f"{name} (was {saved[name]}, is {found.get(name)})" for name in changed)
        raise RunError(
            f"{run_dir} cannot be resumed: {parts} changed since its checkpoint; put it back, or start a new run"
        )


def changed_keys(old: Mapping[str, object], new: Mapping[str, object], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """(old, new) of every leaf key in which two recipes differ, by dotted path."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in old.keys() | new.keys():
        path, before, after = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= changed_keys(before, after, f"{path}.")
        elif before != after:
            changes[path] = (before, after)
    return dict(sorted(changes.items()))


def check_changes(changes: Mapping[str, tuple[Any, Any]], run_dir: Path) -> None:
    """Raise RunError, with each difference, if a key was changed that may not change on resume."""
    refused = {path: change for path, change in changes.items() if not _may_change(path)}
    if refused:
        lines = "\n".join(f"  {path}: {before!r} -> {after!r}" for path, (before, after) in refused.items())
        raise RunError(
            f"{run_dir} cannot be resumed with another recipe:\n{lines}\n"
            f"may change: alarms.*, {', '.join(sorted(MAY_CHANGE))}. Start a new run for anything else"
        )


def _may_change(path: str) -> bool:
    return path in MAY_CHANGE or path.startswith("alarms.")


def fingerprint_of_tensors(module: nn.Module) -> str:
    """A short hash of the names, shapes, dtypes and contents of all parameters, quick enough for every start.

    Contents enter as the sum of their bytes, weighted by position modulo 251: not secure, but a changed, moved or
    rescaled number shows.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        weights = torch.arange(1, 252, device=bits.device, dtype=torch.int32)
        whole = len(bits) // 251 * 251
        columns = bits[:whole].view(-1, 251).sum(dim=0, dtype=torch.int64)
        tail = int(bits[whole:].sum(dtype=torch.int64))
        digest.update(
            f"{name}{tuple(parameter.shape)}{parameter.dtype}{int((columns * weights).sum())},{tail}".encode()
        )
    return digest.hexdigest()[:16]


def fingerprint_of_file(file: Path) -> str:
    """A short hash of what is in `file`."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def fingerprint_of_rows(rows: Iterable[object]) -> str:
    """A short hash of records, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]
