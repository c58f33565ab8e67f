"""The host's side of decoding on a device: fill the slots, let the device run, read the tokens.

Between two visits of the host the device draws several tokens of each completion. On a GPU each step is one CUDA graph,
captured once per number of slots; elsewhere the same function runs eagerly.

Shape legend: B rows that tokens are sampled from, C running completions, S slots, N blocks of a table, P prefixes of G
members, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.kernels.advance.torch_impl import LOGP, RAW_LOGP, TOKEN, VALUE
from tunesmith.engine.kernels.attention.records import Places
from tunesmith.engine.kernels.sample.api import require_drawn
from tunesmith.engine.rollout.device.decode_step import (
    PREFIX_MEMBERS,
    DeviceModel,
    DrawForm,
    DrawSettings,
    Slots,
    Step,
    decode_step,
    draw,
    max_positions,
)
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS, KVCache
from tunesmith.engine.rollout.runner import cache_shape
from tunesmith.engine.rollout.sampler import NoiseKey, SeenTokens
from tunesmith.engine.rollout.scheduler import Plan, Run
from tunesmith.engine.rollout.sequence import Sequence as DrawnSequence

STEPS_PER_VISIT = 16
"""Tokens per completion between two visits of the host. A completion that ends earlier waits for the others."""

_FEWEST_SLOTS = 4

_LEAST_SAVED_BYTES = 12 * 2**20
"""Least bytes of a layer's keys and values for which reading shared prefixes once pays: it takes two more launches, 2.6
microseconds, in which a GPU with 4.8 TB/s reads as much."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Device memory that stays allocated between calls."""

    cache: KVCache
    storage: torch.Tensor
    slots: Slots
    settings: DrawSettings

    @property
    def scratch_block(self) -> int:
        """The last block of `storage`, which no table uses: idle slots write there."""
        return self.storage.shape[2] - 1


@dataclass(frozen=True, slots=True)
class Prefix:
    """Slots whose sequences share their first `length` tokens, in full blocks."""

    slots: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class _CallSettings:
    """Sampling settings of one call; `keys[i]` belong to the prompt with index i."""

    form: DrawForm
    keys: Sequence[NoiseKey]
    seed: int
    top_k: int
    seen: SeenTokens | None


class DeviceSteps:
    """Decoding steps of one model in `buffers`. Call `begin` before the first plan of a request."""

    def __init__(self, model: DeviceModel, buffers: Buffers, value_head: nn.Module | None) -> None:
        self._model = model
        self.buffers = buffers
        self._value_head = value_head
        self._device = buffers.storage.device
        shape = cache_shape(model.decoder.architecture)
        self._token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        self._uploader = Uploader(self._device)
        self._graphs: dict[tuple[int, DrawForm, bool], Callable[[], None]] = {}
        self._pool: Any = None  # torch's handle of the memory pool shared by all graphs
        self._settings: _CallSettings | None = None

    def begin(self, sampling: SamplingParams, stop_ids: frozenset[int], seed: int, keys: Sequence[NoiseKey]) -> None:
        """Use these settings from now on; `keys[i]` belong to the prompt with index i."""
        form = DrawForm.from_sampling(sampling, stop_ids)
        self.buffers.settings.fill(sampling, stop_ids)
        seen = SeenTokens(self.buffers.settings.seen_RV[:-1]) if form.penalises else None
        self._settings = _CallSettings(form, keys, seed, sampling.top_k, seen)

    def release(self, ended: Sequence[DrawnSequence]) -> None:
        """Free what is held for completions that have ended."""
        if self._settings is not None and self._settings.seen is not None:
            self._settings.seen.release(ended)

    def run(self, plan: Plan) -> list[Run]:
        """The new tokens of each of `plan.drawn`. The plan's copies must have been done.

        Raises:
            TrainingError: a logit is not finite, or no token is allowed.
        """
        assert self._settings is not None, "begin is called before the first plan"
        integers_B6, count = self._integers(plan), len(plan.sequences)
        drawn = self._decode(plan, integers_B6[:count]) if count else []
        return drawn + self._prefill(plan, integers_B6[count:]) if plan.chunks else drawn

    def _decode(self, plan: Plan, integers_C6: torch.Tensor) -> list[Run]:
        """Up to `plan.num_steps` tokens of each completion that runs."""
        count = len(plan.sequences)
        num_slots = min(max(_FEWEST_SLOTS, 1 << (count - 1).bit_length()), len(self.buffers.slots.token_S))
        slots, prefixes = self.buffers.slots.first(num_slots), shared_prefixes(plan.sequences)
        # Keys and values that need not be read again.
        saved_tokens = sum((len(prefix.slots) - 1) * prefix.length for prefix in prefixes)
        if saved_tokens * self._token_bytes < _LEAST_SAVED_BYTES:
            prefixes = []
        assert self._settings is not None
        # Masking stop ids needs a copy of the logits, so leave it out once min_new_tokens are reached.
        masks_stops = self._settings.form.masks_stops and any(sequence.masks_stop_ids for sequence in plan.sequences)
        step = self._step(
            num_slots, replace(self._settings.form, masks_stops=masks_stops), shares_prefixes=bool(prefixes)
        )
        self._fill(slots, plan, integers_C6, prefixes)
        for _ in range(plan.num_steps):
            step()
        return self._drawn(slots, count, plan.num_steps)

    @torch.no_grad()
    def _prefill(self, plan: Plan, integers_B6: torch.Tensor) -> list[Run]:
        """The first token of each completion whose prompt ends here; keys and values of all chunks are written."""
        rows = [chunk.table_row for chunk in plan.chunks]
        of_chunk = {row: index for index, row in enumerate(rows)}
        width = self.buffers.slots.tables_SN.shape[1]
        last, end = [], 0
        for chunk in plan.chunks:
            end += chunk.stop - chunk.start
            last += [end - 1] * len(chunk.sequences)
        ids_T, positions_T, rows_T, tables_CN, last_B, integers_B6 = self._uploader.tensors(
            (
                torch.tensor(plan.prefill.token_ids),
                torch.tensor(plan.prefill.positions, dtype=torch.int32),
                torch.tensor([of_chunk[row] for row in plan.prefill.table_rows], dtype=torch.int32),
                self.buffers.cache.block_tables[rows, :width],
                torch.tensor(last, dtype=torch.int64),
                integers_B6,
            )
        )
        places = Places(positions_T, rows_T, tables_CN)
        hidden_TH = self._model.forward(ids_T, places, self.buffers.storage, max_positions(places))
        if not last:
            return []
        assert self._settings is not None
        hidden_BH = hidden_TH[last_B]
        to_mask_B = torch.ones_like(last_B, dtype=torch.int32)  # used with min_new_tokens only
        logits_BV = self._model.logits(hidden_BH)
        token_B, scores_B2, status_B = draw(
            logits_BV, integers_B6, to_mask_B, self.buffers.settings, self._settings.form, self._model.decoder.kernels
        )
        require_drawn(status_B)
        values = [[]] * len(last) if self._value_head is None else self._value_head(hidden_BH)[:, None].tolist()
        logps, raw_logps = (score_B[:, None].tolist() for score_B in scores_B2.unbind(1))
        return list(zip(token_B[:, None].tolist(), logps, raw_logps, values, strict=True))

    def _fill(self, slots: Slots, plan: Plan, integers_C6: torch.Tensor, prefixes: list[Prefix]) -> None:
        """Write the state of the plan's completions into the slots; the remaining slots are idle."""
        count, idle = len(plan.sequences), len(slots.token_S) - len(plan.sequences)
        sequences = plan.sequences
        tables_SN = torch.full(slots.tables_SN.shape, self.buffers.scratch_block, dtype=torch.int32)
        tables_SN[:count] = self.buffers.cache.block_tables[plan.decode.table_rows, : tables_SN.shape[1]]
        to_mask = [max(0, sequence.limits.min_new_tokens - len(sequence.token_ids)) for sequence in sequences]
        sent = self._uploader.tensors(
            (
                torch.tensor(plan.decode.token_ids + [0] * idle),
                torch.tensor(plan.decode.positions + [0] * idle, dtype=torch.int32),
                torch.tensor([sequence.num_left for sequence in sequences] + [0] * idle, dtype=torch.int32),
                torch.tensor(to_mask + [0] * idle, dtype=torch.int32),
                torch.cat((integers_C6, self._no_integers().expand(idle, 6))),
                tables_SN,
                *_prefix_tensors(slots, prefixes),
            )
        )
        for mine, new in zip(slots.written_by_host, sent, strict=True):
            mine.copy_(new)
        slots.count_S.zero_()
        slots.status_S.zero_()

    def _step(self, num_slots: int, form: DrawForm, *, shares_prefixes: bool) -> Callable[[], None]:
        """The step of the first `num_slots` slots: a CUDA graph where possible, captured at first use."""
        key = num_slots, form, shares_prefixes
        if key not in self._graphs:
            buffers = self.buffers
            step = Step(self._model, buffers.storage, buffers.settings, form, shares_prefixes, self._value_head)
            self._graphs[key] = self._new_step(buffers.slots.first(num_slots), step)
        return self._graphs[key]

    def _new_step(self, slots: Slots, step: Step) -> Callable[[], None]:
        if not self._can_be_captured():
            return lambda: decode_step(slots, step)
        # Idle slots: warm-up and capture must not change any completion's blocks.
        for mine in slots.written_by_host:
            mine.zero_()
        slots.tables_SN.fill_(self.buffers.scratch_block)
        slots.integers_S6.copy_(self._no_integers())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels and allocates library workspaces
                    decode_step(slots, step)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                decode_step(slots, step)
        self._pool = graph.pool()
        return graph.replay

    def _can_be_captured(self) -> bool:
        """True on a GPU if these kernels run in Triton; their torch versions synchronise with the host."""
        if self._device.type != "cuda":
            return False
        kernels = self._model.decoder.kernels
        return all(kernels.picked(op, self.buffers.storage) == "triton" for op in ("attention", "sample", "advance"))

    def _integers(self, plan: Plan) -> torch.Tensor:
        """`Slots.integers_S6` of `plan.drawn`, on the host."""
        assert self._settings is not None
        drawn, keys, seen = plan.drawn, self._settings.keys, self._settings.seen
        integers_B6 = torch.zeros((len(drawn), 6), dtype=torch.int64)
        integers_B6[:, 0] = self._settings.top_k
        if seen is not None:
            integers_B6[:, 1] = seen.lookup(plan).slot_B
        integers_B6[:, 2] = self._settings.seed
        prompts = [keys[sequence.request].prompt for sequence in drawn]
        samples = [keys[sequence.request].first_sample + sequence.sample for sequence in drawn]
        positions = [sequence.position for sequence in drawn]
        integers_B6[:, 3:] = torch.tensor((prompts, samples, positions)).T
        return integers_B6

    def _no_integers(self) -> torch.Tensor:
        """`integers_S6` of an idle slot; the last row of the seen tokens is unused."""
        return torch.tensor([0, len(self.buffers.settings.seen_RV) - 1, 0, 0, 0, 0])

    def _drawn(self, slots: Slots, count: int, num_steps: int) -> list[Run]:
        """The new tokens of the first `count` slots; waits for the device."""
        drawn_CK4 = slots.drawn_SK4[:count, :num_steps].cpu()
        require_drawn(slots.status_S[:count])
        counts, ids = slots.count_S[:count].tolist(), drawn_CK4[..., TOKEN].long().tolist()
        logps, raw_logps = drawn_CK4[..., LOGP].tolist(), drawn_CK4[..., RAW_LOGP].tolist()
        values = [[]] * count if self._value_head is None else drawn_CK4[..., VALUE].tolist()
        parts = zip(counts, ids, logps, raw_logps, values, strict=True)
        return [(i[:end], logp[:end], raw[:end], value[:end]) for end, i, logp, raw, value in parts]


def shared_prefixes(sequences: Sequence[DrawnSequence]) -> list[Prefix]:
    """Groups of completions of one prompt, of up to `PREFIX_MEMBERS` slots, that can read its blocks together."""
    members: dict[int, list[int]] = {}
    for slot, sequence in enumerate(sequences):
        members.setdefault(sequence.request, []).append(slot)
    found: list[Prefix] = []
    for slots in members.values():
        length = len(sequences[slots[0]].prompt_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if not length:
            continue
        parts = [slots[start : start + PREFIX_MEMBERS] for start in range(0, len(slots), PREFIX_MEMBERS)]
        found += [Prefix(tuple(part), length) for part in parts if len(part) > 1]
    return found


def _prefix_tensors(slots: Slots, prefixes: Sequence[Prefix]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(start_S, members_PG, length_P), as `Slots` has them."""
    starts, unused = [0] * len(slots.start_S), len(slots.length_P) - len(prefixes)
    for prefix in prefixes:
        for slot in prefix.slots:
            starts[slot] = prefix.length
    members = [prefix.slots + (-1,) * (PREFIX_MEMBERS - len(prefix.slots)) for prefix in prefixes]
    members += [(-1,) * PREFIX_MEMBERS] * unused
    lengths = [prefix.length for prefix in prefixes] + [0] * unused
    start_S, members_PG, length_P = (torch.tensor(given, dtype=torch.int32) for given in (starts, members, lengths))
    return start_S, members_PG.reshape(-1, PREFIX_MEMBERS), length_P
