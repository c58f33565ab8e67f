"""Log-prob, entropy and their gradient in Triton's interpreter, against the definition in float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from logprob_cases import ids_of, normal
from tunesmith.base.core.errors import InputError, TritonUnavailableError
from tunesmith.engine.kernels.launching import LaunchPlan
from tunesmith.engine.kernels.logprob import api, torch_impl, triton_impl
from tunesmith.engine.kernels.logprob.api import ScoreGradient, chosen_logp_entropy, logits_gradient, score
from tunesmith.engine.kernels.logprob.head import OutputLayer, head_logp_entropy
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.triton_softmax import launch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative error of a stored gradient; the interpreter cuts numbers off where a GPU rounds them."""


def gradient(function, logits_NV: torch.Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> torch.Tensor:
    """Of random sums of log-probs and entropies; a weight of 0 leaves the one out of the graph."""
    leaf_NV = logits_NV.clone().requires_grad_()
    d_2N = normal(2, len(logits_NV), seed=5, scale=1.0)
    parts = [
        (weight * d_N.to(out_N) * out_N).sum()
        for out_N, d_N, weight in zip(function(leaf_NV), d_2N, weights, strict=True)
        if weight
    ]
    return torch.autograd.grad(sum(parts), leaf_NV)[0]


def assert_as_defined(
    logits_NV: torch.Tensor, temperature: float, softcap: float | None, kernels: Kernels, weights=(1.0, 1.0)
) -> None:
    ids_N = ids_of(*logits_NV.shape)
    options = {"softcap": softcap, "kernels": kernels}
    found = chosen_logp_entropy(logits_NV, ids_N, temperature, **options)
    exact = torch_impl.chosen_logp_entropy(logits_NV.double(), ids_N, temperature, softcap)
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-6)
    found_NV = gradient(lambda leaf: chosen_logp_entropy(leaf, ids_N, temperature, **options), logits_NV, weights)
    exact_NV = gradient(
        lambda leaf: torch_impl.chosen_logp_entropy(leaf, ids_N, temperature, softcap), logits_NV.double(), weights
    )
    assert found_NV.dtype == logits_NV.dtype
    # A float16 keeps 2^-24 at least, whatever the size of the number.
    torch.testing.assert_close(found_NV.double(), exact_NV, atol=4e-6, rtol=STEP[logits_NV.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("width", [1, 2, 127, 129, 300, 5000])
def test_values_and_gradients_are_those_of_the_definition(width, softcap, dtype, interpreted: Kernels):
    assert_as_defined(normal(6, width, dtype=dtype), 0.7, softcap, interpreted)


@given(
    st.integers(1, 5),
    st.integers(1, 700),
    st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([None, 30.0]),
    st.sampled_from(DTYPES),
    st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]),
    st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_are_scored_as_defined(interpreted, num_rows, width, scale, temperature, cap, dtype, weights, seed):
    assert_as_defined(
        normal(num_rows, width, dtype=dtype, seed=seed, scale=scale), temperature, cap, interpreted, weights
    )


def test_tiles_are_put_together_whatever_their_order_of_size():
    logits_NV = normal(8, 900)
    logits_NV[0] += torch.linspace(-80, 80, 900)
    logits_NV[1] -= torch.linspace(-80, 80, 900)
    logits_NV[2, 128:] = -1e4  # nothing in the others
    logits_NV[3, :896] = -1e4
    ids_N = ids_of(8, 900)
    found = triton_impl.forward(logits_NV, ids_N, 0.7, 0.0, LaunchPlan(128, 8, 4))
    for ours, expected in zip(found, torch_impl.chosen_logp_entropy(logits_NV.double(), ids_N, 0.7), strict=False):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "block", "tiles"), [(1, 128, 1), (129, 256, 1), (4097, 4096, 2), (151936, 4096, 64)]
)
def test_a_launch_covers_the_row_with_powers_of_two(num_tokens, block, tiles):
    for dtype in DTYPES:
        plan = launch(num_tokens, dtype)
        assert (plan.block, plan.tiles) == (block, tiles)
        assert plan.block * plan.tiles >= num_tokens and plan.num_warps in (1, 2, 4, 8, 16)


def test_a_low_entropy_is_not_lost_to_cancellation(interpreted: Kernels):
    gap = torch.tensor([2.0, 8.0, 12.0, 16.0, 20.0])
    logits_NV = torch.zeros(5, 300) - gap[:, None]
    logits_NV[:, 42] = 0
    ids_N = torch.full((5,), 42)
    exact_N = torch_impl.chosen_logp_entropy(logits_NV.double(), ids_N)[1]
    for shift in (0.0, 64.0):
        _, entropy_N = chosen_logp_entropy(logits_NV + shift, ids_N, 1.0, kernels=interpreted)
        torch.testing.assert_close(entropy_N.double(), exact_N, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 130])
def test_a_logit_that_is_not_finite_makes_its_row_nan_and_no_other(dtype, bad, column, interpreted: Kernels):
    logits_NV = normal(4, 131, dtype=dtype)
    logits_NV[2, column] = bad
    leaf_NV = logits_NV.requires_grad_()
    found = chosen_logp_entropy(leaf_NV, ids_of(4, 130), 1.0, kernels=interpreted)
    for out_N in found:
        assert out_N.isnan().tolist() == [False, False, True, False]
    (d_NV,) = torch.autograd.grad(found[0].sum() + found[1].sum(), leaf_NV)
    assert d_NV.isnan().any(-1).tolist() == [False, False, True, False]


def test_logits_that_are_no_tensor_of_their_own_are_read_where_they_stand(interpreted: Kernels):
    ids_N = ids_of(10, 90)
    for spread in (
        lambda wide: (wide * 1)[::2, 5:95],
        lambda wide: (wide * 1).t()[:10, :10].repeat(1, 9)[:, :90],
        lambda wide: (wide * 1)[:1, :90].expand(10, 90),
        lambda wide: (wide * 1).t()[:10, :10].repeat_interleave(9, 0).t(),
    ):
        results = []
        for kernels in (Kernels("torch"), interpreted):
            wide_NV = normal(20, 100).requires_grad_()
            logp_N, _ = chosen_logp_entropy(spread(wide_NV), ids_N, 1.0, kernels=kernels)
            results.append(torch.autograd.grad(logp_N.sum(), wide_NV)[0])
        torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_gradient_of_some_columns_is_that_part_of_the_whole(softcap, interpreted: Kernels):
    logits_NV, ids_N = normal(6, 300), ids_of(6, 300)
    given_ = ScoreGradient(normal(6, seed=1), normal(6, seed=2))
    options = {"softcap": softcap, "kernels": interpreted}
    sums_N3 = score(logits_NV, ids_N, 0.7, **options).sums_NK
    whole_NV = logits_gradient(logits_NV.clone(), ids_N, sums_N3, given_, 0.7, **options)
    for start, end in ((0, 100), (100, 300), (299, 300)):
        part_NC = logits_gradient(logits_NV[:, start:end].clone(), ids_N - start, sums_N3, given_, 0.7, **options)
        torch.testing.assert_close(part_NC, whole_NV[:, start:end])
    strided_NV = logits_NV.t().contiguous().t()  # written where it stands, rows or not
    torch.testing.assert_close(logits_gradient(strided_NV, ids_N, sums_N3, given_, 0.7, **options), whole_NV)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("num_rows", [None, 7])
def test_the_head_scores_hidden_states_in_triton(num_rows, softcap, interpreted: Kernels):
    hidden_NH, weight_VH = normal(19, 16, scale=1.0), normal(300, 16, seed=1, scale=0.7)
    leaves = [hidden_NH.requires_grad_(), weight_VH.requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ids_N, d_2N = ids_of(19, 300), normal(2, 19, seed=3, scale=1.0)
    chunk_bytes = 300 * 4 * (num_rows or 19)
    layer = OutputLayer(weight_VH, softcap=softcap)
    found = head_logp_entropy(hidden_NH, layer, ids_N, 0.7, kernels=interpreted, chunk_bytes=chunk_bytes)
    exact = torch_impl.chosen_logp_entropy(linear(*wide), ids_N, 0.7, softcap)
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(found, leaves, list(d_2N))
    for ours, expected in zip(grads, torch.autograd.grad(exact, wide, list(d_2N.double())), strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


def test_torch_knows_the_operators():
    logits_NV, ids_N = normal(4, 60), ids_of(4, 60)
    torch.library.opcheck(torch.ops.tunesmith.logprob.default, (logits_NV, ids_N, 0.7, 0.0))
    sums_N3 = torch.ops.tunesmith.logprob(logits_NV, ids_N, 0.7, 0.0)[2]
    for given_NV, out_NV in ((logits_NV, logits_NV.clone()), (None, logits_NV)):
        arguments = (given_NV, ids_N, sums_N3, normal(4), normal(4), 0.7, 0.0, out_NV)
        torch.library.opcheck(torch.ops.tunesmith.logprob_gradient.default, arguments)


def test_a_compiled_function_keeps_it_in_one_graph(interpreted: Kernels, monkeypatch):
    monkeypatch.setattr(api, "_check", lambda *_: None)  # on a CPU it reads the ids, on a GPU it does not
    logits_NV, ids_N = normal(4, 60), ids_of(4, 60)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp_N, entropy_N = chosen_logp_entropy(logits * 2, ids_N, 0.7, kernels=interpreted)
        return (logp_N - 0.1 * entropy_N).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf_NV = logits_NV.clone().requires_grad_()
        value = function(leaf_NV)
        results.append((value.detach(), torch.autograd.grad(value, leaf_NV)[0]))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_no_row_gives_no_score_and_an_id_outside_gives_nan():
    logp_N, entropy_N, sums_N3 = torch.ops.tunesmith.logprob(
        torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 1.0, 0.0
    )
    assert logp_N.shape == entropy_N.shape == (0,) and sums_N3.shape == (0, 3)
    logp_N, entropy_N, _ = torch.ops.tunesmith.logprob(torch.zeros(3, 5), torch.tensor([-1, 2, 5]), 1.0, 0.0)
    assert logp_N.isnan().tolist() == [True, False, True] and not entropy_N.isnan().any()


def test_what_does_not_fit_is_refused(interpreted: Kernels):
    logits_NV, ids_N = normal(3, 10), torch.tensor([0, 5, 9])
    outside_N = torch.tensor([0, 5, 10])
    if logits_NV.is_cuda:  # the check would wait for the GPU
        assert chosen_logp_entropy(logits_NV, outside_N, 1.0, kernels=interpreted)[0].isnan().tolist() == [0, 0, 1]
    else:
        with pytest.raises(InputError, match=r"ids lie in \[0, 10\]"):
            chosen_logp_entropy(logits_NV, outside_N, 1.0, kernels=interpreted)
    with pytest.raises(InputError, match="log-probs need one of at least"):
        chosen_logp_entropy(logits_NV, ids_N, 0.0, kernels=interpreted)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match=r"softcap is .*; give a positive finite number"):
            chosen_logp_entropy(logits_NV, ids_N, 1.0, softcap=cap, kernels=interpreted)
    with pytest.raises(TritonUnavailableError, match="float64"):
        chosen_logp_entropy(logits_NV.double(), ids_N, 1.0, kernels=interpreted)
