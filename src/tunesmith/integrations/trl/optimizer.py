"""torch's AdamW with its step in our kernel: one pass over memory for float32 parameters on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tunesmith.engine.kernels.adamw.api import adamw
from tunesmith.engine.kernels.adamw.torch_impl import AdamWSettings, FloatMoments, ParameterUpdate
from tunesmith.engine.kernels.native import shared

_NOT_IN_KERNEL = ("amsgrad", "maximize", "capturable", "differentiable")


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same numbers within rounding and the same state, so each loads the other's.

    Parameters that the kernel does not know, and options such as `amsgrad`, take torch's own step.
    """

    @classmethod
    def like(cls, optimizer: torch.optim.AdamW) -> "FusedAdamW":
        """An optimizer of the same parameters and options, before its first step."""
        options = {name: option for name, option in optimizer.defaults.items() if name != "decoupled_weight_decay"}
        return cls(optimizer.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of AdamW; returns what `closure` does."""
        if not is_plain(self):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            settings = AdamWSettings(beta1, beta2, group["eps"])
            updates = list(self._updates(group))
            adamw(updates, settings, kernels=shared("auto"))
            # Autograd, and whoever keeps a copy of the weights, cannot see what C++ writes.
            torch.autograd.graph.increment_version([update.master for update in updates])
        return loss

    def _updates(self, group: dict[str, Any]) -> Iterator[ParameterUpdate]:
        """The update of each parameter of `group` that has a gradient; counts it."""
        found: tuple[list[Any], ...] = ([], [], [], [], [], [])
        self._init_group(group, *found)
        parameters, gradients, means, squares, _, counts = found
        for parameter, gradient, mean, square, count in zip(parameters, gradients, means, squares, counts, strict=True):
            count += 1
            moments = FloatMoments(mean, square)
            yield ParameterUpdate(
                gradient, parameter.detach(), None, moments, int(count), group["lr"], group["weight_decay"]
            )


def is_plain(optimizer: torch.optim.AdamW) -> bool:
    """True if the kernel computes what torch's AdamW would in the next step."""
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    return all(
        isinstance(group["lr"], float)
        and not any(group[name] for name in _NOT_IN_KERNEL)
        and all(map(_fits, group["params"]))
        for group in optimizer.param_groups
    )


def _fits(parameter: torch.Tensor) -> bool:
    """True for a float32 parameter on the CPU, not a part of a sharded one."""
    return type(parameter.data) is torch.Tensor and parameter.is_cpu and parameter.dtype == torch.float32


class FusedOptimizer:
    """Mixin before a TRL trainer: an optimizer that it creates as torch's AdamW is a `FusedAdamW`."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer as the trainer's arguments name it; one that the user gave is left alone."""
        trainer: Any = self
        is_given = trainer.optimizer is not None
        made = super().create_optimizer(model)  # type: ignore[misc]
        if not is_given and type(made) is torch.optim.AdamW and is_plain(made):
            trainer.optimizer = FusedAdamW.like(made)
        return trainer.optimizer
