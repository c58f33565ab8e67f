"""Add and RMSNorm against the definition in float64, against transformers' module, and to the bit across batches."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tunesmith.core.errors import InputError
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm import reference
from tunesmith.kernels.rms_norm.api import add_rms_norm

WIDTHS = [1, 15, 16, 17, 64, 576, 1000]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_float32_equals_the_definition_in_float64(width: int, with_residual: bool, kernels: Kernels):
    x_RH, residual_RH, weight_H = 4 * normal(9, width), normal(9, width, seed=1), normal(width, seed=2)
    residual_RH = residual_RH if with_residual else None
    found = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=kernels)
    wide_RH = None if residual_RH is None else residual_RH.double()
    exact = reference.add_rms_norm(x_RH.double(), wide_RH, weight_H.double(), 1e-5)
    torch.testing.assert_close(found.normed_RH.double(), exact.normed_RH, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(found.sum_RH.double(), exact.sum_RH, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_is_rounded_where_the_definition_rounds(width: int, native: Kernels):
    x_RH, residual_RH = normal(200, width, dtype=torch.bfloat16), normal(200, width, dtype=torch.bfloat16, seed=1)
    weight_H = normal(width, dtype=torch.bfloat16, seed=2)
    found = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=native)
    exact = reference.add_rms_norm(x_RH, residual_RH, weight_H, 1e-5)
    assert torch.equal(found.sum_RH, exact.sum_RH)
    # Two roundings, each of which may go to the neighbour.
    torch.testing.assert_close(found.normed_RH, exact.normed_RH, atol=1e-6, rtol=2**-6)
    assert (found.normed_RH == exact.normed_RH).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definition_is_the_norm_of_transformers(dtype: torch.dtype):
    module = LlamaRMSNorm(64, eps=1e-6).to(dtype)
    module.weight.data = normal(64, dtype=dtype, seed=2)
    x_RH = normal(20, 64, dtype=dtype)
    assert torch.equal(reference.add_rms_norm(x_RH, None, module.weight, 1e-6).normed_RH, module(x_RH))


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


def test_what_does_not_fit_is_refused(native: Kernels):
    x_RH, weight_H = normal(2, 8), torch.ones(8)
    with pytest.raises(InputError, match="give bfloat16 or float32"):
        add_rms_norm(x_RH.double(), None, weight_H, 1e-5, kernels=native)
    with pytest.raises(InputError, match=r"residual is torch.float32 of shape \(1, 8\)"):
        add_rms_norm(x_RH, x_RH[:1], weight_H, 1e-5, kernels=native)
    with pytest.raises(InputError, match=r"weight is torch\.bfloat16"):
        add_rms_norm(x_RH, None, weight_H.bfloat16(), 1e-5, kernels=native)
    with pytest.raises(InputError, match="has no gradient"):
        add_rms_norm(x_RH, None, weight_H.requires_grad_(), 1e-5, kernels=native)
