"""The engine's side of a vLLM, wherever that runs: settings, requests, answers, and the errors that may pass."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

from tunesmith.base.config.sections import RolloutSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.seeds import derive
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.rollout.engine import Request
from tunesmith.engine.rollout.sampler import noise_keys

PLAIN: Mapping[str, object] = MappingProxyType(
    {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"ignore_eos": True, "logprobs": 0},  # it is one of the stop ids; log-probs of the drawn token alone
    }
)
"""Settings of a draw from the model's own distribution. All are sent each time: what is missing, a server may take from
the model's generation config."""

_COLDEST = 0.01
_LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class VLLM:
    """Settings of the backend `vllm`.

    Args:
        url: Of a server, such as `http://localhost:8000`; None: vLLM in this process.
        timeout_s: A request that takes longer counts as lost, and a server that gives no answer for longer ends the
            run. In seconds.
        folder: That of the weights for the server, which must see it under the same path; None: the system's
            temporary folder.
        options: Keywords of `vllm.LLM`, in this process.
    """

    url: str | None = None
    timeout_s: float = 300.0
    folder: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict[str, object])

    @classmethod
    def of(cls, cfg: RolloutSection) -> Self:
        """Those of a recipe's section."""
        folder = None if cfg.server_folder is None else Path(cfg.server_folder)
        return cls(cfg.server_url, cfg.server_timeout_s, folder, cfg.vllm_options)


class TransientError(Exception):
    """A server did what may pass: it is away, late, or answered what it was not asked. The engine asks again."""


class WrongWeightsError(TransientError):
    """A server's log-probs are not those of the trainer's weights."""


@dataclass(frozen=True, slots=True)
class Job:
    """`n` completions of one prompt. `settings` are keywords of `vllm.SamplingParams` and of its HTTP requests."""

    prompt_ids: tuple[int, ...]
    n: int
    vocabulary_size: int
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Token ids of a completion, and their log-probs under the distribution that they were drawn from."""

    token_ids: Sequence[int]
    logps: Sequence[float]


class Connection(Protocol):
    """A running vLLM. All methods may raise TransientError, and InputError for what it will never do."""

    name: str
    """Its name in error messages."""
    dtype: str | None
    """Dtype of its weights, such as `torch.bfloat16`, once some were pushed; None: it does not say."""

    def push(self, folder: Path, version: str) -> None:
        """Replace its weights by those in `folder`, name them `version`, and forget what it cached of older ones."""
        ...

    def version(self) -> str | None:
        """The name of its weights, empty if they have none; None: it cannot say."""
        ...

    def complete(self, jobs: Mapping[int, Job]) -> tuple[dict[int, list[Drawn]], TransientError | None]:
        """The completions of the jobs that succeeded, by their key, and the first error of another."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of `token_ids` but the first."""
        ...


def jobs_of(request: Request, sampling: SamplingParams) -> dict[int, Job]:
    """One job for each prompt, by its index. Its seed depends on the prompt, so that a job that is sent again, or
    beside others, gives the same completions.

    Raises:
        InputError: vLLM cannot draw so.
    """
    if 0 < sampling.temperature < _COLDEST:
        raise InputError(f"temperature is {sampling.temperature}; vLLM draws at 0, or from {_COLDEST} on")
    for token, value in sampling.logit_bias.items():
        if abs(value) > _LARGEST_BIAS:
            raise InputError(f"logit_bias of token {token} is {value}; vLLM takes numbers from -100 to 100")
    keys = noise_keys(request.prompt_ids, request.n)
    seeds = [derive(request.seed, key.prompt, key.first_sample) >> 1 for key in keys]  # vLLM adds the sample
    limits = request.limits
    settings = {
        **PLAIN,
        "n": request.n,
        "max_tokens": limits.max_new_tokens,
        "min_tokens": limits.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(limits.stop_ids),
        **({"logit_bias": dict(sampling.logit_bias)} if sampling.logit_bias else {}),
    }
    return {
        index: Job(ids, request.n, request.vocabulary_size, {**settings, "seed": seed})
        for index, (ids, seed) in enumerate(zip(request.prompt_ids, seeds, strict=True))
    }


def reshapes(sampling: SamplingParams) -> bool:
    """True if completions are not drawn from the model's own distribution at that temperature."""
    filters = sampling.top_p < 1 or sampling.top_k or sampling.min_p
    return bool(filters or sampling.repetition_penalty != 1 or sampling.logit_bias or sampling.min_new_tokens)


def checked(job: Job, drawn: list[Drawn]) -> list[Drawn]:
    """`drawn`, if it can be the answer to `job`.

    Raises:
        TransientError: it cannot.
    """
    if len(drawn) != job.n:
        raise TransientError(f"it answered with {len(drawn)} completions where {job.n} were asked for")
    for one in drawn:
        if not one.token_ids or len(one.token_ids) != len(one.logps):
            raise TransientError(f"it answered with {len(one.token_ids)} tokens and {len(one.logps)} log-probs")
        if not all(0 <= token < job.vocabulary_size for token in one.token_ids):
            raise TransientError(f"it answered with token ids outside of [0, {job.vocabulary_size}): another model?")
        if not all(math.isfinite(logp) for logp in one.logps):
            raise TransientError("it answered with log-probs that are not finite")
    return drawn
