"""Where a reward curve stops rising."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tunesmith.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Plateau:
    """The level that a curve ends on, and the step, counted from 1, from which it stays near that level.

    `first` and `level` are means over the first and the last `window` values; the plateau begins where the mean over
    `window` values comes and stays within `tolerance` of the whole change. `is_flat` says that at least a window's
    length lies behind that step.
    """

    first: float
    level: float
    step: int
    is_flat: bool


def plateau(values: Sequence[float], *, window: int = 5, tolerance: float = 0.1) -> Plateau:
    """The plateau of a curve. With fewer values than twice the window, the window is half of them.

    Raises InputError for no values.
    """
    if not values:
        raise InputError("a curve without values has no plateau; give at least one")
    window = max(1, min(window, len(values) // 2))
    means = [fmean(values[start : start + window]) for start in range(len(values) - window + 1)]
    first, level = means[0], means[-1]
    bound = tolerance * abs(level - first)
    start = next(index for index in reversed(range(-1, len(means))) if index < 0 or abs(means[index] - level) > bound)
    return Plateau(first, level, step=start + 2, is_flat=len(means) - (start + 1) > window)
