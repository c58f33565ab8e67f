"""The mean of the weights of the last steps (Izmailov et al. 2018, arXiv 1803.05407)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tunesmith.engine.models.lora import trained_parameters


class TailAverage(nn.Module):
    """The mean, in float32, of the trained parameters of `model` after each step from `first` on, counted from 0.

    Its own parameters are the mean, and the step from which on it has the weights, -1 for none: a part of a checkpoint.
    Resumed with another `first`, it goes on if it began no earlier than that, and else begins anew.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.first = first
        self.begun = nn.Parameter(torch.full((1,), -1.0))
        self._trained = trained_parameters(model)
        for name, parameter in self._trained.items():
            self.register_parameter(_own_name(name), nn.Parameter(parameter.detach().float().clone()))

    @classmethod
    def of_run(cls, model: nn.Module, share: float | None, num_steps: int) -> "TailAverage | None":
        """The mean from the `share` of `num_steps` on, of the last step at least; None if there is to be none."""
        return None if share is None else cls(model, min(math.ceil(share * num_steps), num_steps - 1))

    @property
    def has_begun(self) -> bool:
        """True if it has weights, all of them from `first` on."""
        return int(self.begun) >= self.first

    @torch.no_grad()
    def follow(self, index: int) -> None:
        """Take the weights after step `index` into the mean."""
        if index < self.first:
            return
        if not self.has_begun:
            self.begun.fill_(index)
        for mean, parameter in self._pairs():
            mean.lerp_(parameter.float(), 1 / (index - int(self.begun) + 1))

    @torch.no_grad()
    def write(self) -> None:
        """Give the model the mean, rounded to its dtype, if that has begun; there is no way back."""
        if self.has_begun:
            for mean, parameter in self._pairs():
                parameter.copy_(mean)

    @contextmanager
    def written(self) -> Iterator[None]:
        """A block in which the model has the mean, if that has begun."""
        if not self.has_begun:
            yield
            return
        last = [parameter.detach().clone() for parameter in self._trained.values()]
        self.write()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self._trained.values(), last, strict=True):
                    parameter.copy_(own)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The mean of each trained parameter, and that parameter."""
        for name, parameter in self._trained.items():
            yield self.get_parameter(_own_name(name)), parameter


def _own_name(name: str) -> str:
    """The name of the mean of a parameter: a module's parameters have no dots in their names."""
    return name.replace(".", "/")
