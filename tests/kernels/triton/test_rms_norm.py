"""Add and RMSNorm in Triton's interpreter, outputs and gradients, against the definition in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

from drawn import normal
from norm_cases import Case
from tunesmith.base.core.errors import TritonUnavailableError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.rms_norm import torch_impl, triton_impl
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm
from tunesmith.engine.kernels.rms_norm.torch_impl import LONGEST

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative error of one number that is stored; the interpreter cuts numbers off where a GPU rounds them."""

WIDTHS = [1, 15, 64, 1500]


def assert_near(ours: torch.Tensor | None, expected: torch.Tensor | None, bound: torch.Tensor | float) -> None:
    """Within this distance, and a relative one of one number that is stored."""
    assert ours is not None and expected is not None
    excess = (ours.double() - expected).abs() - STEP[ours.dtype] * expected.abs() - bound
    assert float(excess.max()) <= 1e-7, (float(excess.max()), int(excess.argmax()))


def assert_as_defined(case: Case, offset: float, kernels: Kernels) -> None:
    """Each result is the definition's at the sum that was stored, up to its own rounding and that of its terms.

    Without an offset, what the weight is multiplied with is rounded too.
    """
    # Without a residual the sum is x itself: autograd adds its gradient, with one more rounding.
    use_sum = case.residual_RH is not None
    found = case.run(partial(add_rms_norm, offset=offset, kernels=kernels), use_sum=use_sum)
    exact_sum_RH = case.x_RH.double() + (0 if case.residual_RH is None else case.residual_RH.double())
    assert_near(found[1], exact_sum_RH, 0)
    wide = replace(case.wide(), x_RH=found[1].double())  # type: ignore[union-attr]
    wide = wide if wide.residual_RH is None else replace(wide, residual_RH=torch.zeros_like(wide.x_RH))
    exact = wide.run(partial(torch_impl.add_rms_norm, offset=offset), use_sum=use_sum)
    assert all(tensor is not None and tensor.dtype == case.x_RH.dtype for tensor in found)
    scale_R1 = (wide.x_RH.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    unit_RH, weighted_RH = wide.x_RH * scale_R1, wide.d_normed_RH * (offset + wide.weight_H)
    in_unit = 2e-6 if offset else STEP[case.x_RH.dtype]
    assert_near(found[0], exact[0], 2 * in_unit * exact[0].abs())  # type: ignore[union-attr]
    terms_RH = weighted_RH.abs() + unit_RH.abs() * (weighted_RH * unit_RH).abs().mean(-1, keepdim=True)
    bound_RH = 2e-6 * scale_R1 * terms_RH
    for index in (2, 4)[: 2 if use_sum else 1]:
        assert_near(found[index], exact[index], bound_RH)
    terms_H = (wide.d_normed_RH * unit_RH).abs().reshape(-1, wide.weight_H.numel()).sum(0)
    assert_near(found[3], exact[3], (in_unit + 2e-6) * terms_H)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_residual", "offset"), [(True, 0.0), (True, 1.0), (False, 0.0), (False, 1.0)])
@pytest.mark.parametrize("width", [16, 577])
def test_values_and_gradients_are_those_of_the_definition(width, with_residual, offset, dtype, interpreted: Kernels):
    assert_as_defined(Case.of(5, width, dtype=dtype, with_residual=with_residual), offset, interpreted)


@pytest.mark.parametrize(
    ("with_residual", "offset", "dtype"), list(zip((True, False, True), (0.0, 1.0, 1.0), DTYPES, strict=True))
)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_around_powers_of_two_and_long_ones(width, with_residual, offset, dtype, interpreted: Kernels):
    assert_as_defined(Case.of(5, width, dtype=dtype, with_residual=with_residual), offset, interpreted)


@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(0, 3),
    st.sampled_from([1e-3, 1.0, 3e3]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_and_heads_are_normed_as_defined(
    interpreted, num_rows, width, heads, scale, dtype, with_residual, offset, seed
):
    shape = (num_rows, heads, width) if heads else (num_rows, width)
    case = Case.of(*shape, dtype=dtype, with_residual=with_residual, seed=seed, scale=scale)
    assert_as_defined(case, offset, interpreted)


@pytest.mark.parametrize(("use_normed", "use_sum"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_either_of_the_results_may_go_unused(with_residual, use_normed, use_sum, interpreted: Kernels):
    case = Case.of(20, 48, with_residual=with_residual)
    used = {"use_normed": use_normed, "use_sum": use_sum}
    found = case.run(partial(add_rms_norm, kernels=interpreted), **used)
    exact = case.wide().run(torch_impl.add_rms_norm, **used)
    for ours, expected in zip(found, exact, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_the_same(trained, interpreted: Kernels):
    case = Case.of(6, 20)
    assert case.residual_RH is not None
    _, _, x_RH, weight_H, residual_RH = case.run(partial(add_rms_norm, kernels=interpreted))
    leaves = [case.x_RH.clone(), case.residual_RH.clone(), case.weight_H.clone()]
    for index in trained:
        leaves[index].requires_grad_()
    found = add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-5, kernels=interpreted)
    ((found.normed_RH * case.d_normed_RH).sum() + (found.sum_RH * case.d_sum_RH).sum()).backward()
    for index, expected in enumerate((x_RH, residual_RH, weight_H)):
        assert (leaves[index].grad is not None) == (index in trained)
        if index in trained:
            assert torch.equal(leaves[index].grad, expected)


def test_the_gradient_of_the_weight_is_summed_over_the_rows_of_many_programs(monkeypatch, interpreted: Kernels):
    monkeypatch.setattr(triton_impl, "_ROWS_OF_PROGRAM", 1)
    monkeypatch.setattr(triton_impl, "_PROGRAMS", 90)
    for shape in ((77, 520), (101, 520), (230, 24), (70, 3, 24)):  # some programs end past the last row
        case = Case.of(*shape)
        _, _, *found = case.run(partial(add_rms_norm, kernels=interpreted))
        _, _, *exact = case.wide().run(torch_impl.add_rms_norm)
        for ours, expected in zip(found, exact, strict=True):
            assert ours is not None and expected is not None
            torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)
        again = case.run(partial(add_rms_norm, kernels=interpreted))
        assert all(torch.equal(a, b) for a, b in zip(again[2:], found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "dtype"), list(zip((48, 24, 577), DTYPES, strict=True)))
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_however_it_stands(width, dtype, interpreted: Kernels):
    case = Case.of(19, width, dtype=dtype)
    work = partial(add_rms_norm, kernels=interpreted)
    normed_RH, sum_RH, d_x_RH, *_ = case.run(work)
    padded_RX = torch.zeros(19, width + 7, dtype=dtype)
    padded_RX[:, 5 : 5 + width] = case.x_RH
    for rows in (slice(7, 8), slice(0, 19, 4), slice(1, 19)):
        part = replace(case, **{name: getattr(case, name)[rows] for name in vars(case) if name != "weight_H"})
        for given_RH in (part.x_RH, padded_RX[rows, 5 : 5 + width], part.x_RH.t().contiguous().t()):
            normed, total, d_x, *_ = replace(part, x_RH=given_RH).run(work)
            plain = add_rms_norm(given_RH, part.residual_RH, part.weight_H, 1e-5, kernels=interpreted)
            for ours, whole in ((normed, normed_RH), (total, sum_RH), (d_x, d_x_RH), (plain.normed_RH, normed_RH)):
                assert ours is not None and whole is not None and torch.equal(ours, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_within_a_fused_projection_are_normed_where_they_stand(dtype, interpreted: Kernels):
    fused_RX, weight_H = normal(12, 9 * 32, dtype=dtype).requires_grad_(), normal(32, dtype=dtype, seed=1)
    heads_RKH = fused_RX[:, 64:160].unflatten(1, (3, 32))
    found_RKH = add_rms_norm(heads_RKH, None, weight_H, 1e-5, kernels=interpreted).normed_RH
    leaf_RH = heads_RKH.detach().reshape(36, 32).requires_grad_()
    plain_RH = add_rms_norm(leaf_RH, None, weight_H, 1e-5, kernels=interpreted).normed_RH
    assert torch.equal(found_RKH.detach().reshape(36, 32), plain_RH.detach())
    gradient_RH = normal(36, 32, dtype=dtype, seed=2)
    (found_RX,) = torch.autograd.grad(found_RKH, fused_RX, gradient_RH.view(12, 3, 32))
    (expected_RH,) = torch.autograd.grad(plain_RH, leaf_RH, gradient_RH)
    assert torch.equal(found_RX[:, 64:160].reshape(36, 32), expected_RH)
    assert not found_RX[:, :64].any()
    assert not found_RX[:, 160:].any()


def test_a_slice_is_copied_only_where_the_compiler_would_see_other_addresses():
    wide_RX = normal(8, 256)
    in_place = (wide_RX, wide_RX[:, 32:64], wide_RX[1:], wide_RX.unflatten(1, (4, 64))[:, 1:3], wide_RX[:1, :64])
    for x_RH in (*in_place, wide_RX[:, :40].contiguous()[1:]):
        assert triton_impl._placed(x_RH) is x_RH
    for x_RH in (wide_RX[:, 2:66], wide_RX[:, :40], normal(8, 40)[:, :32], wide_RX.t()):
        placed_RH = triton_impl._placed(x_RH)
        assert placed_RH.is_contiguous() and placed_RH is not x_RH and torch.equal(placed_RH, x_RH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_not_hidden(dtype, interpreted: Kernels):
    x_RH = normal(3, 40, dtype=dtype)
    x_RH[0, 3], x_RH[1, 39] = float("nan"), float("inf")
    normed_RH = add_rms_norm(x_RH, None, torch.ones(40, dtype=dtype), 1e-5, kernels=interpreted).normed_RH
    assert normed_RH[0].isnan().all()
    assert normed_RH[1, 39].isnan()
    assert normed_RH[2].isfinite().all()


def test_rows_of_zeros_have_finite_gradients(interpreted: Kernels):
    case = replace(Case.of(3, 40, with_residual=False), x_RH=torch.zeros(3, 40))
    found = case.run(partial(add_rms_norm, kernels=interpreted))
    exact = case.wide().run(torch_impl.add_rms_norm)
    for ours, expected in zip(found[2:], exact[2:], strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("with_residual", [True, False])
def test_torch_compile_sees_one_operator_in_each_direction(with_residual, interpreted: Kernels):
    case = Case.of(5, 40, with_residual=with_residual)
    operators: list[str] = []

    def noted(module: torch.fx.GraphModule, _: object):
        operators.extend(str(node.target) for node in module.graph.nodes if "tunesmith" in str(node.target))
        return make_boxed_func(module.forward)

    work = partial(add_rms_norm, kernels=interpreted)
    plain, compiled = (
        case.run(work),
        case.run(torch.compile(work, fullgraph=True, backend=aot_autograd(fw_compiler=noted))),
    )
    assert sorted(operators) == ["tunesmith.add_rms_norm.default", "tunesmith.add_rms_norm_gradient.default"]
    for ours, expected in zip(compiled, plain, strict=True):
        assert ours is not None and expected is not None and torch.equal(ours, expected)


def test_a_launch_is_a_function_of_the_width_and_covers_it():
    for width in (1, 16, 17, 64, 576, 896, 4096, LONGEST):
        plan = triton_impl.launch(width)
        assert plan.block >= width and plan.block & (plan.block - 1) == 0
        assert plan.block_rows & (plan.block_rows - 1) == 0 and plan.num_warps in (4, 8, 16)
        assert plan.block_rows * plan.block <= plan.num_warps * 32 * 16
        for num_rows in (1, 100, 100_000, 10_000_000):
            in_program = triton_impl.rows_of_program(num_rows, plan)
            assert in_program % plan.block_rows == 0
            assert -(-num_rows // in_program) <= 1056


def test_rows_too_long_for_registers_are_refused_or_left_to_torch(interpreted: Kernels):
    x_RH, weight_H = normal(1, LONGEST + 1), normal(LONGEST + 1, seed=1)
    with pytest.raises(TritonUnavailableError, match="rows of up to 8192 numbers and was given 8193; choose auto"):
        add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=interpreted)
    with pytest.raises(TritonUnavailableError, match=r"given torch\.float64"):
        add_rms_norm(x_RH.double(), None, weight_H.double(), 1e-5, kernels=interpreted)
