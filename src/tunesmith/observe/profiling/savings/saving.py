"""The record of a saving, and what several models need."""

import math
from dataclasses import dataclass

from tunesmith.observe.profiling.facts import Facts

_EFFICIENCY = 0.75
"""Share of the rate of large matrix products that those of a pass reach."""

_BYTES_PER_S = 15e9
"""Rate at which weights are read from memory."""


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
    """Completions that are drawn together, if they fit into the cache."""
    key = "num_slots" if f.values.get("setup.engine") != "transformers" else "batch_size"
    return min(num_completions(f), f.number(f"recipe.rollout.{key}"))


def usable_cores(f: Facts) -> float:
    """Cores that the run may use: those of its affinity, or fewer by a quota."""
    return min(f.number("setup.usable_cores"), f.number("setup.cpu_quota", math.inf))


def pass_rate(f: Facts) -> float:
    """Floating-point operations a second that the matrix products of a pass reach, in the dtype of the run."""
    return _EFFICIENCY * f.number(f"setup.peak_flop_per_s.{f.text('setup.dtype')}")


def decode_step_s(f: Facts, num_rows: float) -> float:
    """Seconds of a step of the native engine that decodes `num_rows` tokens: Python, the weights, and each row."""
    num_parameters, itemsize = f.number("setup.num_parameters"), 4 if f.text("setup.dtype") == "float32" else 2
    weights_s = num_parameters * itemsize / _BYTES_PER_S
    return around_products_s(f, num_rows) + weights_s + num_rows * 2 * num_parameters / pass_rate(f)


def around_products_s(f: Facts, num_rows: float) -> float:
    """Seconds of such a step that are no products: Python, attention, sampling."""
    return 4e-4 + 5e-5 * f.number("setup.num_layers") + num_rows * 3e-5


def pass_fixed_s(f: Facts) -> float:
    """Seconds of a forward and backward pass of the packed decoder that do not depend on the number of positions."""
    return 1e-3 + 1e-3 * f.number("setup.num_layers") + 4e-10 * f.number("setup.num_parameters")


def pass_token_s(f: Facts) -> float:
    """Seconds of a position in a forward and backward pass of the packed decoder."""
    return 6 * f.number("setup.num_parameters") / pass_rate(f) + 4e-6 * f.number("setup.num_layers")


def running_share(f: Facts) -> float:
    """Share of the time in which a thread has a core while it could run."""
    running_s = f.number("cpu/process") * f.step_s
    return running_s / (running_s + f.number("cpu/run_delay_s")) if running_s else 1.0


def share_together(f: Facts, share: float) -> float:
    """Share of the time in which a parallel loop goes on if each of its threads has a core for `share` of the time: its
    threads wait for each other.
    """
    return share ** min(2.0, f.number("setup.num_threads"))
