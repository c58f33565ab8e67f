"""Sequences that go on from one that they share: to the bit as if each had a copy of it, with the gradients of all.

Shape legend: T packed tokens, C tokens with a copy of the shared ones for each sequence, X, Y widths of q and of k, v.
"""

import pytest
import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.attention import torch_impl
from tunesmith.engine.kernels.attention.api import attend_packed
from tunesmith.engine.kernels.attention.records import AttentionSettings, Packing, Rope, Segments, copied_places
from tunesmith.engine.kernels.native import Kernels

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [{}, {"window": 20}, {"softcap": 5.0}]
SHAPES = {
    "ends within a block": Segments((37, 1, 20, 70, 5, 3, 40), (-1, 0, 0, 0, 0, 0, 0)),
    "ends with a block": Segments((32, 9, 17), (-1, 0, 0)),
    "shorter than a block": Segments((3, 9, 13, 1), (-1, 0, 0, 0)),
    "two prompts, and rows alone": Segments((11, 18, 4, 7, 33, 2, 8, 5), (-1, -1, 1, 1, -1, 4, 4, -1)),
    "children apart": Segments((18, 20, 5, 6, 7), (-1, -1, 0, 1, 0)),
    "longer than a span": Segments((520, 30, 8), (-1, 0, 0)),
}


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, native: Kernels) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


def rope() -> Rope:
    angle_PF = torch.arange(600)[:, None] * 10000.0 ** (-torch.arange(16) / 16)
    return Rope(angle_PF.cos(), angle_PF.sin())


def settings_of(heads: int = 6, kv_heads: int = 2, head_dim: int = 64, **form: float) -> AttentionSettings:
    return AttentionSettings(heads, kv_heads, head_dim, head_dim**-0.5, **form)  # type: ignore[arg-type]


def random(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def split(qkv_TZ: torch.Tensor, settings: AttentionSettings) -> tuple[torch.Tensor, ...]:
    return qkv_TZ.split([settings.query_width, settings.key_width, settings.key_width], 1)


def width_of(settings: AttentionSettings) -> int:
    return settings.query_width + 2 * settings.key_width


def copies(segments: Segments) -> tuple[list[int], list[int], list[bool]]:
    """Token of each of the C places, lengths with the copies, and whether a place is the sequence's own."""
    index: list[int] = []
    lengths: list[int] = []
    is_own: list[bool] = []
    for row, (length, parent) in enumerate(zip(segments.lengths, segments.parents, strict=True)):
        before = [] if parent < 0 else list(range(sum(segments.lengths[:parent]), sum(segments.lengths[: parent + 1])))
        own = list(range(sum(segments.lengths[:row]), sum(segments.lengths[: row + 1])))
        index += before + own
        is_own += [False] * len(before) + [True] * length
        lengths.append(len(before) + length)
    return index, lengths, is_own


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", SHAPES.values(), ids=SHAPES)
def test_shared_sequences_have_the_bits_of_copies(segments: Segments, dtype, form, native: Kernels) -> None:
    settings = settings_of(**form)
    qkv_TZ = random(segments.num_tokens, width_of(settings), dtype)
    index, lengths, is_own = copies(segments)
    q, k, v = split(qkv_TZ, settings)
    shared_TX = attend_packed(q, k, v, rope(), Packing(segments), settings, kernels=native)
    q, k, v = split(qkv_TZ[index], settings)
    copied_CX = attend_packed(q, k, v, rope(), lengths, settings, kernels=native)
    assert torch.equal(shared_TX, copied_CX[torch.tensor(is_own)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("segments", SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_copies_in_float64(segments: Segments, form, kernels: Kernels) -> None:
    check_gradients(segments, settings_of(**form), torch.float32, kernels)


@pytest.mark.parametrize("shape", [(6, 2, 64), (4, 4, 8), (3, 1, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_other_widths(shape: tuple[int, int, int], dtype: torch.dtype, kernels: Kernels) -> None:
    check_gradients(SHAPES["ends within a block"], settings_of(*shape), dtype, kernels)


def check_gradients(segments: Segments, settings: AttentionSettings, dtype: torch.dtype, kernels: Kernels) -> None:
    table = Rope(*(x[:, : settings.head_dim // 4] for x in (rope().cos_PF, rope().sin_PF)))
    qkv_TZ = random(segments.num_tokens, width_of(settings), dtype).requires_grad_()
    wide_TZ = qkv_TZ.detach().double().requires_grad_()
    grad_TX = random(segments.num_tokens, settings.query_width, dtype, seed=2)
    q, k, v = split(qkv_TZ, settings)
    attend_packed(q, k, v, table, Packing(segments), settings, kernels=kernels).backward(grad_TX)
    index, lengths, is_own = copies(segments)
    q, k, v = split(wide_TZ[index], settings)
    exact_CX = torch_impl.attend_packed(q, k, v, table, Segments.alone(lengths), settings)
    exact_CX[torch.tensor(is_own)].backward(grad_TX.double())
    assert qkv_TZ.grad is not None and wide_TZ.grad is not None
    for found, exact in zip(split(qkv_TZ.grad, settings), split(wide_TZ.grad, settings), strict=True):
        error = (found.double() - exact).norm() / exact.norm()
        assert error < (2e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_threads(dtype: torch.dtype, native: Kernels) -> None:
    settings, segments = settings_of(), Segments((200, *[60] * 9), (-1, *[0] * 9))
    num_threads = torch.get_num_threads()
    found: list[torch.Tensor] = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            qkv_TZ = random(segments.num_tokens, width_of(settings), dtype).requires_grad_()
            q, k, v = split(qkv_TZ, settings)
            attend_packed(q, k, v, rope(), Packing(segments), settings, kernels=native).sum().backward()
            assert qkv_TZ.grad is not None
            found.append(qkv_TZ.grad)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_layers_of_a_pass_share_room_and_do_not_see_each_other(native: Kernels) -> None:
    settings, segments = settings_of(), SHAPES["ends within a block"]
    packing = Packing(segments)
    layers = [split(random(segments.num_tokens, width_of(settings), torch.bfloat16, seed), settings) for seed in (0, 1)]
    alone = [attend_packed(q, k, v, rope(), Packing(segments), settings, kernels=native) for q, k, v in layers]
    together = [attend_packed(q, k, v, rope(), packing, settings, kernels=native) for q, k, v in (*layers, layers[0])]
    assert all(torch.equal(a, b) for a, b in zip((*alone, alone[0]), together, strict=True))
    assert packing.buffer(settings.key_width, torch.bfloat16) is packing.buffer(settings.key_width, torch.bfloat16)


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    copied = copied_places(Segments((37, 1, 20), (-1, 0, 0)))
    assert copied.places.block_tables_RN.tolist() == [[0, 1, 2, 0], [0, 1, 3, 0], [0, 1, 4, 5]]
    assert copied.num_blocks == 6
    assert copied.copied_E.tolist() == [32, 33, 34, 35, 36] * 2
    assert copied.places.positions_T[58:].tolist() == [32, 33, 34, 35, 36] * 2
    assert copied.places.table_rows_T[58:].tolist() == [1] * 5 + [2] * 5


def test_segments_know_where_their_tokens_stand() -> None:
    segments = Segments((5, 3, 4, 6), (-1, 0, 0, -1))
    assert segments.positions().tolist() == [*range(5), *range(5, 8), *range(5, 9), *range(6)]
    assert segments.longest == 9 and segments.num_tokens == 18
    assert [tokens.tolist() for tokens in segments.token_indices()] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17],
    ]


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((3, 0), (-1, -1), "lengths must be positive"),
        ((3, 2), (-1,), "1 parents"),
        ((3, 2), (1, -1), "sequence 0 continues 1"),
        ((3, 2, 1), (-1, 0, 1), "sequence 2 continues 1"),
        ((3, 2), (-1, -2), "continues -2"),
    ],
)
def test_impossible_segments_are_refused(lengths: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Segments(lengths, parents)


def test_a_shared_sequence_must_fit_the_rotary_tables(native: Kernels) -> None:
    settings, segments = settings_of(), Segments((590, 11), (-1, 0))
    q, k, v = split(random(601, width_of(settings), torch.float32), settings)
    with pytest.raises(InputError, match="601 tokens and the rotary tables 600"):
        attend_packed(q, k, v, rope(), Packing(segments), settings, kernels=native)
