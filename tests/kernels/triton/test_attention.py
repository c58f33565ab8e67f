"""Attention in Triton, run by its interpreter: against the definition in float64, and to the bit across batches."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.base.core.errors import InputError, TritonUnavailableError
from tunesmith.engine.kernels.attention import torch_impl
from tunesmith.engine.kernels.attention.api import attend, attend_packed
from tunesmith.engine.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope, SharedPrefixes
from tunesmith.engine.kernels.attention.triton_impl import SPLIT_TOKENS, launch
from tunesmith.engine.kernels.native import Kernels

# Turned queries and keys are rounded once, as outputs are; the interpreter cuts bfloat16 where a GPU rounds.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2**-5}
DTYPES = list(TOLERANCE)
LENGTHS = [1, 16, 17, 40, 112]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """So what nobody wrote shows where it is read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rope_of(half: int | None, num_positions: int = 1200) -> Rope | None:
    if half is None:
        return None
    angle_PF = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return Rope(angle_PF.cos(), angle_PF.sin())


@dataclass(slots=True)
class Batch:
    """Tokens at `places`, over a cache whose other positions are full; `run` and `exact` leave the cache alone."""

    settings: AttentionSettings
    rope: Rope | None
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    places: Places
    cache_2NW: torch.Tensor
    prefixes: SharedPrefixes | None = None

    @classmethod
    def of(cls, settings: AttentionSettings, dtype: torch.dtype, half: int | None, lengths: list[int], seed=0):
        """The last token of sequences of these lengths, over shuffled blocks; tables are wider than needed."""
        generator = torch.Generator().manual_seed(seed)
        width = max(lengths) // BLOCK_TOKENS + 2
        tables_RN = 1 + torch.randperm(len(lengths) * width, generator=generator).int().view(-1, width)
        rows_T = torch.randperm(len(lengths), generator=generator).int()
        shape = (2, 1 + tables_RN.numel(), BLOCK_TOKENS * settings.key_width)
        widths = [settings.query_width, settings.key_width, settings.key_width]
        qkv_TZ = torch.randn(len(lengths), sum(widths), generator=generator).to(dtype)
        q_TX, k_TY, v_TY = qkv_TZ.split(widths, 1)  # slices of one tensor, as from one linear layer
        places = Places(ints(*lengths) - 1, rows_T, tables_RN)
        cache_2NW = torch.randn(shape, generator=generator).to(dtype)
        return cls(settings, rope_of(half), (q_TX, k_TY, v_TY), places, cache_2NW)

    def some(self, index: torch.Tensor) -> "Batch":
        """Some of its tokens, without prefixes."""
        q_TX, k_TY, v_TY = (tensor[index] for tensor in self.qkv)
        places = replace(
            self.places, positions_T=self.places.positions_T[index], table_rows_T=self.places.table_rows_T[index]
        )
        return replace(self, qkv=(q_TX, k_TY, v_TY), places=places, prefixes=None)

    def sharing(self, groups: tuple[tuple[int, ...], ...], lengths: tuple[int, ...]) -> "Batch":
        """The same where the members of each group share the blocks of their first tokens, in padded records."""
        tables_RN, start_T = self.places.block_tables_RN.clone(), torch.zeros_like(self.places.positions_T)
        members_PG = torch.full((len(groups) + 1, 2 + max(map(len, groups), default=0)), -1, dtype=torch.int32)
        for prefix, (members, length) in enumerate(zip(groups, lengths, strict=True)):
            members_PG[prefix, 1 : 1 + len(members)] = ints(*members)
            rows = self.places.table_rows_T[list(members)].long()
            tables_RN[rows, : length // BLOCK_TOKENS] = tables_RN[rows[0], : length // BLOCK_TOKENS].clone()
            start_T[list(members)] = length
        places = replace(self.places, block_tables_RN=tables_RN)
        return replace(self, places=places, prefixes=SharedPrefixes(members_PG, ints(*lengths, 0), start_T))

    def run(self, cache_2NW: torch.Tensor | None = None) -> torch.Tensor:
        cache_2NW = self.cache_2NW.clone() if cache_2NW is None else cache_2NW
        kernels = Kernels("triton")
        given = (*self.qkv, self.rope, self.places, cache_2NW, self.settings)
        return attend(*given, prefixes=self.prefixes, kernels=kernels)

    def run_in_splits(self, split_tokens: int, uses_dot: bool | None = None) -> torch.Tensor:
        from tunesmith.engine.kernels.attention import triton_impl

        width, dtype = self.places.block_tables_RN.shape[1], self.cache_2NW.dtype
        dot = triton_impl.uses_dot(self.cache_2NW) if uses_dot is None else uses_dot
        plan = launch(self.settings, dtype, width, uses_dot=dot, split_tokens=split_tokens)
        given = (self.qkv, self.rope, self.places, self.cache_2NW.clone(), self.prefixes, self.settings)
        return triton_impl.forward(*given, plan)

    def exact(self, cache_2NW: torch.Tensor | None = None) -> torch.Tensor:
        cache_2NW = self.cache_2NW.double() if cache_2NW is None else cache_2NW
        q_TX, k_TY, v_TY = (tensor.double() for tensor in self.qkv)
        return torch_impl.attend(q_TX, k_TY, v_TY, self.rope, self.places, cache_2NW, self.settings)

    def check(self, found_TX: torch.Tensor) -> None:
        assert found_TX.dtype == self.cache_2NW.dtype
        torch.testing.assert_close(found_TX.double(), self.exact(), atol=TOLERANCE[found_TX.dtype], rtol=0)


def layer(heads: int, kv_heads: int, head_dim: int, **form) -> AttentionSettings:
    return AttentionSettings(heads, kv_heads, head_dim, head_dim**-0.5, **form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("settings", "half"),
    [
        (layer(4, 4, 64), 32),
        (layer(7, 1, 64), 32),
        (layer(9, 3, 64, window=20), 16),
        (layer(8, 2, 80, softcap=5.0), 20),
        (layer(8, 1, 128, window=30, softcap=5.0), 64),
        (layer(6, 2, 24), 5),
        (layer(3, 3, 16), None),
        (layer(48, 1, 16), 8),
    ],
)
def test_outputs_and_cache_are_those_of_the_definition_in_float64(settings, half, dtype: torch.dtype):
    batch = Batch.of(settings, dtype, half, LENGTHS)
    found_2NW, exact_2NW = batch.cache_2NW.clone(), batch.cache_2NW.double()
    found_TX, exact_TX = batch.run(found_2NW), batch.exact(exact_2NW)
    assert found_TX.dtype == dtype
    torch.testing.assert_close(found_TX.double(), exact_TX, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(found_2NW.double(), exact_2NW, atol=TOLERANCE[dtype] / 2, rtol=2**-7)
    is_same_2NW = found_2NW == batch.cache_2NW
    assert int((~is_same_2NW).sum()) <= 2 * len(LENGTHS) * settings.key_width  # nothing else was written


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float32) for form in ({}, {"window": 40}, {"window": 1}, {"softcap": 5.0})),
        *((form, torch.float16) for form in ({}, {"window": 40})),
    ],
)
def test_several_splits_are_merged(form: dict, dtype: torch.dtype):
    batch = Batch.of(layer(6, 2, 16, **form), dtype, 8, [1, 31, 32, 33, 64, 65, 97, 200])
    batch.check(batch.run_in_splits(32))
    if dtype == torch.float32:
        batch.check(batch.run_in_splits(64, uses_dot=True))


@pytest.mark.parametrize("form", [{}, {"window": 600}])
def test_a_context_of_several_splits_equals_the_definition(form: dict):
    lengths = [SPLIT_TOKENS, SPLIT_TOKENS + 1, 2 * SPLIT_TOKENS + 70]
    batch = Batch.of(layer(3, 1, 16, **form), torch.float32, 8, lengths)
    batch.check(batch.run())


def test_more_splits_than_are_merged_at_a_time():
    batch = Batch.of(layer(1, 1, 8), torch.float32, 4, [16 * 40, 16 * 16, 16 * 17])
    batch.check(batch.run_in_splits(16))
    shared = batch.sharing(((0, 2), (1,)), (272, 240))
    shared.check(shared.run_in_splits(16))


@pytest.mark.parametrize(
    ("form", "dtype"), [({}, torch.float32), ({"window": 20}, torch.float16), ({}, torch.bfloat16)]
)
def test_bits_depend_on_the_sequence_alone(form: dict, dtype: torch.dtype):
    batch = Batch.of(layer(6, 2, 16, **form), dtype, 8, [1, 40, 112, 17, 700])
    whole_TX = batch.run()
    alone_TX = torch.cat([batch.some(torch.tensor([token])).run() for token in range(5)])
    assert torch.equal(alone_TX, whole_TX)
    order = torch.tensor([4, 1, 1, 3, 0, 2, 4])
    assert torch.equal(batch.some(order).run(), whole_TX[order])
    narrow = batch.some(torch.arange(4))
    narrow.places = replace(narrow.places, block_tables_RN=batch.places.block_tables_RN[:, :8])
    assert torch.equal(narrow.run(), whole_TX[:4])  # without a merge


@pytest.mark.parametrize("form", [{}, {"window": 9}])
def test_a_prompt_gives_the_same_bits_at_once_in_parts_and_token_by_token(form: dict):
    settings = layer(4, 2, 16, **form)
    batch = Batch.of(settings, torch.float16, 8, [20] * 20)
    row_T, positions_T = torch.zeros(20, dtype=torch.int32), torch.arange(20).int()
    batch.places = Places(positions_T, row_T, batch.places.block_tables_RN)
    batch.check(batch.run())
    outs, caches = [], []
    for size in (20, 7, 1):
        cache_2NW = batch.cache_2NW.clone()
        outs.append(torch.cat([batch.some(part).run(cache_2NW) for part in torch.arange(20).split(size)]))
        caches.append(cache_2NW)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(caches[0], caches[1]) and torch.equal(caches[0], caches[2])


def test_many_tokens_are_taken_in_several_passes(monkeypatch):
    from tunesmith.engine.kernels.attention import triton_impl

    batch = Batch.of(layer(2, 1, 16), torch.float32, 8, [1 + 3 * (token % 30) for token in range(20)])
    whole_TX = batch.run_in_splits(32)
    batch.check(whole_TX)
    monkeypatch.setattr(triton_impl, "SCRATCH_BYTES", 1)
    assert torch.equal(batch.run_in_splits(32), whole_TX)


def test_rows_that_fill_up_a_batch_at_one_place_change_nothing():
    batch = Batch.of(layer(6, 2, 16), torch.float16, 8, [20, 50, 1])
    padded = batch.some(torch.tensor([0, 1, 2, 2, 2, 2]))
    q_TX, k_TY, v_TY = (torch.cat((tensor[:2], torch.randn(4, tensor.shape[1]).half())) for tensor in padded.qkv)
    padded.qkv = q_TX, k_TY, v_TY
    assert torch.equal(padded.run()[:2], batch.run()[:2])
    assert padded.run().isfinite().all()


def test_keys_and_values_behind_a_token_are_not_looked_at():
    batch = Batch.of(layer(6, 2, 16), torch.float16, 8, [1, 20, 33])
    clean_TX = batch.run()
    used = torch.zeros(batch.cache_2NW.shape[1] * BLOCK_TOKENS, dtype=torch.bool)
    for position, row in zip(batch.places.positions_T.tolist(), batch.places.table_rows_T.tolist(), strict=True):
        index = torch.arange(position + 1)
        used[batch.places.block_tables_RN[row, index // BLOCK_TOKENS].long() * BLOCK_TOKENS + index % BLOCK_TOKENS] = (
            True
        )
    batch.cache_2NW.view(2, len(used), -1)[:, ~used] = float("nan")
    assert torch.equal(batch.run(), clean_TX)


class NoReading(TorchDispatchMode):
    """Fails where a number of a tensor goes to Python, which on a GPU would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_sequences_grow_in_place_and_the_host_reads_nothing_of_them():
    batch = Batch.of(layer(4, 2, 16), torch.float32, 8, [15, 30, 62, 1]).sharing(((0, 1),), (0,))
    assert batch.prefixes is not None
    exact_2NW = batch.cache_2NW.double()
    for step in range(4):
        batch.places.positions_T.add_(1)
        batch.places.block_tables_RN[:, -1].fill_(0)  # tables change as well
        if step == 2:  # the first two now share what both begin with
            first, second = batch.places.table_rows_T[:2].tolist()
            batch.places.block_tables_RN[second, 0] = batch.places.block_tables_RN[first, 0]
            batch.prefixes.length_P[0] = 16
            batch.prefixes.start_T[:2] = 16
        with NoReading():
            found_TX = batch.run(batch.cache_2NW)
        torch.testing.assert_close(found_TX.double(), batch.exact(exact_2NW), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("split_tokens", "form", "dtype"),
    [
        (32, {}, torch.float32),
        (32, {"window": 40}, torch.float16),
        (32, {"window": 12}, torch.bfloat16),
        (SPLIT_TOKENS, {"softcap": 5.0}, torch.float16),
    ],
)
def test_shared_prefixes_change_no_more_than_rounding(split_tokens: int, form: dict, dtype: torch.dtype):
    """Of one block, of several splits, up to the token itself, and of nobody."""
    batch = Batch.of(layer(7, 1, 16, **form), dtype, 8, [40, 33, 150, 117, 200, 34, 97, 97])
    for members, lengths in ((((0, 1, 5), (3, 2, 4), (7,)), (16, 112, 96)), (((6, 7, 4),), (96,)), ((), ())):
        shared = batch.sharing(members, lengths)
        shared.check(shared.run_in_splits(split_tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_token_inside_of_its_prefix_sees_it_up_to_itself(dtype: torch.dtype):
    batch = Batch.of(layer(4, 2, 16), dtype, 8, [5, 40, 64, 150, 101])
    shared = batch.sharing(((0, 1, 2, 3, 4),), (112,))
    shared.check(shared.run_in_splits(32))


def test_prefixes_through_the_public_function_and_none_of_them():
    batch = Batch.of(layer(14, 2, 64), torch.float16, 32, [40, 33, 60, 57])
    shared = batch.sharing(((0, 1), (3, 2)), (32, 48))
    shared.check(shared.run())
    assert shared.prefixes is not None
    none = SharedPrefixes(shared.prefixes.members_PG[:0], shared.prefixes.length_P[:0], 0 * shared.prefixes.start_T)
    assert torch.equal(replace(batch, prefixes=none).run(), batch.run())


@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 40)),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    form=st.fixed_dictionaries({"window": st.none() | st.integers(1, 60), "softcap": st.none() | st.just(3.0)}),
    split_blocks=st.integers(1, 4),
    prefix_blocks=st.integers(0, 4),
    seed=st.integers(0, 999),
)
@budget(max_examples=15, deadline=None)
def test_any_layer_and_any_lengths(heads, lengths, form, split_blocks: int, prefix_blocks: int, seed: int):
    kv_heads, group, head_dim = heads
    settings = layer(kv_heads * group, kv_heads, head_dim, **form)
    batch = Batch.of(settings, torch.float32, seed % (head_dim // 2 + 1) or None, lengths, seed)
    length = BLOCK_TOKENS * prefix_blocks
    members = tuple(token for token, size in enumerate(lengths) if size > length)
    if members and length:
        batch = batch.sharing((members,), (length,))
    batch.check(batch.run_in_splits(BLOCK_TOKENS * split_blocks, uses_dot=bool(seed % 2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uses_dot", [True, False])
@pytest.mark.parametrize("width", [1, 32, 33, 2048])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (71, 1, 64), (8, 4, 256), (1, 1, 8)])
def test_a_plan_covers_all_heads_and_the_tables(heads, kv_heads, head_dim, width: int, uses_dot: bool, dtype):
    settings = layer(heads, kv_heads, head_dim)
    plan = launch(settings, dtype, width, uses_dot=uses_dot)
    assert plan.rows * plan.head_tiles >= settings.group_size > plan.rows * (plan.head_tiles - 1)
    assert plan.num_splits * plan.split_tokens >= width * BLOCK_TOKENS > (plan.num_splits - 1) * plan.split_tokens
    assert plan.split_tokens % plan.tile_tokens == 0
    assert plan.prefix_tiles(8, settings.group_size) * plan.prefix_rows >= 8 * settings.group_size
    if uses_dot:
        assert min(plan.rows, plan.prefix_rows, plan.tile_tokens, plan.block_d) >= 16


def test_what_does_not_fit_is_refused(interpreted: Kernels):
    batch = Batch.of(layer(4, 2, 16), torch.float32, 8, [20, 30])
    shared = batch.sharing(((0, 1),), (16,))
    assert shared.prefixes is not None
    given = (*batch.qkv, batch.rope, batch.places, batch.cache_2NW, batch.settings)
    with pytest.raises(InputError, match="3 starts and 2 tokens"):
        attend(*given, prefixes=replace(shared.prefixes, start_T=ints(0, 0, 0)), kernels=interpreted)
    far = Places(*(getattr(batch.places, name).to("meta") for name in Places.__slots__))
    for kernels in (interpreted, Kernels("torch")):
        with pytest.raises(InputError, match=f"places are on meta and q is on {batch.cache_2NW.device}"):
            attend(*batch.qkv, batch.rope, far, batch.cache_2NW, batch.settings, kernels=kernels)
    with pytest.raises(InputError, match=r"length is torch\.int64"):
        replace(shared.prefixes, length_P=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="members are of 2 prefixes and length of 1"):
        replace(shared.prefixes, length_P=ints(0))
    with pytest.raises(InputError, match="attend has no gradient"):
        attend(batch.qkv[0].clone().requires_grad_(), *given[1:], kernels=interpreted)
    with pytest.raises(TritonUnavailableError, match="attend_packed has no Triton kernel"):
        attend_packed(*batch.qkv, batch.rope, [2], batch.settings, kernels=interpreted)


def test_no_tokens_give_no_rows():
    batch = Batch.of(layer(4, 2, 16), torch.float32, 8, [20])
    assert batch.some(torch.zeros(0, dtype=torch.int64)).run().shape == (0, 64)


def test_torch_knows_the_operator():
    batch = Batch.of(layer(4, 2, 16), torch.float32, 8, [20, 30]).sharing(((0, 1),), (16,))
    assert batch.rope is not None and batch.prefixes is not None
    places, prefixes = ([getattr(one, name) for name in one.__slots__] for one in (batch.places, batch.prefixes))
    rope = [batch.rope.cos_PF, batch.rope.sin_PF]
    given = (list(batch.qkv), rope, places, batch.cache_2NW, prefixes, [4, 2, 16, 0], [0.25, 0.0])
    torch.library.opcheck(torch.ops.tunesmith.attend.default, given, test_utils=("test_schema", "test_faketensor"))
