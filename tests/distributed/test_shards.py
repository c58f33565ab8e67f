"""Parts of tensors in a checkpoint: boxes of consecutive elements, read by ranks that divide them otherwise."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tunesmith.base.core.errors import CheckpointError
from tunesmith.engine.distributed.shards import Elements, boxes_of, described, read, write


@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (1, 5), (3, 2, 4), (2, 1, 3, 2)])
def test_boxes_cover_exactly_the_elements_of_a_range(shape: Sequence[int]) -> None:
    size = math.prod(shape)
    whole = torch.arange(size)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        found = torch.full(tuple(shape), -1)
        for offsets, box in boxes_of(whole[start:stop], start, shape):
            place = found[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))]
            assert (place == -1).all(), "boxes overlap"
            place.copy_(box)
        inside = (whole >= start) & (whole < stop)
        assert torch.equal(found.view(-1), torch.where(inside, whole, -1))


def test_what_was_written_in_parts_is_read_in_others(tmp_path: Path) -> None:
    held, shape = torch.randn(12), (3, 4)
    write(tmp_path, {"policy/weight": Elements(held, 0, shape), "optimizer/num_updates/weight": torch.tensor(3.0)})
    assert {name: tensor.shape for name, tensor in described(tmp_path)["policy"].items()} == {"weight": shape}
    parts = [torch.zeros(5), torch.zeros(7)]
    for start, part in zip((0, 5), parts, strict=True):
        read(tmp_path, {"policy/weight": Elements(part, start, shape)})
    whole, count = torch.zeros(shape), torch.zeros(())
    read(tmp_path, {"policy/weight": whole, "optimizer/num_updates/weight": count})
    assert torch.equal(torch.cat(parts), held) and torch.equal(whole.view(-1), held) and count == 3


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"policy/weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"cannot read .*rank 0: Missing key .*policy/bias"):
        read(tmp_path, {"policy/bias": torch.zeros(3)})
