"""The policy loss in Triton's interpreter, against the definition by autograd in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_cases import NOISE, TERMS, Case, check
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.policy_loss import triton_impl
from tunesmith.engine.kernels.policy_loss.api import fused_policy_loss
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens

WHOLE = PolicyTerms(kl_coef=0.1, dual_clip=3.0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 4),
    num_columns=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.7, 1.0]),
    terms=TERMS,
    noise=NOISE,
    per_row=st.booleans(),
)
def test_loss_sums_and_gradients_are_those_of_autograd(seed, num_rows, num_columns, share, terms, noise, per_row):
    case = Case.of(num_rows, num_columns, terms, noise=noise, share=share, per_row=per_row, seed=seed)
    check(case, Kernels("triton"), tolerance=2e-6 if noise < 1 else 1e-4)


def test_a_batch_of_several_blocks_with_a_weight_for_each_row(interpreted: Kernels):
    check(Case.of(7, 500, WHOLE, per_row=True), interpreted, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_computed_in_float32(dtype: torch.dtype, interpreted: Kernels):
    # The interpreter cuts a float32 off where a GPU rounds it to bfloat16; the gradient is stored in float32.
    check(Case.of(3, 50, WHOLE, dtype=dtype), interpreted, tolerance=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_beyond_the_range_of_floats_gives_a_gradient_that_is_refused(advantage: float, interpreted: Kernels):
    logp_BT = torch.tensor([[1e4, -1.0]]).requires_grad_()
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    tokens = PolicyTokens(logp_BT, torch.tensor([[-1.0, -1.0]]), torch.full((1, 2), advantage), mask_BT)
    fused = fused_policy_loss(tokens, PolicyTerms(), 2.0, kernels=interpreted)
    assert fused is not None
    (gradient_BT,) = torch.autograd.grad(fused[0], logp_BT)
    assert not gradient_BT[0, 0].isfinite() and gradient_BT[0, 1].isfinite()


def test_what_is_not_fused_is_left_to_the_definition(interpreted: Kernels):
    whole, wide = Case.of(2, 3, WHOLE), Case.of(2, 3, WHOLE, dtype=torch.float64)
    assert fused_policy_loss(whole.tokens, PolicyTerms(level="sequence"), 1.0, kernels=interpreted) is None
    is_on_gpu = whole.tokens.logp_BT.is_cuda
    assert (fused_policy_loss(whole.tokens, WHOLE, 1.0, kernels=Kernels("auto")) is None) != is_on_gpu
    assert fused_policy_loss(wide.tokens, WHOLE, 1.0, kernels=Kernels("auto")) is None


def test_a_launch_covers_every_token():
    for num_tokens in (0, 1, 1024, 1025, 5_000_000):
        plan = triton_impl.launch(num_tokens)
        assert (plan.grid[0] - 1) * plan.block < max(num_tokens, 1) and plan.grid[0] * plan.block >= num_tokens
