"""Statistics of votes. What is undefined is None, with the reason beside it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BiasTest:
    """How often raters took one side of a choice that should not matter, with the two-sided binomial p-value.

    `share` and `p_value` are None where `num` is 0.
    """

    num_hits: int
    num: int
    share: float | None
    p_value: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """A measure of agreement, or None with the reason why it is undefined. `num` items were judged by several."""

    value: float | None
    num: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RaterPair:
    """Cohen's kappa of two raters over the items that both judged."""

    a: str
    b: str
    kappa: Agreement


@dataclass(frozen=True, slots=True)
class RaterStats:
    """What one rater did. `left` counts choices of the left answer, `longer` those of the longer one."""

    rater_id: int
    name: str
    num_votes: int
    num_ties: int
    num_both_bad: int
    num_skips: int
    left: BiasTest
    longer: BiasTest
    num_gold: int
    gold_accuracy: float | None
    median_dwell_ms: float | None


@dataclass(frozen=True, slots=True)
class VoteStats:
    """Counts of effective votes, agreement, biases and gold accuracy of one campaign, or of all."""

    num_items: int
    num_items_done: int
    num_votes: int
    num_ties: int
    num_both_bad: int
    num_skips: int
    num_rankings: int
    num_demonstrations: int
    num_votes_last_hour: int
    alpha: Agreement
    kappas: Sequence[RaterPair]
    left: BiasTest
    longer: BiasTest
    raters: Sequence[RaterStats]
