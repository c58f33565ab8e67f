"""Statistics of a step: those of its micro-batches together are those of all its tokens."""

import pytest
import torch

from tunesmith.learn.algorithms.policy_loss import Correction
from tunesmith.learn.trainers.metrics import FirstPass


def correction(ratios: list[float], cuts: list[bool], differences: list[float]) -> Correction:
    return Correction(torch.zeros(0), torch.tensor(ratios), torch.tensor(cuts), torch.tensor(differences))


def passes(*corrections: Correction) -> FirstPass:
    """The first pass over a micro-batch for each correction."""
    return sum((FirstPass(corrections=(one,)) for one in corrections), FirstPass())


def test_importance_weights_of_micro_batches_are_merged_as_those_of_all_tokens() -> None:
    """Weights are per completion here, so each micro-batch has more differences than weights."""
    micro_batches = (
        correction([0.5, 1.5], [False, True], [0.6, 0.3, 0.0]),
        correction([2.0], [True], [0.7, 0.1, 0.2, 0.4]),
    )
    found = passes(*micro_batches).metrics()
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(2.3 / 7)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(0.7)
    assert found["sampling/importance_sampling_ratio/min"] == 0.5
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(4 / 3)
    assert found["sampling/importance_sampling_ratio/max"] == 2
    assert found["sampling/importance_sampling_ratio/cut_share"] == pytest.approx(2 / 3)


def test_micro_batches_without_tokens_and_exact_log_probs_have_no_importance_weights() -> None:
    exact, empty = correction([1.0, 1.0], [False, False], [0.0, 0.0]), correction([], [], [])
    assert passes(exact, empty).metrics() == FirstPass().metrics()
    assert "sampling/importance_sampling_ratio/mean" in passes(empty, correction([0.9], [False], [0.1])).metrics()
