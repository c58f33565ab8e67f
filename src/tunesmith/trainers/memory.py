"""Memory that runs out: where it happened and what to lower, instead of a traceback from an allocator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tunesmith.config.schema import AnyRecipe, GRPORecipe, PPORecipe, SFTRecipe
from tunesmith.core.errors import TrainingError
from tunesmith.core.trace import Trace

_SIGNS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


@contextmanager
def memory_advice(cfg: AnyRecipe, times: Trace, run_dir: Path) -> Iterator[None]:
    """Turn a failed allocation in the block into a TrainingError that names the stage and what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise TrainingError(
            f"memory ran out in `{times.failed_in or 'the step'}`; lower {_what_to_lower(cfg, times.failed_in)}. The "
            f"checkpoints in {run_dir} are whole"
        ) from error


def is_memory_error(error: BaseException) -> bool:
    """True for a failed allocation on the CPU or on a GPU, in the words of Python, torch or the C++ library."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def _what_to_lower(cfg: AnyRecipe, stage: str) -> str:
    if isinstance(cfg, PPORecipe | GRPORecipe) and stage.split("/")[0] in ("rollout", "evaluate"):
        rollout = cfg.rollout
        if rollout.backend == "native":
            return f"rollout.num_slots ({rollout.num_slots}), rollout.kv_cache_mb or rollout.max_new_tokens"
        return f"rollout.batch_size ({rollout.batch_size}) or rollout.max_new_tokens"
    section = {"reward": "reward_model"}.get(cfg.algorithm, cfg.algorithm)
    key = "micro_batch_tokens" if isinstance(cfg, SFTRecipe) else "micro_batch_size"
    size = getattr(getattr(cfg, section), key)
    return f"{section}.{key} ({size}), set model.gradient_checkpointing, or train fewer layers"
