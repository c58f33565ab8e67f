"""Linear maps in 8 bits: against their definition, and against the exact product within the error of rounding."""

import pytest
import torch

import drawn
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.linear_int8 import torch_impl
from tunesmith.engine.kernels.linear_int8.api import PackedInt8, has_native, linear, pack, stored, unpacked
from tunesmith.engine.kernels.native import Kernels

SHAPES = [(48, 64), (960, 576), (100, 1030), (576, 1536), (17, 2), (33, 65), (1, 7)]
CPU = torch.device("cpu")


@pytest.fixture(params=["native", "torch"])
def kernels(request, native: Kernels) -> Kernels:
    """Both implementations; the first needs instructions for products of whole numbers."""
    if request.param == "torch":
        return Kernels("torch")
    if not has_native(native, CPU):
        pytest.skip("this processor has no AVX2")
    return native


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request) -> torch.dtype:
    return request.param


def case(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn.normal(num_rows, shape[1], seed=1, dtype=dtype), drawn.normal(*shape, dtype=dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_the_definition_in_float64(shape, with_bias, dtype, kernels: Kernels):
    x_RI, weight_OI = case(shape, dtype)
    bias_O = drawn.normal(shape[0], seed=2, dtype=dtype) if with_bias else None
    found_RO = linear(x_RI, pack(weight_OI, kernels=kernels), bias_O)
    wide_O = 0.0 if bias_O is None else bias_O.double()
    rounded_RI, rounded_OI = torch_impl.dequantized(x_RI).double(), torch_impl.dequantized(weight_OI).double()
    expected_RO = rounded_RI @ rounded_OI.T + wide_O
    terms_RO = rounded_RI.abs() @ rounded_OI.abs().T
    assert found_RO.dtype == dtype
    error_RO = (found_RO.double() - expected_RO).abs()
    assert bool((error_RO <= torch.finfo(dtype).eps * expected_RO.abs() + 1e-6 * (terms_RO + 1)).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_that_of_half_a_step_of_each_number(shape, kernels: Kernels):
    x_RI, weight_OI = case(shape, torch.float32)
    found_RO = linear(x_RI, pack(weight_OI, kernels=kernels), None).double()
    (_, x_RB1), (_, weight_OB1) = torch_impl.quantized(x_RI), torch_impl.quantized(weight_OI)
    half_RI = (x_RB1 / 2).expand(-1, -1, torch_impl.BLOCK).flatten(1)[:, : shape[1]].double()
    half_OI = (weight_OB1 / 2).expand(-1, -1, torch_impl.BLOCK).flatten(1)[:, : shape[1]].double()
    bound_RO = half_RI @ weight_OI.double().abs().T + x_RI.double().abs() @ half_OI.T + half_RI @ half_OI.T
    error_RO = (found_RO - x_RI.double() @ weight_OI.double().T).abs()
    assert bool((error_RO <= 1.001 * bound_RO + 1e-6).all())
    assert float(error_RO.max()) > 0


def test_bits_of_a_row_depend_on_that_row_alone(dtype, kernels: Kernels):
    x_RI, weight_OI = case((100, 200), dtype, num_rows=300)
    packed, num_threads = pack(weight_OI, kernels=kernels), torch.get_num_threads()
    all_RO = linear(x_RI, packed, None)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(3, 5), slice(7, 40), slice(290, 300), slice(None)):
                assert torch.equal(linear(x_RI[rows], packed, None), all_RO[rows])
    finally:
        torch.set_num_threads(num_threads)


def test_rows_may_lie_apart_and_a_row_of_zeros_gives_the_bias(dtype, kernels: Kernels):
    x_RI, weight_OI = case((30, 130), dtype)
    bias_O, packed = drawn.normal(30, seed=2, dtype=dtype), pack(weight_OI, kernels=kernels)
    wide = torch.cat([x_RI, x_RI], 1)
    assert torch.equal(linear(wide[:, :130], packed, bias_O), linear(x_RI, packed, bias_O))
    assert torch.equal(linear(x_RI * 0, packed, bias_O), bias_O.expand(13, -1))
    assert linear(x_RI[:0], packed, bias_O).shape == (0, 30)


def test_a_block_with_large_numbers_leaves_the_others_their_precision(kernels: Kernels):
    x_RI, weight_OI = case((16, 192), torch.float32)
    x_RI[:, :64] *= 1e6
    weight_OI[:, :64] = 0
    found_RO = linear(x_RI, pack(weight_OI, kernels=kernels), None)
    exact_RO = x_RI.double() @ weight_OI.double().T
    assert float((found_RO - exact_RO).abs().max()) < 0.02 * float(exact_RO.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_row_or_column_nan_and_no_other(bad, dtype, kernels: Kernels):
    x_RI, weight_OI = case((20, 100), dtype)
    plain_RO = linear(x_RI, pack(weight_OI, kernels=kernels), None)
    spoilt_RI, spoilt_OI = x_RI.clone(), weight_OI.clone()
    spoilt_RI[4, 70], spoilt_OI[5, 3] = bad, bad
    found_RO = linear(spoilt_RI, pack(weight_OI, kernels=kernels), None)
    assert bool(found_RO[4].isnan().all())
    assert torch.equal(found_RO[:4], plain_RO[:4])
    found_RO = linear(x_RI, pack(spoilt_OI, kernels=kernels), None)
    assert bool(found_RO[:, 5].isnan().all())
    assert torch.equal(found_RO[:, 6:], plain_RO[:, 6:])


def test_numbers_at_the_ends_of_float32(kernels: Kernels):
    x_RI, weight_OI = case((20, 100), torch.float32)
    for scale in (1e-38, 1e-34, 1e-25, 1e30):
        found_RO = linear(x_RI * scale, pack(weight_OI, kernels=kernels), None)
        assert bool(found_RO.isfinite().all())


@pytest.mark.parametrize("shape", SHAPES)
def test_unpacked_it_is_what_the_8_bits_stand_for(shape, dtype, kernels: Kernels):
    weight_OI = drawn.normal(*shape, dtype=dtype)
    packed = pack(weight_OI, kernels=kernels)
    assert torch.equal(unpacked(packed), torch_impl.dequantized(weight_OI).to(dtype))
    again = stored(packed.numbers, packed.scales, *shape, dtype)
    x_RI = drawn.normal(5, shape[1], seed=1, dtype=dtype)
    assert torch.equal(linear(x_RI, again, None), linear(x_RI, packed, None))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_that_of_the_unpacked_weight(shape, kernels: Kernels):
    x_RI, weight_OI = case(shape, torch.float32)
    bias_O, d_y_RO = drawn.normal(shape[0], seed=2), drawn.normal(13, shape[0], seed=3)
    x_RI.requires_grad_()
    bias_O.requires_grad_()
    linear(x_RI, pack(weight_OI, kernels=kernels), bias_O).backward(d_y_RO)
    expected_RI = d_y_RO.double() @ torch_impl.dequantized(weight_OI).double()
    torch.testing.assert_close(x_RI.grad.double(), expected_RI, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias_O.grad, d_y_RO.sum(0))


def test_other_dtypes_are_computed_by_torch():
    x_RI, weight_OI = case((20, 100), torch.float64)
    packed = pack(weight_OI, kernels=Kernels())
    assert linear(x_RI, packed, None).dtype == torch.float64


def test_wrong_arguments_are_refused(kernels: Kernels):
    packed = pack(drawn.normal(8, 6), kernels=kernels)
    assert isinstance(packed, PackedInt8)
    for weight in (torch.zeros(8), torch.zeros(0, 4), torch.zeros(3, 4, dtype=torch.int8)):
        with pytest.raises(InputError, match="give floating-point"):
            pack(weight, kernels=kernels)
    with pytest.raises(InputError, match="x is"):
        linear(torch.zeros(3, 7), packed, None)
    with pytest.raises(InputError, match="x is"):
        linear(torch.zeros(3, 6, dtype=torch.bfloat16), packed, None)
    with pytest.raises(InputError, match="the bias is"):
        linear(torch.zeros(3, 6), packed, torch.zeros(7))
