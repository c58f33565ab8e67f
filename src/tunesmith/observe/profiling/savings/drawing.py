"""Savings in drawing completions: engine, cache, lengths, groups that teach nothing."""

import math

from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.savings.saving import (
    Saving,
    around,
    around_products_s,
    decode_step_s,
    num_completions,
    rows_at_a_time,
)

_LOW_TEMPERATURE = 0.7
"""Temperature below which completions of a group are often alike."""


def engine_fallback(f: Facts) -> Saving | None:
    """The native engine needs as long as its decoding steps. If it is exact, the pass for the old policy goes too."""
    if f.text("setup.engine") != "transformers" or not f.stage_s("rollout"):
        return None
    drawing_s, rows = f.stage_s("rollout"), min(num_completions(f), f.number("recipe.rollout.num_slots"))
    num_steps = math.ceil(num_completions(f) / rows) * f.number("completions/max_length")
    num_drawn = num_completions(f) * f.number("completions/mean_length")
    native_s = num_steps * decode_step_s(f, num_drawn / num_steps)
    is_exact = f.text("setup.dtype") in ("float32", f.text("setup.best_dtype"))
    old_s = f.stage_s("old_policy") if is_exact else 0.0
    with_evaluation = 1 + f.stage_s("evaluate") / drawing_s
    saved_s = with_evaluation * max(0.3 * drawing_s, drawing_s - native_s) + old_s
    return Saving(saved_s, 0.5 * saved_s, with_evaluation * drawing_s + old_s)


def int8_drawing(f: Facts) -> Saving | None:
    """The products of a decoding step take as much less time as they did when the run began; all else of drawing stays.
    The pass for the old policy that an exact engine makes needless comes back, where the update needs it.
    """
    is_corrected = f.values.get("recipe.rollout.importance.mode") != "off"
    if f.values.get("recipe.rollout.weights") != "model" or not is_corrected:
        return None
    before_s, after_s = f.number("setup.products_s.model"), f.number("setup.products_s.int8")
    share = (before_s - after_s) / (before_s + around_products_s(f, rows_at_a_time(f)))
    saved_s = share * (f.stage_s("rollout", "evaluate") - f.number("time/rollout/load_s", 0.0))
    needs_pass = f.values.get("setup.int8_needs_old_policy") and not f.stage_s("old_policy")
    new_s = f.stage_s("forward") / f.number(f"recipe.{f.section}.num_epochs", 1.0) if needs_pass else 0.0
    return around(saved_s - new_s, 0.6, 1.4)


def long_tail(f: Facts) -> Saving | None:
    """Of the steps with few completions left, those beyond the new limit go, and about a tenth of the learnt tokens."""
    limit, end = length_limit(f), f.number("completions/max_length")
    if end <= limit or f.number("rollout/tail_s") < 0.1 * f.stage_s("rollout"):
        return None
    share = (end - limit) / (end - 1.3 * f.number("completions/mean_length"))
    return around(f.number("rollout/tail_s") * share + 0.1 * f.stage_s("forward", "backward"), 0.6, 1.4)


def length_limit(f: Facts) -> int:
    """The limit of a completion to advise: twice the mean length, and no less than the least one."""
    return max(math.ceil(2 * f.number("completions/mean_length")), int(f.number("recipe.rollout.min_new_tokens", 0.0)))


def cache_starved(f: Facts) -> Saving | None:
    """With all slots in use there are fewer decoding steps, each with more rows."""
    if f.number("rollout/starved_s") < 0.05 * f.stage_s("rollout"):
        return None
    rows_new = rows_at_a_time(f)
    rows_now = f.number("rollout/slots_used") * rows_new
    return around(f.number("rollout/starved_s") * (1 - _cost_of_row(f, rows_new) / _cost_of_row(f, rows_now)), 0.6, 1.4)


def _cost_of_row(f: Facts, num_rows: float) -> float:
    """Seconds of one token where `num_rows` are decoded together."""
    return decode_step_s(f, num_rows) / max(1.0, num_rows)


def no_signal_groups(f: Facts) -> Saving | None:
    """Drawing and scoring of the groups that teach nothing goes."""
    share = f.number("groups/num_dropped") / f.number("groups/num_drawn")
    if share < 0.25:
        return None
    rows = rows_at_a_time(f)
    left = (1 - share) * _cost_of_row(f, max(1.0, (1 - share) * rows)) / _cost_of_row(f, rows)
    return around(f.stage_s("rollout") * (1 - left) + f.stage_s("reward") * share, 0.6, 1.4)


def for_signal(f: Facts) -> str:
    """Advice for groups whose rewards differ. Fewer prompts alone do not help: as many in ten would teach nothing."""
    dropped, drawn = f.number("groups/num_dropped"), f.number("groups/num_drawn")
    if teaches_nothing(f) and f.number("reward_std", 1.0) < 1e-6:
        return (
            "the reward gives all completions the same number, so nothing is learnt: look at the completions in "
            "samples.jsonl and at the reward function, such as its format or its parser"
        )
    larger = 2 * int(f.number("recipe.rollout.completions_per_prompt", 4.0))
    advice = (
        "leave out prompts that are always or never solved (samples.jsonl names them) for ones of a difficulty "
        f"between, or draw larger groups, such as rollout.completions_per_prompt {larger}"
    )
    if teaches_nothing(f):
        return f"nothing is learnt: {advice}; a reward with more grades than right and wrong gives a signal sooner"
    useful = max(1, round(drawn - dropped))
    return f"{advice}. Once prompts are filtered, {useful} of them in a step teach as much as {drawn:.0f} do now"


def teaches_nothing(f: Facts) -> bool:
    """True if no group of a step has a signal."""
    return 0 < f.number("groups/num_drawn") <= f.number("groups/num_dropped")


def livelier_temperature(f: Facts) -> object:
    """The setting of `rollout.temperature` to advise: 1 where it is so low that completions of a group are alike."""
    now = f.number("recipe.rollout.temperature", 1.0)
    return 1.0 if now < _LOW_TEMPERATURE else f.values.get("recipe.rollout.temperature")


def larger_cache(f: Facts) -> str:
    """Advice for a cache for all slots."""
    if f.values.get("recipe.rollout.kv_cache_mb") is not None:
        return "let the cache have what all slots need"
    return "null takes up to a quarter of the memory: set rollout.kv_cache_mb to more, or lower rollout.max_new_tokens"


def engine_reload(f: Facts) -> Saving | None:
    """The allocation of cache and packed weights goes; the copy of new weights stays."""
    if not f.values.get("recipe.rollout.unload_during_update"):
        return None
    held_gb = sum(f.number(f"setup.estimate_gb.{part}", 0.0) for part in ("cache", "packed weights"))
    if held_gb > 0.5 * f.number("memory/available_gb"):
        return None
    return around(f.number("time/rollout/load_s") / 4, 0.4, 1.8)
