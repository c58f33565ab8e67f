"""Causal attention over a paged cache, in C++, in Triton or in torch, and over packed sequences with gradients.

Shape legend: T tokens, X = query heads * head width, Y = key/value heads * head width, N blocks, W numbers of a block,
R tables.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.base.core.errors import InputError, TritonUnavailableError
from tunesmith.engine.kernels.arguments import (
    DOUBLE,
    FLOATS,
    INTEGER,
    POINTER,
    address,
    library_for,
    picked_library,
    records_gradient,
    require,
    with_dense_rows,
)
from tunesmith.engine.kernels.attention import torch_impl
from tunesmith.engine.kernels.attention.records import (
    BLOCK_TOKENS,
    AttentionSettings,
    Packing,
    Places,
    Rope,
    Segments,
    SharedPrefixes,
)
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.recording import call

_COMPLAINTS = {
    1: "a position is negative, or outside of the block tables or the rotary tables",
    2: "a table row is outside of the block tables",
    3: "a block of a table is outside of the cache",
}


def _record(name: str, pointers: str, numbers: str) -> type[ctypes.Structure]:
    """A structure of cpu.cpp that begins with the fields that forward and backward have in common."""
    layer = (
        *((field, POINTER) for field in ("cos", "sin", "sinks")),
        *((field, INTEGER) for field in ("num_heads", "num_kv_heads", "head_dim", "half_rotary")),
        *((field, INTEGER) for field in ("window", "is_bfloat16", "num_threads")),
        *((field, DOUBLE) for field in ("scale", "softcap")),
    )
    own = (*((field, POINTER) for field in pointers.split()), *((field, INTEGER) for field in numbers.split()))
    return type(name, (ctypes.Structure,), {"_fields_": (*layer, *own)})


_AttendArguments = _record(
    "_AttendArguments",
    "q k v keys values out position table_row tables copied",
    "num_rows q_stride k_stride v_stride num_blocks num_tables table_width num_positions num_copies",
)
_GradientArguments = _record(
    "_GradientArguments",
    "q k v grad dq dk dv d_sinks starts parents",
    "num_sequences q_stride k_stride v_stride grad_stride",
)


def attend(  # noqa: PLR0913 - the prefixes say of the places what only one kernel reads
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    rope: Rope | None,
    places: Places,
    cache_2NW: torch.Tensor,
    settings: AttentionSettings,
    *,
    prefixes: SharedPrefixes | None = None,
    kernels: Kernels,
) -> torch.Tensor:
    """Attention of each token over its own sequence up to itself, [T, X], as `torch_impl.attend` defines it.

    Queries and keys are turned by `rope`; keys and values of all tokens are written into `cache_2NW`, one layer of
    `rollout.kv_cache.allocate_storage`, before any is read. How a block is laid out depends on the kernels, so a cache
    belongs to one `Kernels`. Numbers after a token in its block must be finite and have no effect. The rows of q, k
    and v may be any distance apart. The same token may be given twice.

    Natively, bfloat16 or float32, the result of a token depends to the bit on its sequence alone: not on other rows, on
    threads, on blocks, or on how the prompt was split. There is no gradient.

    In Triton there are no sinks, and places are on the device of the tokens. The host reads nothing of them, so
    **their ranges are not checked**, and what is launched depends on shapes and settings alone: a CUDA graph of it
    stays right while positions and tables change in place. Bits depend on a token's sequence alone, here too, without
    `prefixes`. With them a beginning that several tokens share is read once for all of them, which changes the order of
    sums and so the last bits; C++ and torch ignore them.

    Raises:
        InputError: shapes, dtypes or devices do not fit, a place is out of range, or a gradient would be lost.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(q_TX, k_TY, v_TY, rope, settings)
    _check_places(q_TX, places, cache_2NW, settings)
    if records_gradient(q_TX, k_TY, v_TY):
        raise InputError("attend has no gradient and an input requires one; use attend_packed, or torch.no_grad()")
    backend = kernels.picked("attention", q_TX)
    if backend == "torch":
        return torch_impl.attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings)
    if backend == "native":
        library = picked_library(kernels, "attention", q_TX)
        return _native(library, (q_TX, k_TY, v_TY), rope, places, None, cache_2NW, settings)
    if settings.sinks_H is not None:
        raise TritonUnavailableError("attend has no sinks in Triton; choose torch for it")
    return _triton((q_TX, k_TY, v_TY), rope, places, cache_2NW, settings, prefixes)


def attend_packed(
    q_TX: torch.Tensor,
    k_TY: torch.Tensor,
    v_TY: torch.Tensor,
    rope: Rope | None,
    packing: Packing | Sequence[int],
    settings: AttentionSettings,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Attention of packed sequences, [T, X].

    `packing` says where each ends and which earlier one it continues; lengths alone are sequences that share
    nothing, each from position 0. Layers of one pass take the same `Packing`.

    Natively it has the bits of `attend`, shared or not. Gradients flow to q, k, v and sinks; they are computed anew
    from these, so no probabilities are kept. What all sequences give to the keys and values of one that they share is
    summed in float32. Only the first gradient is defined.

    Raises:
        InputError: shapes or dtypes do not fit, or the lengths do not add up to the tokens.
        NativeUnavailableError: native kernels were chosen and cannot run.
        TritonUnavailableError: Triton was chosen, which has none for packed sequences.
    """
    if kernels.choice == "triton":
        raise TritonUnavailableError("attend_packed has no Triton kernel; choose auto, native or torch for it")
    _check(q_TX, k_TY, v_TY, rope, settings)
    if not isinstance(packing, Packing):
        packing = Packing(Segments.alone(packing))
    segments = packing.segments
    if segments.num_tokens != len(q_TX):
        raise InputError(
            f"the lengths {list(segments.lengths)[:8]} add up to {segments.num_tokens} and there are {len(q_TX)} "
            "tokens; give one positive length for each sequence"
        )
    if rope is not None and segments.longest > len(rope.cos_PF):
        raise InputError(
            f"a sequence has {segments.longest} tokens and the rotary tables {len(rope.cos_PF)} positions; "
            "make longer tables or cut the sequence"
        )
    call = _Call(packing, rope, settings, kernels)
    if records_gradient(q_TX, k_TY, v_TY, settings.sinks_H):
        return _Packed.apply(q_TX, k_TY, v_TY, settings.sinks_H, call)  # type: ignore[return-value]
    return call.forward(q_TX, k_TY, v_TY)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `attend_packed`, without its tensors."""

    packing: Packing
    rope: Rope | None
    settings: AttentionSettings
    kernels: Kernels

    def forward(self, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor) -> torch.Tensor:
        library = library_for(self.kernels, "attention", q_TX)
        if library is None:
            return torch_impl.attend_packed(q_TX, k_TY, v_TY, self.rope, self.packing.segments, self.settings)
        cache_2NW, placed = self.packing.buffer(self.settings.key_width, q_TX.dtype), self.packing.places
        return _native(library, (q_TX, k_TY, v_TY), self.rope, placed.places, placed.copied_E, cache_2NW, self.settings)

    def backward(
        self, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor, grad_TX: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v and the sinks."""
        segments = self.packing.segments
        library = library_for(self.kernels, "attention_gradient", q_TX)
        if library is None:
            return torch_impl.packed_gradients(q_TX, k_TY, v_TY, grad_TX, self.rope, segments, self.settings)
        tensors = tuple(with_dense_rows(tensor) for tensor in (q_TX, k_TY, v_TY, grad_TX))
        dq_TX, dk_TY, dv_TY = (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors[:3])
        starts, parents = torch.tensor(segments.starts), torch.tensor(segments.parents, dtype=torch.int64)
        rope, sinks_H = _float32(self.rope), _float32_sinks(self.settings)
        d_sinks_TH = None if sinks_H is None else torch.empty(len(q_TX), len(sinks_H))
        arguments = _GradientArguments(
            *_layer(q_TX, rope, sinks_H, self.settings),
            *(address(tensor) for tensor in (*tensors, dq_TX, dk_TY, dv_TY, d_sinks_TH, starts, parents)),
            len(parents),
            *(tensor.stride(0) for tensor in tensors),
        )
        library.attend_backward(ctypes.byref(arguments))
        return dq_TX, dk_TY, dv_TY, None if d_sinks_TH is None else d_sinks_TH.sum(0)


class _Packed(torch.autograd.Function):
    """Keeps q, k and v alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        q_TX, k_TY, v_TY, _, call = inputs  # `call` has the sinks; they are an input for their gradient
        ctx.save_for_backward(q_TX, k_TY, v_TY)
        ctx.call = call
        return call.forward(q_TX, k_TY, v_TY)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *of_qkv, d_sinks_H = ctx.call.backward(*ctx.saved_tensors, *grads)
        sinks_H = ctx.call.settings.sinks_H
        return *of_qkv, None if d_sinks_H is None else d_sinks_H.to(sinks_H.dtype), None


def _native(
    library: ctypes.CDLL,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rope: Rope | None,
    places: Places,
    copied_E: torch.Tensor | None,
    cache_2NW: torch.Tensor,
    settings: AttentionSettings,
) -> torch.Tensor:
    # The names hold contiguous copies alive until the call is over.
    q_TX, k_TY, v_TY = (with_dense_rows(tensor) for tensor in qkv)
    positions_T, rows_T, tables_RN = (
        tensor.contiguous() for tensor in (places.positions_T, places.table_rows_T, places.block_tables_RN)
    )
    rope, sinks_H = _float32(rope), _float32_sinks(settings)
    out_TX = torch.empty(q_TX.shape, dtype=q_TX.dtype)
    num_tables, table_width = tables_RN.shape
    arguments = _AttendArguments(
        *_layer(q_TX, rope, sinks_H, settings),
        *(tensor.data_ptr() for tensor in (q_TX, k_TY, v_TY, cache_2NW)),
        cache_2NW.data_ptr() + cache_2NW.stride(0) * cache_2NW.element_size(),
        out_TX.data_ptr(),
        *(tensor.data_ptr() for tensor in (positions_T, rows_T, tables_RN)),
        address(copied_E),
        len(q_TX),
        *(tensor.stride(0) for tensor in (q_TX, k_TY, v_TY)),
        cache_2NW.shape[1],
        num_tables,
        table_width,
        table_width * BLOCK_TOKENS if rope is None else len(rope.cos_PF),
        0 if copied_E is None else len(copied_E),
    )
    tables = () if rope is None else (rope.cos_PF, rope.sin_PF)
    tensors = (q_TX, k_TY, v_TY, cache_2NW, out_TX, positions_T, rows_T, tables_RN, copied_E, sinks_H, *tables)
    call(library, "attend", arguments, tensors, _check_status)
    return out_TX


def _check_status(status: int) -> None:
    if status:
        raise InputError(f"{_COMPLAINTS[status]}; nothing was written. Give places inside of them")


def _triton(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rope: Rope | None,
    places: Places,
    cache_2NW: torch.Tensor,
    settings: AttentionSettings,
    prefixes: SharedPrefixes | None,
) -> torch.Tensor:
    q_TX, rope = qkv[0], _float32(rope)
    given = {"places": places.positions_T, "the cache": cache_2NW}
    given |= {} if rope is None else {"the cosines": rope.cos_PF, "the sines": rope.sin_PF}
    given |= {} if prefixes is None else {"prefixes": prefixes.start_T}
    for name, tensor in given.items():
        if tensor.device != q_TX.device:
            raise InputError(f"{name} are on {tensor.device} and q is on {q_TX.device}; give all on one device")
    if prefixes is not None and len(prefixes.start_T) != len(q_TX):
        raise InputError(f"{len(prefixes.start_T)} starts and {len(q_TX)} tokens; give one for each token")
    return _triton_attend(
        list(qkv),
        [] if rope is None else [rope.cos_PF, rope.sin_PF],
        [places.positions_T, places.table_rows_T, places.block_tables_RN],
        cache_2NW,
        [] if prefixes is None else [prefixes.members_PG, prefixes.length_P, prefixes.start_T],
        [settings.num_heads, settings.num_kv_heads, settings.head_dim, settings.window or 0],
        [settings.scale, settings.softcap or 0.0],
    )


# An operator, which torch.compile sees and a CUDA graph may contain; it takes no records, so they come in parts.
@torch.library.custom_op("tunesmith::attend", mutates_args=("cache_2NW",))
def _triton_attend(
    qkv: Sequence[torch.Tensor],
    rope: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    cache_2NW: torch.Tensor,
    prefixes: Sequence[torch.Tensor],
    heads: Sequence[int],
    scores: Sequence[float],
) -> torch.Tensor:
    """The result of `torch_impl.attend`, [T, X]; no `rope` or `prefixes` are empty lists. No gradient.

    `heads` are the numbers of query heads and key/value heads, the head width and the window; `scores` are scale and
    soft-cap; 0 is no window and no cap.
    """
    from tunesmith.engine.kernels.attention.triton_impl import forward

    num_heads, num_kv_heads, head_dim, window = heads
    scale, softcap = scores
    settings = AttentionSettings(num_heads, num_kv_heads, head_dim, scale, window or None, softcap or None)
    q_TX, k_TY, v_TY = qkv
    shared = SharedPrefixes(*prefixes) if prefixes else None
    return forward((q_TX, k_TY, v_TY), Rope(*rope) if rope else None, Places(*places), cache_2NW, shared, settings)


@_triton_attend.register_fake
def _(qkv: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
    return torch.empty(qkv[0].shape, dtype=qkv[0].dtype, device=qkv[0].device)


def _float32(rope: Rope | None) -> Rope | None:
    """`rope` as the kernel reads it; itself, if it is that already, because every layer of every step asks."""
    if rope is None or all(x.dtype == torch.float32 and x.is_contiguous() for x in (rope.cos_PF, rope.sin_PF)):
        return rope
    return Rope(rope.cos_PF.float().contiguous(), rope.sin_PF.float().contiguous())


def _float32_sinks(settings: AttentionSettings) -> torch.Tensor | None:
    return None if settings.sinks_H is None else settings.sinks_H.detach().float().contiguous()


def _layer(
    q_TX: torch.Tensor, rope: Rope | None, sinks_H: torch.Tensor | None, settings: AttentionSettings
) -> tuple[float | None, ...]:
    """The fields that forward and backward have in common; `rope` and `sinks_H`, float32, must outlive the call."""
    tables = (None, None) if rope is None else (rope.cos_PF.data_ptr(), rope.sin_PF.data_ptr())
    half = 0 if rope is None else rope.cos_PF.shape[1]
    heads = (settings.num_heads, settings.num_kv_heads, settings.head_dim, half)
    work = (settings.window or 0, int(q_TX.dtype == torch.bfloat16), torch.get_num_threads())
    return *tables, address(sinks_H), *heads, *work, settings.scale, settings.softcap or 0.0


def _check(
    q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor, rope: Rope | None, settings: AttentionSettings
) -> None:
    num_tokens = q_TX.shape[0] if q_TX.dim() else 0
    require("q", q_TX, (num_tokens, settings.query_width), q_TX)
    require("k", k_TY, (num_tokens, settings.key_width), q_TX)
    require("v", v_TY, (num_tokens, settings.key_width), q_TX)
    if q_TX.dtype not in FLOATS:
        raise InputError(f"q, k and v are {q_TX.dtype}; give floating-point numbers")
    if rope is not None and 2 * rope.cos_PF.shape[1] > settings.head_dim:
        raise InputError(
            f"the rotary tables turn {2 * rope.cos_PF.shape[1]} numbers and a head has {settings.head_dim}; give at "
            "most half as many columns as a head has numbers"
        )


def _check_places(q_TX: torch.Tensor, places: Places, cache_2NW: torch.Tensor, settings: AttentionSettings) -> None:
    if len(places.positions_T) != len(q_TX):
        raise InputError(f"{len(places.positions_T)} places and {len(q_TX)} tokens; give one for each token")
    if places.positions_T.device not in (torch.device("cpu"), q_TX.device):
        raise InputError(
            f"places are on {places.positions_T.device} and q is on {q_TX.device}; give both on one device"
        )
    width = BLOCK_TOKENS * settings.key_width
    is_cache = cache_2NW.dim() == 3 and cache_2NW.shape[0] == 2 and cache_2NW.shape[2] == width
    if not is_cache or cache_2NW.dtype != q_TX.dtype or cache_2NW.stride()[1:] != (width, 1):
        raise InputError(
            f"the cache is {cache_2NW.dtype} of shape {tuple(cache_2NW.shape)}; "
            f"give {q_TX.dtype} [2, blocks, {width}] whose blocks are contiguous"
        )
