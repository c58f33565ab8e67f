"""The CPU rollout engine: continuous batching over a paged key/value cache, from the weights that are being trained.

Shape legend: R rows that tokens are sampled from, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import psutil
import torch
from torch import nn

from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.system import warn_of_spinning
from tunesmith.base.core.trace import span
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.linear.exact import rows_are_independent
from tunesmith.engine.kernels.sample.torch_impl import Sampled
from tunesmith.engine.models.architecture import Stack
from tunesmith.engine.models.fingerprint import Fingerprint, fingerprint, fingerprint_of
from tunesmith.engine.models.int8_base import is_int8
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.rollout import weight_check
from tunesmith.engine.rollout.dialogue import Replies
from tunesmith.engine.rollout.drafts import Drafts, Memory, rows_for
from tunesmith.engine.rollout.engine import (
    Callbacks,
    Dialogue,
    Functions,
    Request,
    decode_of,
    make_request,
    run_request,
)
from tunesmith.engine.rollout.kv_cache import KVCache, allocate_storage, blocks_for, copy_blocks, num_blocks_for
from tunesmith.engine.rollout.runner import Packer, Runner, cache_shape, projections, read_in_place
from tunesmith.engine.rollout.sampler import NoiseKey, RequestSampling, Sampler, noise_keys
from tunesmith.engine.rollout.scheduler import Plan, Scheduler
from tunesmith.engine.rollout.sequence import Decode
from tunesmith.engine.rollout.threads import FreeThreads

_PREFILL_TOKENS = 512
"""Prompt tokens per step: enough to keep the matrix units busy, few enough that decoding rows do not wait."""

_MEMORY_SHARE = 0.25
"""Share of the machine's memory for the cache if no budget is given. Of all memory, not of the free part: in float32 a
completion's bits may depend on what is computed beside it, and so on the size of the cache."""


_OPEN_MEMORY_SHARE = 0.1
"""The same for a server, which other programs run beside."""

_OPEN_TOKENS = 1024
"""Tokens of a sequence that the cache of a server holds at least, or the model's context if that is shorter."""


@dataclass(frozen=True, slots=True)
class Native:
    """Settings of the backend `native`.

    Args:
        weights: Of products: `model` has them in the model's dtype. `int8`, on a CPU, rounds weights and inputs to 8
            bits, which is faster; log-probs are then about a tenth of a nat from the trainer's.
        drafts: With up to four completions at a time, compute tokens that were guessed from the text so far beside the
            next one. Only the time depends on it; it is not done where a row's bits depend on the rows beside it.
    """

    weights: Weights = "model"
    drafts: bool = True


@dataclass(frozen=True, slots=True)
class _Cache:
    """Block tables, and the storage of keys and values."""

    tables: KVCache
    storage: torch.Tensor


@dataclass(frozen=True, slots=True)
class OpenCache:
    """Packed weights, and a cache that belongs to an `OpenBatch` alone."""

    runner: Runner
    tables: KVCache
    storage: torch.Tensor


class NativeEngine:
    """Samples from `model`'s weights as they are at each call. See `factory.open_engine` for the arguments.

    `is_trained` says that the trainer computes log-probs by this very `model`, and not by another forward pass.
    Calls from several threads wait for each other.
    """

    name = "native"

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 128,
        kv_cache_mb: int | None = None,
        value_head: nn.Module | None = None,
        settings: Native = Native(),
        is_trained: bool = True,
    ) -> None:
        if model.decoder is None:
            raise InputError("this model has no flat decoder; draw with the transformers backend")
        if torch.get_num_threads() > 1:
            warn_of_spinning()
        self._decoder = model.decoder
        self._module = model.module
        self.kernels = model.kernels
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._num_slots = num_slots
        self._kv_cache_mb = kv_cache_mb
        self._value_head = value_head
        self._weights: Weights = settings.weights
        self._packer = Packer(model.kernels, settings.weights)  # kept when the weights go: its trials take a while
        self._is_trained = is_trained
        self._cache: _Cache | None = None
        self._runner: Runner | None = None
        self._packed: tuple[int, Fingerprint] | None = None  # the runner's weights; None: pack and check again
        self._is_exact: bool | None = None  # None: not measured yet
        self.has_drafts = settings.drafts
        """True if tokens are guessed, from the next call on."""
        self.drafts: Drafts | None = None
        """Guesses of the last call, for their counts."""
        self.memory = Memory()
        """Texts that guesses are taken from."""
        self._is_by_row = False  # a row's bits do not depend on the rows beside it, nor on threads
        self._needs_full_check = True
        self._threads = FreeThreads()
        self._turns = Turns("engine")

    @property
    def is_exact(self) -> bool:
        """True if raw log-probs equal the trainer's to the bit. Packs the weights if that is not measured yet.

        Raises:
            TrainingError: the packed weights do not reproduce the trainer's log-probs.
        """
        if self._is_exact is None:
            with self._turns.next():
                self._look_again()
                self._pack_weights()
        return bool(self._is_exact) and self._is_trained

    def free_threads(self) -> AbstractContextManager[None]:
        """A block that computes with no more threads than other programs leave cores free, if no bits depend on it."""
        return self._threads.used() if self._is_by_row else nullcontext()

    @property
    def decode(self) -> Decode:
        """The text of token ids."""
        return decode_of(self._tokenizer, with_marks=True)

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits."""
        return self._module.config.get_text_config().vocab_size

    def request(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> Request:
        """A call of `generate` as token ids and limits. Raises InputError if it cannot be served."""
        return make_request(
            self._module, self._tokenizer, prompts, n, sampling, self._num_slots, self._weight_version()
        )

    def open_drafts(self) -> Drafts | None:
        """Guesses of the next tokens for the weights that were packed last; None if there are to be none."""
        if not self.has_drafts or not self._is_by_row:
            return None
        architecture = self._decoder.architecture
        linears = projections(architecture)
        weights = "int8" if any(map(is_int8, linears)) else self._weights
        has_experts = any(isinstance(one, Stack) for one in linears)
        return Drafts(self.memory, rows_for(weights, architecture.dtype, has_experts=has_experts))

    def open_cache(self, num_slots: int, kv_cache_mb: int | None) -> OpenCache:
        """The current weights, packed, and a cache for `num_slots` whole contexts, or as much as `kv_cache_mb` MiB hold
        (None: a tenth of the machine's memory).

        Raises:
            InputError: the budget is too small.
            TrainingError: the packed weights do not reproduce the trainer's log-probs.
        """
        with self._turns.next():
            self._look_again()
            runner = self._pack_weights()
        shape, context = cache_shape(self._decoder.architecture), self._decoder.architecture.context_length
        budget = int(psutil.virtual_memory().total * _OPEN_MEMORY_SHARE)
        if kv_cache_mb is not None:
            budget = kv_cache_mb * 2**20
        most = num_blocks_for(budget, shape, max_tokens=min(context, _OPEN_TOKENS))
        num_blocks = min(most, num_slots * (blocks_for(context) + 1))
        tables = KVCache(num_blocks, max_tokens=context, max_tables=2 * num_slots)
        return OpenCache(runner, tables, allocate_storage(shape, num_blocks))

    def unload(self) -> None:
        """Free the cache and the packed weights; the next `generate` rebuilds them.

        With adapters the packed base is kept.
        """
        with self._turns.next():
            self._unload()

    def _unload(self) -> None:
        self._cache = self._packed = None
        if self._runner is not None and not self._runner.has_adapters:
            self._runner = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        keys: Sequence[NoiseKey] | None = None,
        **functions: Unpack[Functions],
    ) -> list[Group]:
        """See `engine.Engine.generate`. With `sampling.seed` set, a prompt's completions are always the same, whatever
        the other prompts and the number of slots.

        `keys` has the noise of each prompt, where the request is a part of a larger one, or where a prompt ends with
        the first tokens of a completion that is to go on; None: that of a request of its own.
        """
        with self._turns.next():
            return self._generate(prompts, n, sampling, keys, functions)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`. While replies are awaited the other conversations go on; one that waits has no
        slot, and keeps its blocks of the cache as long as there are others.
        """
        with self._turns.next():
            return self._generate(prompts, 1, sampling, dialogue.keys, {}, dialogue)[0].weight_version

    def _generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        keys: Sequence[NoiseKey] | None,
        functions: Functions,
        dialogue: Dialogue | None = None,
    ) -> list[Group]:
        version, num_slots = self._weight_version(), self._num_slots
        request = make_request(self._module, self._tokenizer, prompts, n, sampling, num_slots, version)
        replies = None
        if dialogue is not None:
            request = replace(request, max_tokens=dialogue.max_tokens, first=dialogue.first)
            replies = Replies(dialogue.on_turn, request.limits)
        with span("load"):
            runner, cache = self._load(request)
        keys = keys or noise_keys(request.prompt_ids, n)
        rows = [RequestSampling(sampling, request.seed, key, request.limits.stop_ids) for key in keys]
        sampler = Sampler(rows, request.vocabulary_size, self.kernels)
        scheduler = request.open_scheduler(cache.tables, prefill_tokens=_PREFILL_TOKENS)
        callbacks = Callbacks(request, **functions)
        draw = partial(self._draw_all, runner, cache, scheduler, sampler, callbacks, replies)
        groups = run_request(request, scheduler, draw)
        self._check_unchanged()
        return groups

    def _draw_all(
        self,
        runner: Runner,
        cache: _Cache,
        scheduler: Scheduler,
        sampler: Sampler,
        callbacks: Callbacks,
        replies: Replies | None,
    ) -> None:
        """The loop of the engine: plan a step, compute it, sample, take the tokens."""
        storage, block_tables = cache.storage, cache.tables.block_tables
        drafts = self.drafts = self.open_drafts()
        run = runner.run if drafts is None else partial(drafts.run, runner)
        while True:
            if replies is not None:
                replies.resume(scheduler, wait=False)
            plan = scheduler.plan(drafter=drafts)
            if plan is None and replies is not None and replies.resume(scheduler, wait=True):
                continue
            if plan is None:
                return
            copy_blocks(storage, plan.copies)
            with span("prefill" if plan.chunks else "decode"), self.free_threads():
                output = run(plan, storage, block_tables)
            if not plan.drawn:
                scheduler.accept(plan, [])
                continue
            with span("sample"):
                passed = plan if drafts is None else drafts.passed
                sampled = self._sample(runner, cache, sampler, plan, output.logits_RV, passed)
            values = [[]] * len(plan.drawn) if self._value_head is None else self._values(output.hidden_RH)
            columns = (column_B[:, None].tolist() for column_B in (sampled.token_B, sampled.logp_B, sampled.raw_logp_B))
            ended = scheduler.accept(plan, list(zip(*columns, values, strict=True)))
            sampler.release(ended)
            callbacks.note(plan.drawn, ended)
            if replies is not None:
                replies.ask(ended)

    def _sample(
        self,
        runner: Runner,
        cache: _Cache,
        sampler: Sampler,
        plan: Plan,
        logits_RV: torch.Tensor,
        passed: Plan | None,
    ) -> Sampled:
        """One token for each of `plan.drawn`, from the logits that `passed` computed."""
        try:
            return sampler.draw(plan, logits_RV)
        except TrainingError as error:
            self._unload()  # cached blocks may hold numbers that are not finite
            if passed is None or bool(logits_RV.isfinite().all()):
                raise
            storage, block_tables = cache.storage, cache.tables.block_tables
            layer = weight_check.first_bad_layer(lambda look: runner.run(passed, storage, block_tables, on_layer=look))
            raise TrainingError(weight_check.not_finite(layer)) from error

    @torch.no_grad()
    def _values(self, hidden_RH: torch.Tensor) -> list[list[float]]:
        assert self._value_head is not None
        # Row by row: a product of several rows may sum each of them otherwise, and bits would depend on the others.
        return [self._value_head(row_H[None]).tolist() for row_H in hidden_RH]

    def _load(self, request: Request) -> tuple[Runner, _Cache]:
        """The current weights, packed, and a cache for the request.

        Raises:
            InputError: the cache's budget is too small for one sequence.
            TrainingError: the packed weights do not reproduce the trainer's log-probs.
        """
        self._look_again()
        cache = self._fitting_cache(request)
        runner = self._pack_weights()
        if not self._is_by_row:
            cache.tables.invalidate()  # blocks of an earlier call would change the bits, and a resumed run has none
        return runner, cache

    def _pack_weights(self) -> Runner:
        """The runner with the current weights, packed and checked again if they changed."""
        version, current = self._weight_version(), fingerprint(self._module, kernels=self.kernels)
        if self._runner is not None and self._packed == (version, current):
            return self._runner
        self._packed = None
        if self._cache is not None:
            self._cache.tables.invalidate()
        if self._runner is None:
            self._runner = Runner(self._decoder, current, self._packer)
        else:
            self._runner.repack(current)
        self.memory.forget()
        self._check_weights(self._runner, version)
        self._packed = version, current
        return self._runner

    def _look_again(self) -> None:
        """Forget what was made of the model if its parts are others now; another engine may have seen it first."""
        self._decoder.refresh()
        if self._runner is not None and self._runner.architecture is not self._decoder.architecture:
            self._runner = self._cache = self._packed = self._is_exact = None
            self._needs_full_check = True

    def _check_unchanged(self) -> None:
        """Compare the weights that each step reads in the model itself with those of the beginning.

        Raises:
            TrainingError: they changed, so that the tokens are of no one model.
        """
        assert self._packed is not None and self._runner is not None
        read = read_in_place(self._runner.architecture)
        after = fingerprint_of({str(place): one for place, one in enumerate(read)}, kernels=self.kernels)
        if any(self._packed[1].of(one) != after.of(one) for one in read):
            self._unload()
            raise TrainingError(
                "the model's weights changed while completions were drawn from them, so nothing is returned: does "
                "another thread, or a function that `generate` calls, train this model? Draw between two updates, or "
                "from a copy"
            )

    def _rows_are_independent(self) -> bool:
        """True if a product of few rows has the bits of one of many, for the shape of every weight."""
        by_float = [one for one in projections(self._decoder.architecture) if not is_int8(one)]
        weights = [weight for one in by_float for weight in one.weights]
        return all(map(rows_are_independent, {weight.shape: weight for weight in weights}.values()))

    def _rows_are_alone_in_int8(self, runner: Runner) -> bool:
        """True if products are in 8 bits, and bits of fixed tokens do not depend on the tokens of the same step."""
        if self._weights != "int8" or self._decoder.is_divided:
            return False
        is_by_row = runner.min_rows == 1 or self._rows_are_independent()  # adapters are multiplied as the trainer does
        return is_by_row and weight_check.steps_are_alike(self._decoder, runner)

    def _fitting_cache(self, request: Request) -> _Cache:
        shape = cache_shape(self._decoder.architecture)
        budget = int(psutil.virtual_memory().total * _MEMORY_SHARE)
        if self._kv_cache_mb is not None:
            budget = self._kv_cache_mb * 2**20
        num_blocks = min(request.num_blocks, num_blocks_for(budget, shape, max_tokens=request.longest))
        num_tables = request.num_tables
        held = self._cache
        if held is None or held.tables.num_blocks < num_blocks or held.tables.max_tables < num_tables:
            self._cache = held = None  # free the old storage first
            if self._runner is not None:
                self._runner.forget_step()
            context_length = self._decoder.architecture.context_length
            tables = KVCache(num_blocks, max_tokens=context_length, max_tables=num_tables)
            self._cache = held = _Cache(tables, allocate_storage(shape, num_blocks))
        return held

    def _check_weights(self, runner: Runner, version: int) -> None:
        """Compare the log-probs of fixed tokens with the trainer's, thoroughly the first time."""
        dtype = self._decoder.architecture.dtype
        check = weight_check.FIRST_CHECK if self._needs_full_check else weight_check.LATER_CHECK
        difference = weight_check.largest_difference(self._decoder, runner, check)
        if self._needs_full_check:
            self._is_exact = self._weights == "model" and difference == 0 and self._rows_are_independent()
            self._is_exact &= not self._decoder.is_divided
            self._is_by_row = self._is_exact or self._rows_are_alone_in_int8(runner)
            self._needs_full_check = runner.is_idle  # adapters that are zero prove nothing about later ones
        rounded = weight_check.MAX_INT8_DIFFERENCE if self._weights == "int8" else weight_check.MAX_DIFFERENCE[dtype]
        allowed = 0.0 if self._is_exact else rounded
        if not difference <= allowed:
            raise TrainingError(
                f"the rollout engine's log-probs of fixed tokens are {difference:.3g} nats from the trainer's, "
                f"{allowed:g} is allowed, with weights of version {version}: its packed weights are not the trained "
                "ones, or these are not finite. Train on with rollout.backend transformers, and report it"
            )
