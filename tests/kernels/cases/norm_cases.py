"""What the tests of RMSNorm share with their twins in Triton."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from drawn import normal
from tunesmith.engine.kernels.rms_norm.torch_impl import Normed


@dataclass(frozen=True)
class Case:
    """What is given, and the gradients of both results."""

    x_RH: torch.Tensor
    residual_RH: torch.Tensor | None
    weight_H: torch.Tensor
    d_normed_RH: torch.Tensor
    d_sum_RH: torch.Tensor

    @classmethod
    def of(cls, *shape: int, dtype=torch.float32, with_residual: bool = True, seed: int = 0, scale=1.0) -> "Case":
        x_RH, residual_RH, d_normed_RH, d_sum_RH = (
            normal(*shape, dtype=dtype, seed=4 * seed + index, scale=scale if index < 2 else 1.0) for index in range(4)
        )
        weight_H = normal(shape[-1], dtype=dtype, seed=9 + seed)
        return cls(x_RH, residual_RH if with_residual else None, weight_H, d_normed_RH, d_sum_RH)

    def wide(self) -> "Case":
        return Case(*(None if tensor is None else tensor.double() for tensor in vars(self).values()))

    def run(self, function: Callable[..., Normed], *, use_normed=True, use_sum=True) -> list[torch.Tensor | None]:
        """Normed, sum, and the gradients of x, weight and residual."""
        leaves = [self.x_RH, self.weight_H, *([] if self.residual_RH is None else [self.residual_RH])]
        leaves = [tensor.clone().requires_grad_() for tensor in leaves]
        found = function(leaves[0], leaves[2] if len(leaves) > 2 else None, leaves[1], 1e-5)
        outputs = [(found.normed_RH, self.d_normed_RH)] * use_normed + [(found.sum_RH, self.d_sum_RH)] * use_sum
        grads = torch.autograd.grad([a for a, _ in outputs], leaves, [b for _, b in outputs], allow_unused=True)
        return [found.normed_RH.detach(), found.sum_RH.detach(), *grads]

    def gradients(
        self, function: Callable[..., Normed], *, use_normed: bool = True, use_sum: bool = True
    ) -> list[torch.Tensor | None]:
        """Those of x, weight and residual."""
        return self.run(function, use_normed=use_normed, use_sum=use_sum)[2:]
