"""Selection by votes between two outputs, and the update of weights by what was selected, in one pass.

Shape legend: B pairs, M pairs of the largest batch so far, N numbers of an output.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import (
    DOUBLE,
    FLOATS,
    INTEGER,
    POINTER,
    address,
    empty_as,
    function_of,
    picked_library,
    with_dense_rows,
)
from tunesmith.engine.kernels.native import Choice, Kernels, shared
from tunesmith.engine.kernels.preference import torch_impl
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch, Selected

_NATIVE = (*[POINTER] * 8, *[INTEGER] * 5, DOUBLE, INTEGER, INTEGER)

BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Block sizes, see `update_in_place`."""


def select_and_update(
    outputs_a_BN: torch.Tensor,
    outputs_b_BN: torch.Tensor,
    choices_B: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    scale: float,
    vote_weights_B: torch.Tensor | None = None,
    deterministic: bool = True,
    kernels: Kernels,
) -> Selected:
    """The selected outputs and the updated weights, as `torch_impl.select_and_update` defines them; nothing is changed.

    Gradients go to outputs, weights and vote weights. Of each pair only what was selected is read. Sums are in float32:
    on a CPU they have the same bits for any number of threads; on a GPU they have the same bits in every run if
    `deterministic`, else programs add to the weights as they end. Choices that are on a GPU are not checked.

    Raises:
        InputError: shapes, dtypes, devices, choices or the scale do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(PreferenceBatch(outputs_a_BN, outputs_b_BN, choices_B, vote_weights_B), weights_N, scale)
    return Selected(
        *_select(outputs_a_BN, outputs_b_BN, choices_B, vote_weights_B, weights_N, scale, deterministic, kernels.choice)
    )


def update_in_place(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    *,
    scale: float,
    out_BN: torch.Tensor | None = None,
    deterministic: bool = True,
    block: int | None = None,
    kernels: Kernels,
) -> torch.Tensor:
    """The selected outputs `[B, N]`; the weights are updated in place. As `select_and_update`, without gradients.

    `out_BN`, contiguous and of the shape and dtype of the outputs, receives the selected outputs: on a CPU a buffer
    that is used again is written several times faster than a new one. `block` is how the work is cut: in C++ the rows
    that are summed in float32, in Triton the columns of a tile, a power of two from 16 to 2,048; None is the fastest
    that was found. The last bits of the weights depend on it. The definition in torch has none.

    Raises:
        InputError, NativeUnavailableError, TritonUnavailableError: as `select_and_update`; or `out` or `block` does not
            fit.
    """
    _check(batch, weights_N, scale)
    if block is not None and block not in BLOCKS:
        raise InputError(f"block is {block}; give one of {', '.join(map(str, BLOCKS))}")
    a_BN = batch.outputs_a_BN
    if out_BN is None:
        out_BN = empty_as(a_BN)
    elif out_BN.shape != a_BN.shape or out_BN.dtype != a_BN.dtype or not out_BN.is_contiguous():
        raise InputError(
            f"out is {out_BN.dtype} of shape {tuple(out_BN.shape)} with strides {out_BN.stride()}; give "
            f"{a_BN.dtype} of shape {tuple(a_BN.shape)} without gaps"
        )
    _run(batch, weights_N, scale, (out_BN, weights_N), kernels, deterministic=deterministic, block=block)
    return out_BN


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
    votes, or whose vote weights add up to 0, changes nothing. The other arguments are those of `update_in_place`.

    Raises:
        InputError, NativeUnavailableError, TritonUnavailableError: as `update_in_place`; or the learning rate is not
            finite.
    """
    votes_B = batch.vote_weights_B
    count = float(len(batch.choices_B) if votes_B is None else votes_B.double().sum())
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

    The learning rate is multiplied by `decay` after each epoch. Batches may be on another device than the weights;
    each is then copied there when its turn comes. The selected outputs share one buffer.

    Raises:
        InputError, NativeUnavailableError, TritonUnavailableError: as `process_user_preference`; or epochs or decay do
            not fit.
    """
    if epochs < 0:
        raise InputError(f"epochs is {epochs}; give 0 or more")
    if not 0 < decay <= 1:
        raise InputError(f"decay is {decay}; give a number above 0 and at most 1")
    buffer_MN: torch.Tensor | None = None
    moved: list[float] = []
    for epoch in range(epochs):
        before_N = weights_N.clone()
        for batch in batches:
            a_BN = batch.outputs_a_BN
            if buffer_MN is None or not _has_rows_for(buffer_MN, a_BN):
                buffer_MN = torch.empty(a_BN.shape, dtype=a_BN.dtype, device=weights_N.device)
            process_user_preference(
                batch.to(weights_N.device),
                weights_N,
                learning_rate=learning_rate * decay**epoch,
                out_BN=buffer_MN[: len(a_BN)],
                deterministic=deterministic,
                block=block,
                kernels=kernels,
            )
        moved.append(float((weights_N - before_N).float().norm()))
    num_votes = sum(len(batch.choices_B) for batch in batches)
    return TuningReport(epochs * num_votes, epochs * len(batches), tuple(moved))


def _has_rows_for(buffer_MN: torch.Tensor, a_BN: torch.Tensor) -> bool:
    return buffer_MN.dtype == a_BN.dtype and buffer_MN.shape[1:] == a_BN.shape[1:] and len(buffer_MN) >= len(a_BN)


@torch.library.custom_op("tunesmith::select_and_update", mutates_args=())
def _select(
    a_BN: torch.Tensor,
    b_BN: torch.Tensor,
    choices_B: torch.Tensor,
    votes_B: torch.Tensor | None,
    weights_N: torch.Tensor,
    scale: float,
    deterministic: bool,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, out = PreferenceBatch(a_BN, b_BN, choices_B, votes_B), (empty_as(a_BN), torch.empty_like(weights_N))
    _run(batch, weights_N, scale, out, shared(cast(Choice, choice)), deterministic=deterministic)
    return out


@_select.register_fake
def _(
    a_BN: torch.Tensor, b_BN: object, choices_B: object, votes_B: object, weights_N: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_as(a_BN), torch.empty_like(weights_N)


def _save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a_BN, b_BN, choices_B, votes_B, _, ctx.scale, _, _ = inputs
    needs_votes = votes_B is not None and votes_B.requires_grad
    ctx.save_for_backward(*((a_BN, b_BN) if needs_votes else (None, None)), choices_B, votes_B)
    ctx.dtype = a_BN.dtype


def _gradients(ctx: Any, d_selected_BN: torch.Tensor, d_weights_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of A and B, vote weights and weights: of each pair, what was selected gets the gradient of both results."""
    a_BN, b_BN, choices_B, votes_B = ctx.saved_tensors
    wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
    through_N = ctx.scale * d_weights_N.to(wide)
    d_picked_BN = d_selected_BN.to(wide) + (1.0 if votes_B is None else votes_B.to(wide)[:, None]) * through_N
    share_B1 = 0.5 + 0.5 * (choices_B.to(wide)[:, None] - 0.5).sign()  # of A: 1, 0, or a half for a tie
    d_votes_B = None
    if a_BN is not None and votes_B is not None:
        picked_BN = torch_impl.select(a_BN.to(wide), b_BN.to(wide), choices_B)
        d_votes_B = (picked_BN * through_N).sum(1).to(votes_B.dtype)
    d_a_BN, d_b_BN = (d_picked_BN * share_B1).to(ctx.dtype), (d_picked_BN * (1 - share_B1)).to(ctx.dtype)
    return d_a_BN, d_b_BN, None, d_votes_B, d_weights_N, None, None, None


_select.register_autograd(_gradients, setup_context=_save)


def _run(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    kernels: Kernels,
    *,
    deterministic: bool = True,
    block: int | None = None,
) -> None:
    """Write what was selected and the updated weights, which may be the weights themselves, to `out`."""
    a_BN, (selected_BN, updated_N) = batch.outputs_a_BN, out
    backend = kernels.picked("preference", a_BN)
    if not a_BN.numel():
        backend = "torch"
    # C++ checks the choices itself; on a GPU the check would wait for the device.
    if backend != "native" and a_BN.device.type == "cpu":
        _check_choices(batch.choices_B)
    if backend == "torch":
        with torch.no_grad():
            found = torch_impl.select_and_update(batch, weights_N, scale)
            selected_BN.copy_(found.selected_BN)
            updated_N.copy_(found.weights_N if a_BN.numel() else weights_N)
        return
    votes_B = None if batch.vote_weights_B is None else _single(batch.vote_weights_B)
    outputs = with_dense_rows(a_BN), with_dense_rows(batch.outputs_b_BN)
    dense, start_N = PreferenceBatch(*outputs, _single(batch.choices_B), votes_B), _single(weights_N)
    new_N = updated_N if _is_single(updated_N) else torch.empty_like(start_N)
    if backend == "native":
        _native(dense, start_N, scale, block or 0, (selected_BN, new_N), kernels)
    else:
        from tunesmith.engine.kernels.preference import triton_impl

        plan = triton_impl.launch((a_BN.shape[0], a_BN.shape[1]), block)
        triton_impl.select_into(dense, start_N, scale, (selected_BN, new_N), plan, deterministic=deterministic)
    if new_N is updated_N:
        # torch does not see what kernels write.
        torch.autograd.graph.increment_version(updated_N)
    else:
        with torch.no_grad():
            updated_N.copy_(new_N)


def _native(
    dense: PreferenceBatch,
    start_N: torch.Tensor,
    scale: float,
    block: int,
    out: tuple[torch.Tensor, torch.Tensor],
    kernels: Kernels,
) -> None:
    a_BN, b_BN, unknown = dense.outputs_a_BN, dense.outputs_b_BN, ctypes.c_int64()
    tensors = (a_BN, b_BN, dense.choices_B, dense.vote_weights_B, out[0], start_N, out[1])
    function_of(picked_library(kernels, "preference", a_BN), "select_and_update", _NATIVE)(
        *map(address, tensors),
        ctypes.addressof(unknown),
        *a_BN.shape,
        a_BN.stride(0),
        b_BN.stride(0),
        block,
        scale,
        a_BN.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if unknown.value >= 0:
        _refuse_choice(dense.choices_B, unknown.value)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, contiguous."""
    return tensor if _is_single(tensor) else tensor.detach().to(torch.float32).contiguous()


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _check(batch: PreferenceBatch, weights_N: torch.Tensor, scale: float) -> None:
    a_BN, choices_B = batch.outputs_a_BN, batch.choices_B
    if a_BN.dim() != 2 or a_BN.dtype not in FLOATS:
        raise InputError(
            f"outputs_a is {a_BN.dtype} of shape {tuple(a_BN.shape)}; give floating-point [pairs, numbers]"
        )
    num_pairs, num_columns = a_BN.shape
    for name, tensor, shape, dtypes in (
        ("outputs_b", batch.outputs_b_BN, (num_pairs, num_columns), (a_BN.dtype,)),
        ("weights", weights_N, (num_columns,), FLOATS),
        ("vote_weights", batch.vote_weights_B, (num_pairs,), FLOATS),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != a_BN.device:
            raise InputError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; give {list(shape)} of "
                f"{' or '.join(map(str, dtypes))} on {a_BN.device}"
            )
    if choices_B.shape != (num_pairs,) or choices_B.device != a_BN.device or choices_B.is_complex():
        raise InputError(
            f"choices are {choices_B.dtype} of shape {tuple(choices_B.shape)} on {choices_B.device}; give "
            f"[{num_pairs}] on {a_BN.device}"
        )
    if not math.isfinite(scale):
        raise InputError(f"scale is {scale}; give a finite number")


def _check_choices(choices_B: torch.Tensor) -> None:
    is_known_B = (choices_B == 0) | (choices_B == 0.5) | (choices_B == 1)
    if not bool(is_known_B.all()):
        _refuse_choice(choices_B, int((~is_known_B).nonzero()[0]))


def _refuse_choice(choices_B: torch.Tensor, index: int) -> NoReturn:
    raise InputError(
        f"choices hold {choices_B[index].item()} at {index}; allowed: 1 (A), 0 (B) and 0.5 (a tie, which counts as the "
        "mean of both)"
    )
