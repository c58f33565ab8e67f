"""The rollout engine on a GPU: the host plans, and the device draws many tokens in a row without it.

What is scheduled, cached, drawn and handed out is the native engine's. What differs is the step: weights are the
trained ones themselves, the state of all slots stands on the device, and a step is one CUDA graph. On a CPU the same
code runs without graphs, which is how it is tested; the native engine is faster there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.errors import TrainingError
from tunesmith.core.trace import span
from tunesmith.kernels.native import Kernels
from tunesmith.models.decoder import Decoder
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.rollout import weight_check
from tunesmith.rollout.device.decode_step import DrawSettings, Slots
from tunesmith.rollout.device.model import DeviceModel
from tunesmith.rollout.device.steps import STEPS_PER_VISIT, DeviceDrawn, DeviceSteps, Room
from tunesmith.rollout.engine import OnGroup, OnProgress, OnText
from tunesmith.rollout.kv_cache import BLOCK_TOKENS, KVCache, allocate_storage, blocks_for, copy_blocks, num_blocks_for
from tunesmith.rollout.request import Callbacks, RequestSize, make_request, run_request
from tunesmith.rollout.sampler import noise_keys
from tunesmith.rollout.scheduler import Plan, Scheduler
from tunesmith.schema.records import Prompt

_PREFILL_TOKENS = 8192
"""Tokens of prompts in one step: enough to fill a GPU; slots stay empty until their prompts are computed."""

_MEMORY_SHARE = 0.5
"""Share of the free memory that the cache may take where no budget is given; an update needs the rest."""

_KEPT_SHARE = 0.1
"""Share of all memory up to which the cache is kept over an update."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What `unload` frees: the cache, the slots and the graphs."""

    room: Room
    steps: DeviceSteps


class DeviceEngine:
    """Draws from the weights of `module`, which stands on one device, as they are at each call.

    The weights of queries, keys and values (and of gate and up) become views of one tensor; the parameters stay the
    same objects. Not thread-safe: one `generate` at a time. With `value_head`, each completion carries the values of
    its states.

    Raises:
        UnsupportedArchitecture: the model is of no known family.
    """

    is_exact = False
    """Log-probs are not the trainer's to the bit: products of few and of many rows round differently on a GPU."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kernels: Kernels,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 256,
        kv_cache_mb: int | None = None,
        value_head: nn.Module | None = None,
    ) -> None:
        self._module = module
        self._model = DeviceModel(module, Decoder(module, kernels))
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._num_slots = num_slots
        self._kv_cache_mb = kv_cache_mb
        self._value_head = value_head
        self._loaded: _Loaded | None = None
        self._is_checked = False

    def unload(self) -> None:
        """Free the cache and the graphs if the cache takes more than a tenth of the device's memory.

        A smaller one stays: an update hardly needs its room, and graphs would have to be captured again.
        """
        if self._loaded is not None and self._loaded.room.storage.nbytes > _KEPT_SHARE * self._memory()[1]:
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
        """One group of `n` completions for each prompt. With `sampling.seed` set, the same call returns the same
        tokens.

        Raises:
            InputError: for a request that cannot be served, before any token is drawn.
            TrainingError: if logits are not finite; the message names the layer.
            GenerationInterrupted: on Ctrl-C, with what was finished by then.
        """
        request = make_request(self._module, self._tokenizer, prompts, n, sampling)
        size = request.size(self._num_slots)
        loaded = self._load(size, penalises=sampling.repetition_penalty != 1)
        loaded.steps.begin(sampling, request.limits.stop_ids, request.seed, noise_keys(request.prompt_ids, n))
        cache = loaded.room.cache
        scheduler = request.open_scheduler(cache, num_slots=size.num_slots, prefill_tokens=_PREFILL_TOKENS)
        version = self._weight_version()
        callbacks = Callbacks(request, version, on_progress=on_progress, on_text=on_text, on_group=on_group)
        return run_request(request, scheduler, version, lambda: self._draw_all(loaded, scheduler, callbacks))

    def _draw_all(self, loaded: _Loaded, scheduler: Scheduler, callbacks: Callbacks) -> None:
        """The loop of the engine: plan some steps, let the device do them, take what was drawn."""
        while (plan := scheduler.plan(STEPS_PER_VISIT)) is not None:
            copy_blocks(loaded.room.storage, plan.copies)
            with span("prefill" if plan.chunks else "decode"):
                drawn = self._run(loaded, plan)
            ended = scheduler.accept_runs(plan, [(run.token_ids, run.logps, run.raw_logps) for run in drawn])
            for sequence, run in zip(plan.drawn, drawn, strict=True):
                sequence.values += run.values[: len(sequence.token_ids) - len(sequence.values)]
            loaded.steps.release(ended)
            callbacks.note(plan.drawn, ended)

    def _run(self, loaded: _Loaded, plan: Plan) -> list[DeviceDrawn]:
        try:
            return loaded.steps.run(plan)
        except TrainingError as error:
            self._loaded = None  # what is not finite must not stand in blocks that are used again
            place = self._first_bad_layer(plan)
            if place is None:
                raise
            raise TrainingError(weight_check.not_finite(place)) from error

    @torch.no_grad()
    def _first_bad_layer(self, plan: Plan) -> str | None:
        """Where the numbers of the plan's sequences are not finite; None if they are fine."""
        decoder = self._model.decoder
        rows = [(*sequence.prompt_ids, *sequence.token_ids) for sequence in plan.drawn]
        ids_T = torch.tensor([token for row in rows for token in row], device=decoder.architecture.device)
        lengths = [len(row) for row in rows]
        if bool(decoder.logits(decoder.hidden_states(ids_T, lengths)).isfinite().all()):
            return None
        return weight_check.first_bad_layer(lambda look: decoder.hidden_states(ids_T, lengths, on_layer=look))

    def _load(self, size: RequestSize, *, penalises: bool) -> _Loaded:
        """Room for a call of `size`, with graphs that read the weights where they stand.

        Raises:
            InputError: not even one of its sequences fits the budget.
            TrainingError: the first steps do not give what the trainer computes.
        """
        loaded, self._loaded = self._loaded, None  # if anything fails from here on, nothing half-made is left
        if not self._model.follow():
            loaded = None
        self._check_model()
        needed = self._needed(size, 0 if loaded is None else loaded.room.storage.nbytes, penalises=penalises)
        if loaded is None or not _is_enough(loaded.room, needed):
            loaded = None  # the old cache is freed before the new one is made
            room = self._new_room(needed)
            loaded = _Loaded(room, DeviceSteps(self._model, room, self._value_head))
        # The weights may have changed, and what an earlier call left would change the order of sums.
        loaded.room.cache.invalidate()
        self._loaded = loaded
        return loaded

    def _needed(self, size: RequestSize, held_bytes: int, *, penalises: bool) -> "_Needed":
        shape, budget = self._model.cache_shape, self._budget(held_bytes)
        num_blocks = min(size.num_blocks, num_blocks_for(budget, shape, max_tokens=size.longest))
        width = 1 << (blocks_for(size.longest) - 1).bit_length()  # so that few calls need other graphs
        return _Needed(size.num_slots, num_blocks, width, 2 * size.num_slots if penalises else 0)

    def _budget(self, held_bytes: int) -> int:
        """Bytes that the cache may take, of which one that is there holds `held_bytes`."""
        if self._kv_cache_mb is not None:
            return self._kv_cache_mb * 2**20
        return int((self._memory()[0] + held_bytes) * _MEMORY_SHARE)

    def _memory(self) -> tuple[int, int]:
        """(free, all) bytes of the device."""
        device = self._model.decoder.architecture.device
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def _new_room(self, needed: "_Needed") -> Room:
        architecture = self._model.decoder.architecture
        device = architecture.device
        longest = needed.table_width * BLOCK_TOKENS
        cache = KVCache(needed.num_blocks, max_tokens=longest, max_tables=2 * needed.num_slots)
        storage = allocate_storage(self._model.cache_shape, needed.num_blocks + 1, device)
        slots = Slots.empty(needed.num_slots, needed.table_width, STEPS_PER_VISIT, device)
        return Room(cache, storage, slots, DrawSettings.empty(architecture.head.sizes[0], needed.num_seen, device))

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
class _Needed:
    """Sizes of a room."""

    num_slots: int
    num_blocks: int
    table_width: int
    num_seen: int


def _is_enough(room: Room, needed: _Needed) -> bool:
    """True if a call of these sizes fits the room."""
    return (
        len(room.slots.token_S) >= needed.num_slots
        and room.cache.num_blocks >= needed.num_blocks
        and room.slots.tables_SN.shape[1] >= needed.table_width
        and len(room.settings.seen_RV) > needed.num_seen
    )
