"""What `bench rollout` measures: our engine, transformers' two ways to generate, and the matrix products alone.

Each `serve_*` runs in a process of its own; see `process.py`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from benchmarks import baselines
from benchmarks.machine import peak_rss_since_reset_gb, reset_peak_rss
from benchmarks.process import Server, serve
from benchmarks.workloads import Workload
from tunesmith.batch.pack import pack
from tunesmith.batch.rollout import Group
from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.core.system import keep_freed_memory
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import language_model
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import LoadedModel
from tunesmith.models.tokenizer import stop_token_ids
from tunesmith.rollout.factory import open_engine
from tunesmith.trainers.rollouts import logps

Backend = Literal["native", "transformers"]
Way = Literal["generate", "continuous"]

_SCORED_ROWS = 16  # rows of one pass of the trainer while log-probs are compared


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, in which precision ("auto": bfloat16 where the machine has it), on how many threads."""

    name: str
    dtype: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Our engine; `num_slots` None leaves it its default."""

    model: ModelSettings
    backend: Backend
    num_slots: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """How transformers is called: attention, sequences at a time, and which of its two ways."""

    attention: str
    batch_size: int
    way: Way = "generate"


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the workload's completions. `keeps_tokens` sends them back; `setting` is for transformers."""

    workload: Workload
    seed: int
    keeps_tokens: bool = False
    setting: Setting | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Seconds that drawing took, tokens of each completion in the order of `Workload.rows`, and the tokens if kept."""

    seconds: float
    lengths: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of all completions."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class LogpDifference:
    """Draw, and compare the engine's raw log-probs with the trainer's."""

    workload: Workload
    seed: int


@dataclass(frozen=True, slots=True)
class Margins:
    """By how much the best logit leads at each of `tokens` behind `prompt`, by the reference model."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """Ask for the peak of resident memory since the last time it was asked for; it begins anew."""


class EngineContender:
    """Our engine, as trainers use it. Its weight version changes before each call, as it does in training.

    So nothing is carried over from an earlier round: no packed weights, no cached prompts.
    """

    def __init__(self, settings: EngineSettings) -> None:
        keep_freed_memory()  # as our trainings and commands do
        loaded = _load(settings.model)
        self._policy = language_model(loaded.model, Kernels())  # as the trainers have it
        self._version = 0
        open_with = partial(open_engine, self._policy, loaded.tokenizer, backend=settings.backend)
        if settings.num_slots is not None:
            open_with = partial(open_with, num_slots=settings.num_slots)
        self._engine = open_with(weight_version=lambda: self._version)

    def handle(self, request: Draw | LogpDifference | Peak) -> object:
        """`Drawn`, the largest difference of log-probs in nats, or the peak in GB."""
        match request:
            case Draw():
                seconds, groups = self._draw(request.workload, request.seed)
                tokens = tuple(item.token_ids for group in groups for item in group.completions)
                return _drawn(request, seconds, tokens)
            case LogpDifference():
                return self._difference(request)
            case Peak():
                return _peak()

    def _draw(self, work: Workload, seed: int) -> tuple[float, list[Group]]:
        least = work.sampling.max_new_tokens if work.is_exact_length else 0
        sampling = replace(work.sampling, seed=seed, min_new_tokens=least)
        self._version += 1
        start_s = time.perf_counter()
        groups = self._engine.generate(work.prompts, work.num_completions, sampling)
        return time.perf_counter() - start_s, groups

    def _difference(self, request: LogpDifference) -> float:
        _, groups = self._draw(request.workload, request.seed)
        sequences = pack(groups, pad_id=0, device=torch.device("cpu"))
        temperature = request.workload.sampling.temperature or 1.0
        trained_BT = logps(self._policy, sequences, temperature, _SCORED_ROWS)
        completions = [item for group in groups for item in group.completions]
        return max(
            (trained_BT[row, : len(item.raw_logps)] - torch.tensor(item.raw_logps)).abs().max().item()
            for row, item in enumerate(completions)
        )


class TransformersContender:
    """`model.generate` and `model.generate_batch`, as their user calls them."""

    def __init__(self, settings: ModelSettings) -> None:
        loaded = _load(settings)
        self._model = loaded.model
        self._stop_ids = stop_token_ids(loaded.model, loaded.tokenizer)

    def handle(self, request: Draw | Margins | Peak) -> object:
        """`Drawn`, the margins, or the peak in GB."""
        match request:
            case Draw():
                return self._draw(request)
            case Margins():
                return baselines.greedy_margins(self._model, request.prompt, request.tokens)
            case Peak():
                return _peak()

    def _draw(self, request: Draw) -> Drawn:
        setting, work = request.setting, request.workload
        if setting is None:
            raise InputError("a draw by transformers needs a setting: attention and batch size")
        baselines.set_attention(self._model, setting.attention)
        torch.manual_seed(request.seed)
        stop_ids = () if work.is_exact_length else self._stop_ids
        start_s = time.perf_counter()
        if setting.way == "continuous":
            tokens = baselines.generate_continuously(self._model, work.rows, work.sampling, stop_ids, request.seed)
        else:
            tokens = baselines.generate(self._model, work.rows, work.sampling, stop_ids, batch_size=setting.batch_size)
        return _drawn(request, time.perf_counter() - start_s, tokens)


def serve_engine(settings: EngineSettings, server: Server) -> None:
    """Our engine."""
    serve(EngineContender, settings, server)


def serve_transformers(settings: ModelSettings, server: Server) -> None:
    """transformers."""
    serve(TransformersContender, settings, server)


def _load(settings: ModelSettings) -> LoadedModel:
    torch.set_num_threads(settings.num_threads)
    return load_policy(ModelSection(name=settings.name, dtype=settings.dtype))  # pyright: ignore[reportArgumentType]


def _drawn(request: Draw, seconds: float, tokens: Sequence[Sequence[int]]) -> Drawn:
    """What was drawn, checked: a contender that does less than was asked has no speed."""
    work, lengths = request.workload, tuple(map(len, tokens))
    if len(lengths) != len(work.rows) or min(lengths) < 1 or max(lengths) > work.sampling.max_new_tokens:
        raise TrainingError(
            f"{len(lengths)} completions of {min(lengths)} to {max(lengths)} tokens came for {work.name}"
        )
    if work.is_exact_length and set(lengths) != {work.sampling.max_new_tokens}:
        raise TrainingError(f"completions of {min(lengths)} tokens came, not of {work.sampling.max_new_tokens}")
    kept = tuple(map(tuple, tokens)) if request.keeps_tokens else ()
    return Drawn(seconds, lengths, kept)


def _peak() -> float:
    peak_gb = peak_rss_since_reset_gb()
    reset_peak_rss()
    return peak_gb
