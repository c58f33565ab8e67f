"""One decoding step on a device: model, sampling, stop test, state of the next step; no synchronisation with the host.

The step is one function over tensors with fixed addresses, so it can be captured in a CUDA graph and replayed; on a
CPU, and in the tests, the same function runs eagerly.

Shape legend: S slots, N blocks of a table, P shared prefixes, G members of one, H hidden, V vocabulary, K tokens that
are drawn between two visits of the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

import torch
from torch import nn

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.advance.api import advance
from tunesmith.engine.kernels.advance.torch_impl import DrawnTokens, SlotState
from tunesmith.engine.kernels.attention.records import Places, SharedPrefixes
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample.api import draw_in_triton, sample
from tunesmith.engine.kernels.sample.torch_impl import LogitBias, NoiseKeys, SampleSettings, Seen
from tunesmith.engine.models.architecture import Projection, weight_of
from tunesmith.engine.models.decoder import Decoder, module_outputs
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS
from tunesmith.engine.rollout.runner import CachedDecoder, PackedLinear, projections

PREFIX_MEMBERS = 16
"""Largest number of completions that read a shared prefix together; larger groups are split."""


@torch.no_grad()
def share(projection: Projection) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """The projection as one product; the modules' weights and biases are made adjacent unless they are already.

    With adapters, or with a bias for some modules only, it is computed module by module, as the trainer does.
    The weights of queries, keys and values (and of gate and up) become views of one tensor. Modules and parameters stay
    the same objects and training changes them in place, so the engine needs no copy, and CUDA graphs stay valid.
    """
    biases = [module.bias for module in projection.modules]
    if any(projection.adapters) or len({bias is None for bias in biases}) == 2:
        return partial(module_outputs, projection)
    if len(projection.modules) == 1:
        return PackedLinear(weight_of(projection.modules[0]), biases[0], projection.sizes)  # type: ignore[arg-type]
    weight_OI = _adjacent([module.weight for module in projection.modules])  # type: ignore[misc]
    bias_O = None if biases[0] is None else _adjacent(biases)  # type: ignore[arg-type]
    return PackedLinear(weight_OI, bias_O, projection.sizes)


def _adjacent(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """All rows as one tensor of which the parameters are views."""
    first = parameters[0].detach()
    rows = sum(map(len, parameters))
    size = (rows, *first.shape[1:])
    if _are_adjacent(parameters):
        return first.as_strided(size, first.stride(), first.storage_offset())
    joined = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _are_adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """True if the parameters are contiguous in one storage, in order and without gaps."""
    first = parameters[0]
    end = first.data_ptr()
    for parameter in parameters:
        is_same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_same and parameter.is_contiguous() and parameter.data_ptr() == end):
            return False
        end += parameter.numel() * parameter.element_size()
    return True


class DeviceModel(CachedDecoder):
    """`module` as `decoder` computes it, with projections that read the trained weights themselves."""

    def __init__(self, module: PreTrainedModel, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._module = module
        self._addresses: tuple[int, ...] = ()
        self.refresh()

    def refresh(self) -> bool:
        """True if all weights are at the same addresses as before, as after an update in place.

        Otherwise the projections are rebuilt, and CUDA graphs with the old addresses are invalid.
        """
        addresses = self._current_addresses()
        if self._addresses and addresses == self._addresses:
            return True
        parts = projections(self.decoder.architecture)
        self.linears = {id(projection): share(projection) for projection in parts if isinstance(projection, Projection)}
        self._addresses = self._current_addresses()
        return False

    def _current_addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._module.parameters())


def max_positions(places: Places) -> int:
    """Positions that the block tables can hold, known without reading the device."""
    return places.block_tables_RN.shape[1] * BLOCK_TOKENS


_MOST_LISTED = 8
"""Up to as many stop ids are masked one by one; with more, a mask over the vocabulary is added."""


@dataclass(frozen=True, slots=True)
class DrawForm:
    """The parts of sampling that a call uses. A CUDA graph depends on these, not on the numbers."""

    filters: bool
    penalises: bool
    biases: bool
    masks_stops: bool
    few_stops: bool

    @classmethod
    def from_sampling(cls, sampling: SamplingParams, stop_ids: frozenset[int]) -> "DrawForm":
        """The parts that `sampling` uses."""
        return cls(
            filters=sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0,
            penalises=sampling.repetition_penalty != 1,
            biases=bool(sampling.logit_bias),
            masks_stops=sampling.min_new_tokens > 0 and bool(stop_ids),
            few_stops=len(stop_ids) <= _MOST_LISTED,
        )


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of a call, on the device, at fixed addresses.

    `settings_4` float64: temperature, top_p, min_p, repetition penalty. `top_k` is in `integers_B6` of `draw`.
    `bias_V` float32 is added to the logits. `is_stop_V` bool: the token ends a completion; `stop_E` int64 lists some of
    those, one perhaps several times. `seen_RV` bool: what the penalty applies to; its last row belongs to slots without
    a completion.
    """

    settings_4: torch.Tensor
    bias_V: torch.Tensor
    is_stop_V: torch.Tensor
    stop_E: torch.Tensor
    seen_RV: torch.Tensor

    @classmethod
    def empty(cls, vocabulary_size: int, num_seen: int, device: torch.device) -> "DrawSettings":
        """Allocated buffers, zeroed."""
        return cls(
            torch.zeros(4, dtype=torch.float64, device=device),
            torch.zeros(vocabulary_size, device=device),
            torch.zeros(vocabulary_size, dtype=torch.bool, device=device),
            torch.zeros(_MOST_LISTED, dtype=torch.int64, device=device),
            torch.zeros((num_seen + 1, vocabulary_size), dtype=torch.bool, device=device),
        )

    def fill(self, sampling: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Write the settings of the next call."""
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        self.settings_4.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.bias_V.zero_()
        if sampling.logit_bias:
            device = self.bias_V.device
            tokens, values = list(sampling.logit_bias), [float(value) for value in sampling.logit_bias.values()]
            self.bias_V[torch.tensor(tokens, device=device)] = torch.tensor(values, device=device)
        self.is_stop_V.zero_()
        if stop_ids:
            self.is_stop_V[torch.tensor(sorted(stop_ids), device=self.is_stop_V.device)] = True
            listed = sorted(stop_ids)[:_MOST_LISTED]
            self.stop_E.copy_(torch.tensor(listed + listed[-1:] * (_MOST_LISTED - len(listed))))


def draw(
    logits_BV: torch.Tensor,
    integers_B6: torch.Tensor,
    left_to_mask_B: torch.Tensor,
    given: DrawSettings,
    form: DrawForm,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_B int64, scores_B2 float32, status_B int32), as `kernels.sample.api.draw_in_triton` has them.

    `integers_B6` int64: top_k, row of the seen tokens, and the four noise keys. While `left_to_mask_B` is above 0 no
    stop id can be drawn. On a GPU nothing waits; on a CPU a row that nothing can be drawn from raises TrainingError.
    """
    seen_RV = given.seen_RV if form.penalises else None
    if kernels.picked("sample", logits_BV) == "triton":
        settings_B4 = given.settings_4.expand(len(logits_BV), 4)
        changed_BV = _changed(logits_BV, left_to_mask_B, given, form)
        return draw_in_triton(logits_BV, settings_B4, integers_B6, changed_BV, seen_RV, form.filters)
    change_BV = _change(logits_BV, left_to_mask_B, given, form)
    on_host_B6 = integers_B6.cpu()
    drawn = sample(
        logits_BV,
        _settings(given.settings_4.cpu(), on_host_B6[:, 0], change_BV),
        NoiseKeys(*(on_host_B6[:, column].contiguous() for column in range(2, 6))),
        seen=None if seen_RV is None else Seen(seen_RV, on_host_B6[:, 1].contiguous()),
        kernels=kernels,
    )
    scores_B2 = torch.stack((drawn.logp_B, drawn.raw_logp_B), -1)
    return drawn.token_B, scores_B2, torch.zeros_like(drawn.token_B, dtype=torch.int32)


def _changed(
    logits_BV: torch.Tensor, left_to_mask_B: torch.Tensor, given: DrawSettings, form: DrawForm
) -> torch.Tensor | None:
    """The logits to sample from [B, V]; None if they are the model's."""
    if form.masks_stops and form.few_stops and not form.biases:
        changed_BV, stop_BE = logits_BV.clone(), given.stop_E.expand(len(logits_BV), -1)
        kept_BE = logits_BV[:, given.stop_E].masked_fill((left_to_mask_B > 0)[:, None], float("-inf"))
        return changed_BV.scatter_(1, stop_BE, kept_BE)
    change_BV = _change(logits_BV, left_to_mask_B, given, form)
    return None if change_BV is None else logits_BV.float() + change_BV


def _change(
    logits_BV: torch.Tensor, left_to_mask_B: torch.Tensor, given: DrawSettings, form: DrawForm
) -> torch.Tensor | None:
    """The bias to add to the logits [B, V]; None if there is none."""
    if not (form.biases or form.masks_stops):
        return None
    change_BV = given.bias_V.expand(logits_BV.shape)
    if form.masks_stops:
        change_BV = change_BV.masked_fill((left_to_mask_B > 0)[:, None] & given.is_stop_V, float("-inf"))
    return change_BV


def _settings(settings_4: torch.Tensor, top_k_B: torch.Tensor, change_BV: torch.Tensor | None) -> SampleSettings:
    """The settings of `kernels.sample.api.sample`, for as many rows."""
    temperature, top_p, min_p, penalty = settings_4.tolist()
    settings = SampleSettings.same(
        len(top_k_B), temperature=temperature, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    bias = None
    if change_BV is not None:
        row_N, token_N = change_BV.nonzero(as_tuple=True)
        offset_B1 = torch.zeros(len(change_BV) + 1, dtype=torch.int64)
        offset_B1[1:] = (change_BV != 0).sum(1).cumsum(0)
        bias = LogitBias(offset_B1, token_N.cpu(), change_BV[row_N, token_N].cpu())
    return replace(settings, top_k_B=top_k_B.contiguous(), bias=bias)


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of all slots. A slot without a completion has `left` 0; it computes one token over and over, in a block
    that no table uses.

    The host writes these before a visit:
      token_S, position_S, left_S, to_mask_S, integers_S6: as `kernels.advance.torch_impl.SlotState` has them.
      tables_SN int32: the blocks of each sequence; places enough for all steps of the visit.
      start_S, members_PG, length_P int32: which slots' sequences begin with the same blocks (`SharedPrefixes`).
    `row_S` int32 counts the slots. The device writes these, and the host reads them after a visit:
      drawn_SK4, count_S, status_S: there too.
    """

    token_S: torch.Tensor
    position_S: torch.Tensor
    left_S: torch.Tensor
    to_mask_S: torch.Tensor
    integers_S6: torch.Tensor
    tables_SN: torch.Tensor
    start_S: torch.Tensor
    members_PG: torch.Tensor
    length_P: torch.Tensor
    row_S: torch.Tensor
    drawn_SK4: torch.Tensor
    count_S: torch.Tensor
    status_S: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, table_width: int, max_steps: int, device: torch.device) -> Self:
        """Slots without completions."""

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            token_S=zeros(num_slots, dtype=torch.int64),
            position_S=zeros(num_slots),
            left_S=zeros(num_slots),
            to_mask_S=zeros(num_slots),
            integers_S6=zeros(num_slots, 6, dtype=torch.int64),
            tables_SN=zeros(num_slots, table_width),
            start_S=zeros(num_slots),
            members_PG=zeros(_num_prefixes(num_slots), PREFIX_MEMBERS),
            length_P=zeros(_num_prefixes(num_slots)),
            row_S=torch.arange(num_slots, dtype=torch.int32, device=device),
            drawn_SK4=zeros(num_slots, max_steps + 1, 4, dtype=torch.float32),
            count_S=zeros(num_slots, dtype=torch.int64),
            status_S=zeros(num_slots),
        )

    @property
    def written_by_host(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the host writes before a visit."""
        of_each = self.token_S, self.position_S, self.left_S, self.to_mask_S, self.integers_S6, self.tables_SN
        return *of_each, self.start_S, self.members_PG, self.length_P

    def state(self, is_stop_V: torch.Tensor, seen_RV: torch.Tensor | None) -> SlotState:
        """The state that the end of a step reads and updates."""
        of_step = self.token_S, self.position_S, self.left_S, self.to_mask_S, self.integers_S6
        return SlotState(*of_step, self.drawn_SK4, self.count_S, self.status_S, is_stop_V, seen_RV)

    def first(self, num_slots: int) -> Self:
        """The first slots: views, in which a smaller step reads and writes the same memory."""
        views = type(self)(*(getattr(self, field.name)[:num_slots] for field in fields(self)))
        prefixes = slice(_num_prefixes(num_slots))
        return replace(views, members_PG=self.members_PG[prefixes], length_P=self.length_P[prefixes])


def _num_prefixes(num_slots: int) -> int:
    """Largest number of prefixes with two members or more."""
    return num_slots // 2


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of a step besides the slots. With `shares_prefixes` attention reads a shared prefix only once."""

    model: DeviceModel
    storage: torch.Tensor
    settings: DrawSettings
    form: DrawForm
    shares_prefixes: bool
    value_head: nn.Module | None


@torch.no_grad()
def decode_step(slots: Slots, step: Step) -> None:
    """One more token for each slot that has some left."""
    # A captured graph has one shape and no branches, so slots without a completion are computed too, and what ended is
    # masked in `advance`; leaving them out would need their number on the host, which would wait for the device.
    places = Places(slots.position_S, slots.row_S, slots.tables_SN)
    prefixes = SharedPrefixes(slots.members_PG, slots.length_P, slots.start_S) if step.shares_prefixes else None
    hidden_SH = step.model.forward(slots.token_S, places, step.storage, max_positions(places), prefixes=prefixes)
    logits_SV = step.model.logits(hidden_SH)
    kernels = step.model.decoder.kernels
    token_S, scores_S2, status_S = draw(
        logits_SV, slots.integers_S6, slots.to_mask_S, step.settings, step.form, kernels
    )
    value_S = None if step.value_head is None else step.value_head(hidden_SH).float()
    state = slots.state(step.settings.is_stop_V, step.settings.seen_RV if step.form.penalises else None)
    advance(state, DrawnTokens(token_S, scores_S2, status_S, value_S), kernels=kernels)
