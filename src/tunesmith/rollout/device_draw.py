"""Draws tokens from logits that stand on a device, by settings that stand there too.

Shape legend: B rows that are drawn from, V vocabulary, R rows of the mask of seen tokens, E stop ids that have a list.
"""

from dataclasses import dataclass, replace

import torch

from tunesmith.batch.rollout import SamplingParams
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.sample import ops
from tunesmith.kernels.sample.api import sample
from tunesmith.kernels.sample.records import LogitBias, NoiseKeys, SampleSettings, Seen

_MOST_LISTED = 8
"""Stop ids whose logits are changed one by one; of more, all logits are passed over."""


@dataclass(frozen=True, slots=True)
class DrawForm:
    """Which parts the drawing of a call has; what is captured in a graph depends on it and not on the numbers."""

    filters: bool
    penalises: bool
    biases: bool
    masks_stops: bool
    few_stops: bool

    @classmethod
    def of(cls, sampling: SamplingParams, stop_ids: frozenset[int]) -> "DrawForm":
        """The parts that `sampling` asks for."""
        return cls(
            filters=sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0,
            penalises=sampling.repetition_penalty != 1,
            biases=bool(sampling.logit_bias),
            masks_stops=sampling.min_new_tokens > 0 and bool(stop_ids),
            few_stops=len(stop_ids) <= _MOST_LISTED,
        )


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of a call, on the device: they keep their place from call to call.

    `settings_4` float64: temperature, top_p, min_p, repetition penalty. `top_k` stands with the noise keys of each row.
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
        """Room for a call's settings."""
        return cls(
            torch.zeros(4, dtype=torch.float64, device=device),
            torch.zeros(vocabulary_size, device=device),
            torch.zeros(vocabulary_size, dtype=torch.bool, device=device),
            torch.zeros(_MOST_LISTED, dtype=torch.int64, device=device),
            torch.zeros((num_seen + 1, vocabulary_size), dtype=torch.bool, device=device),
        )

    def fill(self, sampling: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Take the settings of the next call."""
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
    """(token_B int64, scores_B2 float32, status_B int32), as `kernels.sample.ops.sample` has them.

    `integers_B6` int64: top_k, row of the seen tokens, and the four noise keys. While `left_to_mask_B` is above 0 no
    stop id can be drawn. On a GPU nothing waits; on a CPU a row that nothing can be drawn from raises TrainingError.
    """
    seen_RV = given.seen_RV if form.penalises else None
    if kernels.picked("sample", logits_BV) == "triton":
        settings_B4 = given.settings_4.expand(len(logits_BV), 4)
        changed_BV = _changed(logits_BV, left_to_mask_B, given, form)
        return ops.sample(logits_BV, settings_B4, integers_B6, changed_BV, seen_RV, form.filters)
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
    """The logits that are drawn from [B, V]; None where they are those of the model."""
    if form.masks_stops and form.few_stops and not form.biases:
        changed_BV, stop_BE = logits_BV.clone(), given.stop_E.expand(len(logits_BV), -1)
        kept_BE = logits_BV[:, given.stop_E].masked_fill((left_to_mask_B > 0)[:, None], float("-inf"))
        return changed_BV.scatter_(1, stop_BE, kept_BE)
    change_BV = _change(logits_BV, left_to_mask_B, given, form)
    return None if change_BV is None else logits_BV.float() + change_BV


def _change(
    logits_BV: torch.Tensor, left_to_mask_B: torch.Tensor, given: DrawSettings, form: DrawForm
) -> torch.Tensor | None:
    """What is added to the logits [B, V]; None where nothing is."""
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
