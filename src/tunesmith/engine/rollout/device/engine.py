"""The GPU rollout engine: the host plans, and the device decodes several tokens in a row.

Requests, scheduler, cache and callbacks are the CPU engine's. What differs is the step: weights are the trained tensors
themselves, the state of all slots is on the device, and a step is one CUDA graph. On a CPU the same code runs without
graphs, which is how it is tested; the CPU engine is faster there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

import psutil
import torch
from torch import nn

from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.trace import span
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.architecture import UnsupportedArchitecture
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.rollout import weight_check
from tunesmith.engine.rollout.device.decode_step import DeviceModel, DrawSettings, Slots
from tunesmith.engine.rollout.device.steps import STEPS_PER_VISIT, Buffers, DeviceSteps
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Callbacks, Dialogue, Functions, Request, make_request, run_request
from tunesmith.engine.rollout.kv_cache import (
    BLOCK_TOKENS,
    KVCache,
    allocate_storage,
    blocks_for,
    copy_blocks,
    num_blocks_for,
)
from tunesmith.engine.rollout.runner import cache_shape
from tunesmith.engine.rollout.sampler import noise_keys
from tunesmith.engine.rollout.scheduler import Plan, Run, Scheduler

_PREFILL_TOKENS = 8192
"""Prompt tokens per step: enough to fill a GPU; slots stay empty until their prompts are computed."""

_MEMORY_SHARE = 0.5
"""Share of the free memory for the cache if no budget is given; an update needs the rest."""

_KEPT_SHARE = 0.1
"""Share of all memory up to which the cache is kept during an update."""


class DeviceEngine:
    """Samples from `model`'s weights, on one device, as they are at each call. See `factory.open_engine`.

    The weights of queries, keys and values (and of gate and up) become views of one tensor; the parameters stay the
    same objects. Calls from several threads wait for each other.

    Raises:
        UnsupportedArchitecture: the model has a part that is not known here.
    """

    name = "device"

    is_exact = False
    """Log-probs do not equal the trainer's to the bit: on a GPU products of few and of many rows round differently."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 256,
        kv_cache_mb: int | None = None,
        value_head: nn.Module | None = None,
    ) -> None:
        self._module = model.module
        self._model = self._known_model(Decoder(model.module, model.kernels))
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._num_slots = num_slots
        self._kv_cache_mb = kv_cache_mb
        self._value_head = value_head
        self._steps: DeviceSteps | None = None  # with their buffers and graphs
        self._is_checked = False
        self._turns = Turns("engine")

    def _known_model(self, decoder: Decoder) -> DeviceModel:
        if part := decoder.architecture.needs_decoder:
            raise UnsupportedArchitecture(part)
        self._architecture = decoder.architecture
        return DeviceModel(self._module, decoder)

    def unload(self) -> None:
        """Free the cache and the graphs if the cache takes more than a tenth of the device's memory.

        A smaller one is kept: an update hardly needs the memory, and graphs would have to be captured again.
        """
        with self._turns.next():
            if self._steps is not None and self._steps.buffers.storage.nbytes > _KEPT_SHARE * self._memory()[1]:
                self._steps = None

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `engine.Engine.generate`. With `sampling.seed` set, the same call returns the same tokens."""
        with self._turns.next():
            return self._generate(prompts, n, sampling, functions)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`; in rounds."""
        return in_rounds(lambda asked, own, _: self.generate(asked, 1, own), prompts, sampling, dialogue)

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, functions: Functions
    ) -> list[Group]:
        version, num_slots = self._weight_version(), self._num_slots
        request = make_request(self._module, self._tokenizer, prompts, n, sampling, num_slots, version)
        with span("load"):
            steps = self._load(request, penalises=sampling.repetition_penalty != 1)
        steps.begin(sampling, request.limits.stop_ids, request.seed, noise_keys(request.prompt_ids, n))
        scheduler = request.open_scheduler(steps.buffers.cache, prefill_tokens=_PREFILL_TOKENS)
        callbacks = Callbacks(request, **functions)
        return run_request(request, scheduler, lambda: self._draw_all(steps, scheduler, callbacks))

    def _draw_all(self, steps: DeviceSteps, scheduler: Scheduler, callbacks: Callbacks) -> None:
        """The loop of the engine: plan some steps, let the device run them, take the tokens."""
        while (plan := scheduler.plan(STEPS_PER_VISIT)) is not None:
            copy_blocks(steps.buffers.storage, plan.copies)
            with span("prefill" if plan.chunks else "decode"):
                runs = self._run(steps, plan)
            ended = scheduler.accept(plan, runs)
            steps.release(ended)
            callbacks.note(plan.drawn, ended)

    def _run(self, steps: DeviceSteps, plan: Plan) -> list[Run]:
        try:
            return steps.run(plan)
        except TrainingError as error:
            self._steps = None  # cached blocks may hold numbers that are not finite
            layer = self._first_bad_layer(plan)
            if layer is None:
                raise
            raise TrainingError(weight_check.not_finite(layer)) from error

    @torch.no_grad()
    def _first_bad_layer(self, plan: Plan) -> str | None:
        """The first layer whose output for the plan's sequences is not finite; None if all are finite."""
        decoder = self._model.decoder
        rows = [(*sequence.prompt_ids, *sequence.token_ids) for sequence in plan.drawn]
        ids_T = torch.tensor([token for row in rows for token in row], device=decoder.architecture.device)
        lengths = [len(row) for row in rows]
        if bool(decoder.logits(decoder.hidden_states(ids_T, lengths)).isfinite().all()):
            return None
        return weight_check.first_bad_layer(lambda look: decoder.hidden_states(ids_T, lengths, on_layer=look))

    def _load(self, request: Request, *, penalises: bool) -> DeviceSteps:
        """Steps with buffers for the request, and graphs that read the weights at their current addresses.

        Raises:
            InputError: the cache's budget is too small for one sequence.
            TrainingError: the first steps do not reproduce the trainer's log-probs.
        """
        steps, self._steps = self._steps, None  # stays None if anything below fails
        self._model.decoder.refresh()
        if self._model.decoder.architecture is not self._architecture:  # a layer was replaced, for example
            self._model = self._known_model(self._model.decoder)
            steps, self._is_checked = None, False
        elif not self._model.refresh():
            steps = None
        self._check_model()
        held_bytes = 0 if steps is None else steps.buffers.storage.nbytes
        needed = self._needed(request, held_bytes, penalises=penalises)
        if steps is None or not needed.fits(steps.buffers):
            steps = None  # free the old cache first
            steps = DeviceSteps(self._model, self._allocate(needed), self._value_head)
        # The weights may have changed, and cached blocks of an earlier call would change the order of sums.
        steps.buffers.cache.invalidate()
        self._steps = steps
        return steps

    def _needed(self, request: Request, held_bytes: int, *, penalises: bool) -> "_BufferSizes":
        """Buffer sizes for a call, within the cache's budget, of which `held_bytes` are allocated already."""
        budget = int((self._memory()[0] + held_bytes) * _MEMORY_SHARE)
        if self._kv_cache_mb is not None:
            budget = self._kv_cache_mb * 2**20
        shape = cache_shape(self._model.decoder.architecture)
        num_blocks = min(request.num_blocks, num_blocks_for(budget, shape, max_tokens=request.longest))
        width = 1 << (blocks_for(request.longest) - 1).bit_length()  # a power of two, so that few calls need new graphs
        return _BufferSizes(request.num_slots, num_blocks, width, 2 * request.num_slots if penalises else 0)

    def _memory(self) -> tuple[int, int]:
        """(free, all) bytes of the device."""
        device = self._model.decoder.architecture.device
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def _allocate(self, sizes: "_BufferSizes") -> Buffers:
        architecture = self._model.decoder.architecture
        device = architecture.device
        longest = sizes.table_width * BLOCK_TOKENS
        cache = KVCache(sizes.num_blocks, max_tokens=longest, max_tables=2 * sizes.num_slots)
        storage = allocate_storage(cache_shape(architecture), sizes.num_blocks + 1, device)
        slots = Slots.empty(sizes.num_slots, sizes.table_width, STEPS_PER_VISIT, device)
        return Buffers(cache, storage, slots, DrawSettings.empty(architecture.head.sizes[0], sizes.num_seen, device))

    def _check_model(self) -> None:
        """Compare the first steps with the trainer's pass, once."""
        if self._is_checked:
            return
        decoder = self._model.decoder
        difference = weight_check.largest_difference(decoder, self._model, weight_check.FIRST_CHECK)
        allowed = weight_check.MAX_DIFFERENCE[decoder.architecture.dtype]
        if not difference <= allowed:
            raise TrainingError(
                f"the rollout engine's log-probs of fixed tokens are {difference:.3g} nats from those of one pass, "
                f"{allowed:g} is allowed: its kernels are wrong on this device. Train on with rollout.backend "
                "transformers, and report it"
            )
        self._is_checked = True


@dataclass(frozen=True, slots=True)
class _BufferSizes:
    """Sizes of `Buffers`."""

    num_slots: int
    num_blocks: int
    table_width: int
    num_seen: int

    def fits(self, buffers: Buffers) -> bool:
        """True if `buffers` are large enough."""
        return (
            len(buffers.slots.token_S) >= self.num_slots
            and buffers.cache.num_blocks >= self.num_blocks
            and buffers.slots.tables_SN.shape[1] >= self.table_width
            and len(buffers.settings.seen_RV) > self.num_seen
        )
