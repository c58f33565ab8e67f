"""Scale, mask and softmax in Triton, run by its interpreter: against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from softmax_cases import MASKS, check_extreme_scores, check_mask, check_shape, with_gradient
from tunesmith.engine.kernels.masked_softmax import torch_impl
from tunesmith.engine.kernels.masked_softmax.api import NO_WINDOW, masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels

# The interpreter cuts bfloat16 where a GPU rounds: a unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_are_those_of_the_definition_in_float64(
    name: str, dtype: torch.dtype, interpreted: Kernels
):
    check_mask(MASKS[name], dtype, interpreted, TOLERANCE[dtype])


@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 4), st.integers(0, 30)),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 999),
)
@settings(max_examples=25, deadline=None)
def test_any_shape(sizes: tuple[int, int, int, int], causal: bool, window: int | None, seed: int):
    check_shape(sizes, KeyMask(causal, window), Kernels("triton"), scale=2.0, seed=seed)


@pytest.mark.parametrize("mask", [KeyMask(causal=False), KeyMask(), KeyMask(window=70), MASKS["none"]])
def test_rows_longer_than_a_block_give_the_same(mask: KeyMask, interpreted: Kernels):
    from tunesmith.engine.kernels.masked_softmax import triton_impl

    scores_BHQK, d_out = 3 * normal(2, 1, 3, 200), normal(2, 1, 3, 200, seed=1)
    mask = KeyMask(mask.causal, mask.window, keys_B2=torch.tensor([[150, 200], [0, 30]]))
    exact, gradient = with_gradient(scores_BHQK.double(), d_out, lambda x: torch_impl.masked_softmax(x, 0.5, mask))
    plan = triton_impl.LaunchPlan(64, 4, 4, grid=(6,))
    window = NO_WINDOW if mask.window is None else mask.window
    rules = (0.5, mask.causal, window, 197, plan)
    found = triton_impl.forward(scores_BHQK, mask.keys_B2, None, *rules)
    torch.testing.assert_close(found.double(), exact, atol=2e-6, rtol=2e-6)
    d_scores = triton_impl.backward(found, d_out, mask.keys_B2, *rules)
    torch.testing.assert_close(d_scores.double(), gradient, atol=2e-6, rtol=2e-6)


def test_a_mask_of_booleans_holds_in_rows_longer_than_a_block_too(interpreted: Kernels):
    from tunesmith.engine.kernels.masked_softmax import triton_impl

    allowed_BQK = torch.rand(2, 1, 200, generator=torch.Generator().manual_seed(3)) > 0.7
    allowed_BQK[1] = False
    scores_BHQK, mask = normal(2, 1, 3, 200), KeyMask(causal=False, allowed_BQK=allowed_BQK)
    plan = triton_impl.LaunchPlan(64, 4, 4, grid=(6,))
    found = triton_impl.forward(scores_BHQK, None, allowed_BQK, 1.0, False, NO_WINDOW, 197, plan)
    exact = torch_impl.masked_softmax(scores_BHQK.double(), 1.0, mask)
    torch.testing.assert_close(found.double(), exact, atol=2e-6, rtol=2e-6)


def test_extreme_scores_stay_exact_and_rows_that_see_nothing_are_0(interpreted: Kernels):
    check_extreme_scores(interpreted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_are_told_by_their_row_alone(bad: float, interpreted: Kernels):
    scores_BHQK = normal(1, 1, 9, 9)
    scores_BHQK[0, 0, 7, 3] = bad
    scores_BHQK[0, 0, 2, 8] = bad  # after its query
    found = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=interpreted)
    expected = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=Kernels("torch"))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("num_keys", [1, 17, 1000, 4096, 8192, 8193, 1_000_000])
@pytest.mark.parametrize("num_rows", [1, 100, 1 << 20])
def test_a_plan_covers_every_row_and_fits_the_registers(num_rows: int, num_keys: int):
    from tunesmith.engine.kernels.masked_softmax.triton_impl import launch

    plan = launch(num_rows, num_keys)
    assert plan.grid[0] * plan.block_rows >= num_rows > (plan.grid[0] - 1) * plan.block_rows
    assert plan.block * plan.tiles >= num_keys > plan.block * (plan.tiles - 1)
    assert plan.tiles == 1 or plan.block_rows == 1
    assert plan.block_rows * plan.block <= 8 * 32 * plan.num_warps or plan.num_warps == 1
