"""Add and RMSNorm against the definition in float64, against transformers' modules, and to the bit across batches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drawn import normal
from norm_cases import Case
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.rms_norm import torch_impl
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm

WIDTHS = [1, 15, 16, 17, 64, 576, 1000]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_float32_equals_the_definition_in_float64(width: int, with_residual: bool, kernels: Kernels):
    x_RH, residual_RH, weight_H = 4 * normal(9, width), normal(9, width, seed=1), normal(width, seed=2)
    residual_RH = residual_RH if with_residual else None
    found = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=kernels)
    wide_RH = None if residual_RH is None else residual_RH.double()
    exact = torch_impl.add_rms_norm(x_RH.double(), wide_RH, weight_H.double(), 1e-5)
    torch.testing.assert_close(found.normed_RH.double(), exact.normed_RH, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(found.sum_RH.double(), exact.sum_RH, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_is_rounded_where_the_definition_rounds(width: int, native: Kernels):
    x_RH, residual_RH = normal(200, width, dtype=torch.bfloat16), normal(200, width, dtype=torch.bfloat16, seed=1)
    weight_H = normal(width, dtype=torch.bfloat16, seed=2)
    found = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=native)
    exact = torch_impl.add_rms_norm(x_RH, residual_RH, weight_H, 1e-5)
    assert torch.equal(found.sum_RH, exact.sum_RH)
    # Two roundings, each of which may go to the neighbour.
    torch.testing.assert_close(found.normed_RH, exact.normed_RH, atol=1e-6, rtol=2**-6)
    assert (found.normed_RH == exact.normed_RH).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definition_is_the_norm_of_transformers(dtype: torch.dtype):
    module = LlamaRMSNorm(64, eps=1e-6).to(dtype)
    module.weight.data = normal(64, dtype=dtype, seed=2)
    x_RH = normal(20, 64, dtype=dtype)
    assert torch.equal(torch_impl.add_rms_norm(x_RH, None, module.weight, 1e-6).normed_RH, module(x_RH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype, native: Kernels):
    x_RH, residual_RH = normal(64, 577, dtype=dtype), normal(64, 577, dtype=dtype, seed=1)
    weight_H = normal(577, dtype=dtype, seed=2)
    whole = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=native)
    num_threads = torch.get_num_threads()
    for rows in (slice(5, 6), slice(0, 64, 7), slice(1, 64)):
        try:
            torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
            part = add_rms_norm(x_RH[rows], residual_RH[rows], weight_H, 1e-5, kernels=native)
        finally:
            torch.set_num_threads(num_threads)
        assert torch.equal(part.normed_RH, whole.normed_RH[rows])
        assert torch.equal(part.sum_RH, whole.sum_RH[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_not_hidden(dtype: torch.dtype, kernels: Kernels):
    x_RH = normal(3, 40, dtype=dtype)
    x_RH[0, 3], x_RH[1, 39] = float("nan"), float("inf")
    normed_RH = add_rms_norm(x_RH, None, torch.ones(40, dtype=dtype), 1e-5, kernels=kernels).normed_RH
    assert normed_RH[0].isnan().all()
    assert normed_RH[1, 39].isnan()
    assert normed_RH[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_makes_it_the_norm_of_gemma(dtype: torch.dtype, kernels: Kernels):
    module = Gemma2RMSNorm(72, eps=1e-6).to(dtype)
    module.weight.data = normal(72, dtype=dtype, seed=2)
    x_RH = normal(200, 72, dtype=dtype)
    assert torch.equal(torch_impl.add_rms_norm(x_RH, None, module.weight, 1e-6, 1.0).normed_RH, module(x_RH))
    found_RH = add_rms_norm(x_RH, None, module.weight.detach(), 1e-6, offset=1.0, kernels=kernels).normed_RH
    # One rounding, which may go to the neighbour.
    torch.testing.assert_close(found_RH, module(x_RH), atol=1e-6, rtol=2e-6 if dtype == torch.float32 else 2**-7)
    assert (found_RH == module(x_RH)).float().mean() > (0.4 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("use_normed", "use_sum"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 17), (64, 48), (130, 576)])
def test_gradients_are_those_of_the_definition_in_float64(
    num_rows, width, with_residual, use_normed, use_sum, offset, kernels: Kernels
):
    case = Case.of(num_rows, width, with_residual=with_residual)
    used = {"use_normed": use_normed, "use_sum": use_sum}
    found = case.gradients(partial(add_rms_norm, offset=offset, kernels=kernels), **used)
    exact = case.wide().gradients(partial(torch_impl.add_rms_norm, offset=offset), **used)
    for ours, expected in zip(found, exact, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_in_bfloat16_are_exact_up_to_one_rounding(offset: float, native: Kernels):
    case = Case.of(300, 96, with_residual=True, dtype=torch.bfloat16)
    found = case.gradients(partial(add_rms_norm, offset=offset, kernels=native))
    # The gradients are defined at the sum that the forward pass rounded.
    total_RH = (case.x_RH + case.residual_RH).double()
    wide = replace(case.wide(), x_RH=total_RH, residual_RH=torch.zeros_like(total_RH))
    exact = wide.gradients(partial(torch_impl.add_rms_norm, offset=offset))
    if offset == 0:
        # What the weight is multiplied with is rounded, and so its gradient is a sum over rounded numbers.
        ones_H = torch.ones_like(case.weight_H)
        unit_RH = torch_impl.add_rms_norm(case.x_RH, case.residual_RH, ones_H, 1e-5).normed_RH
        exact[1] = (case.d_normed_RH.double() * unit_RH.double()).sum(0)
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        scale = float(expected.abs().max())
        torch.testing.assert_close(ours.double(), expected, atol=2**-8 * scale * 0.2, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recording_gradients_and_threads_change_no_bit(dtype: torch.dtype, native: Kernels):
    case = Case.of(700, 70, with_residual=True, dtype=dtype)
    plain = add_rms_norm(case.x_RH, case.residual_RH, case.weight_H, 1e-5, kernels=native)
    leaf_H = case.weight_H.clone().requires_grad_()
    recorded = add_rms_norm(case.x_RH, case.residual_RH, leaf_H, 1e-5, kernels=native)
    assert torch.equal(recorded.normed_RH, plain.normed_RH)
    assert torch.equal(recorded.sum_RH, plain.sum_RH)
    num_threads, gradients = torch.get_num_threads(), []
    for threads in (1, 2):
        try:
            torch.set_num_threads(threads)
            gradients.append(case.gradients(partial(add_rms_norm, kernels=native)))
        finally:
            torch.set_num_threads(num_threads)
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_within_a_fused_projection_are_normed_where_they_stand(dtype: torch.dtype, native: Kernels):
    fused_RX, weight_H = normal(30, 5 * 40 + 3, dtype=dtype).requires_grad_(), normal(40, dtype=dtype, seed=1)
    heads_RKH = fused_RX[:, 43:163].unflatten(1, (3, 40))
    found_RKH = add_rms_norm(heads_RKH, None, weight_H, 1e-5, kernels=native).normed_RH
    rows_RH = heads_RKH.detach().reshape(90, 40)
    plain_RH = add_rms_norm(rows_RH, None, weight_H, 1e-5, kernels=native).normed_RH
    assert torch.equal(found_RKH.detach().reshape(90, 40), plain_RH)
    gradient_RH = normal(90, 40, dtype=dtype, seed=2)
    (found_RX,) = torch.autograd.grad(found_RKH, fused_RX, gradient_RH.view(30, 3, 40))
    leaf_RH = rows_RH.clone().requires_grad_()
    (expected_RH,) = torch.autograd.grad(
        add_rms_norm(leaf_RH, None, weight_H, 1e-5, kernels=native).normed_RH, leaf_RH, gradient_RH
    )
    assert torch.equal(found_RX[:, 43:163].reshape(90, 40), expected_RH)
    assert not found_RX[:, :43].any()
    assert not found_RX[:, 163:].any()


def test_rows_and_columns_may_be_spread(native: Kernels):
    wide_RH, weight_H = normal(12, 90), normal(30, seed=1)
    heads_RKH = normal(5, 3, 48, seed=3)
    turned_RKH = heads_RKH.transpose(0, 1)
    rows = (wide_RH[::3, 7:37], normal(30, 4, seed=2).t(), wide_RH[:1, :30].expand(4, 30))
    for x_RH in (*rows, heads_RKH[:, :, 4:34], turned_RKH[:, :, :30]):
        found = add_rms_norm(x_RH, x_RH, weight_H, 1e-5, kernels=native)
        plain = add_rms_norm(x_RH.contiguous(), x_RH.contiguous(), weight_H, 1e-5, kernels=native)
        assert torch.equal(found.normed_RH, plain.normed_RH)
        assert torch.equal(found.sum_RH, plain.sum_RH)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_the_same(trained: tuple[int, ...], kernels: Kernels):
    case = Case.of(6, 20, with_residual=True)
    assert case.residual_RH is not None
    # x, residual and weight here; the gradients of the case are those of x, weight and residual.
    x_RH, weight_H, residual_RH = case.gradients(partial(add_rms_norm, kernels=kernels))
    leaves = [case.x_RH.clone(), case.residual_RH.clone(), case.weight_H.clone()]
    for index in trained:
        leaves[index].requires_grad_()
    found = add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-5, kernels=kernels)
    ((found.normed_RH * case.d_normed_RH).sum() + (found.sum_RH * case.d_sum_RH).sum()).backward()
    for index, expected in enumerate((x_RH, residual_RH, weight_H)):
        assert (leaves[index].grad is not None) == (index in trained)
        if index in trained:
            torch.testing.assert_close(leaves[index].grad, expected)


def test_without_a_residual_the_sum_is_x_itself(kernels: Kernels):
    x_RH = normal(3, 8).requires_grad_()
    assert add_rms_norm(x_RH, None, torch.ones(8), 1e-5, kernels=kernels).sum_RH is x_RH


def test_float64_runs_as_defined_and_never_natively(native: Kernels):
    x_RH, weight_H = normal(3, 8).double(), normal(8, seed=1).double()
    found = add_rms_norm(x_RH, x_RH, weight_H, 1e-5, offset=1.0, kernels=Kernels("auto"))
    assert torch.equal(found.normed_RH, torch_impl.add_rms_norm(x_RH, x_RH, weight_H, 1e-5, 1.0).normed_RH)
    with pytest.raises(NativeUnavailableError, match=r"for bfloat16 and float32 and was given torch\.float64"):
        add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=native)


def test_what_does_not_fit_is_refused(native: Kernels):
    x_RH, weight_H = normal(2, 8), torch.ones(8)
    for bad in (x_RH.long(), x_RH[0], x_RH[:0]):
        with pytest.raises(InputError, match=r"give floating-point \[rows, hidden\] or \[rows, heads, hidden\]"):
            add_rms_norm(bad, None, weight_H, 1e-5, kernels=native)
    with pytest.raises(InputError, match=r"residual is torch.float32 of shape \(1, 8\)"):
        add_rms_norm(x_RH, x_RH[:1], weight_H, 1e-5, kernels=native)
    with pytest.raises(InputError, match=r"weight is torch\.bfloat16"):
        add_rms_norm(x_RH, None, weight_H.bfloat16(), 1e-5, kernels=native)
