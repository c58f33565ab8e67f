"""Log-prob and entropy against the definition in float64, to the bit against the sampler, and across batches."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from logprob_cases import ids_of, normal
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.logprob import torch_impl
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import NoiseKeys, SampleSettings

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 15, 17, 127, 128, 129, 1000]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


def gradient(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Of random sums of log-probs and entropies; a weight of 0 leaves the one out of the graph."""
    leaf_NV = logits_NV.clone().requires_grad_()
    found = function(leaf_NV, ids_N, temperature)
    d_N = normal(2, len(ids_N), seed=5, scale=1.0)
    used = [
        (out_N, (weight * d_N[i]).to(out_N))
        for i, (out_N, weight) in enumerate(zip(found, weights, strict=True))
        if weight
    ]
    return torch.autograd.grad([out_N for out_N, _ in used], leaf_NV, [d_N for _, d_N in used])[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_values_are_those_of_the_definition_in_float64(width, temperature, dtype, kernels: Kernels):
    logits_NV, ids_N = normal(20, width, dtype=dtype), ids_of(20, width)
    found = chosen_logp_entropy(logits_NV, ids_N, temperature, kernels=kernels)
    exact = torch_impl.chosen_logp_entropy(logits_NV.double(), ids_N, temperature)
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_are_those_of_the_definition_in_float64(width, temperature, weights, dtype, kernels: Kernels):
    logits_NV, ids_N = normal(20, width, dtype=dtype), ids_of(20, width)
    found_NV = gradient(partial(chosen_logp_entropy, kernels=kernels), logits_NV, ids_N, temperature, weights)
    exact_NV = gradient(torch_impl.chosen_logp_entropy, logits_NV.double(), ids_N, temperature, weights)
    assert found_NV.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found_NV.double(), exact_NV, atol=3e-6, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", [*WIDTHS, 49152])
def test_log_probs_have_the_bits_that_the_sampler_gave(width, temperature, dtype, native: Kernels):
    logits_BV, zero_B, row_B = normal(40, width, dtype=dtype), torch.zeros(40, dtype=torch.int64), torch.arange(40)
    chosen = SampleSettings.same(40, temperature=temperature, top_p=0.9, repetition_penalty=1.1, bias={0: 1.0})
    drawn = sample(logits_BV, chosen, NoiseKeys(zero_B, row_B, zero_B, zero_B), kernels=native)
    logp_N, _ = chosen_logp_entropy(logits_BV, drawn.token_B, temperature, kernels=native)
    assert torch.equal(logp_N, drawn.raw_logp_B)
    leaf_NV = logits_BV.clone().requires_grad_()
    assert torch.equal(chosen_logp_entropy(leaf_NV, drawn.token_B, temperature, kernels=native)[0], drawn.raw_logp_B)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_however_many_threads_there_are(dtype, native: Kernels):
    logits_NV, ids_N = normal(40, 777, dtype=dtype), ids_of(40, 777)
    d_N2 = normal(40, 2, seed=3, scale=1.0)

    def work(rows: torch.Tensor) -> list[torch.Tensor]:
        leaf_NV = logits_NV[rows].requires_grad_()
        found = chosen_logp_entropy(leaf_NV, ids_N[rows], 0.7, kernels=native)
        return [*(out_N.detach() for out_N in found), *torch.autograd.grad(found, leaf_NV, list(d_N2[rows].unbind(1)))]

    whole, num_threads = work(torch.arange(40)), torch.get_num_threads()
    for rows in (torch.tensor([17]), torch.tensor([39, 3, 17, 0]), torch.arange(39, -1, -1)):
        try:
            torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
            part = work(rows)
        finally:
            torch.set_num_threads(num_threads)
        for ours, expected in zip(part, whole, strict=True):
            assert torch.equal(ours, expected[rows])


def test_a_low_entropy_is_not_lost_to_cancellation(native: Kernels):
    gap = torch.tensor([2.0, 8.0, 12.0, 16.0, 20.0])
    logits_NV = torch.zeros(5, 300) - gap[:, None]
    logits_NV[:, 42] = 0
    ids_N = torch.full((5,), 42)
    for shift in (0.0, 64.0):
        _, entropy_N = chosen_logp_entropy(logits_NV + shift, ids_N, 1.0, kernels=native)
        exact_N = torch_impl.chosen_logp_entropy((logits_NV + shift).double(), ids_N)[1]
        torch.testing.assert_close(entropy_N.double(), exact_N, atol=5e-7, rtol=1e-6)
    logits_NV[:, :42] = logits_NV[:, 43:] = -1e4
    assert not chosen_logp_entropy(logits_NV, ids_N, 1.0, kernels=native)[1].any()


def test_the_entropy_of_equal_logits_is_the_logarithm_of_their_number(kernels: Kernels):
    logp_N, entropy_N = chosen_logp_entropy(
        torch.full((3, 1000), 7.0), torch.tensor([0, 500, 999]), 0.5, kernels=kernels
    )
    torch.testing.assert_close(entropy_N, torch.full((3,), math.log(1000)), atol=1e-5, rtol=0)
    torch.testing.assert_close(logp_N, -entropy_N, atol=1e-5, rtol=0)


def test_logits_that_are_no_tensor_of_their_own_are_read_where_they_stand(native: Kernels):
    ids_N = ids_of(10, 90)
    for spread in (lambda wide: (wide * 1)[::2, 5:95], lambda wide: (wide * 1).t()[:10, :10].repeat(1, 9)[:, :90]):
        results = []
        for function in (native, Kernels("torch")):
            wide_NV = normal(20, 100).requires_grad_()
            logp_N, _ = chosen_logp_entropy(spread(wide_NV), ids_N, 1.0, kernels=function)
            results.append(torch.autograd.grad(logp_N.sum(), wide_NV)[0])
        torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    # Rows that are one row in memory have a gradient each.
    row_1V = normal(1, 90).requires_grad_()
    logp_N, _ = chosen_logp_entropy((row_1V * 1).expand(10, 90), ids_N, 1.0, kernels=native)
    (found_1V,) = torch.autograd.grad(logp_N.sum(), row_1V)
    (expected_1V,) = torch.autograd.grad(row_1V.log_softmax(-1)[0, ids_N].sum(), row_1V)
    torch.testing.assert_close(found_1V, expected_1V, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 15, 128, 130])
def test_a_logit_that_is_not_finite_makes_its_row_nan_and_no_other(column, bad, dtype, kernels: Kernels):
    logits_NV, ids_N = normal(4, 131, dtype=dtype), ids_of(4, 130)
    logits_NV[2, column] = bad
    leaf_NV = logits_NV.requires_grad_()
    found = chosen_logp_entropy(leaf_NV, ids_N, 1.0, kernels=kernels)
    for out_N in found:
        assert out_N.isnan().tolist() == [False, False, True, False]
    (d_NV,) = torch.autograd.grad(found[0].sum() + found[1].sum(), leaf_NV)
    assert d_NV.isnan().any(-1).tolist() == [False, False, True, False]


def test_float64_runs_as_defined_and_never_natively(native: Kernels):
    logits_NV, ids_N = normal(3, 8).double(), ids_of(3, 8)
    found = chosen_logp_entropy(logits_NV, ids_N, 0.5, kernels=Kernels("auto"))
    for ours, expected in zip(found, torch_impl.chosen_logp_entropy(logits_NV, ids_N, 0.5), strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    with pytest.raises(NativeUnavailableError, match=r"was given torch\.float64"):
        chosen_logp_entropy(logits_NV, ids_N, 1.0, kernels=native)


def test_what_does_not_fit_is_refused(kernels: Kernels):
    logits_NV, ids_N = normal(3, 10), torch.tensor([0, 5, 9])

    def refused(match: str, logits=logits_NV, ids=ids_N, temperature=1.0, **options):
        with pytest.raises(InputError, match=match):
            chosen_logp_entropy(logits, ids, temperature, kernels=kernels, **options)

    refused(r"logits is torch\.float32 of shape \(10,\)", logits=logits_NV[0])
    refused(r"ids are torch\.int32 of shape \(3,\); give torch\.int64 \[3\]", ids=ids_N.int())
    refused(r"ids are torch\.int64 of shape \(2,\)", ids=ids_N[:2])
    refused(r"ids lie in \[0, 10\]; give ids in \[0, 10\)", ids=torch.tensor([0, 5, 10]))
    refused(r"ids lie in \[-1, 9\]", ids=torch.tensor([0, -1, 9]))
    for temperature in (0.0, 1e-7, -1.0, float("nan"), float("inf")):
        refused("log-probs need one of at least 1e-06, and finite", temperature=temperature)
