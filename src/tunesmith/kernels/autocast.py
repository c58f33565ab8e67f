"""Definitions under autocast: they round where they say, and nowhere else."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def without_autocast(
    work: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """`work` with autocast off on the device of its first argument."""

    @functools.wraps(work)
    def exact(first: torch.Tensor, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        with torch.autocast(first.device.type, enabled=False):
            return work(first, *rest, **named)

    return exact
