"""Scores whose gradients are computed along with them: the same numbers for fewer products, also where the word of the
loss was wrong.

Shape legend: N rows, H hidden, V vocabulary.
"""

import pytest
import torch
from head_cases import FORMS, HIDDEN, ROW_BYTES, ROWS, TOKENS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tunesmith.kernels.logprob.api import ScoreGradient
from tunesmith.kernels.logprob.head import OutputLayer, ScoreLoss, head_gradients, head_logp_entropy, head_scores
from tunesmith.kernels.logprob.head_blocks import blocks
from tunesmith.kernels.native import Kernels

PRODUCT = 2 * HIDDEN * TOKENS
"""Operations of one row in one product."""

Grads = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def one_visit_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU."""
    monkeypatch.setattr("tunesmith.kernels.logprob.head_blocks.ONE_VISIT_ON", {"cpu"})


def loss_of(case: Case, factor: float = 1.0) -> ScoreLoss:
    """What `Case.gradients` gives the scores, times a factor."""
    return lambda rows, *_: ScoreGradient(factor * case.d_logp_N[rows], factor * case.d_entropy_N[rows])


def taken(case: Case, kernels: Kernels, known: ScoreLoss | None, num_rows: int = 12) -> tuple[Grads, Grads, int]:
    """(scores, gradients, operations) by blocks of `num_rows` rows."""
    layer = OutputLayer(case.weight_VH, case.bias_V, case.cap)
    chunk_bytes = num_rows * ROW_BYTES[case.hidden_NH.dtype]
    with FlopCounterMode(display=False) as counter:
        scores = head_logp_entropy(
            case.hidden_NH, layer, case.ids_N, 0.7, kernels=kernels, chunk_bytes=chunk_bytes, known=known
        )
        gradients = case.gradients(scores)
    return scores, tuple(gradients), counter.get_total_flops()


@pytest.mark.parametrize(("has_bias", "cap"), FORMS)
@pytest.mark.parametrize("choice", ["native", "torch"])
def test_three_products_give_the_gradients_of_float64(has_bias, cap, choice, native: Kernels) -> None:
    case = Case(torch.float32, has_bias, cap)
    kernels = native if choice == "native" else Kernels("torch")
    scores, gradients, operations = taken(case, kernels, loss_of(case))
    assert operations == 3 * ROWS * PRODUCT
    later = taken(case, kernels, None)
    assert later[2] == 4 * ROWS * PRODUCT
    for ours, expected in zip(scores, later[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for ours, exact in zip(gradients, case.exact(), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=1e-5)


def test_in_bfloat16_values_have_the_same_bits_and_weights_no_more_error(native: Kernels) -> None:
    case = Case(torch.bfloat16)
    scores, gradients, _ = taken(case, native, loss_of(case), num_rows=7)
    later_scores, later_gradients, _ = taken(case, native, None, num_rows=7)
    assert all(torch.equal(a, b) for a, b in zip(scores, later_scores, strict=True))
    for ours, later, exact in zip(gradients, later_gradients, case.exact(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() <= 1.05 * (later - exact).norm()


@pytest.mark.parametrize("wrong", ["factor", "one row", "nothing", "not a number"])
def test_a_wrong_word_of_the_loss_costs_time_and_no_gradient(wrong: str, native: Kernels) -> None:
    case = Case(torch.float32)
    said_N = case.d_logp_N.clone()
    if wrong == "one row":
        said_N[3] += 0.01
    if wrong == "not a number":
        said_N[3] = torch.nan
    words: dict[str, ScoreLoss] = {
        "factor": loss_of(case, 2.0),
        "one row": lambda rows, *_: ScoreGradient(said_N[rows], case.d_entropy_N[rows]),
        "nothing": lambda *_: ScoreGradient(None, None),
        "not a number": lambda rows, *_: ScoreGradient(said_N[rows], case.d_entropy_N[rows]),
    }
    _, gradients, operations = taken(case, native, words[wrong])
    assert operations > 3 * ROWS * PRODUCT
    for ours, exact in zip(gradients, case.exact(), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=1e-5)


def test_a_gradient_of_one_score_alone_is_known_too(native: Kernels) -> None:
    case = Case(torch.float32)
    case.d_entropy_N.zero_()
    expected = case.exact()
    layer = OutputLayer(case.weight_VH)
    chunk_bytes = 12 * ROW_BYTES[torch.float32]

    def silent(rows: slice, *_: torch.Tensor) -> ScoreGradient:
        return ScoreGradient(case.d_logp_N[rows], None)

    for said in (silent, loss_of(case)):
        with FlopCounterMode(display=False) as counter:
            logp_N, _ = head_logp_entropy(
                case.hidden_NH, layer, case.ids_N, 0.7, kernels=native, chunk_bytes=chunk_bytes, known=said
            )
            found = torch.autograd.grad(logp_N, case.leaves, case.d_logp_N)
        assert counter.get_total_flops() == 3 * ROWS * PRODUCT
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=1e-5)


def test_where_all_logits_fit_nothing_is_asked_of_the_loss(native: Kernels) -> None:
    case = Case(torch.bfloat16)

    def never(*_: object) -> ScoreGradient:
        raise AssertionError("the logits are kept")

    kept, plain = taken(case, native, never, num_rows=ROWS), taken(case, native, None, num_rows=ROWS)
    assert kept[2] == 3 * ROWS * PRODUCT
    assert all(torch.equal(a, b) for a, b in zip(kept[0] + kept[1], plain[0] + plain[1], strict=True))
    with torch.no_grad():
        head_logp_entropy(case.hidden_NH, OutputLayer(case.weight_VH), case.ids_N, kernels=native, known=never)


def test_on_a_cpu_nothing_is_asked_of_the_loss(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case(torch.bfloat16)
    asked, plain = taken(case, native, lambda *_: ScoreGradient(None, None)), taken(case, native, None)
    assert asked[2] == plain[2] == 4 * ROWS * PRODUCT
    assert all(torch.equal(a, b) for a, b in zip(asked[0] + asked[1], plain[0] + plain[1], strict=True))


def test_rows_without_gradient_take_one_product(native: Kernels) -> None:
    case = Case(torch.float32)
    unused_N = torch.arange(ROWS) % 3 > 0
    case.d_logp_N[unused_N], case.d_entropy_N[unused_N] = 0.0, 0.0
    _, gradients, operations = taken(case, native, loss_of(case))
    assert operations == (ROWS + 2 * int((~unused_N).sum())) * PRODUCT
    assert (gradients[0][unused_N] == 0).all()
    for ours, exact in zip(gradients, case.exact(), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=1e-5)
    case.d_logp_N.zero_()
    case.d_entropy_N.zero_()
    assert not any(gradient.any() for gradient in taken(case, native, loss_of(case))[1])


def test_a_frozen_layer_takes_two_products(native: Kernels) -> None:
    case = Case(torch.float32)
    expected = case.exact()[0]
    case.weight_VH.requires_grad_(False)
    layer, chunk_bytes = OutputLayer(case.weight_VH), 12 * ROW_BYTES[torch.float32]
    with FlopCounterMode(display=False) as counter:
        logp_N, entropy_N = head_logp_entropy(
            case.hidden_NH, layer, case.ids_N, 0.7, kernels=native, chunk_bytes=chunk_bytes, known=loss_of(case)
        )
        ((logp_N * case.d_logp_N).sum() + (entropy_N * case.d_entropy_N).sum()).backward()
    assert counter.get_total_flops() == 2 * ROWS * PRODUCT
    assert case.hidden_NH.grad is not None
    torch.testing.assert_close(case.hidden_NH.grad.double(), expected, atol=1e-5, rtol=1e-5)
    # Blocks of as many rows: in float32 the bits of a product depend on that.
    way = {"kernels": native, "chunk_bytes": chunk_bytes, "needs_weight": False}
    found = head_gradients(case.hidden_NH, layer, case.ids_N, loss_of(case), 0.7, **way)
    assert found.d_weight_VH is None and torch.equal(found.d_hidden_NH, case.hidden_NH.grad)


def test_a_second_backward_pass_gives_the_same(native: Kernels) -> None:
    case = Case(torch.float32)
    scores = head_logp_entropy(
        case.hidden_NH,
        OutputLayer(case.weight_VH),
        case.ids_N,
        0.7,
        kernels=native,
        chunk_bytes=12 * ROW_BYTES[torch.float32],
        known=loss_of(case),
    )
    first, second = case.gradients(scores, retain=True), case.gradients(scores)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_most_likely_tokens_are_marked_in_the_same_visit(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32)
    layer = OutputLayer(case.weight_VH)
    expected = head_scores(case.hidden_NH, layer, case.ids_N, kernels=native)
    monkeypatch.setattr("tunesmith.kernels.logprob.head_blocks.CPU_CHUNK_BYTES", 12 * ROW_BYTES[torch.float32])
    found = head_scores(case.hidden_NH, layer, case.ids_N, kernels=native, known=loss_of(case))
    assert torch.equal(found.is_top_N, expected.is_top_N)
    torch.testing.assert_close(found.logp_N, expected.logp_N, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 300), of_one=st.integers(1, 50), block=st.integers(0, 400), fewest=st.integers(1, 9))
def test_blocks_cover_everything_once_and_keep_their_bound(length: int, of_one: int, block: int, fewest: int) -> None:
    found = list(blocks(length, of_one, block, fewest))
    assert [index for one in found for index in range(length)[one]] == list(range(length))
    assert all(one.stop - one.start <= max(fewest, block // of_one) for one in found)
