"""Savings in drawing completions: engine, cache, lengths, groups that teach nothing."""

import math

from tunesmith.profiling.facts import Facts
from tunesmith.profiling.savings.saving import Saving, around, pass_rate, rows_at_a_time

_BYTES_PER_S = 15e9
"""Rate at which weights are read from memory."""


def engine_fallback(f: Facts) -> Saving | None:
    """Drawing becomes as many times as fast as benchmarks/rollout.json says: 4.2 times for a single completion of each
    prompt, 19 times for 32. An exact engine also makes the pass for the old policy needless.
    """
    if f.text("setup.engine") != "transformers":
        return None
    drawing_s, ratio = f.stage_s("rollout"), 4.2 * f.number("recipe.rollout.completions_per_prompt") ** 0.36
    old_s = f.stage_s("old_policy") if f.text("setup.dtype") == f.text("setup.best_dtype") == "bfloat16" else 0.0
    return Saving(drawing_s * (1 - 1 / ratio) + old_s, drawing_s / 2, drawing_s + old_s)


def long_tail(f: Facts) -> Saving | None:
    """Of the steps with few completions left, those beyond the new limit go."""
    begin, end = 1.3 * f.number("completions/mean_length"), f.number("completions/max_length")
    if end <= 1.2 * length_limit(f):
        return None
    return around(f.number("rollout/tail_s") * (end - length_limit(f)) / (end - begin), 0.6, 1.4)


def length_limit(f: Facts) -> int:
    """The limit of a completion to advise: twice the mean length."""
    return math.ceil(2 * f.number("completions/mean_length"))


def cache_starved(f: Facts) -> Saving | None:
    """With all slots in use there are fewer decoding steps, each with more rows."""
    if f.number("rollout/starved_s") < 0.05 * f.stage_s("rollout"):
        return None
    slots = f.number("recipe.rollout.num_slots")
    rows_now, rows_new = f.number("rollout/slots_used") * slots, rows_at_a_time(f)
    return around(f.number("rollout/starved_s") * (1 - _cost_of_row(f, rows_new) / _cost_of_row(f, rows_now)), 0.6, 1.4)


def _cost_of_row(f: Facts, num_rows: float) -> float:
    """Time of one token where `num_rows` are decoded together: a step has a fixed cost, and one of each row."""
    num_parameters, num_layers = f.number("setup.num_parameters"), f.number("setup.num_layers")
    rate = pass_rate(f)
    itemsize = 4 if f.text("setup.dtype") == "float32" else 2
    fixed_s = 3e-4 + 6e-5 * num_layers + num_parameters * itemsize / _BYTES_PER_S
    row_s = 1.5e-5 + 2 * num_parameters / rate
    return fixed_s / max(1.0, num_rows) + row_s


def no_signal_groups(f: Facts) -> Saving | None:
    """Drawing and scoring of the groups that teach nothing goes."""
    share = f.number("groups/num_dropped") / f.number("groups/num_drawn")
    if share < 0.25:
        return None
    rows = rows_at_a_time(f)
    left = (1 - share) * _cost_of_row(f, max(1.0, (1 - share) * rows)) / _cost_of_row(f, rows)
    return around(f.stage_s("rollout") * (1 - left) + f.stage_s("reward") * share, 0.6, 1.4)


def num_useful_groups(f: Facts) -> int:
    """Groups of a step that teach something, at least one."""
    return max(1, round(f.number("groups/num_drawn") - f.number("groups/num_dropped")))


def engine_reload(f: Facts) -> Saving | None:
    """The allocation of cache and packed weights goes; the copy of new weights stays."""
    if not f.values.get("recipe.rollout.unload_during_update"):
        return None
    held_gb = sum(f.number(f"setup.estimate_gb.{part}", 0.0) for part in ("cache", "packed weights"))
    if held_gb > 0.5 * f.number("memory/available_gb"):
        return None
    return around(0.5 * f.number("time/rollout/load_s"), 0.4, 1.6)
