"""Savings in passes of the model: dtype, kernels, threads, micro-batches, padding, needless passes."""

import math

from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.savings.saving import (
    Saving,
    around,
    decode_step_s,
    pass_fixed_s,
    pass_rate,
    pass_token_s,
    running_share,
    share_together,
    usable_cores,
)

MICRO_BATCH_TOKENS = 2048
"""Positions of a forward pass beyond which larger micro-batches bring little."""

_SMALL_EFFICIENCY = 0.4
"""Share of its peak that a dtype with matrix units reaches: its products end sooner, so what is around them counts."""

_TWICE = 0.72
"""Share of the seconds of products that a dtype with twice the peak saves; what is around them moves half the bytes."""


def kernels_fallback(f: Facts) -> Saving | None:
    """With compiled kernels passes become 2.3 times as fast, and drawing 8 times."""
    if f.text("setup.kernels") != "torch":
        return None
    drawing_s = f.stage_s("rollout", "evaluate") if f.values.get("setup.engine") == "native" else 0.0
    passes_s = f.stage_s("frozen", "old_policy", "reference", "teachers", "forward", "backward")
    return around(passes_s * (1 - 1 / 2.3) + drawing_s * (1 - 1 / 8), 0.6, 1.15)


def precision(f: Facts) -> Saving | None:
    """Matrix products take as much less time as the peak of the best dtype is higher. The pass for the old policy goes
    too, if that dtype makes the engine exact.
    """
    products_s, old_s = _products_saved_s(f), _old_pass_saved_s(f)
    return around(products_s + (old_s if products_s >= old_s else 0.0), 0.6, 1.4)


def recomputed_old_policy(f: Facts) -> Saving | None:
    """The pass for the old policy goes; with another dtype matrix products become faster too."""
    if f.values.get("setup.engine_exact"):
        return around(f.stage_s("old_policy"), 0.9, 1.1) if f.values.get("recipe.rollout.recompute_logps") else None
    products_s, old_s = _products_saved_s(f), _old_pass_saved_s(f)
    return around(old_s + (products_s if old_s > products_s else 0.0), 0.8, 1.2) if old_s > 0 else None


def _products_saved_s(f: Facts) -> float:
    """Seconds that the best dtype saves in matrix products and, where its peak is not far higher, around them."""
    dtype, best = f.text("setup.dtype"), f.text("setup.best_dtype")
    if dtype == best:
        return 0.0
    best_peak = f.number(f"setup.peak_flop_per_s.{best}")
    saved = 1 - f.number(f"setup.peak_flop_per_s.{dtype}") / best_peak
    return products_s(f) * max(0.0, min(_TWICE, 2 * _TWICE * saved), 1 - pass_rate(f) / (_SMALL_EFFICIENCY * best_peak))


def _old_pass_saved_s(f: Facts) -> float:
    """Seconds of the pass for the old policy that an exact engine in the best dtype would make needless."""
    dtype, best = f.text("setup.dtype"), f.text("setup.best_dtype")
    is_engine_able = f.values.get("setup.engine") == "native" and not f.values.get("setup.engine_exact")
    return f.stage_s("old_policy") if is_engine_able and dtype != best else 0.0


def products_s(f: Facts) -> float:
    """Seconds of a step in matrix products. Those of an evaluation are not counted, and taken for as large a share."""
    counted_s = f.computing_s - f.stage_s("evaluate")
    return f.computing_s * min(1.0, f.number("flop_per_s") * f.step_s / pass_rate(f) / counted_s) if counted_s else 0.0


def num_passes(f: Facts) -> float:
    """Forward and backward passes of a step."""
    num_each = math.ceil(_rows_of_update(f) / f.setting(size_key(f)))
    draws = "recipe.rollout.backend" in f.values
    return num_each * (f.setting("num_epochs") * f.setting("num_minibatches") if draws else 1)


def faster_dtype(f: Facts) -> object:
    """The setting of `model.dtype` to advise: what it is, if that is the best."""
    return f.values.get("recipe.model.dtype") if f.text("setup.dtype") == f.text("setup.best_dtype") else "auto"


def threads_of_a_rank(f: Facts) -> int:
    """The setting of `run.num_threads` to advise: each rank's share of the cores."""
    return max(1, int(usable_cores(f) / f.number("setup.num_ranks", 1)))


def threads_few(f: Facts) -> Saving | None:
    """All but Python becomes nearly as many times as fast as there are more cores that nobody else uses."""
    threads, free = f.number("setup.num_threads"), usable_cores(f) - f.number("cpu/others")
    if threads >= free or free - threads < 0.5:
        return None
    python_s = num_passes(f) * pass_fixed_s(f) + f.number("rollout/decode_steps", 0.0) * decode_step_s(f, 0)
    return around(0.9 * max(0.0, f.computing_s - python_s) * (1 - threads / free), 0.6, 1.2)


def threads_many(f: Facts) -> Saving | None:
    """Of the wait of threads for cores, the part of the surplus threads goes; the rest is work spread over more. A loop
    in equal parts ends with a round in which cores have none, unless its threads are a multiple of the cores.
    """
    threads, cores = f.number("setup.num_threads"), usable_cores(f)
    if threads <= cores:
        return None
    waiting = 0.85 * (1 - running_share(f)) * (1 - cores / threads)
    idle = 1 - threads / (cores * math.ceil(threads / cores))
    return around(f.computing_s * (waiting + idle), 0.5, 1.6)


def starved(f: Facts) -> Saving | None:
    """The threads of a parallel loop wait for each other: it goes on only while all of them, or two, have a core. The
    share that they get is measured twice: by their own wait, which misses that they also wait for each other, and by
    the cores that others leave, which misses that others may run while these threads rest.
    """
    taken, threads = f.number("cpu/others") + f.number("cpu/stolen", 0.0), f.number("setup.num_threads")
    if taken < 0.15 or threads > usable_cores(f):
        return None
    share = math.sqrt(running_share(f) * min(1.0, max(0.0, usable_cores(f) - taken) / threads))
    together = share_together(f, share)
    return Saving(f.computing_s * (1 - together), f.computing_s * (1 - share), f.computing_s * (1 - together**1.3))


def fewer_processes(f: Facts) -> str:
    """Advice on other processes, among which are those that the run itself started."""
    own = "recipe.scale.workers" in f.values and f.number("recipe.scale.workers", 0.0) > 0
    if own or f.number("setup.num_ranks", 1) > 1:
        return "processes of this run are among them: give it fewer workers or ranks, or more cores; stop all others"
    return "stop the other processes, or run one after the other"


def small_micro_batches(f: Facts) -> Saving | None:
    """A pass has a fixed cost, which is paid as often as there are passes."""
    passes_s, prompts_s = _passes_saved_s(f), _prompts_saved_s(f)
    return around(passes_s + (prompts_s if passes_s >= prompts_s else 0.0), 0.6, 1.4)


def prompts_not_shared(f: Facts) -> Saving | None:
    """Prompts of a group that several micro-batches compute are computed once; there are fewer passes, too."""
    passes_s, prompts_s = _passes_saved_s(f), _prompts_saved_s(f)
    return around(prompts_s + (passes_s if prompts_s > passes_s else 0.0), 0.6, 1.4) if prompts_s > 0 else None


def _passes_saved_s(f: Facts) -> float:
    num_rows, size = _rows_of_update(f), f.setting(size_key(f))
    fewer = 1 - math.ceil(num_rows / micro_batch_size(f)) / math.ceil(num_rows / size)
    return _fixed_share(f) * f.stage_s("forward", "backward") * fewer


def _prompts_saved_s(f: Facts) -> float:
    """Seconds of the positions of prompts in the update that micro-batches of whole groups would share."""
    if f.values.get("setup.forward") != "decoder" or "recipe.rollout.completions_per_prompt" not in f.values:
        return 0.0
    in_minibatch = _group_size(f) / f.setting("num_minibatches")
    prompt_tokens = f.number("rollout/prefill_tokens") + f.number("rollout/shared_tokens")
    shareable = f.setting("num_epochs") * _learnt_share(f) * prompt_tokens * max(0.0, 1 - 1 / in_minibatch)
    num_positions = num_passes(f) * f.number("update/micro_batch_tokens")
    share = (shareable - f.number("update/shared_tokens")) / num_positions
    return max(0.0, share) * (1 - _fixed_share(f)) * f.stage_s("forward", "backward")


def _fixed_share(f: Facts) -> float:
    """Share of the fixed cost in the time of one forward and backward pass."""
    fixed_s = pass_fixed_s(f)
    return fixed_s / (fixed_s + pass_token_s(f) * f.number("update/micro_batch_tokens"))


def size_key(f: Facts) -> str:
    """Key of the size of a micro-batch in the section of the algorithm."""
    return "micro_batch_tokens" if f"recipe.{f.section}.micro_batch_tokens" in f.values else "micro_batch_size"


def micro_batch_size(f: Facts) -> int:
    """The size to advise: `MICRO_BATCH_TOKENS` positions or what fits into memory, as whole groups where there are any,
    and no less than now.
    """
    size, num_rows = f.setting(size_key(f)), _rows_of_update(f)
    held_gb, free_gb = f.number("setup.estimate_gb.activations", 0.0), f.number("memory/available_gb", math.inf)
    fitting = 1 + free_gb / 2 / held_gb if held_gb > 0 else math.inf
    wanted = size * min(fitting, max(1.0, MICRO_BATCH_TOKENS / f.number("update/micro_batch_tokens")))
    group = _group_size(f)
    whole = math.ceil(wanted / group) * group if group <= size * fitting else wanted
    return int(max(size, min(whole, num_rows)))


def _rows_of_update(f: Facts) -> float:
    """Rows of one optimizer step: completions, pairs, or tokens for SFT."""
    if f"recipe.{f.section}.micro_batch_tokens" in f.values:
        return f.number("num_tokens")
    if f"recipe.{f.section}.pairs_per_step" in f.values:
        return f.setting("pairs_per_step")
    return (
        f.number("recipe.rollout.prompts_per_step") * _learnt_share(f) * _group_size(f) / f.setting("num_minibatches")
    )


def _learnt_share(f: Facts) -> float:
    """Share of the groups that teach something."""
    return 1 - f.number("groups/num_dropped", 0.0) / f.number("groups/num_drawn", 1.0)


def _group_size(f: Facts) -> float:
    """Completions of each prompt that are learnt."""
    return f.number(f"recipe.{f.section}.keep", f.number("recipe.rollout.completions_per_prompt", 1.0))


def padding(f: Facts) -> Saving | None:
    """Passes take as much less time as fewer positions are computed; one part in ten of the padding stays. Where a
    setting forbids the packed decoder, that computes what is left faster, too.
    """
    passes_s, share = f.stage_s("forward", "backward"), f.number("update/padding_share")
    if share > 0 and f.values.get("recipe.model.forward") == "padded":
        num_used = (1 - share) * f.number("update/micro_batch_tokens")
        return around(passes_s - num_passes(f) * (pass_fixed_s(f) + num_used * pass_token_s(f)), 0.6, 1.2)
    return around(0.9 * share * passes_s, 0.6, 1.2)


def bucket_steps(f: Facts) -> int:
    """The setting of `sft.bucket_steps` to advise, no less than now."""
    return int(max(8, f.number("recipe.sft.bucket_steps", 0.0)))


def gradient_checkpointing(f: Facts) -> Saving | None:
    """The second forward pass goes, if the activations of the first fit into memory."""
    if not f.values.get("recipe.model.gradient_checkpointing"):
        return None
    needed_gb = 17 * f.number("setup.estimate_gb.activations")  # 34 values a layer instead of 2, see trainers/estimate
    if needed_gb > 0.7 * f.number("memory/available_gb"):
        return None
    return around(f.stage_s("forward"), 0.7, 1.4)


def unneeded_reference(f: Facts) -> Saving | None:
    """The reference's pass goes: its penalty is too small to matter, or a pass before training does for all epochs."""
    reference = f.values.get(f"recipe.{f.section}.reference")
    if reference is not None:  # of given rows: it could be computed before training
        is_live = reference == "live"
        return around(f.stage_s("reference") * (1 - 1 / f.setting("num_epochs"))) if is_live else None
    largest_penalty = f.setting("kl.coef") * max(10.0, f.number("objective/kl", 0.0))
    is_adaptive = f.values.get(f"recipe.{f.section}.kl.target") is not None
    if is_adaptive or not 0 < largest_penalty < 0.01 * f.number("reward_std"):
        return None
    return around(f.stage_s("reference"), 0.9, 1.05)
