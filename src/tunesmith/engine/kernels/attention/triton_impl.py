"""Attention over a paged cache in Triton, for CUDA graphs: what grows with a sequence is read from device memory.

1. `write_kernel` turns queries and keys, and writes keys and values into the cache.
2. `attend_kernel`: a program for each token, key/value head and split of the sequence. Query heads that share a
   key/value head are the rows of one tile, so a key is loaded once for all of them. Programs beyond the end of the
   sequence leave at once. `prefix_kernel` does the same for a beginning that several tokens share: all their queries
   are rows.
3. `merge_kernel` puts together what programs found of one token: each gives the largest score m, the sum l of
   exp(score - m), and the sum of exp(score - m) value; those are brought to the largest m (Dao et al., Flash-Decoding,
   2023; Juravsky et al., Hydragen, 2024). With a single split the program writes the result itself.

A row's sums run over tiles of keys that begin at multiples of a tile, so its bits depend on no other row.

Shape legend: T tokens, X = query heads * D, Y = key/value heads * D, D head width, H query heads, N blocks, W numbers
of a block, S slots for partial results, P prefixes, G members of a prefix.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.engine.kernels.arguments import with_dense_rows
from tunesmith.engine.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope, SharedPrefixes
from tunesmith.engine.kernels.attention.triton_kernels import attend_kernel, merge_kernel, prefix_kernel, write_kernel
from tunesmith.engine.kernels.launching import ceil_div, power_of_two

SPLIT_TOKENS = 512
"""Tokens of a sequence that one program goes over. Where a split begins depends on nothing else, and so do the bits."""

_SMALLEST_DOT = 16
_MOST_ROWS = 32
_TILE_BYTES = 16 * 1024
_NUMBERS_OF_A_PRODUCT = 4096
_NUMBERS_OF_A_PROGRAM = 1024

SCRATCH_BYTES = 256 * 2**20
"""Most memory for partial results of tokens without shared prefixes; more tokens are taken in several passes."""

PREFIX_REGISTERS = 255
"""Of a thread: left alone, the compiler spills a few for the sake of more threads at a time."""

MERGED_SLOTS = 16  # at a time
MERGE_WARPS = 2


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Grid and splits of the attention of one layer.

    A program has `rows` query heads of one token, `head_tiles` programs make up those of a key/value head, and programs
    over a shared prefix have `prefix_rows` of several tokens. They go over `split_tokens` keys, `tile_tokens` at a
    time; `num_splits` of them make up the width of the tables. `block_d` is a head's width, filled up to a power of
    two, and `block_h` the number of heads in a program that turns and writes. `uses_dot`: by matrix units. The
    stages of a loop are entries of the block table, keys and values that these lead to, and products.
    """

    rows: int
    head_tiles: int
    prefix_rows: int
    tile_tokens: int
    split_tokens: int
    num_splits: int
    block_d: int
    block_h: int
    uses_dot: bool
    num_warps: int
    num_stages: int = 5

    def prefix_tiles(self, num_members: int, group_size: int) -> int:
        """Programs that make up the query heads of a key/value head, of all members of a prefix."""
        return ceil_div(num_members * group_size, self.prefix_rows)


def launch(
    settings: AttentionSettings,
    dtype: torch.dtype,
    table_width: int,
    *,
    uses_dot: bool,
    split_tokens: int = SPLIT_TOKENS,
) -> AttentionPlan:
    """The plan for tables of `table_width` blocks. It reads no positions: a CUDA graph stays valid as sequences grow.

    Matrix units take the query heads of a key/value head as 16 rows or
    more; without them a product of rows, keys and a head's width has to fit the registers.
    """
    group, block_d = settings.group_size, max(_SMALLEST_DOT, power_of_two(settings.head_dim))
    if uses_dot:
        rows = min(_MOST_ROWS, max(_SMALLEST_DOT, power_of_two(group)))
        prefix_rows = _MOST_ROWS
        tile_tokens = max(_SMALLEST_DOT, min(64, _TILE_BYTES // (block_d * dtype.itemsize)))
    else:
        prefix_rows = max(1, min(4, 512 // block_d))
        rows = min(power_of_two(group), prefix_rows)
        tile_tokens = max(BLOCK_TOKENS, min(64, _NUMBERS_OF_A_PRODUCT // (prefix_rows * block_d)))
    return AttentionPlan(
        rows=rows,
        head_tiles=ceil_div(group, rows),
        prefix_rows=prefix_rows,
        tile_tokens=tile_tokens,
        split_tokens=split_tokens,
        num_splits=max(1, ceil_div(table_width * BLOCK_TOKENS, split_tokens)),
        block_d=block_d,
        block_h=max(1, min(power_of_two(settings.num_heads), _NUMBERS_OF_A_PROGRAM // block_d)),
        uses_dot=uses_dot,
        num_warps=4 if uses_dot else 8,
    )


def uses_dot(tensor: torch.Tensor) -> bool:
    """True if matrix units compute the products: in 16 bits, from compute capability 8.0 on, and in the interpreter."""
    if tensor.dtype == torch.float32:
        return False
    return tensor.device.type != "cuda" or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def forward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rope: Rope | None,
    places: Places,
    cache_2NW: torch.Tensor,
    prefixes: SharedPrefixes | None,
    settings: AttentionSettings,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """The result of `torch_impl.attend`, [T, X]; all tensors on one device, tables of `rope` float32 without gaps."""
    q_TX, k_TY, v_TY = (with_dense_rows(tensor) for tensor in qkv)
    positions_T, rows_T = places.positions_T.contiguous(), places.table_rows_T.contiguous()
    places = Places(positions_T, rows_T, with_dense_rows(places.block_tables_RN))
    plan = plan or launch(settings, q_TX.dtype, places.block_tables_RN.shape[1], uses_dot=uses_dot(q_TX))
    if prefixes is not None:
        tensors = (prefixes.members_PG, prefixes.length_P, prefixes.start_T)
        prefixes = SharedPrefixes(*(one.contiguous() for one in tensors)) if prefixes.members_PG.numel() else None
    out_TX = torch.empty(q_TX.shape, dtype=q_TX.dtype, device=q_TX.device)
    num_tokens, num_slots = len(q_TX), plan.num_splits + (prefixes is not None)
    if not num_tokens:
        return out_TX
    with torch.cuda.device_of(q_TX):
        turned_TX = _write((q_TX, k_TY, v_TY), rope, places, cache_2NW, settings, plan)
        step = num_tokens
        if prefixes is None and num_slots > 1:
            step = max(16, SCRATCH_BYTES // (4 * num_slots * settings.query_width) // 16 * 16)
        for first in range(0, num_tokens, step):
            some = slice(first, first + step)
            part = Places(positions_T[some], rows_T[some], places.block_tables_RN)
            _attend(turned_TX[some], part, cache_2NW, prefixes, settings, plan, out_TX[some])
    return out_TX


def _write(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rope: Rope | None,
    places: Places,
    cache_2NW: torch.Tensor,
    settings: AttentionSettings,
    plan: AttentionPlan,
) -> torch.Tensor:
    """The rotated queries; keys and values are written into the cache."""
    q_TX = qkv[0]
    turned_TX = q_TX if rope is None else torch.empty(q_TX.shape, dtype=q_TX.dtype, device=q_TX.device)
    query_parts = 0 if rope is None else ceil_div(settings.num_heads, plan.block_h)
    kernel: Any = write_kernel  # parameters of the launch itself are none of the kernel's
    kernel[(len(q_TX), query_parts + ceil_div(settings.num_kv_heads, plan.block_h))](
        *qkv,
        *((q_TX, q_TX) if rope is None else (rope.cos_PF, rope.sin_PF)),
        places.positions_T,
        places.table_rows_T,
        places.block_tables_RN,
        *cache_2NW.unbind(),
        turned_TX,
        *(tensor.stride(0) for tensor in qkv),
        places.block_tables_RN.stride(0),
        HEADS=settings.num_heads,
        KV_HEADS=settings.num_kv_heads,
        D=settings.head_dim,
        HALF=0 if rope is None else rope.cos_PF.shape[1],
        QUERY_PARTS=query_parts,
        BLOCK_H=plan.block_h,
        BLOCK_D=plan.block_d,
        num_warps=plan.num_warps,
    )
    return turned_TX


def _attend(
    q_TX: torch.Tensor,
    places: Places,
    cache_2NW: torch.Tensor,
    prefixes: SharedPrefixes | None,
    settings: AttentionSettings,
    plan: AttentionPlan,
    out_TX: torch.Tensor,
) -> None:
    """Write the attention of turned queries to `out_TX`."""
    num_tokens, num_heads, num_kv_heads = len(q_TX), settings.num_heads, settings.num_kv_heads
    num_slots = plan.num_splits + (prefixes is not None)
    is_whole = num_slots == 1
    # Of each slot: the largest score and the sum of weights [T, S, H], and the weighted sum of values [T, S, H, D].
    slots = (0 if is_whole else num_tokens, num_slots, num_heads)
    shapes = (slots, slots, (*slots, settings.head_dim))
    partials = [torch.empty(shape, dtype=torch.float32, device=q_TX.device) for shape in shapes]
    starts_T = places.positions_T if prefixes is None else prefixes.start_T
    given = (q_TX, *cache_2NW.unbind(), places.positions_T, places.table_rows_T, places.block_tables_RN)
    strides = (q_TX.stride(0), places.block_tables_RN.stride(0), num_slots)
    shape: dict[str, Any] = {"HEADS": num_heads, "D": settings.head_dim, "WINDOW": settings.window or 0}
    shape |= {"SPLIT": plan.split_tokens, "BLOCK_D": plan.block_d}
    layer = {"KV_HEADS": num_kv_heads, "SCALE": settings.scale, "SOFTCAP": settings.softcap or 0.0}
    layer |= {"USES_DOT": plan.uses_dot, "WIDEN": q_TX.device.type == "cpu", "BLOCK_C": plan.tile_tokens}
    layer |= {"num_warps": plan.num_warps, "num_stages": plan.num_stages, **shape}
    if prefixes is not None:
        members_PG = prefixes.members_PG
        num_prefixes, num_members = members_PG.shape
        tiles = plan.prefix_tiles(num_members, settings.group_size)
        kernel: Any = prefix_kernel
        kernel[(num_prefixes * num_kv_heads, plan.num_splits, tiles)](
            *given,
            members_PG,
            prefixes.length_P,
            *partials,
            *strides,
            num_members,
            ROWS=plan.prefix_rows,
            maxnreg=PREFIX_REGISTERS,
            **layer,
        )
    kernel = attend_kernel
    own = {"HAS_PREFIXES": int(prefixes is not None), "IS_WHOLE": is_whole}
    kernel[(num_tokens * num_kv_heads * plan.head_tiles, plan.num_splits)](
        *(*given, starts_T, out_TX, *partials, *strides), ROWS=plan.rows, HEAD_TILES=plan.head_tiles, **own, **layer
    )
    if not is_whole:
        kernel = merge_kernel
        kernel[(num_tokens, num_heads)](
            *(places.positions_T, starts_T, *partials, out_TX, num_slots),
            HAS_PREFIXES=int(prefixes is not None),
            BLOCK_S=MERGED_SLOTS,
            num_warps=MERGE_WARPS,
            **shape,
        )
