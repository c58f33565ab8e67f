"""Trackers that people already use, behind one flag and off by default: TensorBoard, Weights & Biases, Trackio."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunesmith.core.errors import MissingDependencyError


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics."""
        ...

    def close(self) -> None:
        """Flush and leave."""
        ...


class _TensorBoard:
    def __init__(self, run_dir: Path, config: Mapping[str, object]) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard", "tunesmith[trackers]")
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("recipe", f"```\n{dict(config)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _RunLogger:
    """Weights & Biases, and Trackio, which has the same calls."""

    def __init__(self, package: str, run_dir: Path, config: Mapping[str, object]) -> None:
        self._module = _import(package, package, package)
        self._module.init(project="tunesmith", name=run_dir.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


_TRACKERS: Mapping[str, Callable[[Path, Mapping[str, object]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda run_dir, config: _RunLogger("wandb", run_dir, config),
    "trackio": lambda run_dir, config: _RunLogger("trackio", run_dir, config),
}


def open_trackers(names: Sequence[str], run_dir: Path, config: Mapping[str, object]) -> list[Tracker]:
    """The trackers called `names`, opened for the run.

    Raises:
        MissingDependencyError: naming the package to install.
    """
    return [_TRACKERS[name](run_dir, config) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed, before a run folder is made.

    Raises:
        MissingDependencyError: naming the package to install.
    """
    for name in names:
        _import(
            "tensorboard" if name == "tensorboard" else name,
            name,
            "tunesmith[trackers]" if name == "tensorboard" else name,
        )


def _import(module: str, name: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"report_to names {name}, which is not installed; run `pip install {install}` or leave {name} out"
        ) from error
