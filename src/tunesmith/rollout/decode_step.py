"""One decoding step on a device: model, draw, stop test and the state for the next step. The host is not asked.

The whole step is one function over tensors that keep their place, so it can be captured in a CUDA graph and played
again and again; on a CPU, and in the tests, the same function simply runs.

Shape legend: S slots, N blocks of a table, P shared prefixes, G members of one, H hidden, V vocabulary, K tokens that
are drawn between two visits of the host.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import nn

from tunesmith.kernels.advance.api import advance
from tunesmith.kernels.advance.records import DrawnTokens, SlotState
from tunesmith.kernels.attention.records import Places, SharedPrefixes
from tunesmith.kernels.native import Kernels
from tunesmith.rollout.device_draw import DrawForm, DrawSettings, draw
from tunesmith.rollout.device_model import DeviceModel

PREFIX_MEMBERS = 16
"""Completions that read a shared beginning together; a larger group is several."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of all slots. A slot without a completion has `left` 0; it computes one token over and over, in a block
    that belongs to nobody.

    The host writes these before a visit:
      token_S, position_S, left_S, to_mask_S, integers_S6: as `kernels.advance.records.SlotState` has them.
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
        """What a visit fills."""
        of_each = self.token_S, self.position_S, self.left_S, self.to_mask_S, self.integers_S6, self.tables_SN
        return *of_each, self.start_S, self.members_PG, self.length_P

    def state(self, is_stop_V: torch.Tensor, seen_RV: torch.Tensor | None) -> SlotState:
        """What the end of a step reads and changes."""
        of_step = self.token_S, self.position_S, self.left_S, self.to_mask_S, self.integers_S6
        return SlotState(*of_step, self.drawn_SK4, self.count_S, self.status_S, is_stop_V, seen_RV)

    def first(self, num_slots: int) -> Self:
        """The first slots: views, in which a smaller step reads and writes the same memory."""
        views = type(self)(*(getattr(self, field.name)[:num_slots] for field in fields(self)))
        prefixes = slice(_num_prefixes(num_slots))
        return replace(views, members_PG=self.members_PG[prefixes], length_P=self.length_P[prefixes])


def _num_prefixes(num_slots: int) -> int:
    """As many as there can be of two members or more."""
    return num_slots // 2


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes with, besides the slots. With `shares_prefixes` attention reads a beginning that several
    sequences share once for all of them.
    """

    model: DeviceModel
    storage: torch.Tensor
    settings: DrawSettings
    form: DrawForm
    shares_prefixes: bool
    kernels: Kernels
    value_head: nn.Module | None


@torch.no_grad()
def decode_step(slots: Slots, step: Step) -> None:
    """One more token for each slot that has some left."""
    places = Places(slots.position_S, slots.row_S, slots.tables_SN)
    prefixes = SharedPrefixes(slots.members_PG, slots.length_P, slots.start_S) if step.shares_prefixes else None
    hidden_SH = step.model.forward(slots.token_S, places, step.storage, prefixes=prefixes)
    logits_SV = step.model.logits(hidden_SH)
    token_S, scores_S2, status_S = draw(
        logits_SV, slots.integers_S6, slots.to_mask_S, step.settings, step.form, step.kernels
    )
    value_S = None if step.value_head is None else step.value_head(hidden_SH).float()
    state = slots.state(step.settings.is_stop_V, step.settings.seen_RV if step.form.penalises else None)
    advance(state, DrawnTokens(token_S, scores_S2, status_S, value_S), kernels=step.kernels)
