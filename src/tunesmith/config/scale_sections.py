"""The section of all recipes about more than one process."""

from typing import Literal

from tunesmith.config.sections import Positive, PositiveInt, Section


class ScaleSection(Section):
    """Processes that train together, see docs/scale.md."""

    ranks: PositiveInt = 1
    """Processes that divide each step among them; 1 is this process alone. Under `torchrun` its number counts."""
    rank_timeout_s: Positive = 1800.0
    """Seconds that a rank waits for the others before the run ends and names the one that did not come."""
    reduction: Literal["float32", "exact"] = "float32"
    """Sum of the gradients of micro-batches. `exact`: as integers on a fixed grid, equal to the bit for any number of
    ranks; more time and memory, and run.num_threads must be set."""

    @property
    def is_exact(self) -> bool:
        """True if gradients are added up exactly."""
        return self.reduction == "exact"
