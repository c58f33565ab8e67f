"""Sums over segments in Triton's interpreter against a loop in float64, gradients included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.kernels.native import Kernels
from tunesmith.kernels.segment_sum import triton_impl
from tunesmith.kernels.segment_sum.api import segment_sum


def check(values_T: torch.Tensor, lengths: list[int], kernels: Kernels) -> None:
    leaf_T, offset_S1 = values_T.detach().requires_grad_(), torch.tensor([0, *lengths]).cumsum(0)
    found = segment_sum(leaf_T, offset_S1, kernels=kernels)
    assert found.dtype == torch.float32
    exact = [part.sum(0) for part in values_T.double().split(lengths)] if lengths else []
    for ours, expected in zip(found.double(), exact, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-6)
    d_sum = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad(found, leaf_T, d_sum)
    if sum(lengths):
        expected = d_sum.repeat_interleave(torch.tensor(lengths), dim=0)
        torch.testing.assert_close(ours.float(), expected, atol=0, rtol=0 if ours.dtype == torch.float32 else 2**-7)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 40), max_size=5))
def test_any_lengths_sum_as_in_float64(seed, lengths):
    check(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed)), lengths, Kernels("triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_longer_than_a_tile_and_short_dtypes(dtype: torch.dtype, interpreted: Kernels):
    check(torch.randn(2500, generator=torch.Generator().manual_seed(0)).to(dtype), [1024, 0, 1, 1475], interpreted)


@pytest.mark.parametrize("num_columns", [1, 3, 64, 65])
def test_columns_are_summed_apart(num_columns: int, interpreted: Kernels):
    values_TD = torch.randn(70, 2 * num_columns, generator=torch.Generator().manual_seed(0))[::2, ::2]
    check(values_TD, [17, 0, 18], interpreted)


def test_a_launch_has_a_program_for_each_segment_and_block_of_columns():
    for num_columns in (1, 2, 63, 64, 65, 1000):
        plan = triton_impl.launch(9, num_columns)
        assert plan.grid[0] == 9 and plan.grid[1] * plan.block_columns >= num_columns
        assert plan.block_rows * plan.block_columns == 1024
