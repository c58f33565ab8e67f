"""The mean of the weights of the last steps (Izmailov et al. 2018, arXiv 1803.05407)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tunesmith.engine.models.lora import trained_parameters


class TailAverage(nn.Module):
    """The mean, in float32, of the trained parameters of `model` after each step from `first` on, counted from 0.

    Its own parameters are the mean, which is a part of a checkpoint; the number of weights in it follows from the step.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.first = first
        self.has_begun = False
        self._trained = trained_parameters(model)
        for name, parameter in self._trained.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(parameter.detach().float().clone()))

    @classmethod
    def of_run(cls, model: nn.Module, share: float | None, num_steps: int) -> "TailAverage | None":
        """The mean from the `share` of `num_steps` on, of the last step at least; None if there is to be none."""
        return None if share is None else cls(model, min(math.ceil(share * num_steps), num_steps - 1))

    @torch.no_grad()
    def follow(self, index: int) -> None:
        """Take the weights after step `index` into the mean."""
        if index < self.first:
            return
        self.has_begun = True
        for mean, parameter in zip(self.parameters(), self._trained.values(), strict=True):
            mean.lerp_(parameter.float(), 1 / (index - self.first + 1))

    @torch.no_grad()
    def write(self) -> None:
        """Give the model the mean, rounded to its dtype; there is no way back."""
        for mean, parameter in zip(self.parameters(), self._trained.values(), strict=True):
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
