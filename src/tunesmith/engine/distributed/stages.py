"""The pipeline that a rank is one stage of: what neighbouring stages send each other, and when backward passes run.

Every stage makes the forward passes of all micro-batches in their order. The last one has the losses, and with them
the backward passes; another one makes its oldest outstanding backward pass after a forward pass, once as many are
outstanding as there are stages behind it (1F1B: Narayanan et al., PipeDream-Flush, 2021), and the rest before
the update.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tunesmith.base.core.errors import LostRankError


@dataclass(slots=True)
class Stages:
    """This rank is stage `index` of `count`; `first` is the rank of stage 0, and the others follow it.

    By the id of a parameter, `tied` has the other stage that holds it too, and `divided` those that some stages lack.
    """

    index: int
    count: int
    first: int
    tied: dict[int, int] = field(default_factory=dict[int, int])
    divided: set[int] = field(default_factory=set[int])
    _backlog: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    _sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list[tuple[Any, torch.Tensor]])

    @property
    def is_last(self) -> bool:
        """True for the stage that has the output layer and the losses."""
        return self.index == self.count - 1

    def counts(self, parameter: torch.Tensor) -> bool:
        """True on one of the stages that hold it: the first, or the last if all do."""
        if id(parameter) not in self.divided:
            return self.is_last
        return self.tied.get(id(parameter), self.count) > self.index

    def send(self, stage: int, tensor: torch.Tensor) -> None:
        """Send `tensor`, without waiting for its arrival."""
        self._sent = [one for one in self._sent if not one[0].is_completed()]
        content = tensor.detach().contiguous()
        self._sent.append((self._post(dist.isend, stage, content), content))

    def receive(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, filled with what that stage sends."""
        self._wait(self._post(dist.irecv, stage, tensor), stage)
        return tensor

    def swapped(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Send `tensor` to a stage, and return what that stage sends in its place."""
        self.send(stage, tensor)
        return self.receive(stage, torch.empty_like(tensor, memory_format=torch.contiguous_format))

    def later(self, backward: Callable[[], None]) -> None:
        """Make the backward pass of this stage's last forward pass when its turn comes."""
        self._backlog.append(backward)
        if len(self._backlog) >= self.count - self.index:
            self._backlog.popleft()()

    def finish(self) -> None:
        """Make all backward passes that are outstanding, and wait until what was sent has arrived."""
        while self._backlog:
            self._backlog.popleft()()
        for work, _ in self._sent:
            self._wait(work, None)
        self._sent.clear()

    def _post(self, send: Callable[..., Any], stage: int, tensor: torch.Tensor) -> Any:
        try:
            return send(tensor.view(torch.uint8), self.first + stage)
        except RuntimeError as error:
            raise self._lost(stage) from error

    def _wait(self, work: Any, stage: int | None) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(stage) from error

    def _lost(self, stage: int | None) -> LostRankError:
        other = "a neighbour" if stage is None else f"rank {self.first + stage}"
        return LostRankError(f"rank {self.first + self.index} exchanged activations with {other} in vain")
