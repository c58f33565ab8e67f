"""One operation of `python -m benchmarks.kernels` and `bench gpu`, and what its case is made from."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from tunesmith.kernels.native import Choice


@dataclass(frozen=True, slots=True)
class Setting:
    """Where tensors lie, what they are drawn from, whether they are small, or large enough to fill a GPU, and which
    kernels ours are.
    """

    device: torch.device
    seed: int
    quick: bool
    large: bool = False
    choice: Choice = "auto"

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers; another `stream` gives others. A GPU draws its own: a processor takes seconds."""
        return torch.randn(*shape, generator=self._generator(stream), device=self.device).to(dtype)

    def whole(self, end: int, *shape: int, stream: int = 0) -> torch.Tensor:
        """Whole numbers from 0 to `end`, the last one left out."""
        return torch.randint(end, shape, generator=self._generator(stream), device=self.device)

    def sized(self, whole: int, small: int, large: int | None = None) -> int:
        """The first; the second in a quick run; the third, if there is one, where a GPU is to be filled."""
        if self.quick:
            return small
        return large if self.large and large is not None else whole

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * self.seed + stream)


@dataclass(frozen=True, slots=True)
class Case:
    """Ours and the plain way, as calls without arguments.

    `num_bytes` is what the operation must read and write at least, `num_flops` its multiplications and additions where
    they are what bounds it; `max_error` how far ours is from the definition in float64 (`error_of`), which is to be at
    most `tolerance`. `variants` are other ways of ours, by name; `liger` is Liger's kernel, where it has one and can
    run. `compiles` is false where torch.compile has nothing to work on, or would unroll a loop for minutes; `by_wall`
    is true where part of the work is the processor's.
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
    num_flops: int = 0
    variants: Mapping[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])
    liger: Callable[[], object] | None = None
    compiles: bool = True
    by_wall: bool = False


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
