"""Device, threads and seeds before a training, its result after it."""

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.base.config.schema import trains_reward_model
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.system import keep_freed_memory, warn_of_spinning
from tunesmith.base.runs.environment import usable_cores
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.distributed.launch import from_torchrun, ranks_here
from tunesmith.engine.distributed.ranks import forget_passes
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.optimizer import MasterAdamW

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: its folder, the metrics of each step, and a summary of a few figures.

    `trust_remote_code` is that of its recipe: a model with code of its own is exported with it.
    """

    run_dir: Path
    metrics: Sequence[Mapping[str, float]]
    summary: Mapping[str, object] = field(default_factory=dict[str, object])
    trust_remote_code: bool = False

    def generate(self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.7, seed: int = 0) -> str:
        """The trained policy's continuation of `prompt`; the model is loaded from the run's `final/`.

        Raises:
            ModelError: if this run trained a reward model, which writes no text.
        """
        from tunesmith.base.config.sections import ModelSection
        from tunesmith.base.schema.records import Prompt
        from tunesmith.engine.batch.rollout import SamplingParams
        from tunesmith.engine.models.load import load_policy
        from tunesmith.engine.rollout.factory import open_engine

        if trains_reward_model(self.summary.get("algorithm")):
            raise ModelError(
                f"{self.run_dir} holds a reward model, which scores text and writes none; use the run of a policy"
            )
        loaded = load_policy(ModelSection(name=str(self.run_dir / "final"), trust_remote_code=self.trust_remote_code))
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        (group,) = open_engine(loaded.model, loaded.tokenizer).generate([Prompt("0", prompt)], 1, sampling)
        return group.completions[0].text


def prepare(cfg: Recipe) -> torch.device:
    """Set threads, the seeds of all global generators and the allocator's options; returns the device to train on.

    Only new heads are drawn from global generators, but reward functions may use them too.
    """
    if cfg.run.keep_freed_memory:
        keep_freed_memory()
    torch.set_num_threads(cfg.run.num_threads or default_threads(cfg.scale))
    if torch.get_num_threads() > 1:
        warn_of_spinning()
    seed_generators(cfg.run.seed)
    forget_passes()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_threads(section: ScaleSection) -> int:
    """Threads of one rank: `OMP_NUM_THREADS`, else its share of the cores that the process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0 and not from_torchrun():  # torchrun sets it to 1 where nobody else did
        return int(named)
    return max(1, usable_cores() // ranks_here(section))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def optimizer_of(cfg: Recipe, module: nn.Module, kernels: Kernels, total_steps: int) -> MasterAdamW:
    """The recipe's optimizer of all trainable parameters of `module`, for `total_steps` updates."""
    exact = cfg.scale.is_exact
    return MasterAdamW(module, cfg.optimizer, total_steps=total_steps, kernels=kernels, exact_sums=exact)


def uploader_to(device: torch.device) -> Uploader | None:
    """The uploader that sends batches to `device`; None on a CPU, which needs no copy."""
    return Uploader(device) if device.type == "cuda" else None


def sent(record: RecordT, uploader: Uploader | None) -> RecordT:
    """`record`, a dataclass of CPU tensors, on the training device, by a single copy."""
    return record if uploader is None else uploader.record(record)


def say(message: str, *, enabled: bool) -> None:
    """Print one line to stderr, unless progress is off."""
    if enabled:
        sys.stderr.write(message + "\n")


class Stopwatch:
    """Minutes since its creation, by the monotonic clock: the wall clock may jump."""

    def __init__(self, earlier_minutes: float = 0.0) -> None:
        self._start_s = time.monotonic()
        self._earlier_minutes = earlier_minutes

    @property
    def minutes(self) -> float:
        """Minutes since its creation, plus the earlier ones."""
        return self._earlier_minutes + (time.monotonic() - self._start_s) / 60
