"""The sections of recipes about more than one process."""

import re
from typing import Literal

from pydantic import model_validator

from tunesmith.base.config.sections import NonNegativeInt, Positive, PositiveInt, Section


class ScaleSection(Section):
    """Processes that train together, see docs/scale.md."""

    ranks: PositiveInt = 1
    """Processes that divide each step among them; 1 is this process alone. Under `torchrun` its number counts."""
    rank_timeout_s: Positive = 1800.0
    """Seconds that a rank waits for the others before the run ends and names the one that did not come."""
    shard: Literal["optimizer", "parameters"] = "optimizer"
    """Of each parameter that is trained, a rank holds a share of the master and the moments; with `parameters` of the
    parameter and its gradient too, and gathers a layer's weights when it computes the layer."""
    tensor: PositiveInt = 1
    """Ranks that compute each linear map together, each with a part of its weight; needs shard: parameters."""
    pipeline: PositiveInt = 1
    """Ranks that each hold consecutive layers, with masters and moments, and pass activations on (pipeline stages)."""
    reduction: Literal["float32", "exact"] = "float32"
    """Sum of the gradients of micro-batches. `exact`: as integers on a fixed grid, equal to the bit for any number of
    ranks; more time and memory, and run.num_threads must be set."""

    @property
    def is_exact(self) -> bool:
        """True if gradients are added up exactly."""
        return self.reduction == "exact"

    @property
    def shards_parameters(self) -> bool:
        """True if no rank holds all weights."""
        return self.ranks > 1 and self.shard == "parameters"

    @model_validator(mode="after")
    def _check_ranks(self) -> "ScaleSection":
        if self.ranks % self.pipeline:
            raise ValueError(
                f"pipeline is {self.pipeline}, but ranks is {self.ranks}; ranks must be a multiple of it: set pipeline "
                f"to 1, or ranks to {self.pipeline}"
            )
        if self.pipeline > 1 and (self.shard == "parameters" or self.is_exact):
            raise ValueError(f"pipeline is {self.pipeline}; set shard to optimizer and reduction to float32 with it")
        if self.ranks % self.tensor:
            raise ValueError(
                f"tensor is {self.tensor}, but ranks is {self.ranks}; ranks must be a multiple of it: set tensor to 1, "
                f"or ranks to {self.tensor}"
            )
        if self.tensor > 1 and self.shard != "parameters":
            raise ValueError(f"tensor is {self.tensor}, which shards parameters; set shard to parameters")
        if self.shards_parameters and self.is_exact:
            raise ValueError("reduction is exact, but shard is parameters, whose gradients are added up as float32")
        return self


class SamplingScaleSection(ScaleSection):
    """Processes that train together, and processes that draw completions for them, see docs/scale.md."""

    workers: NonNegativeInt = 0
    """Processes that draw completions by the native engine; 0: the run's own process draws."""
    threads_per_worker: PositiveInt = 1
    """CPU threads of a worker. Cannot change when a run is resumed."""
    lease: PositiveInt = 16
    """Most completions that a worker is given at a time. Cannot change when a run is resumed."""
    timeout_s: Positive = 600.0
    """A worker that gives no answer for longer is killed and started again."""
    address: str | None = None
    """A Ray cluster whose actors draw: `auto` is the one that runs on this machine, else HOST:PORT of its head. null:
    workers are processes of this machine."""
    staleness: NonNegativeInt = 0
    """Steps that workers draw ahead while training goes on: step k learns from completions of the weights before step
    k - staleness. 0: training waits for its own. Cannot change when a run is resumed."""
    swap_tokens: NonNegativeInt = 0
    """Tokens of a completion that are drawn ahead of each training step, as long as training need not wait for it: the
    rest is drawn from the weights after that step. Needs staleness 2 or more. 0: a completion is of one version of
    weights. Cannot change when a run is resumed."""

    @model_validator(mode="after")
    def _check_workers(self) -> "SamplingScaleSection":
        if self.swap_tokens and self.staleness < 2:
            raise ValueError(
                f"swap_tokens is {self.swap_tokens}, but staleness is {self.staleness}, with which no completion "
                "sees newer weights; set staleness to 2 or more, or swap_tokens to 0"
            )
        if self.address is not None and not re.fullmatch(r"auto|[^:/]+:\d+", self.address):
            raise ValueError(f"address is {self.address!r}; give HOST:PORT of the head of a Ray cluster, or auto")
        return self
