"""Checkpoints that all ranks write and read together, each its own parts, by `torch.distributed.checkpoint`.

The parts are read by any number of ranks, also by those that divide a tensor in another way, and by one process.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tunesmith.base.core import faults
from tunesmith.base.core.errors import CheckpointError
from tunesmith.engine.distributed.ranks import num_ranks, rank, together


class Elements(torch.Tensor):
    """The elements of a tensor of `shape` that a rank holds: `held`, 1-d, in the order of memory from `start` on.

    It has no data of its own. `torch.distributed.checkpoint` writes and reads `held` as boxes, by the protocol that
    DTensor implements too (`torch/distributed/_checkpointable.py`).
    """

    _boxes: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, held: torch.Tensor, start: int, shape: Sequence[int]) -> "Elements":
        """Refer to `held`, without a copy."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=held.dtype, device=held.device)
        made._boxes = {torch.Size(offsets): box for offsets, box in boxes_of(held, start, shape)}
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of elements that have no data of their own")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, box.size()), TensorProperties.create_from_tensor(box), self.size()
                ),
            )
            for offsets, box in self._boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.size()) for offsets, box in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "boxes are found by their offsets"
        return self._boxes[index.offset]


def boxes_of(held: torch.Tensor, start: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(Offsets, view of `held`) of the boxes that consecutive elements of a tensor of `shape` consist of: the rest of
    a row, whole rows, and the beginning of a row.

    >>> [(offsets, box.tolist()) for offsets, box in boxes_of(torch.arange(2, 9), 2, (4, 3))]
    [((0, 2), [[2]]), ((1, 0), [[3, 4, 5], [6, 7, 8]])]
    """
    if not len(held):
        return
    if len(shape) < 2:
        yield (start,) * len(shape), held if shape else held.view(())
        return
    inner = shape[1:]
    size = math.prod(inner)
    row, within = divmod(start, size)
    head = min(len(held), -start % size)
    for offsets, box in boxes_of(held[:head], within, inner):
        yield (row, *offsets), box[None]
    row += head > 0
    num_rows = (len(held) - head) // size
    if num_rows:
        yield (row, *(0 for _ in inner)), held[head : head + num_rows * size].view(num_rows, *inner)
    for offsets, box in boxes_of(held[head + num_rows * size :], 0, inner):
        yield (row + num_rows, *offsets), box[None]


class _Writer(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        faults.reach(f"checkpoint/rank_{rank()}")
        return super().write_data(plan, planner)


def write(folder: Path, parts: Mapping[str, torch.Tensor]) -> None:
    """Write the parts of all ranks to `folder`, what several ranks hold once. All ranks must call it.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    with _together(f"cannot write the checkpoint to {folder}"):
        save(dict(parts), storage_writer=_Writer(folder), no_dist=num_ranks() == 1)


def read(folder: Path, parts: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors that this rank wants from `folder`. All ranks must call it.

    Raises:
        CheckpointError: on all ranks, if one of them could not read.
    """
    with _together(f"cannot read the checkpoint in {folder}"):
        load(dict(parts), storage_reader=FileSystemReader(folder), no_dist=num_ranks() == 1)


@contextmanager
def _together(failure: str) -> Iterator[None]:
    with together("checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(f"rank {place}: {cause}" for place, (cause, _) in error.failures.items())
            raise CheckpointError(f"{failure} ({causes})") from error


def described(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Meta tensors with shape and dtype of what `folder` holds, by the first part of their names and the rest."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, stored in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            group, _, name = key.partition("/")
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            found.setdefault(group, {})[name] = tensor
    return found
