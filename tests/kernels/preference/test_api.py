"""Selection by votes and the update: against the definition in float64, bits of what was selected, and refusals."""

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
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.native import Kernels, shared
from tunesmith.engine.kernels.preference import api
from tunesmith.engine.kernels.preference.api import update_in_place
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch

SHAPES = [(1, 1), (3, 16), (7, 17), (257, 33), (600, 512), (2, 2049), (5, 4100), (37, 3072)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_definition_in_float64(shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels):
    batch, weights_N = batch_of(*shape, dtype=dtype), normal(shape[1], seed=5)
    found, expected = run(batch, weights_N, -0.3, kernels), exact(batch, weights_N, -0.3)
    assert torch.equal(found.selected_BN, expected.selected_BN.to(dtype))
    torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


@given(num_pairs=st.integers(0, 40), num_columns=st.integers(0, 70), seed=st.integers(0, 999), votes=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_shape_with_or_without_vote_weights(num_pairs: int, num_columns: int, seed: int, votes: bool):
    batch = batch_of(num_pairs, num_columns, seed=seed)
    check(batch if votes else replace(batch, vote_weights_B=None), Kernels(), seed=seed)


@pytest.mark.parametrize("choices", [torch.tensor([True, False]), torch.tensor([1, 0]), torch.tensor([1.0, 0.0])])
def test_choices_may_be_booleans_whole_numbers_or_floats(choices: torch.Tensor, kernels: Kernels):
    batch = replace(batch_of(2, 5), choices_B=choices, vote_weights_B=None)
    found = run(batch, torch.zeros(5), 1.0, kernels)
    assert torch.equal(found.selected_BN, torch.stack([batch.outputs_a_BN[0], batch.outputs_b_BN[1]]))
    torch.testing.assert_close(found.weights_N, batch.outputs_a_BN[0] + batch.outputs_b_BN[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_not_selected_has_no_influence_and_what_was_is_copied_bit_by_bit(dtype: torch.dtype, kernels: Kernels):
    check_copies_of_what_was_selected(kernels, dtype, num_pairs=300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_definition_in_float64(dtype: torch.dtype, kernels: Kernels):
    batch, weights_N = batch_of(9, 21, dtype=dtype), normal(21, seed=5)
    inputs = (batch.outputs_a_BN, batch.outputs_b_BN, batch.vote_weights_B, weights_N)
    out_BN, out_N = normal(9, 21, seed=7), normal(21, seed=8)

    def gradients(tensors, work):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        a_BN, b_BN, votes_B, start_N = leaves
        selected_BN, updated_N = work(PreferenceBatch(a_BN, b_BN, batch.choices_B, votes_B), start_N)
        total = (selected_BN * out_BN.to(selected_BN.dtype)).sum() + (updated_N * out_N.to(updated_N.dtype)).sum()
        return torch.autograd.grad(total, leaves)

    def ours(pairs: PreferenceBatch, start_N: torch.Tensor):
        found = run(pairs, start_N, 0.4, kernels)
        return found.selected_BN, found.weights_N

    def definition(pairs: PreferenceBatch, start_N: torch.Tensor):
        found = exact(pairs, start_N, 0.4)
        return found.selected_BN, found.weights_N

    found = gradients(inputs, ours)
    expected = gradients([tensor.double() for tensor in inputs], definition)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for mine, theirs, given_ in zip(found, expected, inputs, strict=True):
        assert mine.dtype == given_.dtype
        torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=tolerance)


def test_slices_of_wider_tensors_need_no_copy_and_give_the_same(kernels: Kernels):
    wide_a, wide_b = normal(40, 70), normal(40, 70, seed=1)
    batch = PreferenceBatch(wide_a[:, 3:40], wide_b[:, 20:57], torch.arange(40) % 2)
    found = run(batch, torch.zeros(37), 1.0, kernels)
    dense = PreferenceBatch(batch.outputs_a_BN.clone(), batch.outputs_b_BN.clone(), batch.choices_B)
    expected = run(dense, torch.zeros(37), 1.0, kernels)
    assert torch.equal(found.selected_BN, expected.selected_BN)
    assert torch.equal(found.weights_N, expected.weights_N)


def test_columns_that_lie_apart_are_copied(kernels: Kernels):
    batch = PreferenceBatch(normal(37, 40).t(), normal(37, 40, seed=1).t(), torch.arange(40) % 2)
    found, expected = run(batch, torch.zeros(37), 1.0, kernels), exact(batch, torch.zeros(37), 1.0)
    assert found.selected_BN.is_contiguous()
    assert torch.equal(found.selected_BN, expected.selected_BN.float())
    torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


def test_the_number_of_threads_changes_no_bit(native: Kernels):
    batch, weights_N = batch_of(3000, 600), normal(600)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(run(batch, weights_N, 0.1, native).weights_N)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_long_sum_loses_nothing(native: Kernels):
    ones_BN = torch.ones(200_000, 16)
    batch = PreferenceBatch(ones_BN, ones_BN, torch.zeros(200_000), torch.full((200_000,), 0.1))
    found = run(batch, torch.zeros(16), 1.0, native)
    expected = torch.full((16,), 200_000 * float(torch.tensor(0.1)))
    torch.testing.assert_close(found.weights_N, expected, rtol=5e-6, atol=0.0)


@pytest.mark.parametrize("num_columns", [16, 21, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_too_large_for_the_caches_are_the_same(num_columns: int, dtype: torch.dtype, native: Kernels):
    num_pairs = (1 << 21) // num_columns
    batch, weights_N = batch_of(num_pairs, num_columns, dtype=dtype), torch.zeros(num_columns)
    found, expected = run(batch, weights_N, 1e-3, native), run(batch, weights_N, 1e-3, Kernels("torch"))
    assert torch.equal(found.selected_BN, expected.selected_BN)
    torch.testing.assert_close(found.weights_N, expected.weights_N, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("share_of_ties", [0.0, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pairs", [70, 5003])
def test_ties_between_rows_that_are_added_together_keep_their_place(
    num_pairs: int, dtype: torch.dtype, share_of_ties: float, native: Kernels
):
    batch = batch_of(num_pairs, 512, dtype=dtype, share_of_ties=share_of_ties)
    found, expected = run(batch, torch.zeros(512), 1e-2, native), exact(batch, torch.zeros(512), 1e-2)
    assert torch.equal(found.selected_BN, expected.selected_BN.to(dtype))
    torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_columns", [33, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_size_of_a_block_changes_more_than_rounding_nor_depends_on_threads(
    dtype: torch.dtype, num_columns: int, native: Kernels
):
    batch = batch_of(3001, num_columns, dtype=dtype)
    expected, before = exact(batch, torch.zeros(num_columns), 0.1), torch.get_num_threads()
    for block in (None, 16, 64, 512, 2048):
        results = []
        for num_threads in (1, 2):
            try:
                torch.set_num_threads(num_threads)
                weights_N = torch.zeros(num_columns)
                selected_BN = update_in_place(batch, weights_N, scale=0.1, block=block, kernels=native)
            finally:
                torch.set_num_threads(before)
            results.append(weights_N)
            assert torch.equal(selected_BN, expected.selected_BN.to(dtype))
        assert torch.equal(*results)
        torch.testing.assert_close(results[0].double(), expected.weights_N, atol=1e-4, rtol=1e-5)


def test_an_update_in_place_counts_as_a_change(native: Kernels):
    weights_N = torch.zeros(64)
    before = weights_N._version
    update_in_place(batch_of(5, 64), weights_N, scale=0.1, kernels=native)
    assert weights_N._version > before


@pytest.mark.parametrize("index", [0, 3])
def test_a_choice_that_is_refused_changes_no_weight(index: int, kernels: Kernels):
    weights_N, choices_B = torch.ones(3), torch.tensor([0.0, 1.0, 0.5, 0.0])
    choices_B[index] = 0.75
    with pytest.raises(InputError, match=rf"choices hold 0\.75 at {index}"):
        update_in_place(replace(BATCH, choices_B=choices_B), weights_N, scale=1.0, kernels=kernels)
    assert weights_N.tolist() == [1.0] * 3


@pytest.mark.parametrize("num_columns", [16, 33])
def test_a_block_is_the_rows_that_are_added_in_float32(num_columns: int, native: Kernels):
    a_BN = torch.ones(2048, num_columns)
    a_BN[0] = 2.0**24  # a float32 to which 1 cannot be added
    batch = PreferenceBatch(a_BN, a_BN, torch.ones(2048))
    for block in (16, 256, 2048):
        weights_N = torch.zeros(num_columns)
        update_in_place(batch, weights_N, scale=1.0, block=block, kernels=native)
        assert weights_N.tolist() == [2.0**24 + 2048 - block] * num_columns


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("num_columns", [17, 64])
def test_in_place_writes_weights_and_the_memory_given(num_columns: int, offset: int, kernels: Kernels):
    batch, weights_N = batch_of(40_000, num_columns), normal(num_columns)
    expected = run(batch, weights_N, 0.2, kernels)
    room = torch.empty(batch.outputs_a_BN.numel() + offset)[offset:].view(40_000, num_columns)
    selected_BN = update_in_place(batch, weights_N, scale=0.2, out_BN=room, kernels=kernels)
    assert selected_BN.data_ptr() == room.data_ptr()
    assert torch.equal(room, expected.selected_BN)
    assert torch.equal(weights_N, expected.weights_N)


def test_weights_that_lie_apart_are_updated_in_place(kernels: Kernels):
    check_weights_that_lie_apart(kernels)


def test_empty_batches_change_nothing(kernels: Kernels):
    weights_N = normal(4)
    nothing = torch.empty(0, 4)
    found = run(PreferenceBatch(nothing, nothing, torch.empty(0)), weights_N, 1.0, kernels)
    assert found.selected_BN.shape == (0, 4)
    assert torch.equal(found.weights_N, weights_N)
    no_columns = torch.empty(3, 0)
    assert (
        run(PreferenceBatch(no_columns, no_columns, torch.ones(3)), torch.empty(0), 1.0, kernels).weights_N.numel() == 0
    )


def test_half_and_double_precision_are_left_to_the_definition_and_refused_natively(native: Kernels):
    for dtype in (torch.float16, torch.float64):
        batch, weights_N = batch_of(5, 6, dtype=dtype), torch.zeros(6, dtype=dtype)
        found, expected = run(batch, weights_N, 1.0, shared("auto")), exact(batch, weights_N, 1.0)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-3
        torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=tolerance, rtol=tolerance)
        with pytest.raises(NativeUnavailableError, match="is for bfloat16 and float32 and was given"):
            run(batch, weights_N, 1.0, native)


def test_torch_compile_sees_one_operator_with_gradients(native: Kernels):
    batch, weights_N = batch_of(6, 10), normal(10).requires_grad_()

    def work(a_BN: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        found = run(replace(batch, outputs_a_BN=a_BN * 2), weights_N, 0.5, native)
        return found.selected_BN.sum() + found.weights_N.square().sum()

    a_BN = batch.outputs_a_BN.clone().requires_grad_()
    expected = torch.autograd.grad(work(a_BN, weights_N), (a_BN, weights_N))
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(a_BN, weights_N), (a_BN, weights_N))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_operator_keeps_the_rules_of_torch_library():
    batch = batch_of(6, 10)
    inputs = (batch.outputs_a_BN, batch.outputs_b_BN, batch.vote_weights_B, normal(10))
    a_BN, b_BN, votes_B, weights_N = (tensor.clone().requires_grad_() for tensor in inputs)
    torch.library.opcheck(api._select, (a_BN, b_BN, batch.choices_B, votes_B, weights_N, 0.5, True, "auto"))


BATCH = batch_of(4, 3)
WRONG = {
    r"outputs_a is torch.int64": {"outputs_a_BN": torch.zeros(4, 3, dtype=torch.int64)},
    r"outputs_a is .* \[pairs, numbers\]": {"outputs_a_BN": torch.zeros(4, 3, 1)},
    r"outputs_b is .* \(4, 2\).*give \[4, 3\]": {"outputs_b_BN": torch.zeros(4, 2)},
    r"outputs_b is torch.bfloat16": {"outputs_b_BN": torch.zeros(4, 3, dtype=torch.bfloat16)},
    r"choices are .* \(5,\).*give \[4\]": {"choices_B": torch.zeros(5)},
    r"choices hold 2.0 at 1; allowed: 1 \(A\), 0 \(B\) and 0.5": {"choices_B": torch.tensor([0.5, 2.0, 0.0, 1.0])},
    r"choices hold nan at 0": {"choices_B": torch.full((4,), torch.nan)},
    r"vote_weights is .* \(3,\)": {"vote_weights_B": torch.zeros(3)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused_by_name(message: str, kernels: Kernels):
    with pytest.raises(InputError, match=message):
        run(replace(BATCH, **WRONG[message]), torch.zeros(3), 1.0, kernels)


def test_weights_scale_and_memory_that_do_not_fit_are_refused(kernels: Kernels):
    with pytest.raises(InputError, match=r"weights is .* \(4,\).*give \[3\]"):
        run(BATCH, torch.zeros(4), 1.0, kernels)
    with pytest.raises(InputError, match="scale is inf"):
        run(BATCH, torch.zeros(3), float("inf"), kernels)
    with pytest.raises(InputError, match=r"out is .* without gaps"):
        update_in_place(BATCH, torch.zeros(3), scale=1.0, out_BN=torch.empty(3, 4).t(), kernels=kernels)
    with pytest.raises(InputError, match="block is 100; give one of 16, 32, 64"):
        update_in_place(BATCH, torch.zeros(3), scale=1.0, block=100, kernels=kernels)
