"""GAE in Triton's interpreter against the loop over tokens in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gae_cases import gae_loop
from tunesmith.engine.kernels.gae import triton_impl
from tunesmith.engine.kernels.gae.api import gae
from tunesmith.engine.kernels.native import Kernels


def case(num_rows: int, num_columns: int, share: float, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    reward_BT, value_BT = torch.randn(2, num_rows, num_columns, generator=generator).unbind()
    mask_BT = torch.rand(num_rows, num_columns, generator=generator) < share
    return reward_BT.masked_fill(~mask_BT, float("nan")), value_BT.masked_fill(~mask_BT, float("inf")), mask_BT


def check(tensors: tuple[torch.Tensor, ...], gamma: float, lam: float, kernels: Kernels) -> None:
    found, exact = gae(*tensors, gamma, lam, kernels=kernels), gae_loop(*tensors, gamma, lam)
    torch.testing.assert_close(found.advantage_BT.double(), exact.advantage_BT, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(found.return_BT.double(), exact.return_BT, atol=3e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 3),
    num_columns=st.integers(0, 70),
    share=st.floats(0, 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_a_row_in_one_block_is_the_loop_over_tokens(seed, num_rows, num_columns, share, gamma, lam):
    check(case(num_rows, num_columns, share, seed), gamma, lam, Kernels("triton"))


@pytest.mark.parametrize("num_columns", [31, 32, 33, 64, 100])
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_longer_rows_carry_over_from_block_to_block(num_columns: int, share: float, interpreted, monkeypatch):
    monkeypatch.setattr(triton_impl, "_LARGEST_BLOCK", 32)
    assert triton_impl.launch(2, num_columns).block == 32
    check(case(2, num_columns, share, num_columns), 0.99, 0.95, interpreted)
    check(case(2, num_columns, share, num_columns), 1.0, 1.0, interpreted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strides_and_short_dtypes_are_honoured(dtype: torch.dtype, interpreted: Kernels):
    reward_BT, value_BT, mask_BT = case(6, 40, 0.7, 0)
    spread = (
        reward_BT.t().contiguous().t()[::2, 1:],
        value_BT.to(dtype)[::2, 1:],
        mask_BT.t().contiguous().t()[::2, 1:],
    )
    check(spread, 1.0, 0.95, interpreted)


def test_a_launch_covers_the_row_and_stays_within_its_block():
    for num_columns in (1, 32, 33, 2048, 2049, 100_000):
        plan = triton_impl.launch(7, num_columns)
        assert plan.grid[0] == 7
        assert plan.block >= min(num_columns, 2048) and plan.block <= 2048
        assert plan.num_warps in (1, 2, 4, 8)
