"""Statistics of a step: those of its micro-batches together are those of all its tokens."""

import pytest
import torch

from tunesmith.algorithms.policy_loss import Correction
from tunesmith.trainers.metrics import FirstPass


def correction(ratios: list[float], differences: list[float], cut_share: float = 0.0) -> Correction:
    return Correction(torch.zeros(0), torch.tensor(ratios), torch.tensor(differences), torch.tensor(cut_share))


def passes(*corrections: Correction) -> FirstPass:
    """The first pass over a micro-batch for each correction."""
    return sum((FirstPass(corrections=(one,)) for one in corrections), FirstPass())


def test_importance_weights_of_micro_batches_are_merged_as_those_of_all_tokens() -> None:
    found = passes(correction([0.5, 1.5, 1.0], [0.6, 0.3, 0.0], 1 / 3), correction([2.0], [0.7], 1.0)).metrics()
    together = correction([0.5, 1.5, 1.0, 2.0], [0.6, 0.3, 0.0, 0.7], 0.5).metrics()
    assert {name: found[name] for name in together} == pytest.approx(together)


def test_micro_batches_without_tokens_and_exact_log_probs_have_no_importance_weights() -> None:
    exact = FirstPass().metrics()
    assert passes(correction([1.0, 1.0], [0.0, 0.0]), correction([], [])).metrics() == exact
    assert "sampling/importance_sampling_ratio/mean" in passes(correction([], []), correction([0.9], [0.1])).metrics()
