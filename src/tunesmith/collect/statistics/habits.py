"""Patterns in a rater's votes that hardly come from reading: one side, too little time, an even pace, regular sides."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HabitName = Literal["one_side", "too_fast", "even_pace", "regular_sides"]

MIN_VOTES = 20
"""Fewer votes show no habit."""

ONE_SIDE = 0.8
"""Share of votes on one side from which on it is a habit, if chance does not explain it."""

CHARACTERS_PER_S = 100.0
"""Characters of both answers and a second of looking: 1,200 words a minute, several times what people read."""

MIN_PACE_SPREAD = 0.15
"""Standard deviation of the logarithm of the times. People's times differ by more: so do the texts."""

_Z = 4.0  # of a normal distribution, two-sided: 6 in 100,000


@dataclass(frozen=True, slots=True)
class Look:
    """What a vote shows of its rater: the side of the answer that was taken (1 left, -1 right, 0 neither or not known),
    the time from sight to vote in milliseconds, if it is known, and the characters of both answers.
    """

    side: int
    dwell_ms: float | None
    num_characters: int


@dataclass(frozen=True, slots=True)
class Habit:
    """A pattern: its name, and the figures that show it, as part of a sentence. Example: `Habit("one_side", "the left
    answer in 46 of 50 votes")`.
    """

    name: HabitName
    figures: str


def habits(looks: Sequence[Look]) -> tuple[Habit, ...]:
    """The patterns in one rater's votes, in the order in which they were given."""
    sides = [one.side for one in looks if one.side]
    timed = [(one.dwell_ms, one.num_characters) for one in looks if one.dwell_ms is not None]
    found = (_one_side(sides), _too_fast(timed), _even_pace([dwell for dwell, _ in timed]), _regular(sides))
    return tuple(one for one in found if one is not None)


def _one_side(sides: Sequence[int]) -> Habit | None:
    num, num_left = len(sides), sum(side > 0 for side in sides)
    most = max(num_left, num - num_left)
    if num < MIN_VOTES or most < ONE_SIDE * num or (2 * most - num) / math.sqrt(num) < _Z:
        return None
    return Habit("one_side", f"the {'left' if 2 * num_left > num else 'right'} answer in {most} of {num} votes")


def _too_fast(timed: Sequence[tuple[float, int]]) -> Habit | None:
    num_fast = sum(dwell / 1000 < length / CHARACTERS_PER_S for dwell, length in timed)
    if len(timed) < MIN_VOTES or 2 * num_fast < len(timed):
        return None
    return Habit("too_fast", f"less time than reading takes in {num_fast} of {len(timed)} votes")


def _even_pace(dwells: Sequence[float]) -> Habit | None:
    logs = [math.log(max(dwell, 1.0)) for dwell in dwells]
    if len(logs) < MIN_VOTES or statistics.stdev(logs) >= MIN_PACE_SPREAD:
        return None
    return Habit(
        "even_pace", f"nearly the same time, {statistics.median(dwells) / 1000:.1f} s, for all {len(logs)} votes"
    )


def _regular(sides: Sequence[int]) -> Habit | None:
    """Wald and Wolfowitz 1940: the number of runs of equal sides, against what chance makes of as many of each."""
    num, num_left = len(sides), sum(side > 0 for side in sides)
    product = 2 * num_left * (num - num_left)
    if num < MIN_VOTES or min(num_left, num - num_left) < MIN_VOTES / 4:
        return None
    mean = product / num + 1
    deviation = math.sqrt(product * (product - num) / (num**2 * (num - 1)))
    num_runs = 1 + sum(one != other for one, other in itertools.pairwise(sides))
    if abs(num_runs - mean) < _Z * deviation:
        return None
    how = "changed" if num_runs > mean else "stayed the same"
    count = num_runs - 1 if num_runs > mean else num - num_runs
    return Habit("regular_sides", f"the side {how} {count} times from one of {num} votes to the next")
