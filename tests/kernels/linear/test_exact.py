"""Linear maps on a CPU: against float64, with gradients, and the same bits whatever the other rows."""

from functools import partial

import pytest
import torch

import drawn
from tunesmith.engine.kernels.linear.exact import is_by_onednn, is_by_tiles, linear, product, rows_are_independent

by_onednn = pytest.mark.skipif(
    not is_by_onednn(torch.ones(2, 2), torch.ones(2, 2)), reason="torch has no oneDNN on this processor"
)
by_tiles = pytest.mark.skipif(
    not is_by_tiles(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16()), reason="this processor has no AMX"
)

SHAPES = [(48, 64), (960, 576), (100, 1030), (576, 1536), (17, 2), (1, 33)]


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same matrix as it lies, from transposed storage, and as a part of a larger one."""
    rows, columns = tensor.shape
    larger = torch.zeros(rows + 3, 2 * columns + 1, dtype=tensor.dtype)
    larger[2 : rows + 2, 1 : columns + 1] = tensor
    return [tensor, tensor.t().contiguous().t(), larger[2 : rows + 2, 1 : columns + 1]]


@by_onednn
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_float64(shape, with_bias):
    x_RI, weight_OI, bias_O = drawn.normal(13, shape[1], seed=1), drawn.normal(*shape), drawn.normal(shape[0], seed=2)
    upstream_RO = drawn.normal(13, shape[0], seed=3)
    inputs = [x_RI, weight_OI, *([bias_O] if with_bias else [])]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    torch.nn.functional.linear(*exact).backward(upstream_RO.double())
    for x_view_RI, weight_view_OI in zip(layouts(x_RI), layouts(weight_OI), strict=True):
        found = [x_view_RI.detach().requires_grad_(), weight_view_OI.detach().requires_grad_()]
        found += [bias_O.detach().requires_grad_()] if with_bias else []
        y_RO = linear(*found)
        y_RO.backward(upstream_RO)
        torch.testing.assert_close(y_RO.double(), torch.nn.functional.linear(*exact), rtol=1e-5, atol=1e-4)
        for tensor, reference in zip(found, exact, strict=True):
            torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-5, atol=1e-4)


@by_onednn
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_beside_any_other_rows_in_any_layout(shape):
    x_RI, weight_OI = drawn.normal(300, shape[1], seed=1), drawn.normal(*shape)
    y_RO = linear(x_RI, weight_OI)
    assert rows_are_independent(weight_OI)
    for rows in (slice(7, 8), slice(0, 2), slice(5, 12), slice(100, 300)):
        for x_view_RI, weight_view_OI in zip(layouts(x_RI[rows]), layouts(weight_OI), strict=True):
            assert torch.equal(linear(x_view_RI, weight_view_OI), y_RO[rows])
    assert torch.equal(product(x_RI, weight_OI.t()), y_RO)
    for outputs in (slice(0, 1), slice(shape[0] // 2, shape[0])):
        assert torch.equal(linear(x_RI, weight_OI[outputs]), y_RO[:, outputs])


@by_onednn
def test_a_weight_packed_by_onednn_gives_the_bits_of_a_plain_one():
    x_RI, weight_OI = drawn.normal(37, 576, seed=1), drawn.normal(960, 576)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 64)
    y_RO = torch.ops.mkldnn._linear_pointwise.default(x_RI, packed, None, "none", [], "")
    assert torch.equal(y_RO, linear(x_RI, weight_OI))


@by_onednn
def test_no_gradient_is_computed_that_nobody_asked_for():
    x_RI, weight_OI = drawn.normal(4, 8).requires_grad_(), drawn.normal(6, 8, seed=1)
    linear(x_RI, weight_OI).sum().backward()
    assert x_RI.grad is not None and weight_OI.grad is None
    with torch.no_grad():
        assert not linear(x_RI, weight_OI).requires_grad


@by_onednn
def test_other_dtypes_empty_matrices_and_autocast_go_torchs_way():
    x_RI, weight_OI = drawn.normal(4, 8), drawn.normal(6, 8, seed=1)
    assert not is_by_onednn(x_RI.double(), weight_OI.double()) and not is_by_onednn(x_RI[:0], weight_OI)
    assert linear(x_RI.double(), weight_OI.double()).dtype == torch.float64
    assert linear(x_RI[:0], weight_OI).shape == (0, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x_RI, weight_OI).dtype == torch.bfloat16


@by_tiles
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_by_amx_are_those_of_float64_rounded(shape, with_bias):
    normal = partial(drawn.normal, dtype=torch.bfloat16)
    x_RI, weight_OI, bias_O = normal(77, shape[1], seed=1), normal(*shape), normal(shape[0], seed=2)
    upstream_RO = normal(77, shape[0], seed=3)
    inputs = [x_RI, weight_OI, *([bias_O] if with_bias else [])]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    exact_RO = torch.nn.functional.linear(*exact)
    exact_RO.backward(upstream_RO.double())
    found = [tensor.detach().requires_grad_() for tensor in inputs]
    y_RO = linear(*found)
    y_RO.backward(upstream_RO)
    terms_RO = x_RI.double().abs() @ weight_OI.double().abs().T
    eps = torch.finfo(torch.bfloat16).eps
    assert bool(((y_RO.double() - exact_RO).abs() <= eps * exact_RO.abs() + 1e-6 * terms_RO).all())
    for tensor, reference in zip(found, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=2 * eps, atol=2e-2)


@by_tiles
@pytest.mark.parametrize("shape", [*SHAPES, (576, 4096)])
def test_a_row_by_amx_has_the_same_bits_beside_any_other_rows_with_any_number_of_threads(shape):
    x_RI, weight_OI = drawn.normal(700, shape[1], seed=1).bfloat16(), drawn.normal(*shape).bfloat16()
    y_RO, num_threads = linear(x_RI, weight_OI), torch.get_num_threads()
    assert rows_are_independent(weight_OI)
    for rows in (slice(7, 8), slice(0, 2), slice(5, 12), slice(3, 20), slice(1, 33), slice(90, 170), slice(100, 700)):
        for x_view_RI, weight_view_OI in zip(layouts(x_RI[rows]), layouts(weight_OI), strict=True):
            assert torch.equal(linear(x_view_RI, weight_view_OI), y_RO[rows])
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(linear(x_RI, weight_OI), y_RO)
    finally:
        torch.set_num_threads(num_threads)
    for outputs in (slice(0, 1), slice(shape[0] // 2, shape[0])):
        assert torch.equal(linear(x_RI, weight_OI[outputs]), y_RO[:, outputs])


@by_tiles
def test_a_row_that_is_not_finite_by_amx_leaves_the_others_alone():
    x_RI, weight_OI = drawn.normal(40, 40, seed=1).bfloat16(), drawn.normal(20, 40).bfloat16()
    y_RO = linear(x_RI, weight_OI)
    x_RI[17] = torch.inf
    x_RI[18] = torch.nan
    found_RO = linear(x_RI, weight_OI)
    assert not found_RO[17:19].isfinite().any()
    others = [row for row in range(40) if row not in (17, 18)]
    assert torch.equal(found_RO[others], y_RO[others])
