"""A factor on the loss that keeps float16 gradients within range (Micikevicius et al. 2018, arXiv 1710.03740)."""

_LARGEST = 2.0**24


class LossScale:
    """The factor `value`, a power of two: halved by each overflow, doubled after `window` updates without one.

    Below 2^-24 a float16 is 0 and above 65504 it is infinite; most gradients lie near the lower end.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value = initial
        self.num_good = 0
        self._window = window

    @property
    def can_fall(self) -> bool:
        """Whether a smaller factor is left to try. At 1, a gradient that is not finite is so without any factor."""
        return self.value > 1.0

    def note_overflow(self) -> None:
        """Halve the factor."""
        self.value = max(1.0, self.value / 2)
        self.num_good = 0

    def note_update(self) -> None:
        """Count an update; double the factor if there were enough in a row."""
        self.num_good += 1
        if self.num_good >= self._window:
            self.value, self.num_good = min(_LARGEST, 2 * self.value), 0
