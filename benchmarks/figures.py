"""Ratios and spreads of what a benchmark measured."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of a figure over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of `values`, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def facts(self, name: str) -> dict[str, float]:
        """`<name>_median`, `<name>_min` and `<name>_max`, for JSON."""
        return {f"{name}_median": self.median, f"{name}_min": self.least, f"{name}_max": self.most}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """How many times `theirs` fits into `ours`, round by round: neighbours in time share the machine's mood."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def percentile_95(values: Sequence[int]) -> int:
    """The smallest value that 95 % of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]
