"""Sums over segments in C++ and in torch against a plain loop in float64, gradients included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from tunesmith.core.errors import InputError, NativeUnavailableError
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.segment_sum import torch_impl
from tunesmith.kernels.segment_sum.api import segment_sum

LENGTHS = [[], [0], [1], [0, 0, 3], [5, 0, 64, 1, 200], [1000, 3, 17]]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def by_loop(values_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    sums = [part.sum(0) for part in values_T.double().split(lengths)] if lengths else []
    return torch.stack(sums) if sums else values_T.double()[:0]


@pytest.fixture(params=["native", "torch"])
def kernels(request, built) -> Kernels:
    return built("segment_sum") if request.param == "native" else Kernels("torch")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("columns", [(), (1,), (7,), (3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gradients_are_those_of_a_loop_in_float64(lengths, columns, dtype, kernels: Kernels):
    values_T = normal(sum(lengths), *columns, dtype=dtype).requires_grad_()
    found = segment_sum(values_T, offsets(lengths), kernels=kernels)
    exact = by_loop(values_T, lengths)
    assert found.dtype == torch.float32 and found.shape == (len(lengths), *columns)
    torch.testing.assert_close(found.double(), exact.view(found.shape), atol=1e-4, rtol=1e-6)
    d_sum = normal(*found.shape, seed=1)
    (ours,) = torch.autograd.grad(found, values_T, d_sum)
    assert ours.dtype == dtype
    if sum(lengths):
        expected = d_sum.repeat_interleave(torch.tensor(lengths), dim=0)
        assert torch.equal(ours, expected.to(dtype))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 90), max_size=8), scale=st.sampled_from([1.0, 1e4])
)
def test_any_lengths_sum_as_in_float64(seed, lengths, scale, built):
    values_T = scale * normal(sum(lengths), seed=seed)
    for kernels in (built("segment_sum"), Kernels("torch"), Kernels("auto")):
        found = segment_sum(values_T, offsets(lengths).int(), kernels=kernels)
        torch.testing.assert_close(found.double(), by_loop(values_T, lengths), atol=2e-5 * scale, rtol=1e-6)


def test_a_segment_has_the_same_bits_whatever_is_beside_it_and_on_any_threads(built):
    kernels, lengths = built("segment_sum"), [3000, 17, 250_000, 5, 4000]
    values_T = normal(sum(lengths))
    whole = segment_sum(values_T, offsets(lengths), kernels=kernels)
    num_threads = torch.get_num_threads()
    for index, part_T in enumerate(values_T.split(lengths)):
        alone = segment_sum(part_T.clone(), offsets([len(part_T)]), kernels=kernels)
        assert torch.equal(alone[0], whole[index])
    try:
        torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
        assert torch.equal(segment_sum(values_T, offsets(lengths), kernels=kernels), whole)
    finally:
        torch.set_num_threads(num_threads)


def test_nan_and_infinity_stay_in_their_segment(kernels: Kernels):
    values_T = torch.ones(6)
    values_T[1], values_T[3] = float("nan"), float("inf")
    found = segment_sum(values_T, offsets([2, 2, 2]), kernels=kernels)
    assert found[0].isnan() and found[1].isinf() and found[2] == 2


def test_strides_are_honoured(kernels: Kernels):
    values_TD, lengths = normal(24, 10), [3, 0, 9]
    plain = segment_sum(values_TD[::2, 3:8].contiguous(), offsets(lengths), kernels=kernels)
    assert torch.equal(segment_sum(values_TD[::2, 3:8], offsets(lengths), kernels=kernels), plain)
    spread_S1 = torch.stack([offsets(lengths)] * 2, 1)[:, 0]
    assert torch.equal(segment_sum(values_TD[::2, 3:8], spread_S1, kernels=kernels), plain)


def test_second_derivatives_are_right():
    values_T = normal(9, dtype=torch.float64).requires_grad_()

    def squares(x_T: torch.Tensor) -> torch.Tensor:
        return segment_sum(x_T, offsets([4, 0, 5]), kernels=Kernels("torch")) ** 2

    assert torch.autograd.gradcheck(squares, values_T)
    assert torch.autograd.gradgradcheck(squares, values_T)


def test_torch_sees_an_operator(built):
    kernels, offset_S1, values_TD = built("segment_sum"), offsets([2, 3]), normal(5, 2).requires_grad_()
    torch.library.opcheck(torch.ops.tunesmith.segment_sum.default, (values_TD, offset_S1, kernels.choice))
    torch.library.opcheck(torch.ops.tunesmith.segment_gradient.default, (normal(2, 2), offset_S1, 5, kernels.choice))
    compiled = torch.compile(
        lambda x_TD: segment_sum(x_TD, offset_S1, kernels=kernels).square().sum(), backend="aot_eager", fullgraph=True
    )
    (found,) = torch.autograd.grad(compiled(values_TD), values_TD)
    (plain,) = torch.autograd.grad(segment_sum(values_TD, offset_S1, kernels=kernels).square().sum(), values_TD)
    assert torch.equal(found, plain)


def test_float16_runs_in_torch_and_never_natively(built):
    values_T = normal(5, dtype=torch.float16)
    found = segment_sum(values_T, offsets([5]), kernels=Kernels("auto"))
    assert torch.equal(found, torch_impl.segment_sum(values_T[:, None], offsets([5]))[:, 0])
    with pytest.raises(NativeUnavailableError, match=r"torch\.float16"):
        segment_sum(values_T, offsets([5]), kernels=built("segment_sum"))


def test_what_does_not_fit_is_refused(kernels: Kernels):
    values_T = normal(5)
    with pytest.raises(InputError, match=r"values_T is torch\.int64"):
        segment_sum(values_T.long(), offsets([5]), kernels=kernels)
    with pytest.raises(InputError, match=r"offset_S1 is torch\.float32"):
        segment_sum(values_T, offsets([5]).float(), kernels=kernels)
    for bad in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(InputError, match="it must begin at 0, never fall"):
            segment_sum(values_T, torch.tensor(bad), kernels=kernels)
