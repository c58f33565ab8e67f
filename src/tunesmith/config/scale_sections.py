"""The section of all recipes about more than one process."""

from tunesmith.config.sections import Positive, PositiveInt, Section


class ScaleSection(Section):
    """Processes that train together, see docs/scale.md."""

    ranks: PositiveInt = 1
    """Processes that divide each step among them; 1 is this process alone. Under `torchrun` its number counts."""
    rank_timeout_s: Positive = 1800.0
    """Seconds that a rank waits for the others before the run ends and names the one that did not come."""
