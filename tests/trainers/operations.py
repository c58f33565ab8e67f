"""Torch's operations inside and outside of the stages of a step: what coverage means without a clock."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.base.core import trace


class Operations(TorchDispatchMode, trace.Watcher):
    """Counts the operations of open traces; a watcher of spans as well, so that it knows which are in a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.num_inside = 0
        self.outside: list[str] = []

    def enter(self, path: str) -> None:
        self.depth += 1

    def leave(self, path: str) -> None:
        self.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            self.num_inside += 1
        elif trace._open_trace.get() is not None:
            self.outside.append(str(func))
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Of all operations fewer than 1 % are outside of the stages."""
        assert self.num_inside > 100
        assert len(self.outside) < 0.01 * self.num_inside, self.outside
