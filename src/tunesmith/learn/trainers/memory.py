"""Memory that runs out in a training: the stage, and the setting to lower."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.trace import Trace

_MEMORY_ERRORS = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "could not create a primitive",  # oneDNN says no more where it cannot allocate; the same shapes worked before
)
"""Parts of the messages of a RuntimeError of torch, of oneDNN or of the C++ library."""


@contextmanager
def memory_advice(cfg: Recipe, times: Trace, run_dir: Path) -> Iterator[None]:
    """Turn a failed allocation in the block into a TrainingError that names the stage and the setting to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_of_memory and not any(sign in str(error).lower() for sign in _MEMORY_ERRORS):
            raise
        raise TrainingError(
            f"memory ran out in `{times.failed_in or 'the step'}`; lower {_setting_to_lower(cfg, times.failed_in)}. "
            f"The checkpoints in {run_dir} are whole"
        ) from error


def _setting_to_lower(cfg: Recipe, stage: str) -> str:
    if isinstance(cfg, SamplingRecipe) and stage.split("/")[0] in ("rollout", "evaluate"):
        rollout = cfg.rollout
        if rollout.backend == "vllm":
            return f"rollout.num_slots ({rollout.num_slots}) or rollout.max_new_tokens"
        if rollout.backend == "native":
            return f"rollout.num_slots ({rollout.num_slots}), rollout.kv_cache_mb or rollout.max_new_tokens"
        return f"rollout.batch_size ({rollout.batch_size}) or rollout.max_new_tokens"
    name, section = cfg.section_name, cfg.section
    key = "micro_batch_tokens" if hasattr(section, "micro_batch_tokens") else "micro_batch_size"
    size = getattr(section, key)
    return f"{name}.{key} ({size}), set model.gradient_checkpointing, or train fewer layers"
