"""One operation of `tunesmith bench kernels`, and what its case is made from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Setting:
    """Where tensors lie, what they are drawn from, and whether they are small."""

    device: torch.device
    seed: int
    quick: bool

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers; another `stream` gives others."""
        generator = torch.Generator().manual_seed(1000 * self.seed + stream)
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def whole(self, end: int, *shape: int, stream: int = 0) -> torch.Tensor:
        """Whole numbers from 0 to `end`, the last one left out."""
        generator = torch.Generator().manual_seed(1000 * self.seed + stream)
        return torch.randint(end, shape, generator=generator).to(self.device)

    def either(self, whole: int, small: int) -> int:
        """The first, or the second in a quick run."""
        return small if self.quick else whole


@dataclass(frozen=True, slots=True)
class Case:
    """Ours and the plain way, as calls without arguments.

    `num_bytes` is what the operation must read and write at least; `max_error` how far ours is from the definition in
    float64 (`error_of`), which is to be at most `tolerance`.
    """

    ours: Callable[[], object]
    plain: Callable[[], object]
    max_error: Callable[[], float]
    tolerance: float
    num_bytes: int
    device: torch.device
    size: str
    against: str
    picked: str
    measures_memory: bool = False


def error_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference of (found, exact) over all pairs, each over the largest magnitude of `exact` or 1.

    Not a number where one of them is none, or where only one is infinite.
    """
    worst = 0.0
    for found, exact in pairs:
        if exact.numel():
            difference = (found.detach().double() - exact.detach().double()).abs()
            scale = max(1.0, float(exact.detach().abs().max()))
            error = float(difference.max()) / scale
            worst = error if error != error else max(worst, error)
    return worst
