"""Tuning weights by votes, batch after batch: each step moves them towards what raters selected.

Shape legend: B pairs, M pairs of the largest batch so far, N numbers of an output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.native import Kernels, shared
from tunesmith.kernels.preference.api import update_in_place
from tunesmith.kernels.preference.records import PreferenceBatch


def process_user_preference(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    *,
    learning_rate: float,
    out_BN: torch.Tensor | None = None,
    deterministic: bool = True,
    block: int | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """The outputs that raters selected `[B, N]`; `weights_N` moves by learning_rate times their mean, in place.

    The mean counts every vote as 1 or by its weight; a step has the same size for any number of votes. A batch without
    votes, or whose vote weights add up to 0, changes nothing. `out_BN` receives the selected outputs, and `block` is
    how the work is cut, see `update_in_place`. Batch and weights stand on one device, a CPU or a GPU.

    Raises:
        InputError: shapes, dtypes, devices, choices or the block do not fit, or the learning rate is not finite.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    count = _total_weight(batch)
    return update_in_place(
        batch,
        weights_N,
        scale=learning_rate / count if count else 0.0,
        out_BN=out_BN,
        deterministic=deterministic,
        block=block,
        kernels=kernels or shared("auto"),
    )


@dataclass(frozen=True, slots=True)
class TuningReport:
    """Result of `iterative_tuning`: votes and batches of all epochs, and how far each moved the weights (2-norm)."""

    num_votes: int
    num_batches: int
    moved: tuple[float, ...]


def iterative_tuning(
    batches: Sequence[PreferenceBatch],
    weights_N: torch.Tensor,
    *,
    epochs: int = 1,
    learning_rate: float,
    decay: float = 1.0,
    deterministic: bool = True,
    block: int | None = None,
    kernels: Kernels | None = None,
) -> TuningReport:
    """Tune `weights_N` in place by every batch of every epoch, in order; returns counts and norms.

    The learning rate is multiplied by `decay` after each epoch. Batches may stand on another device than the weights;
    each is then copied there when its turn comes. Memory for the selected outputs is made once.

    Raises:
        InputError: as `process_user_preference`, or epochs or decay do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    if epochs < 0:
        raise InputError(f"epochs is {epochs}; give 0 or more")
    if not 0 < decay <= 1:
        raise InputError(f"decay is {decay}; give a number above 0 and at most 1")
    kernels = kernels or shared("auto")
    room_MN: torch.Tensor | None = None
    moved: list[float] = []
    for epoch in range(epochs):
        before_N = weights_N.clone()
        for given in batches:
            batch = _on(given, weights_N.device)
            out_BN = _room_for(batch.outputs_a_BN, room_MN)
            room_MN = out_BN if room_MN is None or out_BN.numel() > room_MN.numel() else room_MN
            process_user_preference(
                batch,
                weights_N,
                learning_rate=learning_rate * decay**epoch,
                out_BN=out_BN,
                deterministic=deterministic,
                block=block,
                kernels=kernels,
            )
        moved.append(float((weights_N - before_N).float().norm()))
    return TuningReport(epochs * _num_votes(batches), epochs * len(batches), tuple(moved))


def _total_weight(batch: PreferenceBatch) -> float:
    if batch.vote_weights_B is None:
        return float(len(batch.choices_B))
    return float(batch.vote_weights_B.double().sum())


def _num_votes(batches: Iterable[PreferenceBatch]) -> int:
    return sum(len(batch.choices_B) for batch in batches)


def _room_for(outputs_BN: torch.Tensor, room_MN: torch.Tensor | None) -> torch.Tensor:
    """Memory like that of the outputs: within what is given, if they fit."""
    if room_MN is not None and room_MN.dtype == outputs_BN.dtype and room_MN.shape[1:] == outputs_BN.shape[1:]:
        if room_MN.shape == outputs_BN.shape:
            return room_MN
        if room_MN.shape[0] > outputs_BN.shape[0]:
            return room_MN[: outputs_BN.shape[0]]
    return torch.empty_like(outputs_BN, memory_format=torch.contiguous_format)


def _on(batch: PreferenceBatch, device: torch.device) -> PreferenceBatch:
    if batch.outputs_a_BN.device == device:
        return batch
    votes_B = batch.vote_weights_B
    return PreferenceBatch(
        batch.outputs_a_BN.to(device, non_blocking=True),
        batch.outputs_b_BN.to(device, non_blocking=True),
        batch.choices_B.to(device, non_blocking=True),
        None if votes_B is None else votes_B.to(device, non_blocking=True),
    )
