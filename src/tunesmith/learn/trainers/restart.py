"""Contents of a checkpoint, and the checks before a run is resumed: identity of its inputs, keys that may change."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.base.core.errors import CheckpointError, RunError
from tunesmith.base.runs import checkpoint
from tunesmith.base.runs.checkpoint import Checkpoint, Found, remove_unfinished
from tunesmith.base.runs.folder import RunFolder
from tunesmith.engine.distributed import shards
from tunesmith.engine.distributed.ranks import gathered, stages, tell
from tunesmith.engine.distributed.shares import local, own_part, whole
from tunesmith.engine.models.lora import trained_parameters
from tunesmith.engine.models.optimizer import OptimizerState
from tunesmith.engine.models.sharding import free_gathered
from tunesmith.learn.trainers.api import Learner

STATE = "state"
"""The order to write the contents of a checkpoint."""

RESTORE = "restore"
"""The order to load them."""

WHOLE = "whole"
"""The order to send parameters that ranks divide, once training has ended."""

_HASHED_ROWS = 4096
"""Rows of 251 bytes that are summed at once: a megabyte."""


def contents(
    learner: Learner, parts: Path | None = None
) -> tuple[dict[str, Mapping[str, torch.Tensor]], dict[str, object]]:
    """Everything that training changes: tensors by file name and name, and JSON values. The tensors are not copied.

    Several ranks, which all call it, write the tensors to the folder `parts`, each its own; then there are none here.
    Frozen parameters are not included: they are part of the run's identity, and loaded by the model's name.

    Raises:
        CheckpointError: a rank could not write.
    """
    tell(STATE, parts)
    for module in learner.modules.values():
        free_gathered(module)
    optimizer = learner.optimizer.state_dict()
    tensors: dict[str, Mapping[str, torch.Tensor]] = {
        name: trained_parameters(module) for name, module in learner.modules.items()
    }
    tensors["optimizer"] = optimizer.tensors
    values: dict[str, object] = {name: dict(counter.state_dict()) for name, counter in learner.counters.items()}
    if parts is not None:
        named = {f"{name}/{key}": tensor for name, group in tensors.items() for key, tensor in group.items()}
        shards.write(parts, {name: tensor for name, tensor in named.items() if tensor.numel()})
        tensors = {}
    return tensors, {**values, "optimizer": dict(optimizer.scalars)}


def num_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the weights of a checkpoint, with the float32 masters of those in 16 bits, and without moments."""
    trained = [p for module in modules for p in trained_parameters(module).values()]
    return sum(p.numel() * (p.element_size() + (4 if p.element_size() < 4 else 0)) for p in trained)


@torch.no_grad()
def restore(learner: Learner, found: Checkpoint) -> None:
    """Load the contents of a checkpoint into `learner`.

    Raises:
        CheckpointError: if it belongs to another model.
    """
    values: Any = found.state
    tensors, parts = dict(found.tensors), dict[str, torch.Tensor]()
    if found.parts is not None:
        tensors |= shards.described(found.parts)
    for name, module in learner.modules.items():
        free_gathered(module)
        parameters, saved = dict(module.named_parameters()), tensors.get(name, {})
        # Checkpoints of earlier versions hold frozen parameters too.
        needed = {key: p.shape for key, p in parameters.items() if p.requires_grad or key in saved}
        if stages() is not None:  # the others are in other pipeline stages
            needed |= {key: saved[key].shape for key in saved.keys() & needed.keys() if not parameters[key].numel()}
        if needed != {key: tensor.shape for key, tensor in saved.items()}:
            raise CheckpointError(f"the checkpoint's `{name}` has other parameters; resume with the run's own recipe")
        for key, tensor in saved.items():
            if not parameters[key].numel():
                continue
            if tensor.is_meta:
                parts[f"{name}/{key}"] = parameters[key]
            else:
                local(parameters[key]).copy_(own_part(tensor, parameters[key]))
    read = None
    if found.parts is not None:
        shards.read(found.parts, parts)
        read = partial(_read_optimizer, found.parts)
    learner.optimizer.load_state_dict(OptimizerState(tensors["optimizer"], values["optimizer"]), read)
    for name, counter in learner.counters.items():
        counter.load_state_dict(values[name])


def _read_optimizer(folder: Path, held: Mapping[str, torch.Tensor]) -> None:
    shards.read(folder, {f"optimizer/{key}": tensor for key, tensor in held.items()})


MAY_CHANGE = frozenset(
    {
        "description",
        "environment.max_calls",
        "environment.processes",
        "optimizer.learning_rate",
        "optimizer.head_learning_rate",
        "optimizer.max_refused_steps",
        "rollout.drafts",
        "rollout.server_folder",
        "rollout.server_timeout_s",
        "rollout.server_url",
        "rollout.unload_during_update",
        "ppo.critic_process",
        "scale.address",
        "scale.timeout_s",
        "scale.workers",
        "run.steps",
        "run.log_every",
        "run.sample_every",
        "run.checkpoint_every",
        "run.checkpoint_in_background",
        "run.hang_after_s",
        "run.keep_checkpoints",
        "run.keep_freed_memory",
        "run.measure",
        "run.report_to",
        "scale.ranks",
        "scale.rank_timeout_s",
        "scale.pipeline",
        "scale.shard",
        "scale.tensor",
    }
)
"""Keys that may change when a run is resumed, besides those of `alarms`. Any other key would change what the steps so
far mean."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """The session's own part of a checkpoint."""

    identity: Mapping[str, str]
    log_sizes: Mapping[str, int]
    generators: Mapping[str, object]
    facts: Mapping[str, object]
    minutes: float
    num_findings: int


def newest(folder: RunFolder) -> Found:
    """The newest whole checkpoint of a run; unfinished ones are removed first."""
    remove_unfinished(folder.checkpoints)
    return checkpoint.newest(folder.checkpoints)


def check_identity(saved: Mapping[str, str], found: Mapping[str, str], run_dir: Path) -> None:
    """Compare model, data, rewards and device with those of the checkpoint; hashes that it lacks are skipped.

    Raises:
        RunError: naming each difference.
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
    """Refuse changes of keys that may not change.

    Raises:
        RunError: naming each difference.
    """
    refused = {
        path: change for path, change in changes.items() if path not in MAY_CHANGE and not path.startswith("alarms.")
    }
    if refused:
        lines = "\n".join(f"  {path}: {before!r} -> {after!r}" for path, (before, after) in refused.items())
        raise RunError(
            f"{run_dir} cannot be resumed with another recipe:\n{lines}\n"
            f"may change: alarms.*, {', '.join(sorted(MAY_CHANGE))}. Start a new run for anything else"
        )


def fingerprint_of_tensors(module: nn.Module) -> str:
    """A short hash of the names, shapes, dtypes and contents of all parameters, quick enough for every start.

    Contents are summed as bytes, weighted by position modulo 251: not secure, but changed, moved or rescaled numbers
    are detected.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        held = whole(parameter)
        bits = held.contiguous().view(-1).view(torch.uint8)
        weights = torch.arange(1, 252, device=bits.device, dtype=torch.int32)
        rows = len(bits) // 251
        columns = torch.zeros_like(weights, dtype=torch.int64)
        for part in bits[: 251 * rows].view(-1, 251).split(_HASHED_ROWS):  # torch copies them in int64
            columns += part.sum(dim=0, dtype=torch.int64)
        tail = int(bits[251 * rows :].sum(dtype=torch.int64))
        digest.update(f"{name}{tuple(held.shape)}{held.dtype}{int((columns * weights).sum())},{tail}".encode())
    found = digest.hexdigest()[:16]
    return found if stages() is None else gathered([found], "hash of weights", all_ranks=True)[0]


def fingerprint_of_file(file: Path) -> str:
    """A short hash of the contents of `file`."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def fingerprint_of_rows(rows: Iterable[object]) -> str:
    """A short hash of records, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def capture_generators() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """State of the global generators of Python, NumPy and torch, as tensors (uint8) and as JSON values.

    Reward functions may draw from any of them. The package's own draws need none: their seeds are pure functions of
    the run's seed and the step.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    python_version, python_keys, python_gauss = random.getstate()
    return tensors, {
        "python": [python_version, list(python_keys), python_gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }


def restore_generators(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Set the generators to what `capture_generators` returned; those of missing GPUs are skipped."""
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda_{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    version, keys, gauss = values["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
