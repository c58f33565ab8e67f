"""Gated activations and soft-capping against the definition in float64, transformers' functions, and to the bit."""

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

import gated_cases
from gated_cases import normal, with_gradients
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.gated import torch_impl
from tunesmith.engine.kernels.gated.api import Activation, activate, gated, softcap
from tunesmith.engine.kernels.native import Kernels

ACTIVATIONS = get_args(Activation)
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 15, 16, 17, 64, 1000]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


def assert_as_in_float64(
    native_function: Callable[..., torch.Tensor],
    definition: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    d_out: torch.Tensor,
) -> None:
    rtol = 2e-6 if d_out.dtype == torch.float32 else 2**-8
    gated_cases.assert_as_in_float64(native_function, definition, inputs, d_out, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_definition_in_float64(activation, width, dtype, kernels: Kernels):
    gate_RI, up_RI, d_out_RI = (normal(9, width, dtype=dtype, seed=i, scale=s) for i, s in enumerate((4.0, 1.0, 1.0)))
    assert_as_in_float64(
        partial(gated, activation=activation, kernels=kernels),
        partial(torch_impl.gated, activation=activation),
        [gate_RI, up_RI],
        d_out_RI,
    )
    assert_as_in_float64(
        partial(activate, activation=activation, kernels=kernels),
        partial(torch_impl.activate, activation=activation),
        [gate_RI],
        d_out_RI,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_soft_capping_is_that_of_the_definition_in_float64(cap, width, dtype, kernels: Kernels):
    x_RV, d_out_RV = normal(9, width, dtype=dtype, scale=20), normal(9, width, dtype=dtype, seed=1)
    assert_as_in_float64(
        partial(softcap, cap=cap, kernels=kernels), partial(torch_impl.softcap, cap=cap), [x_RV], d_out_RV
    )


@given(st.lists(st.floats(-95, 95, width=32), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_argument_is_off_by_more_than_float32_allows(native, values):
    x_RI = torch.tensor([values])
    ones_RI = torch.ones_like(x_RI)
    for activation in ACTIVATIONS:
        assert_as_in_float64(
            partial(activate, activation=activation, kernels=native),
            partial(torch_impl.activate, activation=activation),
            [x_RI],
            ones_RI,
        )
    assert_as_in_float64(
        partial(softcap, cap=30.0, kernels=native), partial(torch_impl.softcap, cap=30.0), [x_RI], ones_RI
    )


def test_there_may_be_no_rows_to_cap(kernels: Kernels):
    x_RV = torch.zeros(0, 10, requires_grad=True)
    softcap(x_RV, 30.0, kernels=kernels).sum().backward()
    assert x_RV.grad is not None and x_RV.grad.shape == (0, 10)


def test_a_small_number_keeps_its_relative_precision_under_the_cap(native: Kernels):
    x_RV = torch.logspace(-30, 1, 400)[None]
    exact_RV = torch_impl.softcap(x_RV.double(), 30.0)
    torch.testing.assert_close(softcap(x_RV, 30.0, kernels=native).double(), exact_RV, atol=0, rtol=5e-7)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("silu", "silu"), ("gelu_tanh", "gelu_new"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")],
)
def test_the_activations_are_those_of_transformers(ours: Activation, theirs: str, kernels: Kernels):
    x_RI, up_RI = normal(20, 50), normal(20, 50, seed=1)
    expected_RI = ACT2FN[theirs](x_RI)
    torch.testing.assert_close(activate(x_RI, ours, kernels=kernels), expected_RI, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(gated(x_RI, up_RI, ours, kernels=kernels), expected_RI * up_RI, atol=5e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_however_many_threads_there_are(dtype, native: Kernels):
    gate_RI, up_RI = normal(64, 777, dtype=dtype), normal(64, 777, dtype=dtype, seed=1)
    works = [
        *(partial(gated, activation=activation, kernels=native) for activation in ACTIVATIONS),
        lambda gate_RI, _: softcap(gate_RI, 30.0, kernels=native),
    ]
    num_threads = torch.get_num_threads()
    for work in works:
        whole = with_gradients(
            lambda gate_RI, up_RI, work=work: work(gate_RI, up_RI) + 0 * up_RI, [gate_RI, up_RI], up_RI
        )
        for rows in (slice(5, 6), slice(0, 64, 7), slice(1, 64)):
            try:
                torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
                part = with_gradients(
                    lambda gate_RI, up_RI, work=work: work(gate_RI, up_RI) + 0 * up_RI,
                    [gate_RI[rows], up_RI[rows]],
                    up_RI[rows],
                )
            finally:
                torch.set_num_threads(num_threads)
            for ours, expected in zip(part, whole, strict=True):
                assert torch.equal(ours, expected[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves_of_a_fused_projection_are_read_where_they_stand(activation, dtype, native: Kernels):
    fused_RX = normal(20, 2 * 50 + 3, dtype=dtype).requires_grad_()
    gate_RI, up_RI, d_out_RI = fused_RX[:, 3:53], fused_RX[:, 53:], normal(20, 50, dtype=dtype, seed=1)
    found_RI = gated(gate_RI, up_RI, activation, kernels=native)
    work = partial(gated, activation=activation, kernels=native)
    expected = with_gradients(work, [gate_RI.detach().contiguous(), up_RI.detach().contiguous()], d_out_RI)
    assert torch.equal(found_RI.detach(), expected[0])
    (found_RX,) = torch.autograd.grad(found_RI, fused_RX, d_out_RI)
    assert torch.equal(found_RX[:, 3:53], expected[1])
    assert torch.equal(found_RX[:, 53:], expected[2])
    without = gated(gate_RI.detach(), up_RI.detach(), activation, kernels=native)
    assert torch.equal(without, found_RI.detach())
    turned_RI = gate_RI.detach().t().contiguous().t()
    assert torch.equal(
        gated(turned_RI, turned_RI, activation, kernels=native), work(gate_RI.detach(), gate_RI.detach())
    )


def test_nan_is_not_hidden(kernels: Kernels):
    x_RV = normal(2, 20)
    x_RV[0, 3] = x_RV[1, 19] = float("nan")
    functions = [partial(activate, activation=activation, kernels=kernels) for activation in ACTIVATIONS]
    for function in (*functions, partial(softcap, cap=2.0, kernels=kernels)):
        for result_RV in with_gradients(function, [x_RV], torch.ones_like(x_RV)):
            assert torch.equal(result_RV.isnan(), x_RV.isnan())


def test_large_numbers_saturate_and_give_no_nan(native: Kernels):
    x_RI = torch.tensor([[1e30, -1e30, 3e38, -3e38, 200.0, -200.0]])
    for activation in ACTIVATIONS:
        work = partial(activate, activation=activation, kernels=native)
        out_RI, d_x_RI = with_gradients(work, [x_RI], torch.ones_like(x_RI))
        assert torch.equal(out_RI, x_RI.clamp(min=0))
        assert d_x_RI.tolist() == [[1, 0, 1, 0, 1, 0]]
    out_RV, d_x_RV = with_gradients(partial(softcap, cap=1.0, kernels=native), [x_RI], torch.ones_like(x_RI))
    assert out_RV.tolist() == [[1, -1, 1, -1, 1, -1]]
    assert not d_x_RV.any()


def test_float64_runs_as_defined_and_never_natively(native: Kernels):
    x_RI = normal(3, 8).double()
    assert torch.equal(gated(x_RI, x_RI, "silu", kernels=Kernels("auto")), torch_impl.gated(x_RI, x_RI, "silu"))
    assert torch.equal(softcap(x_RI, 3.0, kernels=Kernels("auto")), torch_impl.softcap(x_RI, 3.0))
    with pytest.raises(NativeUnavailableError, match=r"was given torch\.float64; choose auto or torch"):
        activate(x_RI, "silu", kernels=native)


def test_what_does_not_fit_is_refused(native: Kernels):
    x_RI = normal(2, 8)
    with pytest.raises(InputError, match=r"gate is torch\.int64 of shape \(2, 8\); give floating-point"):
        gated(x_RI.long(), x_RI, "silu", kernels=native)
    with pytest.raises(InputError, match=r"up is torch\.bfloat16 of shape \(2, 8\) on cpu; give torch\.float32"):
        gated(x_RI, x_RI.bfloat16(), "silu", kernels=native)
    with pytest.raises(InputError, match=r"up is torch\.float32 of shape \(2, 7\)"):
        gated(x_RI, x_RI[:, 1:], "silu", kernels=native)
    with pytest.raises(InputError, match=r"x is torch\.float32 of shape \(0, 8\)"):
        activate(x_RI[:0], "silu", kernels=native)
    with pytest.raises(InputError, match="activation is 'relu'; allowed: silu, gelu_tanh, gelu"):
        activate(x_RI, "relu", kernels=native)
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="give a positive number"):
            softcap(x_RI, cap, kernels=native)
