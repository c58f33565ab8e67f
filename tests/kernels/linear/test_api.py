"""Linear maps over packed weights: against the definition in float64, and against torch to the bit."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import drawn
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.linear import exact
from tunesmith.engine.kernels.linear.api import PackedWeight, block_like_torch, linear, pack
from tunesmith.engine.kernels.native import Kernels

SHAPES = [(48, 64), (960, 576), (100, 1030), (576, 1536), (17, 2), (33, 64)]
FAST = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request, native) -> torch.dtype:
    """A dtype that the native kernel for linear maps has on this processor."""
    is_bfloat16 = request.param == torch.bfloat16
    if not native.library("linear", torch.device("cpu")).linear_panel_outputs(is_bfloat16):
        pytest.skip("this processor has no AVX512-BF16, or has AMX, with which no weight is packed")
    return request.param


@pytest.fixture
def normal(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Normally distributed numbers of the dtype."""
    return partial(drawn.normal, dtype=dtype)


def cancelling(half_RH: torch.Tensor) -> torch.Tensor:
    """Rows whose second half is their first with the sign turned: sums over equal halves of a weight are rounding."""
    return torch.cat([half_RH, -half_RH], 1)


def packed_like_torch(weight_OI: torch.Tensor, kernels: Kernels) -> PackedWeight:
    block = block_like_torch(weight_OI, kernels=kernels)
    if block is None:
        pytest.skip("torch sums in an order that is not known here")
    return pack(weight_OI, block, kernels=kernels)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("block", [2, 64, 512, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_torch_in_float64(shape, block, with_bias, normal, native: Kernels):
    weight_OI, x_RI = normal(*shape), normal(13, shape[1], seed=1)
    bias_O = normal(shape[0], seed=2) if with_bias else None
    found_RO = linear(x_RI, pack(weight_OI, block, kernels=native), bias_O)
    wide_O = None if bias_O is None else bias_O.double()
    exact_RO = torch.nn.functional.linear(x_RI.double(), weight_OI.double(), wide_O)
    error_RO = (found_RO.double() - exact_RO).abs()
    terms_RO = x_RI.double().abs() @ weight_OI.double().abs().T
    assert bool((error_RO <= torch.finfo(x_RI.dtype).eps * exact_RO.abs() + 1e-6 * terms_RO).all())


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 33, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_torch_even_where_nothing_but_rounding_is_left(shape, num_rows, normal, native: Kernels):
    half_OI = normal(shape[0], shape[1] // 2)
    weight_OI = torch.cat([half_OI, half_OI], 1)
    packed = packed_like_torch(weight_OI, native)
    bias_O = normal(shape[0], seed=2)
    for x_RI in (cancelling(normal(num_rows, shape[1] // 2, seed=0)), normal(num_rows, shape[1], seed=3)):
        rows_RI = torch.cat([x_RI, x_RI])[: max(2, num_rows)]  # torch may sum a single row in another order
        for bias in (None, bias_O):
            expected_RO = exact.linear(rows_RI, weight_OI, bias)[:num_rows]  # torch's own for bfloat16
            assert torch.equal(linear(x_RI, packed, bias), expected_RO)


def test_another_block_has_other_bits(normal, native: Kernels):
    """So the trial of `block_like_torch` can tell one order from another."""
    half_OI = normal(64, 1100)
    weight_OI = torch.cat([half_OI, half_OI], 1)
    x_RI = cancelling(normal(16, 1100, seed=0))
    found = [linear(x_RI, pack(weight_OI, block, kernels=native), None) for block in (512, 1024, 4096)]
    assert all((first != second).float().mean() > 0.9 for first, second in pairwise(found))


@FAST
@given(num_rows=st.integers(1, 70), num_outputs=st.integers(1, 130), pairs=st.integers(1, 40), gap=st.integers(0, 5))
def test_a_row_does_not_depend_on_others_on_threads_or_on_where_it_stands(
    num_rows, num_outputs, pairs, gap, normal, native
):
    packed = pack(normal(num_outputs, 2 * pairs), 16, kernels=native)
    wide_RI = normal(num_rows, 2 * pairs + gap, seed=1)
    x_RI = wide_RI[:, gap:]
    whole_RO = linear(x_RI, packed, None)
    assert torch.equal(linear(x_RI.contiguous(), packed, None), whole_RO)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x_RI, packed, None), whole_RO)
    finally:
        torch.set_num_threads(threads)
    row = num_rows // 2
    assert torch.equal(linear(x_RI[row : row + 1], packed, None), whole_RO[row : row + 1])


def test_large_work_is_divided_and_stays_the_same(normal, native: Kernels):
    packed, x_RI = pack(normal(100, 576), 512, kernels=native), normal(500, 576, seed=1)
    threads = torch.get_num_threads()
    found: list[torch.Tensor] = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(linear(x_RI, packed, None))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


def test_nan_and_infinity_come_through(normal, native: Kernels):
    x_RI = normal(4, 64)
    x_RI[1, 5], x_RI[2, 7] = float("nan"), float("inf")
    found_RO = linear(x_RI, pack(normal(20, 64, seed=1), 512, kernels=native), None)
    assert bool(found_RO[1].isnan().all()) and not bool(found_RO[2].isfinite().any())
    assert bool(found_RO[[0, 3]].isfinite().all())


def test_no_rows_give_no_rows(normal, native: Kernels):
    assert linear(normal(0, 64), pack(normal(20, 64), 512, kernels=native), None).shape == (0, 20)


def test_what_does_not_fit_is_refused(dtype, normal, native: Kernels):
    packed = pack(normal(20, 64), 512, kernels=native)
    with pytest.raises(InputError, match=rf"give {dtype} \[3, 64\]"):
        linear(normal(3, 62), packed, None)
    with pytest.raises(InputError, match="float64"):
        linear(normal(3, 64).double(), packed, None)
    with pytest.raises(InputError, match=rf"give {dtype} \[20\]"):
        linear(normal(3, 64), packed, normal(21))
    with pytest.raises(InputError, match="float64"):
        pack(normal(20, 64).double(), 512, kernels=native)
    with pytest.raises(InputError, match="even number of inputs"):
        pack(normal(20, 63), 512, kernels=native)
    with pytest.raises(InputError, match="block is 3"):
        pack(normal(20, 64), 3, kernels=native)


def test_without_native_kernels_there_is_none_and_packing_says_so():
    weight_OI = torch.zeros(20, 64)
    assert block_like_torch(weight_OI, kernels=Kernels("torch")) is None
    with pytest.raises(NativeUnavailableError, match="block_like_torch"):
        pack(weight_OI, 512, kernels=Kernels("torch"))


def test_an_odd_number_of_inputs_is_left_to_torch(normal, native: Kernels):
    assert block_like_torch(normal(20, 63), kernels=native) is None
