"""Scores from hidden states: bits of the values, gradients against float64, and what exists at a time.

Shape legend: N rows, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_cases import FORMS, HIDDEN, ROW_BYTES, ROWS, TOKENS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.gated.api import softcap
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.logprob.head import LogitsBuffer, OutputLayer, blocks, head_logp_entropy, head_scores
from tunesmith.engine.kernels.native import Kernels


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, native: Kernels) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


class Largest(TorchDispatchMode):
    """Shape and bytes of the largest tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.shape: torch.Size = torch.Size()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > self.num_bytes:
                self.num_bytes, self.shape = leaf.numel() * leaf.element_size(), leaf.shape
        return out


def counted_flop() -> FlopCounterMode:
    """Counts the operations of torch's products, and of oneDNN's, which torch does not count."""

    def of_linear(x_shape: tuple[int, int], weight_shape: tuple[int, int], *_: object, **__: object) -> int:
        return 2 * x_shape[0] * x_shape[1] * weight_shape[0]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.mkldnn._linear_pointwise: of_linear})


@pytest.mark.parametrize("num_rows", [None, 2, 7, 44])
@pytest.mark.parametrize(("has_bias", "cap"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_have_the_bits_of_scores_of_all_logits(dtype, has_bias, cap, num_rows, kernels: Kernels) -> None:
    if dtype == torch.float32 and num_rows:
        pytest.skip("a float32 product depends on the rows beside it")
    case = Case(dtype, has_bias, cap)
    with torch.no_grad():
        logits_NV = linear(case.hidden_NH, case.weight_VH, case.bias_V)
        logits_NV = logits_NV if cap is None else softcap(logits_NV, cap, kernels=kernels)
        whole = chosen_logp_entropy(logits_NV, case.ids_N, 0.7, kernels=kernels)
        without_gradient = case.scores(kernels, num_rows)
    for found, alone, expected in zip(case.scores(kernels, num_rows), without_gradient, whole, strict=True):
        assert torch.equal(found, expected) and torch.equal(alone, expected)


@pytest.mark.parametrize("num_rows", [None, 7])
@pytest.mark.parametrize(("has_bias", "cap"), FORMS)
@pytest.mark.parametrize("of_hidden", [torch.float32, torch.bfloat16])
def test_under_autocast_logits_come_in_its_dtype(of_hidden, has_bias, cap, num_rows, kernels: Kernels) -> None:
    case, narrow = Case(torch.float32, has_bias, cap), Case(torch.bfloat16, has_bias, cap)
    case.hidden_NH = case.hidden_NH.detach().to(of_hidden).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        scores = case.scores(kernels, num_rows, torch.bfloat16)
    expected = narrow.scores(kernels, num_rows)
    assert all(map(torch.equal, scores, expected))
    for found, exact in zip(case.gradients(scores), narrow.gradients(expected), strict=True):
        assert torch.equal(found, exact.to(found.dtype))


def test_blocks_of_logits_share_one_buffer() -> None:
    buffer, case = LogitsBuffer(), Case(torch.bfloat16, True)
    with torch.no_grad():
        parts = list(blocks(ROWS, 1, 7, 1))
        made = [buffer.logits(case.hidden_NH[part], case.weight_VH, case.bias_V) for part in parts]
        assert len(made) > 2 and len({one.data_ptr() for one in made}) == 1
        assert torch.equal(made[-1], linear(case.hidden_NH, case.weight_VH, case.bias_V)[parts[-1]])
    assert sorted(parts, key=lambda part: part.start - part.stop)[0] == parts[0]


@pytest.mark.parametrize("num_rows", [None, 2, 7])
@pytest.mark.parametrize(("has_bias", "cap"), FORMS)
def test_gradients_are_those_of_float64(has_bias, cap, num_rows, kernels: Kernels) -> None:
    case = Case(torch.float32, has_bias, cap)
    for found, exact in zip(case.gradients(case.scores(kernels, num_rows)), case.exact(), strict=True):
        torch.testing.assert_close(found.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize(("has_bias", "cap"), FORMS)
def test_in_float64_the_chunks_are_exact(has_bias, cap) -> None:
    case = Case(torch.float64, has_bias, cap)
    for found, exact in zip(case.gradients(case.scores(Kernels("torch"), 7)), case.exact(), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("num_rows", [2, 7])
def test_in_bfloat16_chunks_cost_no_accuracy(num_rows: int, kernels: Kernels) -> None:
    case = Case(torch.bfloat16)
    whole, chunked = (case.gradients(case.scores(kernels, rows)) for rows in (None, num_rows))
    for one, several, exact in zip(whole, chunked, case.exact(), strict=True):
        assert (several - exact).norm() <= 1.05 * (one - exact).norm()


@pytest.mark.parametrize("num_rows", [None, 7])
def test_rows_without_gradient_are_left_out_and_change_nothing(num_rows: int | None, native: Kernels) -> None:
    case = Case(torch.float32)
    expected = case.exact()[0]
    unused_N = torch.arange(ROWS) % 3 > 0
    case.d_logp_N[unused_N], case.d_entropy_N[unused_N] = 0.0, 0.0
    scores = case.scores(native, num_rows)
    with counted_flop() as counter:
        d_hidden_NH, d_weight_VH = case.gradients(scores)
    num_products = 2 if num_rows is None else 3  # the logits again, unless they were kept
    assert counter.get_total_flops() == num_products * 2 * int((~unused_N).sum()) * HIDDEN * TOKENS
    assert (d_hidden_NH[unused_N] == 0).all()
    scale = expected.abs().max().item()
    torch.testing.assert_close(d_hidden_NH[~unused_N].double(), expected[~unused_N], atol=2e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(d_weight_VH.double(), case.exact()[1], atol=2e-6 * scale, rtol=1e-5)


def test_a_loss_that_uses_nothing_has_a_gradient_of_zero(native: Kernels) -> None:
    case = Case(torch.float32)
    case.d_logp_N.zero_()
    case.d_entropy_N.zero_()
    assert all((gradient == 0).all() for gradient in case.gradients(case.scores(native, 7)))


def test_no_tensor_is_larger_than_the_bound(kernels: Kernels) -> None:
    """Nor than hidden states or weights: those are there anyway, or are the gradients that were asked for."""
    case = Case(torch.float32, rows=400)
    chunk_bytes = 40 * ROW_BYTES[torch.float32]
    layer = OutputLayer(case.weight_VH)
    with Largest() as largest:
        scores = head_logp_entropy(case.hidden_NH, layer, case.ids_N, kernels=kernels, chunk_bytes=chunk_bytes)
        case.gradients(scores)
    given = max(leaf.numel() * leaf.element_size() for leaf in case.leaves)
    assert largest.num_bytes <= max(chunk_bytes, given)
    with Largest() as all_at_once:
        case.gradients(chosen_logp_entropy(linear(*case.leaves), case.ids_N, 1.0, kernels=kernels))
    assert all_at_once.shape == (400, TOKENS)  # the measure sees what it is to see


def test_a_second_backward_pass_gives_the_same(native: Kernels) -> None:
    case = Case(torch.bfloat16)
    scores = case.scores(native)
    first, second = case.gradients(scores, retain=True), case.gradients(scores)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_layer_gets_no_gradient_and_none_is_computed(native: Kernels) -> None:
    case = Case(torch.float32)
    expected = case.gradients(case.scores(native))[0]
    case.weight_VH.requires_grad_(False)
    logp_N, entropy_N = case.scores(native)
    with counted_flop() as counter:
        ((logp_N * case.d_logp_N).sum() + (entropy_N * case.d_entropy_N).sum()).backward()
    assert counter.get_total_flops() == 2 * ROWS * HIDDEN * TOKENS
    assert case.hidden_NH.grad is not None and case.weight_VH.grad is None
    assert torch.equal(case.hidden_NH.grad, expected)


def test_one_row_and_no_row_are_computed(native: Kernels) -> None:
    for rows in (0, 1):
        case = Case(torch.bfloat16, rows=rows)
        whole = Case(torch.bfloat16, rows=5)
        logp_N, _ = case.scores(native)
        with torch.no_grad():
            whole.hidden_NH[:rows] = case.hidden_NH
            whole.ids_N[:rows] = case.ids_N
        assert torch.equal(logp_N, whole.scores(native)[0][:rows])
        (d_hidden_NH,) = torch.autograd.grad(case.scores(native)[0].sum(), case.hidden_NH)
        assert d_hidden_NH.shape == (rows, HIDDEN)


def test_what_does_not_fit_is_refused(native: Kernels) -> None:
    case = Case(torch.float32)
    with pytest.raises(InputError, match="hidden states are"):
        head_logp_entropy(case.hidden_NH[:, 1:], OutputLayer(case.weight_VH), case.ids_N, kernels=native)
    with pytest.raises(InputError, match="ids for 45 rows"):
        head_logp_entropy(case.hidden_NH, OutputLayer(case.weight_VH), case.ids_N[1:], kernels=native)
    with pytest.raises(InputError, match="temperature is 0"):
        head_logp_entropy(case.hidden_NH, OutputLayer(case.weight_VH), case.ids_N, 0.0, kernels=native)
    with pytest.raises(InputError, match="ids lie in"):
        head_logp_entropy(case.hidden_NH, OutputLayer(case.weight_VH), case.ids_N + TOKENS, kernels=native)


def test_the_most_likely_tokens_are_marked_in_each_block(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32)
    layer = OutputLayer(case.weight_VH)
    monkeypatch.setattr("tunesmith.engine.kernels.logprob.head.CPU_CHUNK_BYTES", 12 * ROW_BYTES[torch.float32])
    case.ids_N[::2] = linear(case.hidden_NH, case.weight_VH).argmax(1)[::2]
    expected = linear(case.hidden_NH, case.weight_VH).argmax(1) == case.ids_N
    found = head_scores(case.hidden_NH, layer, case.ids_N, kernels=native)
    assert expected.any() and not expected.all()
    assert torch.equal(found.is_top_N, expected)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 300), of_one=st.integers(1, 50), block=st.integers(0, 400), fewest=st.integers(1, 9))
def test_blocks_cover_everything_once_and_keep_their_bound(length: int, of_one: int, block: int, fewest: int) -> None:
    found = list(blocks(length, of_one, block, fewest))
    assert [index for one in found for index in range(length)[one]] == list(range(length))
    assert all(one.stop - one.start <= max(fewest, block // of_one) for one in found)
