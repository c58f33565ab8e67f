"""A batch on its way to the device: all fields packed into one pinned buffer, one asynchronous copy, views behind it.

A copy of its own costs each field a launch and, from memory that is not pinned, a wait. Here the host packs the next
batch into a second buffer while the device still reads the first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from tunesmith.base.core.errors import InputError

ALIGNMENT = 256
"""Bytes: every field begins at a multiple, as torch's own allocations on a GPU begin at one of 512."""

_SMALLEST_BUFFER = 1 << 16

RecordT = TypeVar("RecordT")

_COPIES = deque[tuple[torch.cuda.Event, torch.cuda.Event]](maxlen=10_000)
"""Begin and end of the newest copies that `copy_s` has not counted."""


def copy_s() -> float:
    """Seconds of all uploaders' copies to a GPU since the last call; waits for those that still run."""
    copies = [_COPIES.popleft() for _ in range(len(_COPIES))]
    for _, ended in copies:
        ended.synchronize()
    return sum(begun.elapsed_time(ended) for begun, ended in copies) / 1e3


@dataclass(slots=True)
class _Buffer:
    """Host memory, and the event behind the last copy out of it; None before the first, and on a CPU."""

    memory: torch.Tensor
    copied: torch.cuda.Event | None = None


class Uploader:
    """Sends batches to one device. Keep one for as long as batches come: it keeps its buffers.

    Two batches may be on their way at a time; one more waits for the oldest copy to end. What is returned lies in
    memory of its own, which lives as long as one of its views. The copy is queued on the device's current stream, so
    what follows on that stream sees the batch; another stream must wait for it. On a CPU the same code runs without
    pinned memory and without events.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InputError(f"device is {self.device}; uploads go to a CPU or a CUDA device")
        self._is_pinned = self.device.type == "cuda"
        self._buffers = [_Buffer(self._host_memory(0)) for _ in range(2)]
        self._num_sent = 0

    def tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the device, contiguous views of one allocation, in the order given; by one copy.

        Any dtypes, shapes and strides, none and empty ones too. They may be changed at once: what was sent is packed.

        Raises:
            InputError: a tensor is not on the CPU, or is no plain dense one.
        """
        for index, tensor in enumerate(tensors):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise InputError(
                    f"tensor {index} is {tensor.layout} on {tensor.device}; give dense tensors on the CPU, which are "
                    "packed there"
                )
        num_bytes = sum(map(_aligned_bytes, tensors))
        buffer = self._next_buffer(num_bytes)
        for tensor, packed in zip(tensors, _views(buffer.memory, tensors), strict=True):
            packed.copy_(tensor.detach())
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        begun = self._mark()
        received.copy_(buffer.memory[:num_bytes], non_blocking=self._is_pinned)
        if begun is not None and (ended := self._mark()) is not None:
            buffer.copied = ended
            _COPIES.append((begun, ended))
        return _views(received, tensors)

    def record(self, record: RecordT) -> RecordT:
        """The dataclass with every tensor in it, in records inside of it too, on the device; by one copy.

        What is neither tensor nor dataclass stays as it is.

        Raises:
            InputError: it is no dataclass, or as for `tensors`.
        """
        if not is_dataclass(record) or isinstance(record, type):
            raise InputError(f"record is {type(record).__name__}; give a dataclass of tensors, or call tensors()")
        found: list[torch.Tensor] = []
        _collect(record, found)
        return _rebuilt(record, iter(self.tensors(found)))

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        """The buffer whose copy began first, once it has ended, large enough."""
        buffer = self._buffers[self._num_sent % len(self._buffers)]
        self._num_sent += 1
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.memory) < num_bytes:
            # Twice as much, so that batches that grow little by little are not a new buffer each.
            buffer.memory = self._host_memory(max(num_bytes, 2 * len(buffer.memory), _SMALLEST_BUFFER))
        return buffer

    def _mark(self) -> torch.cuda.Event | None:
        """An event at this place of the device's queue; None on a CPU."""
        if not self._is_pinned:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)


def _aligned_bytes(tensor: torch.Tensor) -> int:
    """Size of a tensor in the buffer, a multiple of ALIGNMENT."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _views(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors of the same dtypes and shapes in `memory`, one after the other, each aligned."""
    views: list[torch.Tensor] = []
    start = 0
    for tensor in tensors:
        views.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned_bytes(tensor)
    return views


def _collect(record: Any, found: list[torch.Tensor]) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif is_dataclass(value) and not isinstance(value, type):
            _collect(value, found)


def _rebuilt(record: Any, received: Any) -> Any:
    """The record with the tensors of `received` in the order of `_collect`."""
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = next(received)
        elif is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = _rebuilt(value, received)
    return replace(record, **changes)
