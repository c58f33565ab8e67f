"""Tuning by votes: steps of one size, epochs that continue each other, and weights that learn what raters like."""

from dataclasses import replace

import pytest
import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference.api import iterative_tuning, process_user_preference
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch

TORCH = Kernels("torch")


def votes(num_pairs: int, taste_N: torch.Tensor, seed: int) -> PreferenceBatch:
    """Pairs of random outputs, and the choices of a rater who likes outputs along `taste`."""
    draw = torch.Generator().manual_seed(seed)
    a_BN, b_BN = torch.randn(2, num_pairs, len(taste_N), generator=draw).unbind()
    return PreferenceBatch(a_BN, b_BN, (a_BN @ taste_N > b_BN @ taste_N).float())


def test_a_step_moves_the_weights_by_the_mean_of_what_was_selected():
    batch, weights_N = votes(50, torch.ones(6), seed=1), torch.ones(6)
    selected_BN = process_user_preference(batch, weights_N, learning_rate=0.5, kernels=TORCH)
    torch.testing.assert_close(weights_N, 1 + 0.5 * selected_BN.mean(0))


def test_doubled_vote_weights_change_nothing_and_uneven_ones_weigh():
    batch = votes(3, torch.ones(2), seed=1)
    results = []
    for weights in ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0, 5.0]):
        results.append(torch.zeros(2))
        weighted = replace(batch, vote_weights_B=torch.tensor(weights))
        selected_BN = process_user_preference(weighted, results[-1], learning_rate=1.0, kernels=TORCH)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], selected_BN[2])


@pytest.mark.parametrize("num_pairs", [0, 3])
def test_no_votes_that_count_change_nothing(num_pairs: int):
    weights_N = torch.ones(4)
    batch = replace(votes(num_pairs, torch.ones(4), seed=1), vote_weights_B=torch.zeros(num_pairs))
    process_user_preference(batch, weights_N, learning_rate=1.0, kernels=TORCH)
    assert weights_N.tolist() == [1.0] * 4


def test_weights_learn_the_taste_of_a_rater():
    taste_N = torch.nn.functional.normalize(torch.randn(32, generator=torch.Generator().manual_seed(0)), dim=0)
    weights_N = torch.zeros(32)
    iterative_tuning([votes(500, taste_N, seed) for seed in range(1, 9)], weights_N, epochs=2, learning_rate=0.1)
    assert float(torch.cosine_similarity(weights_N, taste_N, dim=0)) > 0.95
    unseen = votes(1000, taste_N, seed=99)
    prefers_a = (unseen.outputs_a_BN - unseen.outputs_b_BN) @ weights_N > 0
    assert float((prefers_a == (unseen.choices_B == 1)).float().mean()) > 0.9


def test_epochs_are_steps_in_order_and_are_reported():
    batches = [votes(num_pairs, torch.ones(5), seed=num_pairs) for num_pairs in (7, 30, 2)]
    weights_N, expected_N = torch.zeros(5), torch.zeros(5)
    report = iterative_tuning(batches, weights_N, epochs=2, learning_rate=0.3, decay=0.5, kernels=TORCH)
    for rate in (0.3, 0.15):
        for batch in batches:
            process_user_preference(batch, expected_N, learning_rate=rate, kernels=TORCH)
    assert torch.equal(weights_N, expected_N)
    assert (report.num_votes, report.num_batches) == (78, 6)
    assert report.moved[1] == pytest.approx(report.moved[0] / 2, rel=1e-4)


def test_no_epochs_and_no_batches_change_nothing():
    weights_N = torch.ones(3)
    assert iterative_tuning([], weights_N, epochs=3, learning_rate=1.0).moved == (0.0, 0.0, 0.0)
    assert iterative_tuning([votes(3, torch.ones(3), 1)], weights_N, epochs=0, learning_rate=1.0).num_votes == 0
    assert weights_N.tolist() == [1.0] * 3


@pytest.mark.parametrize(("options", "message"), [({"epochs": -1}, "epochs is -1"), ({"decay": 0.0}, "decay is 0.0")])
def test_what_does_not_fit_is_refused(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        iterative_tuning([], torch.zeros(3), learning_rate=1.0, **options)
    with pytest.raises(InputError, match="scale is nan"):
        process_user_preference(votes(2, torch.ones(3), 1), torch.zeros(3), learning_rate=float("nan"))
