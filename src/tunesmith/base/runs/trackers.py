"""Trackers that people already use, behind one flag and off by default: TensorBoard, Weights & Biases, Trackio."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import MissingDependencyError

Track = Callable[[int, Mapping[str, float]], None]
"""Sends the metrics of a step, counted from 1, to a tracker."""


@contextmanager
def tracking(name: str, run_dir: Path, config: Mapping[str, object]) -> Iterator[Track]:
    """The tracker `name`, opened for the run and closed at the end of the block.

    Raises:
        MissingDependencyError: naming the package to install.
    """
    module = _import(name)
    if name == "tensorboard":
        with module.SummaryWriter(str(run_dir / "tensorboard")) as writer:
            writer.add_text("recipe", f"```\n{dict(config)}\n```")

            def add_scalars(step: int, metrics: Mapping[str, float]) -> None:
                for key, value in metrics.items():
                    writer.add_scalar(key, value, step)

            yield add_scalars
        return
    # Weights & Biases, and Trackio, which has the same calls.
    module.init(project="tunesmith", name=run_dir.name, config=dict(config))
    try:
        yield lambda step, metrics: module.log(dict(metrics), step=step)
    finally:
        module.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed, before a run folder is made.

    Raises:
        MissingDependencyError: naming the package to install.
    """
    for name in names:
        _import(name)


def _import(name: str) -> Any:
    module, package = ("torch.utils.tensorboard", "'tunesmith[trackers]'") if name == "tensorboard" else (name, name)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"report_to names {name}, which is not installed; run `pip install {package}` or leave {name} out"
        ) from error
