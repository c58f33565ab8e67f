"""Gated activations and soft-capping in Triton's interpreter, values and gradients, against float64."""

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

import gated_cases
from gated_cases import normal, with_gradients
from tunesmith.base.core.errors import TritonUnavailableError
from tunesmith.engine.kernels.gated import torch_impl, triton_impl
from tunesmith.engine.kernels.gated.api import activate, gated, softcap
from tunesmith.engine.kernels.native import Kernels

ACTIVATIONS = get_args(torch_impl.Activation)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative error of a stored number; the interpreter cuts numbers off where a GPU rounds them."""


def assert_as_defined(
    function: Callable[..., torch.Tensor],
    definition: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    d_out: torch.Tensor,
) -> None:
    gated_cases.assert_as_in_float64(function, definition, inputs, d_out, rtol=STEP[d_out.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (9, 17), (2, 1024), (3, 1500)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_definition(activation, shape, dtype, interpreted: Kernels):
    gate_RI, up_RI, d_out_RI = (normal(*shape, dtype=dtype, seed=i, scale=s) for i, s in enumerate((4.0, 1.0, 1.0)))
    way = {"activation": activation, "kernels": interpreted}
    assert_as_defined(
        partial(gated, **way), partial(torch_impl.gated, activation=activation), [gate_RI, up_RI], d_out_RI
    )
    assert_as_defined(
        partial(activate, **way), partial(torch_impl.activate, activation=activation), [gate_RI], d_out_RI
    )


@given(
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([1e-3, 1.0, 30.0]),
    st.sampled_from([0.1, 5.0, 30.0]),
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_numbers_are_activated_and_capped_as_defined(
    interpreted, activation, scale, cap, num_rows, width, dtype, seed
):
    x_RI = normal(num_rows, width, dtype=dtype, seed=seed, scale=scale)
    d_out_RI = normal(num_rows, width, dtype=dtype, seed=seed + 1, scale=1.0)
    work = partial(activate, activation=activation, kernels=interpreted)
    assert_as_defined(work, partial(torch_impl.activate, activation=activation), [x_RI], d_out_RI)
    capped = partial(softcap, cap=cap, kernels=interpreted)
    assert_as_defined(capped, partial(torch_impl.softcap, cap=cap), [x_RI], d_out_RI)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves_of_a_fused_projection_are_read_where_they_stand(activation, dtype, interpreted: Kernels):
    fused_RX = normal(6, 2 * 1100 + 3, dtype=dtype).requires_grad_()
    gate_RI, up_RI, d_out_RI = fused_RX[:, 3:1103], fused_RX[:, 1103:], normal(6, 1100, dtype=dtype, seed=1)
    work = partial(gated, activation=activation, kernels=interpreted)
    found_RI = work(gate_RI, up_RI)
    expected = with_gradients(work, [gate_RI.detach().contiguous(), up_RI.detach().contiguous()], d_out_RI)
    assert torch.equal(found_RI.detach(), expected[0])
    (found_RX,) = torch.autograd.grad(found_RI, fused_RX, d_out_RI)
    assert torch.equal(found_RX[:, 3:1103], expected[1])
    assert torch.equal(found_RX[:, 1103:], expected[2])
    assert torch.equal(work(gate_RI.detach(), up_RI.detach()), expected[0])
    turned_RI = gate_RI.detach().t().contiguous().t()
    assert torch.equal(work(turned_RI, up_RI.detach()), expected[0])
    one_RI = gate_RI.detach()[:1].expand(6, 1100)  # rows that share memory
    assert torch.equal(work(one_RI, up_RI.detach())[0], expected[0][0])


def test_rows_that_stand_apart_are_capped_where_they_stand(interpreted: Kernels):
    wide_RX, d_out_RV = normal(4, 90), normal(4, 40, seed=1)
    work = partial(softcap, cap=3.0, kernels=interpreted)
    found = with_gradients(lambda x_RX: work(x_RX[:, 7:47]), [wide_RX], d_out_RV)
    plain = with_gradients(work, [wide_RX[:, 7:47].contiguous()], d_out_RV)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1][:, 7:47], plain[1])


def test_nan_is_not_hidden(interpreted: Kernels):
    x_RV = normal(2, 20)
    x_RV[0, 3] = x_RV[1, 19] = float("nan")
    functions = [partial(activate, activation=activation, kernels=interpreted) for activation in ACTIVATIONS]
    for function in (*functions, partial(softcap, cap=2.0, kernels=interpreted)):
        for result_RV in with_gradients(function, [x_RV], torch.ones_like(x_RV)):
            assert torch.equal(result_RV.isnan(), x_RV.isnan())


def test_large_numbers_saturate_and_give_no_nan(interpreted: Kernels):
    x_RI = torch.tensor([[1e30, -1e30, 3e38, -3e38, 1e4, -1e4, 200.0, -200.0]])
    for activation in ACTIVATIONS:
        work = partial(activate, activation=activation, kernels=interpreted)
        out_RI, d_x_RI = with_gradients(work, [x_RI], torch.ones_like(x_RI))
        assert torch.equal(out_RI, x_RI.clamp(min=0))
        assert d_x_RI.tolist() == [[1, 0, 1, 0, 1, 0, 1, 0]]
    out_RV, d_x_RV = with_gradients(partial(softcap, cap=1.0, kernels=interpreted), [x_RI], torch.ones_like(x_RI))
    assert out_RV.tolist() == [[1, -1, 1, -1, 1, -1, 1, -1]]
    assert not d_x_RV.any()


def test_torch_compile_sees_one_operator_in_each_direction(interpreted: Kernels):
    operators: list[str] = []

    def noted(module: torch.fx.GraphModule, _: object):
        operators.extend(str(node.target) for node in module.graph.nodes if "tunesmith" in str(node.target))
        return make_boxed_func(module.forward)

    def work(gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
        both_RI = gated(gate_RI, up_RI, "silu", kernels=interpreted)
        return softcap(both_RI, 5.0, kernels=interpreted) + activate(up_RI, "gelu_tanh", kernels=interpreted)

    inputs, d_out_RI = [normal(3, 40), normal(3, 40, seed=1)], normal(3, 40, seed=2)
    plain = with_gradients(work, inputs, d_out_RI)
    compiled = with_gradients(
        torch.compile(work, fullgraph=True, backend=aot_autograd(fw_compiler=noted)), inputs, d_out_RI
    )
    assert sorted(operators) == ["tunesmith.gated.default"] * 3 + ["tunesmith.gated_gradient.default"] * 3
    assert all(torch.equal(ours, expected) for ours, expected in zip(compiled, plain, strict=True))


def test_a_launch_covers_the_matrix_and_a_dense_one_as_a_single_row():
    for shape in ((1, 1), (8192, 4864), (256, 1536), (3, 33), (70_000, 70_000)):
        plan = triton_impl.launch(shape, contiguous=False)
        assert plan.tiles * plan.block >= shape[1] > (plan.tiles - 1) * plan.block
        assert plan.grid == (shape[0] * plan.tiles,)
        plan = triton_impl.launch(shape, contiguous=True)
        assert plan.grid[0] * plan.block >= shape[0] * shape[1]
        assert plan.num_warps in (1, 2, 4) and plan.grid[0] < 2**31


def test_float64_has_no_triton_kernel(interpreted: Kernels):
    with pytest.raises(TritonUnavailableError, match=r"given torch\.float64"):
        activate(normal(2, 3).double(), "silu", kernels=interpreted)
    with pytest.raises(TritonUnavailableError, match=r"given torch\.float64"):
        softcap(normal(2, 3).double(), 2.0, kernels=interpreted)
