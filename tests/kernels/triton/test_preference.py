"""Selection by votes in Triton, run by its interpreter: against the definition in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from preference_cases import (
    batch_of,
    check,
    check_copies_of_what_was_selected,
    check_weights_that_lie_apart,
    exact,
    run,
)
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference.api import update_in_place
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch

SHAPES = [(1, 1), (3, 16), (70, 17), (257, 33), (40, 600)]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_definition_in_float64(
    shape: tuple[int, int], dtype: torch.dtype, deterministic: bool, interpreted: Kernels
):
    batch, weights_N = batch_of(*shape, dtype=dtype), normal(shape[1], seed=5)
    found = run(batch, weights_N, -0.3, interpreted, deterministic=deterministic)
    expected = exact(batch, weights_N, -0.3)
    # The interpreter cuts bfloat16 where a GPU rounds; only means of ties are not exact.
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.selected_BN.double(), expected.selected_BN, atol=1e-6, rtol=tolerance)
    torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


@given(num_pairs=st.integers(0, 20), num_columns=st.integers(0, 40), seed=st.integers(0, 999), votes=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_shape_with_or_without_vote_weights(num_pairs: int, num_columns: int, seed: int, votes: bool):
    batch = batch_of(num_pairs, num_columns, seed=seed)
    check(batch if votes else replace(batch, vote_weights_B=None), Kernels("triton"), seed=seed)


def test_what_was_not_selected_has_no_influence_and_what_was_is_copied_bit_by_bit(interpreted: Kernels):
    check_copies_of_what_was_selected(interpreted, torch.float32, num_pairs=6)


def test_slices_of_wider_tensors_are_found_by_their_strides(interpreted: Kernels):
    wide_a, wide_b = normal(40, 70), normal(40, 90, seed=1)
    batch = PreferenceBatch(wide_a[:, 3:40], wide_b[:, 20:57], torch.arange(40) % 2)
    check(batch, interpreted)


def test_gradients_and_updates_in_place_go_through_the_same_kernels(interpreted: Kernels):
    batch, weights_N = batch_of(12, 20), normal(20)
    a_BN = batch.outputs_a_BN.clone().requires_grad_()
    found = run(replace(batch, outputs_a_BN=a_BN), weights_N, 0.3, interpreted)
    (gradient,) = torch.autograd.grad(found.weights_N.sum(), a_BN)
    share_B = torch.where(batch.choices_B == 0.5, 0.5, batch.choices_B)
    torch.testing.assert_close(gradient, (0.3 * share_B * batch.vote_weights_B)[:, None].expand(12, 20))
    selected_BN = update_in_place(batch, weights_N, scale=0.3, kernels=interpreted)
    assert torch.equal(selected_BN, found.selected_BN)
    assert torch.equal(weights_N, found.weights_N)


def test_more_sums_than_one_block_are_all_added(interpreted: Kernels):
    from tunesmith.engine.kernels.preference import triton_impl

    batch, weights_N = batch_of(100, 10), normal(10)
    out = (torch.empty(100, 10), torch.empty(10))
    triton_impl.select_into(batch, weights_N, 0.5, out, triton_impl.LaunchPlan(16, 1, 4, grid=(100, 1)))
    torch.testing.assert_close(out[1].double(), exact(batch, weights_N, 0.5).weights_N, atol=1e-5, rtol=1e-5)


def test_weights_that_lie_apart_are_updated_in_place(interpreted: Kernels):
    check_weights_that_lie_apart(interpreted)


@pytest.mark.parametrize("block_n", [None, 64, 128, 256, 512])
@pytest.mark.parametrize("shape", [(1, 1), (1000, 512), (1_000_000, 512), (3, 100_000), (1 << 20, 8192)])
def test_a_plan_covers_every_row_and_column_with_tiles_of_one_size(shape: tuple[int, int], block_n: int | None):
    from tunesmith.engine.kernels.preference.triton_impl import launch

    plan = launch(shape, block_n)
    in_program = plan.tiles * plan.block_rows
    assert plan.grid[0] * in_program >= shape[0] > (plan.grid[0] - 1) * in_program
    assert plan.grid[1] * plan.block >= shape[1] > (plan.grid[1] - 1) * plan.block
    assert in_program % plan.block_rows == 0
    assert plan.block_rows * plan.block <= 2048
    assert block_n in (None, plan.block)


def test_all_block_sizes_give_the_same_selection_and_weights(interpreted: Kernels):
    batch, start_N = batch_of(100, 150), normal(150)
    expected = exact(batch, start_N, 0.5)
    for block in (64, 128, 256, 512):
        for deterministic in (True, False):
            weights_N = start_N.clone()
            selected_BN = update_in_place(
                batch, weights_N, scale=0.5, block=block, deterministic=deterministic, kernels=interpreted
            )
            torch.testing.assert_close(selected_BN.double(), expected.selected_BN)
            torch.testing.assert_close(weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)
