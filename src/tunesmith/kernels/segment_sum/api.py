"""Sums over the sequences of a packed batch, with gradients, in C++, in Triton or in torch; no atomic additions.

Shapes: T elements of all segments, one segment after the other; D columns; S segments.
"""

from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import FLOATS, INTEGER, POINTER, address, function_of, picked_library
from tunesmith.kernels.masking import widened
from tunesmith.kernels.native import Choice, Kernels, shared
from tunesmith.kernels.segment_sum import torch_impl

_SUM = (*[POINTER] * 3, *[INTEGER] * 4)
_SPREAD = (*[POINTER] * 3, *[INTEGER] * 3)
_OFFSETS = (torch.int32, torch.int64)


def segment_sum(values_T: Tensor, offset_S1: Tensor, *, kernels: Kernels) -> Tensor:
    """The sum of each segment, `[S]` or `[S, ...]`, in float32 (float64 for float64), with gradients.

    `values_T` is `[T]` or `[T, ...]`, floating-point. `offset_S1` (`cu_seqlens`), int32 or int64, begin at 0: rows
    `offset_S1[s]` to `offset_S1[s + 1]`, the last one left out, are segment s; an empty one gives 0. Each segment is
    summed by one worker in an order that its own length decides, so equal inputs give equal bits, in every batch.
    `torch_impl.segment_sum` is the definition.

    Raises:
        InputError: values or offsets do not fit; on a GPU the offsets are not looked at, which would wait for it.
        NativeUnavailableError, TritonUnavailableError: the chosen kernels cannot run.
    """
    _check(values_T, offset_S1)
    columns = values_T.shape[1:]
    values_TD = values_T.reshape(len(values_T), columns.numel())
    return _segment_sum(values_TD, offset_S1, kernels.choice).reshape(len(offset_S1) - 1, *columns)


def _check(values_T: Tensor, offset_S1: Tensor) -> None:
    if values_T.dtype not in FLOATS or values_T.dim() < 1:
        raise InputError(
            f"values_T is {values_T.dtype} of shape {tuple(values_T.shape)}; give floating-point [elements, ...]"
        )
    if offset_S1.dtype not in _OFFSETS or offset_S1.dim() != 1 or not len(offset_S1):
        raise InputError(
            f"offset_S1 is {offset_S1.dtype} of shape {tuple(offset_S1.shape)}; give int32 or int64 [segments + 1]"
        )
    if offset_S1.device != values_T.device:
        raise InputError(f"offset_S1 is on {offset_S1.device} and values_T on {values_T.device}; move one to the other")
    if offset_S1.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(offset_S1[0]), int(offset_S1[-1])
        if first != 0 or last != len(values_T) or bool((offset_S1.diff() < 0).any()):
            raise InputError(
                f"offset_S1 runs from {first} to {last} over {len(values_T)} elements; it must begin at 0, never fall, "
                "and end at their number"
            )


@torch.library.custom_op("tunesmith::segment_sum", mutates_args=())
def _segment_sum(values_TD: Tensor, offset_S1: Tensor, choice: str) -> Tensor:
    kernels = shared(cast(Choice, choice))
    num_segments = len(offset_S1) - 1
    match kernels.picked("segment_sum", values_TD):
        case "native":
            values_TD, offset_S1 = values_TD.contiguous(), offset_S1.long().contiguous()
            sum_SD = torch.empty(num_segments, values_TD.shape[1])
            function_of(picked_library(kernels, "segment_sum", values_TD), "segment_sum", _SUM)(
                *(address(tensor) for tensor in (values_TD, offset_S1, sum_SD)),
                num_segments,
                values_TD.shape[1],
                values_TD.dtype == torch.bfloat16,
                torch.get_num_threads(),
            )
            return sum_SD
        case "triton":
            from tunesmith.kernels.segment_sum import triton_impl

            return triton_impl.segment_sum(values_TD, offset_S1)
        case "torch":
            return torch_impl.segment_sum(values_TD, offset_S1).contiguous()


@_segment_sum.register_fake
def _(values_TD: Tensor, offset_S1: Tensor, choice: str) -> Tensor:
    return values_TD.new_empty(offset_S1.shape[0] - 1, values_TD.shape[1], dtype=widened(values_TD).dtype)


@torch.library.custom_op("tunesmith::segment_gradient", mutates_args=())
def _segment_gradient(d_sum_SD: Tensor, offset_S1: Tensor, num_rows: int, choice: str) -> Tensor:
    """`[T, D]`: the gradient of the values, in the dtype of the sums."""
    kernels = shared(cast(Choice, choice))
    match kernels.picked("segment_sum", d_sum_SD):
        case "native":
            d_sum_SD, offset_S1 = d_sum_SD.contiguous(), offset_S1.long().contiguous()
            d_values_TD = torch.zeros(num_rows, d_sum_SD.shape[1])
            function_of(picked_library(kernels, "segment_sum", d_sum_SD), "segment_gradient", _SPREAD)(
                *(address(tensor) for tensor in (d_sum_SD, offset_S1, d_values_TD)),
                *d_sum_SD.shape,
                torch.get_num_threads(),
            )
            return d_values_TD
        case "triton":
            from tunesmith.kernels.segment_sum import triton_impl

            return triton_impl.segment_gradient(d_sum_SD, offset_S1, num_rows)
        case "torch":
            return torch_impl.segment_gradient(d_sum_SD, offset_S1, num_rows)


@_segment_gradient.register_fake
def _(d_sum_SD: Tensor, offset_S1: Tensor, num_rows: int, choice: str) -> Tensor:
    return d_sum_SD.new_empty(num_rows, d_sum_SD.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offset_S1, ctx.choice = inputs
    ctx.num_rows, ctx.dtype = len(values_TD), values_TD.dtype
    ctx.save_for_backward(offset_S1)


def _backward(ctx: Any, d_sum_SD: Tensor) -> tuple[Tensor, None, None]:
    d_values_TD = _segment_gradient(d_sum_SD, ctx.saved_tensors[0], ctx.num_rows, ctx.choice)
    return d_values_TD.to(ctx.dtype), None, None


def _keep_for_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.choice = inputs[3]
    ctx.save_for_backward(inputs[1])


def _second_backward(ctx: Any, d_values_TD: Tensor) -> tuple[Tensor, None, None, None]:
    return _segment_sum(d_values_TD, ctx.saved_tensors[0], ctx.choice), None, None, None


_segment_sum.register_autograd(_backward, setup_context=_keep)
_segment_gradient.register_autograd(_second_backward, setup_context=_keep_for_second)
