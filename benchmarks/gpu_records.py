"""What `python -m benchmarks.gpu` measures, as it crosses from the process that works to the one that keeps count."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.gpu_clock import Timing


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and floating-point operations that one part of a work needs at least."""

    num_bytes: int
    num_flops: int = 0

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The longer of both, at the rates that were measured: while bytes move, the matrix units can work."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of a row: a size of a work, or one way to use a model.

    `timings` has `ours`, what it stands beside (`eager`, `compile`, `liger`), and other ways of ours by name; `notes`
    says why one of them is missing. `floors` are the parts of the work, one after the other. `max_error` is None where
    nothing is to be compared. `facts` are figures of other kinds.
    """

    size: str
    picked: str
    against: str
    floors: tuple[Floor, ...]
    timings: Mapping[str, Timing]
    max_error: float | None = None
    tolerance: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    facts: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Bar:
    """What `setting` of a row is to reach: `quantity` is `copy_share`, `matrix_share`, `roofline_share` or
    `times_eager`.
    """

    setting: str
    quantity: str
    least: float
