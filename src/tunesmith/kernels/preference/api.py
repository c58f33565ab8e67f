"""Selection by votes between two outputs, and the update of weights by what was selected, in one pass.

Shape legend: B pairs, N numbers of an output.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import (
    DOUBLE,
    FLOATS,
    INTEGER,
    POINTER,
    address,
    function_of,
    picked_library,
    with_dense_rows,
)
from tunesmith.kernels.native import Backend, Choice, Kernels, shared
from tunesmith.kernels.preference import torch_impl
from tunesmith.kernels.preference.records import PreferenceBatch, Selected

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
    batch = PreferenceBatch(outputs_a_BN, outputs_b_BN, choices_B, vote_weights_B)
    _check(batch, weights_N, scale)
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

    `out_BN`, of the shape and dtype of the outputs and without gaps, receives the selected outputs: memory that is used
    again is written several times faster on a CPU than memory that is new. `block` is how the work is cut: in C++ the
    rows that are summed in float32, in Triton the columns of a tile, a power of two from 16 to 2,048. By default it is
    what was fastest; the definition in torch has none. The last bits of the weights depend on it.

    Raises:
        InputError, NativeUnavailableError, TritonUnavailableError: as `select_and_update`; or `out` or `block` does not
            fit.
    """
    _check(batch, weights_N, scale)
    if block is not None and block not in BLOCKS:
        raise InputError(f"block is {block}; give one of {', '.join(map(str, BLOCKS))}")
    a_BN = batch.outputs_a_BN
    if out_BN is None:
        out_BN = torch.empty_like(a_BN, memory_format=torch.contiguous_format)
    elif out_BN.shape != a_BN.shape or out_BN.dtype != a_BN.dtype or not out_BN.is_contiguous():
        raise InputError(
            f"out is {out_BN.dtype} of shape {tuple(out_BN.shape)} with strides {out_BN.stride()}; give "
            f"{a_BN.dtype} of shape {tuple(a_BN.shape)} without gaps"
        )
    _run(batch, weights_N, scale, kernels, (out_BN, weights_N), deterministic=deterministic, block=block)
    return out_BN


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
    out = torch.empty_like(a_BN, memory_format=torch.contiguous_format), torch.empty_like(weights_N)
    batch = PreferenceBatch(a_BN, b_BN, choices_B, votes_B)
    _run(batch, weights_N, scale, shared(cast(Choice, choice)), out, deterministic=deterministic)
    return out


@_select.register_fake
def _(
    a_BN: torch.Tensor, b_BN: object, choices_B: object, votes_B: object, weights_N: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a_BN, memory_format=torch.contiguous_format), torch.empty_like(weights_N)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a_BN, b_BN, choices_B, votes_B, weights_N, ctx.scale, _, _ = inputs  # type: ignore[attr-defined]
    needs_votes = votes_B is not None and votes_B.requires_grad
    kept: Any = (*((a_BN, b_BN) if needs_votes else (None, None)), choices_B, votes_B)
    ctx.save_for_backward(*kept)
    ctx.dtype, ctx.weights_dtype = a_BN.dtype, weights_N.dtype  # type: ignore[attr-defined]


def _gradients(
    ctx: torch.autograd.function.FunctionCtx, d_selected_BN: torch.Tensor, d_weights_N: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Of A and B, vote weights and weights: of each pair, what was selected gets the gradient of both results."""
    a_BN, b_BN, choices_B, votes_B = ctx.saved_tensors  # type: ignore[attr-defined]
    dtype, scale = ctx.dtype, ctx.scale  # type: ignore[attr-defined]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    through_N = scale * d_weights_N.to(wide)
    votes_B1 = 1.0 if votes_B is None else votes_B.to(wide)[:, None]
    d_picked_BN = d_selected_BN.to(wide) + votes_B1 * through_N
    share_B1 = torch_impl.share_of_a(choices_B, wide)[:, None]
    d_votes_B = None
    if votes_B is not None and a_BN is not None:
        of_a_B, of_b_B = (
            (output.to(wide) * through_N).sum(1) if output.shape[1] else output.new_zeros(len(output), dtype=wide)
            for output in (a_BN, b_BN)
        )
        tied_B = torch.where(share_B1[:, 0] == 0, of_b_B, 0.5 * of_a_B + 0.5 * of_b_B)
        d_votes_B = torch.where(share_B1[:, 0] == 1, of_a_B, tied_B).to(votes_B.dtype)
    d_a_BN, d_b_BN = (d_picked_BN * share_B1).to(dtype), (d_picked_BN * (1 - share_B1)).to(dtype)
    return d_a_BN, d_b_BN, None, d_votes_B, d_weights_N, None, None, None


_select.register_autograd(_gradients, setup_context=_save)


def _run(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    scale: float,
    kernels: Kernels,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    deterministic: bool = True,
    block: int | None = None,
) -> None:
    """Write what was selected and the updated weights, which may be the weights themselves, to `out`."""
    backend = kernels.picked("preference", batch.outputs_a_BN)
    if backend == "native" and batch.outputs_a_BN.numel():
        _run_native(batch, weights_N, scale, block, kernels, out)
    else:
        with torch.no_grad():
            _run_elsewhere(batch, weights_N, scale, _Form(backend, deterministic, block), out)


@dataclass(frozen=True, slots=True)
class _Form:
    """The implementation that runs, and its order of summation."""

    backend: Backend
    deterministic: bool
    block: int | None


def _run_elsewhere(
    batch: PreferenceBatch, weights_N: torch.Tensor, scale: float, form: _Form, out: tuple[torch.Tensor, torch.Tensor]
) -> None:
    a_BN, (selected_BN, updated_N) = batch.outputs_a_BN, out
    # On a GPU this would wait for it.
    if a_BN.device.type == "cpu":
        _check_choices(batch.choices_B)
    if not a_BN.numel():
        updated_N.copy_(weights_N)
    elif form.backend == "triton":
        from tunesmith.kernels.preference import triton_impl

        outputs = (with_dense_rows(a_BN), with_dense_rows(batch.outputs_b_BN))
        votes = triton_impl.Votes(_single(batch.choices_B), _votes(batch))
        new_N = torch.empty(weights_N.shape, dtype=weights_N.dtype, device=weights_N.device)
        plan = triton_impl.launch((a_BN.shape[0], a_BN.shape[1]), form.block)
        new, is_ordered = (selected_BN, new_N), form.deterministic
        triton_impl.select_into(outputs, votes, weights_N.contiguous(), scale, new, deterministic=is_ordered, plan=plan)
        updated_N.copy_(new_N)
    else:
        found = torch_impl.select_and_update(
            a_BN, batch.outputs_b_BN, batch.choices_B, weights_N, scale, batch.vote_weights_B
        )
        selected_BN.copy_(found.selected_BN)
        updated_N.copy_(found.weights_N)


def _run_native(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    scale: float,
    block: int | None,
    kernels: Kernels,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """In C++, with as little around it as can be: a thousand pairs are selected in some tens of microseconds."""
    a_BN, b_BN = with_dense_rows(batch.outputs_a_BN), with_dense_rows(batch.outputs_b_BN)
    choices_B, votes_B, start_N = _single(batch.choices_B), _votes(batch), _single(weights_N)
    selected_BN, updated_N = out
    is_direct, unknown = _is_single(updated_N), ctypes.c_int64()
    new_N = updated_N if is_direct else torch.empty_like(start_N)
    function_of(picked_library(kernels, "preference", a_BN), "select_and_update", _NATIVE)(
        a_BN.data_ptr(),
        b_BN.data_ptr(),
        choices_B.data_ptr(),
        address(votes_B),
        selected_BN.data_ptr(),
        start_N.data_ptr(),
        new_N.data_ptr(),
        ctypes.addressof(unknown),
        *a_BN.shape,
        a_BN.stride(0),
        b_BN.stride(0),
        block or 0,
        scale,
        a_BN.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if unknown.value >= 0:
        _refuse_choice(choices_B, unknown.value)
    if is_direct:
        # torch does not see what C++ writes.
        torch.autograd.graph.increment_version(updated_N)
    else:
        with torch.no_grad():
            updated_N.copy_(new_N)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, without gaps."""
    return tensor if _is_single(tensor) else tensor.detach().to(torch.float32).contiguous()


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _votes(batch: PreferenceBatch) -> torch.Tensor | None:
    return None if batch.vote_weights_B is None else _single(batch.vote_weights_B)


def _check(batch: PreferenceBatch, weights_N: torch.Tensor, scale: float) -> None:
    a_BN, choices_B = batch.outputs_a_BN, batch.choices_B
    if a_BN.dim() != 2 or a_BN.dtype not in FLOATS:
        raise InputError(
            f"outputs_a is {a_BN.dtype} of shape {tuple(a_BN.shape)}; give floating-point [pairs, numbers]"
        )
    num_pairs, num_columns = a_BN.shape
    _require("outputs_b", batch.outputs_b_BN, (num_pairs, num_columns), (a_BN.dtype,), a_BN.device)
    _require("weights", weights_N, (num_columns,), FLOATS, a_BN.device)
    if batch.vote_weights_B is not None:
        _require("vote_weights", batch.vote_weights_B, (num_pairs,), FLOATS, a_BN.device)
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


def _require(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device:
        raise InputError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; give {list(shape)} of "
            f"{' or '.join(map(str, dtypes))} on {device}"
        )
