"""How a rollout is cut into minibatches and micro-batches."""

import pytest
import torch

from tunesmith.base.config.algorithms.grpo import GRPOSection
from tunesmith.engine.batch.pack import PolicyBatch, Sequences
from tunesmith.learn.trainers.passes import micro_batches
from tunesmith.learn.trainers.policy_step import minibatches, update_size


def rollout(num_rows: int) -> PolicyBatch:
    """Row b has the token b."""
    ids_BS = torch.arange(num_rows)[:, None].repeat(1, 2)
    lengths_B, ones_B = torch.full((num_rows,), 2), torch.ones(num_rows, dtype=torch.int64)
    one_BT = torch.zeros(num_rows, 1)
    sequences = Sequences(ids_BS, lengths_B, ones_B, torch.ones(num_rows, 1, dtype=torch.bool), one_BT, one_BT)
    return PolicyBatch(sequences, one_BT, one_BT, one_BT)


def rows_of(section: GRPOSection, seed: int) -> list[list[int]]:
    return [batch.sequences.ids_BS[:, 0].tolist() for batch in minibatches(rollout(24), section, seed)]


def test_minibatches_are_drawn_anew_in_each_epoch_and_keep_the_order_of_the_rollout() -> None:
    section = GRPOSection(num_epochs=2, num_minibatches=3)
    first, second = (rows_of(section, 0)[i : i + 3] for i in (0, 3))
    for epoch in (first, second):
        assert sorted(row for rows in epoch for row in rows) == list(range(24))
        assert all(rows == sorted(rows) for rows in epoch)  # so completions of one prompt stand together
    assert first != second
    assert rows_of(section, 0) == rows_of(section, 0) != rows_of(section, 1)


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 8), (3, [3, 3, 2]), (8, [8]), (99, [8])])
def test_a_mean_over_micro_batches_counts_those_that_are_computed(size: int, expected: list[int]) -> None:
    """Also the last one, which may be smaller, and whatever was drawn and left out before."""
    sequences = rollout(8).sequences
    assert [len(micro.lengths_B) for micro in micro_batches(sequences, size)] == expected
    for num_drawn in (None, 32.0):
        assert update_size(sequences, size, num_drawn).num_micro_batches == len(expected)
