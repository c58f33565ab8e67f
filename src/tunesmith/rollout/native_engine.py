"""Tunesmith's own rollout engine: continuous batching over a paged cache, from the tensors that are being trained.

Shape legend: R rows that are drawn from, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.core.trace import span
from tunesmith.kernels.sample.records import Sampled
from tunesmith.models.decoder import Decoder
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.rollout import weight_check
from tunesmith.rollout.engine import OnGroup, OnProgress, OnText
from tunesmith.rollout.kv_cache import KVCache, allocate_storage, copy_blocks, num_blocks_for
from tunesmith.rollout.request import Callbacks, RequestSize, make_request, run_request
from tunesmith.rollout.runner import Runner, cache_shape
from tunesmith.rollout.sampler import Sampler, noise_keys
from tunesmith.rollout.scheduler import Plan, Scheduler
from tunesmith.schema.records import Prompt

_PREFILL_TOKENS = 512
"""Tokens of prompts in one step: enough to keep the matrix units busy, few enough that decoding rows do not wait."""

_MEMORY_SHARE = 0.25
"""Share of the machine's memory that the cache may take where no budget is given. Not of what is free now: in float32
the bits of a completion depend on what is computed beside it, and so on the size of the cache."""


@dataclass(slots=True)
class _Loaded:
    """What `unload` frees: packed weights of one version, and the cache with its storage."""

    runner: Runner
    version: "_Version"
    cache: KVCache
    storage: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Version:
    """Which weights: what the owner counts, and torch's own count of changes, which sees what the owner forgot."""

    counted: int
    num_changes: int


@dataclass(slots=True)
class _Call:
    """One call of `generate`."""

    loaded: _Loaded
    scheduler: Scheduler
    sampler: Sampler
    callbacks: Callbacks


class NativeEngine:
    """Draws from `model`'s weights as they are at each call. `weight_version` says whether they changed since the last.

    Not thread-safe: one `generate` at a time. With `value_head`, each completion carries the values of its states.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 128,
        kv_cache_mb: int | None = None,
        value_head: nn.Module | None = None,
    ) -> None:
        if model.decoder is None:
            raise InputError("this model has no flat decoder; draw with the transformers backend")
        self._decoder: Decoder = model.decoder
        self._module: PreTrainedModel = model.module
        self._kernels = model.kernels
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._num_slots = num_slots
        self._kv_cache_mb = kv_cache_mb
        self._value_head = value_head
        self._loaded: _Loaded | None = None
        self._base_runner: Runner | None = None
        self._is_exact: bool | None = None
        self._is_settled = False

    @property
    def is_exact(self) -> bool:
        """True if raw log-probs equal the trainer's to the bit, as measured when the weights were first packed."""
        if self._is_exact is None:
            self._load(RequestSize(1, 1, 1, 1))
        return bool(self._is_exact)

    def unload(self) -> None:
        """Free the cache and the packed weights; the next `generate` makes them anew.

        Under adapters the packed weights never change and are kept.
        """
        if self._loaded is not None and self._loaded.runner.has_adapters:
            self._base_runner = self._loaded.runner
        self._loaded = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """One group of `n` completions for each prompt. With `sampling.seed` set, a prompt's completions are always the
        same, whatever else is asked for, and whatever the number of slots.

        Raises:
            InputError: for a request that cannot be served, before any token is drawn.
            TrainingError: if logits are not finite; the message names the layer.
            GenerationInterrupted: on Ctrl-C, with what was finished by then.
        """
        request = make_request(self._module, self._tokenizer, prompts, n, sampling)
        size = request.size(self._num_slots)
        loaded = self._load(size)
        scheduler = request.open_scheduler(loaded.cache, num_slots=size.num_slots, prefill_tokens=_PREFILL_TOKENS)
        sampler = Sampler(
            sampling,
            seed=request.seed,
            stop_ids=request.limits.stop_ids,
            keys=noise_keys(request.prompt_ids, n),
            vocabulary_size=request.vocabulary_size,
            kernels=self._kernels,
        )
        version = self._weight_version()
        callbacks = Callbacks(request, version, on_progress=on_progress, on_text=on_text, on_group=on_group)
        call = _Call(loaded, scheduler, sampler, callbacks)
        return run_request(request, scheduler, version, lambda: self._draw_all(call))

    def _draw_all(self, call: _Call) -> None:
        """The loop of the engine: plan a step, compute it, sample, take the tokens."""
        loaded = call.loaded
        while (plan := call.scheduler.plan()) is not None:
            copy_blocks(loaded.storage, plan.copies)
            with span("prefill" if plan.chunks else "decode"):
                drawn = loaded.runner.run(plan, loaded.storage, loaded.cache.block_tables)
            if not plan.drawn:
                call.scheduler.accept(plan, [], [], [])
                continue
            with span("sample"):
                sampled = self._sample(call, plan, drawn.logits_RV)
            self._record_values(plan, drawn.hidden_RH)
            ended = call.scheduler.accept(
                plan, sampled.token_B.tolist(), sampled.logp_B.tolist(), sampled.raw_logp_B.tolist()
            )
            call.sampler.release(ended)
            call.callbacks.note(plan.drawn, ended)

    def _sample(self, call: _Call, plan: Plan, logits_RV: torch.Tensor) -> Sampled:
        loaded = call.loaded
        try:
            return call.sampler.draw(plan, logits_RV)
        except TrainingError as error:
            self.unload()  # what is not finite must not stand in blocks that are used again
            if bool(logits_RV.isfinite().all()):
                raise
            place = weight_check.first_bad_layer(
                lambda look: loaded.runner.run(plan, loaded.storage, loaded.cache.block_tables, on_layer=look)
            )
            raise TrainingError(weight_check.not_finite(place)) from error

    @torch.no_grad()
    def _record_values(self, plan: Plan, hidden_RH: torch.Tensor) -> None:
        if self._value_head is None:
            return
        for sequence, value in zip(plan.drawn, self._value_head(hidden_RH).tolist(), strict=True):
            sequence.values.append(value)

    def _load(self, size: RequestSize) -> _Loaded:
        """Packed weights of the current version, and a cache for a call of `size`.

        Raises:
            InputError: not even one of its sequences fits the budget.
            TrainingError: the packed weights do not give what the trainer computes.
        """
        version = self._version()
        num_blocks, num_tables = self._num_blocks(size), 2 * size.num_slots
        loaded = self._loaded
        self._loaded = None  # if anything fails from here on, nothing half-made is left
        if loaded is None or loaded.cache.num_blocks < num_blocks or loaded.cache.max_tables < num_tables:
            runner = loaded.runner if loaded and loaded.version == version else None
            del loaded  # the old cache is freed before the new one is made
            context_length = self._decoder.architecture.context_length
            cache = KVCache(num_blocks, max_tokens=context_length, max_tables=num_tables)
            storage = allocate_storage(cache_shape(self._decoder.architecture), num_blocks)
            is_fresh = runner is None
            loaded = _Loaded(runner or self._new_runner(), version, cache, storage)
        else:
            is_fresh = loaded.version != version
            if is_fresh:
                loaded.cache.invalidate()
                loaded.runner.repack()
                loaded.version = version
        if is_fresh:
            self._check_weights(loaded)
        if not self._is_exact:
            loaded.cache.invalidate()  # what an earlier call left would change the bits, and a resumed run has none
        self._loaded = loaded
        return loaded

    def _new_runner(self) -> Runner:
        runner, self._base_runner = self._base_runner, None
        if runner is None:
            return Runner(self._decoder)
        runner.repack()
        return runner

    def _version(self) -> _Version:
        return _Version(self._weight_version(), sum(parameter._version for parameter in self._module.parameters()))

    def _num_blocks(self, size: RequestSize) -> int:
        shape = cache_shape(self._decoder.architecture)
        if self._kv_cache_mb is None:
            budget = int(psutil.virtual_memory().total * _MEMORY_SHARE)
        else:
            budget = self._kv_cache_mb * 2**20
        return min(size.num_blocks, num_blocks_for(budget, shape, max_tokens=size.longest))

    def _check_weights(self, loaded: _Loaded) -> None:
        dtype = self._decoder.architecture.dtype
        is_first = not self._is_settled
        check = weight_check.FIRST_CHECK if is_first else weight_check.LATER_CHECK
        difference = weight_check.largest_difference(self._decoder, loaded.runner, check)
        if is_first:
            # In float32 a linear map of few rows may agree by chance with one of many.
            self._is_exact = difference == 0 and dtype == torch.bfloat16
            self._is_settled = not loaded.runner.is_idle  # adapters that add zeros prove nothing for later ones
        allowed = 0.0 if self._is_exact else weight_check.MAX_DIFFERENCE[dtype]
        if not difference <= allowed:
            raise TrainingError(
                f"the rollout engine's log-probs of fixed tokens are {difference:.3g} nats from the trainer's, "
                f"{allowed:g} is allowed, with weights of version {loaded.version.counted}: its packed weights are not "
                "the trained ones, or these are not finite. Train on with rollout.backend transformers, and report it"
            )
