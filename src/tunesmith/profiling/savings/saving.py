"""The record of a saving, and what several models need."""

import math
from dataclasses import dataclass

from tunesmith.profiling.facts import Facts

EFFICIENCY = 0.6
"""Share of the rate of large matrix products that a whole pass reaches."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds of a step that would be saved, and the interval in which they are expected."""

    seconds: float
    low: float
    high: float


def around(seconds: float, low: float = 0.7, high: float = 1.3) -> Saving | None:
    """`seconds` with an interval of the factors `low` to `high`; None if nothing is saved."""
    return Saving(seconds, low * seconds, high * seconds) if seconds > 0 else None


def num_completions(f: Facts) -> float:
    """Completions of a step."""
    return f.number("recipe.rollout.prompts_per_step") * f.number("recipe.rollout.completions_per_prompt")


def rows_at_a_time(f: Facts) -> float:
    """Completions that are drawn together, if the cache has room for them."""
    key = "num_slots" if f.values.get("setup.engine") != "transformers" else "batch_size"
    return min(num_completions(f), f.number(f"recipe.rollout.{key}"))


def usable_cores(f: Facts) -> float:
    """Cores that the run may use: those of its affinity, or fewer by a quota."""
    return min(f.number("setup.usable_cores"), f.number("setup.cpu_quota", math.inf))


def pass_rate(f: Facts) -> float:
    """Floating-point operations a second that a pass reaches, in the dtype of the run."""
    return EFFICIENCY * f.number(f"setup.peak_flop_per_s.{f.text('setup.dtype')}")
