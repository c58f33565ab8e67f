"""Messages between an engine and its workers: one reply to each. Any transport may carry them; all can be pickled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.core.trace import Trace
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.rollout.sampler import NoiseKey

Handle = Any
"""Place of published tensors in a transport."""

Tensors = Mapping[str, torch.Tensor]
"""Parameters by name."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All of a worker but its weights: `skeleton` is made by `weights.pickled`, the rest are as in `NativeEngine`."""

    skeleton: bytes
    kernels: str
    num_threads: int
    num_slots: int
    kv_cache_mb: int | None
    weights: Weights
    is_trained: bool
    drafts: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """Published parameters, with the digest of their fingerprint. Those that `is_frozen` seldom change."""

    handle: Handle
    digest: str
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Take these weights and prove them. `edition` numbers what was published; a worker has one at a time."""

    edition: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Digests of the worker's own parameters, in the order of the parts, and log-probs of fixed tokens under them.

    With `is_exact` its engine reproduces these log-probs to the bit.
    """

    edition: int
    digests: tuple[str, ...]
    is_exact: bool
    logps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw `n` completions of each prompt, by the noise of `keys[i]`, from weights of `edition`."""

    edition: int
    call: int
    lease: int
    prompt_ids: tuple[tuple[int, ...], ...]
    keys: tuple[NoiseKey, ...]
    n: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """The completions of each prompt of a lease, the spans and figures of the work, and its seconds."""

    completions: tuple[tuple[Completion, ...], ...]
    work: Trace
    busy_s: float


@dataclass(frozen=True, slots=True)
class Unload:
    """Free cache and packed weights."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker did nothing: it has other weights, they are gone already, or it was interrupted."""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Cache and packed weights are freed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that the caller of the engine must see."""

    error: TunesmithError


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's process ended. Not sent by it, but by the transport."""


Message = Load | Draw | Unload
Reply = Loaded | Drawn | Refused | Unloaded | Failed | Lost
