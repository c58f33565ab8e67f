"""The loss of supervised fine-tuning against a float64 twin from logits, and against TRL's."""

import math

import pytest
import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.logprob.torch_impl import chosen_logp_entropy
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.algorithms.token_loss import negative_log_likelihood


def scores(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logp_N, entropy_N = chosen_logp_entropy(logits_NV, ids_N, 1.0)
    return logp_N, entropy_N, logits_NV.argmax(-1) == ids_N


def twin(logits_NV: list[list[float]], ids_N: list[int]) -> tuple[float, float, float, list[list[float]]]:
    """Mean loss, entropy and share of likeliest tokens, and the gradient of the loss, in plain loops."""
    loss = entropy = top = 0.0
    gradient: list[list[float]] = []
    for logits, chosen in zip(logits_NV, ids_N, strict=True):
        normaliser = math.log(math.fsum(math.exp(x) for x in logits))
        p = [math.exp(x - normaliser) for x in logits]
        loss += normaliser - logits[chosen]
        entropy += -math.fsum(q * math.log(q) for q in p)
        top += max(range(len(p)), key=p.__getitem__) == chosen
        gradient.append([(q - (index == chosen)) / len(ids_N) for index, q in enumerate(p)])
    n = len(ids_N)
    return loss / n, entropy / n, top / n, gradient


def test_loss_gradient_and_figures_are_those_of_the_twin() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(9, 17, dtype=torch.float64, generator=generator, requires_grad=True)
    ids_N = torch.randint(17, (9,), generator=generator)
    ids_N[0] = logits_NV[0].argmax()
    loss, stats = negative_log_likelihood(*scores(logits_NV, ids_N), num_tokens=9)
    loss.backward()
    expected = twin(logits_NV.tolist(), ids_N.tolist())
    assert loss.item() == pytest.approx(expected[0], rel=1e-10)
    assert logits_NV.grad is not None
    torch.testing.assert_close(logits_NV.grad, torch.tensor(expected[3], dtype=torch.float64), rtol=1e-10, atol=1e-12)
    figures = stats.metrics()
    assert [figures[name] for name in ("loss", "entropy", "mean_token_accuracy")] == pytest.approx(
        expected[:3], rel=1e-10
    )
    assert figures["mean_token_accuracy"] > 0


def test_micro_batches_add_up_to_the_whole_step() -> None:
    logits_NV = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids_N = torch.arange(8) % 5
    whole, stats = negative_log_likelihood(*scores(logits_NV, ids_N), num_tokens=8)
    parts = [
        negative_log_likelihood(*scores(logits_NV[rows], ids_N[rows]), num_tokens=8)
        for rows in (slice(0, 1), slice(1, 8))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    assert merged(part for _, part in parts).metrics() == pytest.approx(stats.metrics(), rel=1e-12)


def test_shapes_that_differ_and_a_step_without_tokens_are_refused() -> None:
    ones_N, top_N = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(InputError, match="different shapes"):
        negative_log_likelihood(ones_N, ones_N[:1], top_N, num_tokens=3)
    with pytest.raises(InputError, match="num_tokens is 0"):
        negative_log_likelihood(ones_N, ones_N, top_N, num_tokens=0)
