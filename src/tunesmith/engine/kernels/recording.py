"""Calls of native kernels, recorded once and repeated without the Python around them: a CPU's CUDA graph.

A decoding step of a small model is hundreds of calls of some microseconds, and each takes longer to prepare in Python.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_thread = threading.local()

_ALLOCATES = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)


def call(
    library: ctypes.CDLL,
    name: str,
    arguments: ctypes.Structure,
    tensors: Sequence[torch.Tensor | None],
    check: Callable[[int], None] | None = None,
) -> None:
    """Call the function `name` of the library with a pointer to `arguments`, and record the call if a `Recording` is
    open in this thread.

    Its fields `num_rows` and `num_threads` may change when it is repeated. `tensors` are those that the arguments point
    to. `check` is given the status that the function returns, and raises an error.
    """
    recording: Recording | None = getattr(_thread, "recording", None)
    if recording is not None:
        recording.add(library, name, arguments, tensors, check)
    status = getattr(library, name)(ctypes.byref(arguments))
    if check is not None:
        check(status)


class Recording(TorchDispatchMode):
    """Inside of the block, records the calls of a computation over `num_rows` rows; `replay` repeats them.

    A tensor that is allocated inside must have its rows in the first dimension. Its memory is the recording's: another
    tensor gets it once the last view has gone, and a replay writes it again. Tensors from outside are read and written
    where they were; their values may change in between. `problem` names the first operation of torch that is no
    allocation and no view, which would not be repeated; it is empty if the recording can be replayed.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.problem = ""
        self._calls: list[tuple[ctypes.CDLL, str, Any, Callable[[int], None] | None]] = []
        self._arguments: list[tuple[Any, int]] = []  # and its number of rows for each row of the computation
        self._kept: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[np.ndarray]] = {}
        self._own: set[int] = set()
        self._last = (num_rows, torch.get_num_threads())

    def __enter__(self) -> Self:
        _thread.recording = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _thread.recording = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            return self._allocated(result)
        returned = [one.alias_info for one in func._schema.returns]
        is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        if not is_view:
            self.problem = self.problem or str(func)
        return result

    def add(
        self,
        library: ctypes.CDLL,
        name: str,
        arguments: Any,
        tensors: Sequence[torch.Tensor | None],
        check: Callable[[int], None] | None,
    ) -> None:
        """Record a call; see `call`."""
        for tensor in tensors:
            if tensor is not None and (key := tensor.untyped_storage().data_ptr()) not in self._own:
                self._kept[key] = tensor.detach()  # the memory stays, even if a parameter gets another
        self._calls.append((library, name, ctypes.byref(arguments), check))
        self._arguments.append((arguments, arguments.num_rows // self.num_rows))

    def replay(self, num_rows: int) -> None:
        """Repeat the calls for the first `num_rows` rows, at most those of the recording, with torch's threads."""
        now = num_rows, torch.get_num_threads()
        if now != self._last:
            for arguments, factor in self._arguments:
                arguments.num_rows, arguments.num_threads = num_rows * factor, now[1]
            self._last = now
        for library, name, pointer, check in self._calls:
            status = getattr(library, name)(pointer)
            if check is not None:
                check(status)

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the recording for a tensor like this one, returned when its last view has gone."""
        free = self._free.setdefault(like.nbytes, [])
        block = free.pop() if free else torch.empty(like.nbytes, dtype=torch.uint8).numpy()
        self._own.add(block.ctypes.data)
        handle = block.view()
        weakref.finalize(handle, free.append, block)
        return torch.from_numpy(handle).view(like.dtype).view(like.shape)
