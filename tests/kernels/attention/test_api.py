"""Attention against the definition in float64, and to the bit across batches, splits, blocks and threads."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.attention import torch_impl
from tunesmith.engine.kernels.attention.api import attend, attend_packed
from tunesmith.engine.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Packing, Places, Rope, Segments
from tunesmith.engine.kernels.native import Kernels

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [{}, {"window": 20}, {"softcap": 5.0}, {"window": 20, "has_sinks": True}]
LENGTHS = [1, 37, 70, 16]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


def rope_of(half: int, num_positions: int = 1200) -> Rope:
    angle_PF = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return Rope(angle_PF.cos(), angle_PF.sin())


@dataclass(frozen=True, slots=True)
class Case:
    """Packed sequences: q, k and v are slices of one tensor, as from one linear layer."""

    settings: AttentionSettings
    lengths: list[int]
    qkv_TZ: torch.Tensor
    rope: Rope | None

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, lengths: list[int], **form) -> "Case":
        if form.pop("has_sinks", False):
            form["sinks_H"] = torch.linspace(-3, 3, heads)
        settings = AttentionSettings(heads, kv_heads, head_dim, head_dim**-0.5, **form)
        width = settings.query_width + 2 * settings.key_width
        qkv_TZ = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(0)).to(dtype)
        return cls(settings, lengths, qkv_TZ, rope_of(head_dim // 4))

    def split(self, qkv_TZ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_TX, k_TY, v_TY = qkv_TZ.split(
            [self.settings.query_width, self.settings.key_width, self.settings.key_width], 1
        )
        return q_TX, k_TY, v_TY

    def packed(self, kernels: Kernels) -> torch.Tensor:
        return attend_packed(*self.split(self.qkv_TZ), self.rope, self.lengths, self.settings, kernels=kernels)

    def exact(self) -> torch.Tensor:
        return torch_impl.attend_packed(
            *self.split(self.qkv_TZ.double()), self.rope, Segments.alone(self.lengths), self.settings
        )

    def paged(self, batches: list[list[tuple[int, int]]], kernels: Kernels) -> torch.Tensor:
        """The same by `attend`: a call for each batch of (sequence, position), over shuffled blocks full of garbage."""
        starts = [0, *accumulate(self.lengths)]
        width = -(-max(self.lengths) // BLOCK_TOKENS)
        generator = torch.Generator().manual_seed(1)
        tables_RN = torch.randperm(len(self.lengths) * width, generator=generator).int().view(-1, width)
        shape = (2, tables_RN.numel(), BLOCK_TOKENS * self.settings.key_width)
        cache_2NW = 100 * torch.randn(shape, generator=generator).to(self.qkv_TZ.dtype)
        out_TX = torch.full((len(self.qkv_TZ), self.settings.query_width), float("nan"), dtype=self.qkv_TZ.dtype)
        for batch in batches:
            index = [starts[sequence] + position for sequence, position in batch]
            rows_T, positions_T = torch.tensor(batch, dtype=torch.int32).unbind(1)
            places = Places(positions_T, rows_T, tables_RN)
            q_TX, k_TY, v_TY = self.split(self.qkv_TZ[index])
            out_TX[index] = attend(q_TX, k_TY, v_TY, self.rope, places, cache_2NW, self.settings, kernels=kernels)
        return out_TX


def token_by_token(lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [[(s, p) for s, length in enumerate(lengths) if p < length] for p in range(max(lengths))]


def in_chunks(lengths: list[int], size: int) -> list[list[tuple[int, int]]]:
    return [
        [(s, p) for s, length in enumerate(lengths) for p in range(start, min(start + size, length))]
        for start in range(0, max(lengths), size)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 2, 8), (9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 1, 256)]
)
def test_packed_equals_the_definition_in_float64(heads, kv_heads, head_dim, dtype, form, kernels: Kernels):
    case = Case.of(heads, kv_heads, head_dim, dtype, LENGTHS, **form)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.packed(kernels).double(), case.exact(), atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [{}, {"window": 600}])
def test_a_context_of_several_spans_equals_the_definition(dtype: torch.dtype, form: dict[str, int], kernels: Kernels):
    case = Case.of(3, 1, 16, dtype, [1100], **form)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.packed(kernels).double(), case.exact(), atol=atol, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 16)])
def test_bits_do_not_depend_on_how_tokens_are_batched(heads, kv_heads, head_dim, dtype, form, native: Kernels):
    case = Case.of(heads, kv_heads, head_dim, dtype, LENGTHS, **form)
    whole = case.packed(native)
    for batches in (token_by_token(LENGTHS), in_chunks(LENGTHS, 7), in_chunks(LENGTHS, 32)):
        assert torch.equal(case.paged(batches, native), whole)
    repeated = [batch + [batch[-1]] * 3 for batch in token_by_token(LENGTHS)]
    assert torch.equal(case.paged(repeated, native), whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 16)])
@pytest.mark.parametrize("num_shared", [5, 35])
def test_bits_do_not_depend_on_whether_sequences_with_one_beginning_stand_together(
    num_shared, heads, kv_heads, head_dim, dtype, form, native: Kernels
):
    """The completions of a prompt share its blocks, and then each has some of its own, also none."""
    num_own = torch.tensor([0, 3, 1, 2, 40, 1, 1, 0, 2])
    case = Case.of(heads, kv_heads, head_dim, dtype, [len(num_own)], **form)
    generator = torch.Generator().manual_seed(2)
    tables_RN = torch.arange(num_shared).int().repeat(len(num_own), 1)
    own_RN = torch.arange(num_shared, num_shared + 40 * len(num_own)).int().view(len(num_own), 40)
    places = Places(
        (16 * (num_shared + num_own) - 1 - torch.arange(len(num_own)) % 3).int(),
        torch.arange(len(num_own)).int(),
        torch.cat([tables_RN, own_RN], 1),
    )
    shape = (2, num_shared + own_RN.numel(), BLOCK_TOKENS * case.settings.key_width)
    cache_2NW = torch.randn(shape, generator=generator).to(dtype)
    q_TX, k_TY, v_TY = case.split(case.qkv_TZ)

    def attended(index: torch.Tensor) -> torch.Tensor:
        some = Places(places.positions_T[index], places.table_rows_T[index], places.block_tables_RN)
        rows = (x[index] for x in (q_TX, k_TY, v_TY))
        return attend(*rows, case.rope, some, cache_2NW, case.settings, kernels=native)

    attended(torch.arange(len(num_own)))  # all keys and values are written, by those that share a block too
    alone_TX = torch.cat([attended(torch.tensor([token])) for token in range(len(num_own))])
    for order in (torch.arange(len(num_own)), torch.randperm(len(num_own), generator=generator)):
        assert torch.equal(attended(order), alone_TX[order])


def test_the_torch_path_reads_the_cache_that_it_wrote():
    case = Case.of(6, 2, 16, torch.float32, LENGTHS)
    found = case.paged(in_chunks(LENGTHS, 7), Kernels("torch"))
    torch.testing.assert_close(found.double(), case.exact(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_spans(dtype: torch.dtype, native: Kernels):
    case = Case.of(6, 2, 64, dtype, [1100])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, parts = case.packed(native), case.paged(in_chunks([1100], 500), native)
        torch.set_num_threads(2)
        two = case.packed(native)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(one, two)
    assert torch.equal(one, parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 64), (4, 4, 8), (3, 1, 80)])
def test_gradients_are_those_of_the_definition_in_float64(heads, kv_heads, head_dim, dtype, form, kernels: Kernels):
    case = Case.of(heads, kv_heads, head_dim, dtype, LENGTHS, **form)
    qkv_TZ, wide_TZ = case.qkv_TZ.clone().requires_grad_(), case.qkv_TZ.double().requires_grad_()
    grad_TX = torch.randn(len(qkv_TZ), case.settings.query_width, generator=torch.Generator().manual_seed(2)).to(dtype)
    out_TX = attend_packed(*case.split(qkv_TZ), case.rope, LENGTHS, case.settings, kernels=kernels)
    out_TX.backward(grad_TX)
    exact_TX = torch_impl.attend_packed(*case.split(wide_TZ), case.rope, Segments.alone(LENGTHS), case.settings)
    exact_TX.backward(grad_TX.double())
    assert qkv_TZ.grad is not None and wide_TZ.grad is not None
    error = (qkv_TZ.grad.double() - wide_TZ.grad).norm() / wide_TZ.grad.norm()
    assert error < (2e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_have_the_gradient_of_the_definition_in_float64(dtype: torch.dtype, kernels: Kernels):
    case, gradients = Case.of(6, 3, 16, dtype, LENGTHS), []
    segments = Segments((20, 9, 30, 5), (-1, 0, 0, -1))
    qkv_TZ = case.qkv_TZ[:64]
    grad_TX = torch.randn(64, case.settings.query_width, generator=torch.Generator().manual_seed(2)).to(dtype)
    for wide, path in ((dtype, kernels), (torch.float64, Kernels("torch"))):
        sinks_H = torch.linspace(-2, 2, 6, dtype=wide).requires_grad_()
        settings = replace(case.settings, sinks_H=sinks_H)
        qkv = case.split(qkv_TZ.to(wide))
        attend_packed(*qkv, case.rope, Packing(segments), settings, kernels=path).backward(grad_TX.to(wide))
        assert sinks_H.grad is not None
        gradients.append(sinks_H.grad.double())
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error < (5e-6 if dtype == torch.float32 else 2e-2)


def test_what_does_not_fit_is_refused(native: Kernels):
    case = Case.of(4, 2, 16, torch.float32, [20])
    q_TX, k_TY, v_TY = case.split(case.qkv_TZ)
    with pytest.raises(InputError, match="add up to 19"):
        attend_packed(q_TX, k_TY, v_TY, case.rope, [19], case.settings, kernels=native)
    with pytest.raises(InputError, match=r"k is torch\.float32 of shape"):
        attend_packed(q_TX, q_TX, v_TY, case.rope, [20], case.settings, kernels=native)
    with pytest.raises(InputError, match="rotary tables 8 positions"):
        attend_packed(q_TX, k_TY, v_TY, rope_of(4, 8), [20], case.settings, kernels=native)
    with pytest.raises(InputError, match="turn 32 numbers and a head has 16"):
        attend_packed(q_TX, k_TY, v_TY, rope_of(16, 20), [20], case.settings, kernels=native)


@pytest.mark.parametrize(
    ("position", "row", "block", "complaint"),
    [(-1, 0, 0, "position"), (32, 0, 0, "position"), (0, 2, 0, "row"), (0, 0, 9, "block"), (0, 0, -1, "block")],
)
def test_a_place_out_of_range_is_refused_and_nothing_is_written(position, row, block, complaint, kernels: Kernels):
    settings = AttentionSettings(2, 1, 16, 0.25)
    places = Places(
        torch.tensor([position], dtype=torch.int32),
        torch.tensor([row], dtype=torch.int32),
        torch.full((2, 2), block, dtype=torch.int32),
    )
    cache_2NW = torch.zeros(2, 4, 256)
    with pytest.raises(InputError, match=complaint):
        attend(
            torch.ones(1, 32), torch.ones(1, 16), torch.ones(1, 16), None, places, cache_2NW, settings, kernels=kernels
        )
    assert not cache_2NW.any()
