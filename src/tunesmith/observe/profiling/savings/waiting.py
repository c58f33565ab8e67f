"""Savings of what a step waits for: rewards, the interpreter's lock, checkpoints, evaluations, disk, memory, a GPU."""

import math

from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.savings.saving import (
    Saving,
    around,
    num_completions,
    rows_at_a_time,
    running_share,
    share_together,
    usable_cores,
)

_LOG_S = 0.003
"""Seconds that the record of a step takes."""

_MOST = 0.5
"""Share of completions that a reward model does not know from which on a step teaches little that votes say."""

_WAITS = 0.03
"""Share of the time from which on a wait for the interpreter's lock is no chance."""


def gil(f: Facts) -> Saving | None:
    """The share of each stage that the training thread waits for the interpreter's lock goes, and the wait for the core
    that the other thread uses. Not of the reward, whose own threads it may wait for.
    """
    if f.number("gil/waiting_share") <= _WAITS:
        return None
    prefix, is_alone = "gil/waiting/", f.number("cpu/others", 0.0) < 0.15
    share = share_together(f, running_share(f)) if is_alone else 1.0
    stages = [name.removeprefix(prefix) for name in f.values if name.startswith(prefix)]
    lost_s = sum(
        f.stage_s(stage) * (1 - (1 - f.number(prefix + stage)) * share) for stage in stages if stage != "reward"
    )
    return around(lost_s, 0.6, 1.3)


def away_from_lock(f: Facts) -> str:
    """Advice on Python code in other threads."""
    advice = "take Python work in other threads to another process"
    if "recipe.reward" not in f.values:
        return advice
    later = ", or score after drawing" if f.values.get("recipe.rollout.score_while_drawing") else ""
    return f"{advice}, that of a reward function by its `workers`{later}"


def slow_reward(f: Facts) -> Saving | None:
    """A reward that computes: at best all of its time goes."""
    kind = f.reward_kind
    computes = kind in ("computes", "gil", "gpu") if kind is not None else not _waits(f)
    return around(f.reward_s, 0.5, 1.0) if computes else None


def remote_reward_serial(f: Facts) -> Saving | None:
    """Requests that wait one after the other wait at the same time instead: one wait is left of as many as there are
    completions, and what the processor does for them.
    """
    is_remote = f.reward_kind in (None, "network", "other", "threads") and _waits(f)
    if not is_remote or any(name.startswith("time/reward/async") for name in f.values):
        return None
    left = 1 / num_completions(f) + f.number("cpu/stage/reward")
    return around(f.reward_s * max(0.0, 1 - left), 0.6, 1.2)


def reward_not_overlapped(f: Facts) -> Saving | None:
    """Groups that end before the last are scored meanwhile: those of all waves of slots but the last, and of the last
    those that the length limit did not end. What the processor does for them takes from drawing what it saves.
    """
    if f.values.get("recipe.rollout.score_while_drawing") or not _waits(f):
        return None
    waves = math.ceil(num_completions(f) / rows_at_a_time(f))
    ended = (1 - f.number("completions/clipped_ratio")) ** f.number("recipe.rollout.completions_per_prompt")
    early = (waves - 1 + ended / 2) / waves
    waited = 1 - min(1.0, f.number("cpu/stage/reward"))
    return around(early * waited * min(f.stage_s("reward"), f.stage_s("rollout")), 0.5, 1.3)


def slow_tools(f: Facts) -> Saving | None:
    """The time in which the engine had nothing to draw goes, as far as replies come sooner or others are drawn."""
    return around(f.stage_s("rollout/reply"), 0.5, 1.0)


def for_tools(f: Facts) -> str:
    """Advice for sooner replies: fewer stragglers, more calls at a time, or more trajectories to go on with."""
    mean_s, longest_s = f.number("environment/reply_mean_s"), f.number("environment/reply_max_s")
    if longest_s > 5 * mean_s:
        return "a few replies are much slower than the others: cache what they look up, or lower environment.timeout_s"
    if num_completions(f) > f.number("recipe.environment.max_calls"):
        return "more calls wait than may run at a time: raise environment.max_calls"
    return "draw more trajectories in a step, so that others go on meanwhile, or make the tools faster"


def malformed_calls(f: Facts) -> Saving | None:
    """The turns with calls that cannot be made need not be drawn, but for those in which others are made."""
    num_failed = f.number("environment/failed_calls") * f.number("environment/calls")
    share = min(1.0, num_failed / max(1.0, f.number("environment/turns", 1.0)))
    return around(share * (f.stage_s("rollout") - f.stage_s("rollout/reply")), 0.3, 1.2)


def unknown_answers(f: Facts) -> Saving | None:
    """Steps whose answers the reward model does not know, most of them, need not be made: they teach its guesses."""
    share = f.number("unfamiliar")
    return around(share * (f.computing_s + f.reward_s), 0.3, 1.0) if share > _MOST else None


def broken_prefixes(f: Facts) -> Saving | None:
    """One sequence is learnt in place of several that have their beginnings in common."""
    passes_s = f.stage_s("old_policy", "reference", "update")
    return around(passes_s * (1 - 1 / max(1.0, f.number("environment/samples"))), 0.3, 1.0)


def _waits(f: Facts) -> bool:
    """True if the reward waits for something else than a core, most of the time."""
    can_run = running_share(f) if "cpu/run_delay_s" in f.values else 1.0
    return f.number("cpu/stage/reward") < 0.5 * can_run


def checkpoints(f: Facts) -> Saving | None:
    """Checkpoints are as many times rarer as advised; what a slow disk costs is another cause."""
    if f.number("recipe.run.checkpoint_every") == 0:  # a callback asks for them
        return None
    saved_s = f.stage_s("checkpoint") - _disk_s(f)
    return around(saved_s * (1 - f.number("recipe.run.checkpoint_every") / checkpoint_every(f)), 0.7, 1.2)


def checkpoint_every(f: Facts) -> int:
    """Steps between checkpoints at which they take 1 % of the time."""
    return _every(f.number("recipe.run.checkpoint_every"), f.stage_s("checkpoint"), 0.01 * f.step_s)


def evaluation(f: Facts) -> Saving | None:
    """Evaluations are as many times rarer as advised."""
    if f.number("recipe.run.eval_every") == 0:
        return None
    return around(f.stage_s("evaluate") * (1 - f.number("recipe.run.eval_every") / eval_every(f)), 0.8, 1.2)


def eval_every(f: Facts) -> int:
    """Steps between evaluations at which they take 5 % of the time."""
    return _every(f.number("recipe.run.eval_every"), f.stage_s("evaluate"), 0.05 * (f.step_s - f.stage_s("evaluate")))


def _every(now: float, mean_s: float, allowed_s: float) -> int:
    """A round number of steps, at least `now`, at which work of `mean_s` a step takes at most `allowed_s`."""
    wanted = max(1.0, now) * max(1.0, mean_s / max(1e-9, allowed_s))
    power = 10 ** math.floor(math.log10(wanted))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * 0.999))


def logging(f: Facts) -> Saving | None:
    """All but what a step without trackers takes goes, or nine tenths where samples are written at each tenth step."""
    share = 1.0 if trackers(f) != f.values.get("recipe.run.report_to") else 0.9
    return around(share * (f.stage_s("log") - _LOG_S), 0.6, 1.1)


def trackers(f: Facts) -> object:
    """The setting of `run.report_to` to advise: none."""
    return [] if f.values.get("recipe.run.report_to") else f.values.get("recipe.run.report_to")


def sample_every(f: Facts) -> int:
    """The setting of `run.sample_every` to advise; where there are trackers, they are the first suspects."""
    now = int(f.number("recipe.run.sample_every", 1))
    return now if f.values.get("recipe.run.report_to") else max(now, 10)


def less_recorded(f: Facts) -> str:
    """Advice on a slow record of the steps."""
    if f.values.get("recipe.run.report_to"):
        return "leave out trackers that are slow, or write their files to a local disk"
    if sample_every(f) != f.number("recipe.run.sample_every", 1):
        return "store samples less often"
    return "put the run folder on a faster disk; no tracker is in use, and samples are stored rarely"


def callback(f: Facts) -> Saving | None:
    """The time of callbacks."""
    return around(f.stage_s("callback"), 0.5, 1.0)


def data(f: Facts) -> Saving | None:
    """The time to get the rows of a step, which are small."""
    return around(f.stage_s("data"), 0.5, 1.0)


def garbage_collection(f: Facts) -> Saving | None:
    """The pauses of the collector."""
    return around(f.number("gc/pause_s"), 0.5, 1.0)


def throttled(f: Facts) -> Saving | None:
    """The pauses that a quota causes, which are counted for each core."""
    return around(f.number("cpu/throttled_s") / max(1.0, f.number("setup.num_threads")), 0.4, 1.5)


def unthrottled_threads(f: Facts) -> object:
    """The setting of `run.num_threads` to advise: what it is, unless there are more threads than the quota's cores."""
    wanted = max(1, int(usable_cores(f) / f.number("setup.num_ranks", 1)))
    return wanted if f.number("setup.num_threads") > wanted else f.values.get("recipe.run.num_threads")


def slow_disk(f: Facts) -> Saving | None:
    """The time in which the step waits for the disk."""
    return around(_disk_s(f), 0.7, 1.2)


def _disk_s(f: Facts) -> float:
    """Seconds of a step in which it waits for a disk that is slow: below 300 MB/s, and more than 50 ms a checkpoint."""
    sync_s, num_checkpoints = f.number("io/fsync_s", 0.0), 1 / max(1.0, f.number("recipe.run.checkpoint_every"))
    is_slow = sync_s > f.number("io/written_mb", 0.0) / 300 + 0.05 * num_checkpoints
    return min(sync_s, f.stage_s("checkpoint", "log")) if is_slow else 0.0


def memory_growth(f: Facts) -> Saving | None:
    """The time to make what is kept, and its fresh pages. Memory that runs out costs the run, not seconds."""
    growth_mb = f.number("memory/growth_mb")
    # A virtual machine may take ten times as long for a fresh page as others, so the kernel's own time is what counts.
    fault_s = f.number("cpu/system_s", 0.0) / max(1.0, f.number("faults/minor", 0.0)) or 1.2e-6
    fresh_s = growth_mb * 1e6 / 4096 * min(fault_s, 2e-5)
    making_s = min(growth_mb * 1e-4, f.stage_s("reward"))
    return around(fresh_s + making_s, 0.2, 1.5) if growth_mb > 5 and f.num_steps >= 5 else None


def what_grows(f: Facts) -> str:
    """The place to look for what keeps objects."""
    if "recipe.reward" in f.values:
        return (
            "look for what keeps objects: lists or caches in a reward function, or in a callback, grow with each call"
        )
    if f.algorithm == "live":
        return (
            "start the trainer again now and then, which loses nothing; no code of yours runs there: report the growth"
        )
    return (
        "look for what keeps objects, such as lists in a callback; a run without callbacks should not grow: report it"
    )


def local_folder(f: Facts) -> str:
    """The setting that moves the folder that is written to."""
    return f"put the folder on a local disk with {'live.dir' if f.algorithm == 'live' else 'run.dir'}"


def less_memory(f: Facts) -> str:
    """The parts that could need less memory in this run."""
    parts = ["smaller micro-batches"]
    parts += ["a smaller rollout.kv_cache_mb"] if "recipe.rollout.kv_cache_mb" in f.values else []
    parts += ["optimizer.state int8"] if f.values.get("recipe.optimizer.state") != "int8" else []
    return f"use less memory: {', '.join(parts)}"


def runs_out(f: Facts) -> bool:
    """True if the growth of memory would end the run, or one of 1000 steps."""
    num_steps = max(1000.0, f.number("recipe.run.steps", 0.0))
    return f.number("memory/growth_mb") * num_steps > 1e3 * f.number("memory/available_gb", math.inf)


def memory_pressure(f: Facts) -> Saving | None:
    """Pages that were written out need not be read again."""
    num_faults = f.number("faults/major")
    return around(min(0.8 * f.step_s, 2e-4 * num_faults), 0.2, 2.0) if num_faults > 100 else None


def gpu_launches(f: Facts) -> Saving | None:
    """Computing takes the time of its kernels."""
    return around(f.computing_s - f.number("gpu/kernel_s") - f.number("gpu/copy_s", 0.0), 0.3, 1.0)


def gpu_copies(f: Facts) -> Saving | None:
    """Copies overlap with kernels, but for a fifth."""
    return around(0.8 * f.number("gpu/copy_s"), 0.4, 1.2)


def gpu_idle(f: Facts) -> Saving | None:
    """The GPU works while the step scores, but for a tenth."""
    if f.number("gpu/busy") > 0.5:
        return None
    return around(0.9 * min(f.stage_s("reward"), f.stage_s("rollout")), 0.3, 1.2)


def waiting_ranks(f: Facts) -> Saving | None:
    """Ranks that are equally fast do not wait for each other."""
    return around(f.number("ranks/wait_s"), 0.3, 1.0)
