"""Scale, mask by indices and softmax of attention scores in one pass, with gradients.

Shape legend: B sequences, H heads, Q queries, K keys.
"""

import math
from typing import Any, cast

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import (
    FLOATS,
    INTEGER,
    POINTER,
    SINGLE,
    address,
    empty_as,
    function_of,
    picked_library,
    step_of,
    with_dense_rows,
)
from tunesmith.engine.kernels.masked_softmax import torch_impl
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Choice, Kernels, shared

_FORWARD = (*[POINTER] * 4, *[INTEGER] * 9, SINGLE, INTEGER, INTEGER)
_BACKWARD = (*[POINTER] * 4, *[INTEGER] * 7, SINGLE, INTEGER, INTEGER)
NO_WINDOW = 2**31 - 1
"""A window that is longer than any row."""


def masked_softmax(scores_BHQK: torch.Tensor, *, scale: float, mask: KeyMask, kernels: Kernels) -> torch.Tensor:
    """softmax(scale * scores) over the keys that each query sees `[B, H, Q, K]`, in the dtype given, with gradients.

    Computed in float32 (float64 for float64) and rounded once, whatever autocast says. Keys that are not seen get 0,
    and a query that sees none gets 0 for all. No mask of the size of the scores is made. Scores with gaps are copied.

    Raises:
        InputError: shapes, dtypes, devices, the scale or a rule of the mask do not fit.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(scores_BHQK, scale, mask)
    offset = scores_BHQK.shape[3] - scores_BHQK.shape[2] if mask.offset is None else mask.offset
    window = NO_WINDOW if mask.window is None else mask.window
    return _softmax(scores_BHQK, mask.keys_B2, mask.allowed_BQK, scale, mask.causal, window, offset, kernels.choice)


@torch.library.custom_op("tunesmith::masked_softmax", mutates_args=())
def _softmax(
    scores_BHQK: torch.Tensor,
    keys_B2: torch.Tensor | None,
    allowed_BQK: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    offset: int,
    choice: str,
) -> torch.Tensor:
    kernels = shared(cast(Choice, choice))
    backend = kernels.picked("masked_softmax", scores_BHQK)
    if backend == "torch" or not scores_BHQK.numel():
        return torch_impl.masked_softmax(
            scores_BHQK.contiguous(), scale, KeyMask(causal, window, offset, keys_B2, allowed_BQK)
        )
    scores_BHQK = scores_BHQK.contiguous()
    keys_B2 = None if keys_B2 is None else keys_B2.contiguous()
    allowed_BQK = None if allowed_BQK is None else with_dense_rows(allowed_BQK)
    if backend == "triton":
        from tunesmith.engine.kernels.masked_softmax import triton_impl

        return triton_impl.forward(scores_BHQK, keys_B2, allowed_BQK, scale, causal, window, offset)
    out_BHQK = torch.empty_like(scores_BHQK)
    function_of(picked_library(kernels, "masked_softmax", scores_BHQK), "masked_softmax", _FORWARD)(
        *map(address, (scores_BHQK, keys_B2, allowed_BQK, out_BHQK)),
        *(scores_BHQK.shape[:-1].numel(), *scores_BHQK.shape[1:]),
        *(offset, causal, window),
        *((0, 0) if allowed_BQK is None else (step_of(allowed_BQK, 0), step_of(allowed_BQK, 1))),
        *(scale, scores_BHQK.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return out_BHQK


@torch.library.custom_op("tunesmith::masked_softmax_backward", mutates_args=())
def _softmax_backward(
    p_BHQK: torch.Tensor,
    d_p_BHQK: torch.Tensor,
    keys_B2: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    offset: int,
    choice: str,
) -> torch.Tensor:
    kernels = shared(cast(Choice, choice))
    backend = kernels.picked("masked_softmax", p_BHQK)
    if backend == "torch" or not p_BHQK.numel():
        return torch_impl.scores_gradient(p_BHQK, d_p_BHQK.contiguous(), scale)
    d_p_BHQK, keys_B2 = d_p_BHQK.contiguous(), None if keys_B2 is None else keys_B2.contiguous()
    if backend == "triton":
        from tunesmith.engine.kernels.masked_softmax import triton_impl

        return triton_impl.backward(p_BHQK, d_p_BHQK, keys_B2, scale, causal, window, offset)
    d_scores_BHQK = torch.empty_like(p_BHQK)
    function_of(picked_library(kernels, "masked_softmax", p_BHQK), "masked_softmax_backward", _BACKWARD)(
        *map(address, (p_BHQK, d_p_BHQK, keys_B2, d_scores_BHQK)),
        *(p_BHQK.shape[:-1].numel(), *p_BHQK.shape[1:]),
        *(offset, causal, window),
        *(scale, p_BHQK.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return d_scores_BHQK


@_softmax.register_fake
@_softmax_backward.register_fake
def _(scores_BHQK: torch.Tensor, *_: object) -> torch.Tensor:
    return empty_as(scores_BHQK)


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, keys_B2, _, *ctx.numbers = inputs
    ctx.save_for_backward(output, keys_B2)


def _gradients(ctx: Any, d_p_BHQK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    p_BHQK, keys_B2 = ctx.saved_tensors
    return _softmax_backward(p_BHQK, d_p_BHQK, keys_B2, *ctx.numbers), *[None] * 7


_softmax.register_autograd(_gradients, setup_context=_save)


def _check(scores_BHQK: torch.Tensor, scale: float, mask: KeyMask) -> None:
    if scores_BHQK.dim() != 4 or scores_BHQK.dtype not in FLOATS:
        raise InputError(
            f"scores are {scores_BHQK.dtype} of shape {tuple(scores_BHQK.shape)}; give floating-point "
            "[sequences, heads, queries, keys]"
        )
    if not math.isfinite(scale):
        raise InputError(f"scale is {scale}; give a finite number")
    if mask.window is not None and mask.window < 1:
        raise InputError(f"mask.window is {mask.window}; give 1 or more, or None for no window")
    num_sequences, _, num_queries, num_keys = scores_BHQK.shape
    keys_B2, allowed_BQK = mask.keys_B2, mask.allowed_BQK
    if keys_B2 is not None and (keys_B2.shape != (num_sequences, 2) or keys_B2.dtype != torch.int64):
        raise InputError(
            f"mask.keys is {keys_B2.dtype} of shape {tuple(keys_B2.shape)}; give torch.int64 [{num_sequences}, 2]"
        )
    sizes = ({1, num_sequences}, {1, num_queries}, {num_keys})
    if allowed_BQK is not None and (
        allowed_BQK.dim() != 3
        or allowed_BQK.dtype != torch.bool
        or any(size not in allowed for size, allowed in zip(allowed_BQK.shape, sizes, strict=True))
    ):
        raise InputError(
            f"mask.allowed is {allowed_BQK.dtype} of shape {tuple(allowed_BQK.shape)}; give torch.bool "
            f"[{num_sequences} or 1, {num_queries} or 1, {num_keys}]"
        )
    for name, tensor in (("keys", keys_B2), ("allowed", allowed_BQK)):
        if tensor is not None and tensor.device != scores_BHQK.device:
            raise InputError(
                f"mask.{name} is on {tensor.device} and the scores on {scores_BHQK.device}; give one device"
            )
