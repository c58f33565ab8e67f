"""Which elements of the parameters each rank holds."""

import pytest
import torch
from on_ranks import on_ranks
from torch import nn

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.engine.distributed.ranks import gathered, rank
from tunesmith.engine.distributed.shares import ranges_of
from tunesmith.engine.models.optimizer import MasterAdamW

SIZES = [1000, 3, 0, 256, 70_000, 512, 1]
BLOCK = 256


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_element_has_one_owner_and_the_shares_are_equal_but_for_a_block(num_ranks: int) -> None:
    ranges = ranges_of(SIZES, num_ranks, BLOCK)
    for parameter, size in enumerate(SIZES):
        owned = [element for of_rank in ranges for element in of_rank[parameter]]
        assert owned == list(range(size))
        assert all(of_rank[parameter].start % BLOCK == 0 for of_rank in ranges)
    blocks = [sum(-(-len(part) // BLOCK) for part in of_rank) for of_rank in ranges]
    assert max(blocks) - min(blocks) <= 1


def held_after_a_step() -> list[tuple[int, int]]:
    """For each rank, the numbers in masters and moments, and the rank whose gradient alone the step had."""
    layer = nn.Linear(64, 100, dtype=torch.bfloat16)
    nn.init.zeros_(layer.weight)
    optimizer = MasterAdamW(layer, OptimizerSection(), total_steps=1)
    if rank() == 1:  # the others had no micro-batch
        layer(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    slots = optimizer._slots
    held = sum(tensor.numel() for slot in slots for name, tensor in slot.tensors().items() if name != "num_updates")
    return gathered([(held, int(layer.weight.count_nonzero()))])


def test_a_rank_holds_its_share_of_masters_and_moments_and_all_weights() -> None:
    found = on_ranks(3, held_after_a_step)
    assert [weights for _, weights in found] == [6400] * 3
    assert max(held for held, _ in found) <= 3 * (6500 / 3 + 2 * BLOCK)
    assert sum(held for held, _ in found) == 3 * 6500
