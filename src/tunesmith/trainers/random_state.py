"""The state of every global random generator: reward functions may draw from any of them.

Tunesmith's own draws need none of it: their seeds are pure functions of the run's seed and the step.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The generators of Python, NumPy and torch, on the CPU and on each GPU: as tensors (uint8) and as JSON values."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    python_version, python_keys, python_gauss = random.getstate()
    return tensors, {
        "python": [python_version, list(python_keys), python_gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }


def restore(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Set the generators to what `capture` returned; those of GPUs that are not here are left out."""
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda_{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    version, keys, gauss = values["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
