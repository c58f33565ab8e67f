"""Which completions a reward is asked for together, and how its answers become one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.rewards.outcome import Logged, Outcome, SampleError, Scored

PORTION_ROWS = 16
"""Completions that a reward model is asked for together, as whole groups: enough to keep the matrix units busy, few
enough that scoring can begin while others are drawn."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive groups of `group_size` completions. The groups `groups` have the samples `samples`."""

    groups: range
    group_size: int

    @property
    def samples(self) -> range:
        """Places of the samples, counted over all groups."""
        return range(self.groups.start * self.group_size, self.groups.stop * self.group_size)


def portions(num_groups: int, group_size: int, *, num_rows: int = PORTION_ROWS) -> list[Portion]:
    """All groups in portions of at most `num_rows` completions, but at least one group each.

    A function of the two numbers alone: which sequences a model computes together can move the last bits of a reward,
    so that they are the same whether or not scoring waits for the last group.
    """
    size = max(1, num_rows // group_size)
    return [Portion(range(start, min(start + size, num_groups)), group_size) for start in range(0, num_groups, size)]


def one_answer(parts: Mapping[Portion, Scored]) -> Scored:
    """The answers to all portions as one, in the order of the samples."""
    ordered: Sequence[tuple[Portion, Scored]] = sorted(parts.items(), key=lambda item: item[0].groups.start)
    logged = Logged(sum(len(portion.samples) for portion, _ in ordered))
    outcomes: list[Outcome] = []
    retried: SampleError | None = None
    for portion, scored in ordered:
        outcomes += scored.outcomes
        logged.add(scored.logged, portion.samples)
        retried = retried or scored.retried
    return Scored(outcomes, logged, retried)
