"""Rules: the causes of slow training, one record each: facts needed, symptom, evidence, advice, model of the saving.

`tunesmith.observe.profiling.diagnosis` applies them. A new cause is a record here, a model in `savings/`, a test with
facts that show it, and a section of docs/slow.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.savings import computing, drawing, waiting
from tunesmith.observe.profiling.savings.saving import Saving
from tunesmith.observe.profiling.waits import Kind

Scope = Literal["all", "sampling", "rewards", "environments", "groups", "cpu", "gpu"]
"""Runs that a rule is for: all; those that draw completions; those that score them too; those that talk to an
environment; those that compare groups of completions; on a CPU; on a GPU."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause. In `evidence` and `advice` a fact in braces, with a format, is replaced by its value.

    `needs` are the facts without which the rule abstains; a stage that a run does not have takes no time. `settings`
    are the keys of the recipe to set (`{section}` is that of the algorithm), as values or functions of the facts;
    `advice` says what to do in words, of the facts where it depends on them. `least` is the smallest share of the run
    for which the cause is named. What `is_urgent`, because the run may end, comes first. With `stage` the evidence has
    the line at which most of that stage's time goes; with `kinds` only one at which a thread does one of them.
    """

    name: str
    symptom: str
    needs: tuple[str, ...]
    evidence: str
    advice: str | Callable[[Facts], str]
    saving: Callable[[Facts], Saving | None]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    scope: Scope = "all"
    least: float = 0.03
    is_urgent: Callable[[Facts], bool] = lambda _: False
    stage: str = ""
    kinds: tuple[Kind, ...] = ()


_PEAKS = ("setup.dtype", "setup.best_dtype", "setup.peak_flop_per_s.{setup.dtype}")
_PASS = ("update/micro_batch_tokens", "setup.num_layers", "setup.num_parameters", *_PEAKS[::2])
_SLOTS = ("recipe.rollout.num_slots", "setup.num_layers", "setup.num_parameters", *_PEAKS[::2])
_LENGTHS = ("completions/mean_length", "completions/max_length")
_LARGER = {"{section}.{size}": computing.micro_batch_size}
_CORES = ("setup.num_threads", "setup.usable_cores", "cpu/run_delay_s", "cpu/process")
_WORK = ("update/micro_batch_tokens", "setup.num_parameters", "setup.num_layers")

RULES: tuple[Rule, ...] = (
    Rule(
        name="engine_fallback",
        symptom="Completions are drawn by the fallback, `transformers.generate`.",
        needs=("setup.engine", "setup.best_dtype", "time/rollout_s", *_LENGTHS, *_SLOTS),
        evidence="engine {setup.engine}; time/rollout_s {time/rollout_s:.3g} s of {time/step_s:.3g} s",
        advice="draw with the native engine; if that is set already, take a model of a family that it supports",
        settings={"rollout.backend": "native"},
        saving=drawing.engine_fallback,
        scope="sampling",
    ),
    Rule(
        name="kernels_fallback",
        symptom="Operations run in torch instead of compiled kernels.",
        needs=("setup.kernels",),
        evidence="kernels {setup.kernels}; {time/step_s:.3g} s of a step",
        advice="use the compiled kernels; if that is set already, `tunesmith doctor` says why there are none",
        settings={"model.kernels": "auto"},
        saving=computing.kernels_fallback,
        scope="cpu",
    ),
    Rule(
        name="precision",
        symptom="The weights are not in the dtype that this machine computes fastest in.",
        needs=(*_PEAKS, "setup.peak_flop_per_s.{setup.best_dtype}", "flop_per_s"),
        evidence="dtype {setup.dtype}, best {setup.best_dtype} (peak_flop_per_s in setup.json has the rates of both)",
        advice="compute in the best dtype",
        settings={"model.dtype": "auto"},
        saving=computing.precision,
    ),
    Rule(
        name="recomputed_old_policy",
        symptom="The log-probs of the old policy are computed again, which an exact engine makes needless.",
        needs=(*_PEAKS, "setup.peak_flop_per_s.{setup.best_dtype}", "flop_per_s"),
        evidence="time/old_policy_s {time/old_policy_s:.3g} s of {time/step_s:.3g} s; dtype {setup.dtype}",
        advice="use the log-probs of the engine, which are exact in bfloat16 and float32",
        settings={"rollout.recompute_logps": False, "model.dtype": computing.faster_dtype},
        saving=computing.recomputed_old_policy,
        scope="sampling",
    ),
    Rule(
        name="threads_few",
        symptom="The run uses fewer threads than there are cores.",
        needs=("setup.num_threads", "setup.usable_cores", "cpu/others", *_WORK),
        evidence="{setup.num_threads:.0f} threads, {setup.usable_cores:.0f} cores",
        advice="use all cores",
        settings={"run.num_threads": computing.threads_of_a_rank},
        saving=computing.threads_few,
        scope="cpu",
    ),
    Rule(
        name="threads_many",
        symptom="The run uses more threads than there are cores, and they wait for each other.",
        needs=_CORES,
        evidence="{setup.num_threads:.0f} threads, {setup.usable_cores:.0f} cores; threads waited "
        "{cpu/run_delay_s:.3g} s in a step for a core (cpu/run_delay_s)",
        advice="use as many threads as cores",
        settings={"run.num_threads": computing.threads_of_a_rank},
        saving=computing.threads_many,
        scope="cpu",
    ),
    Rule(
        name="starved",
        symptom="Other processes use the cores.",
        needs=(*_CORES, "cpu/others"),
        evidence="other processes use {cpu/others:.2g} of {setup.usable_cores:.0f} cores (cpu/others); threads waited "
        "{cpu/run_delay_s:.3g} s in a step for a core (cpu/run_delay_s)",
        advice=computing.fewer_processes,
        saving=computing.starved,
        scope="cpu",
    ),
    Rule(
        name="gil",
        symptom="Training waits for Python's interpreter lock, which another thread holds.",
        needs=("gil/waiting_share", "gil/wait_ms", "cpu/process", "cpu/run_delay_s"),
        evidence="training waits for the lock {gil/waiting_share:.0%} of the time (gil/waiting_share); who asks for it "
        "waits {gil/wait_ms:.3g} ms",
        advice=waiting.away_from_lock,
        settings={"rollout.score_while_drawing": False},
        saving=waiting.gil,
        scope="rewards",
        stage="step",
        kinds=("gil",),
    ),
    Rule(
        name="slow_reward",
        symptom="The reward computes for long.",
        needs=("time/reward_s", "cpu/stage/reward"),
        evidence="time/reward_s {time/reward_s:.3g} s of {time/step_s:.3g} s, on {cpu/stage/reward:.2g} cores",
        advice="make the function faster: score completions together, cache, use a library in C, or give it `workers`",
        saving=waiting.slow_reward,
        scope="rewards",
        least=0.05,
        stage="reward",
    ),
    Rule(
        name="remote_reward_serial",
        symptom="The reward waits for one answer after the other.",
        needs=("time/reward_s", "cpu/stage/reward"),
        evidence="time/reward_s {time/reward_s:.3g} s of {time/step_s:.3g} s, on {cpu/stage/reward:.2g} cores",
        advice="make the function `async def` and send all requests at once with asyncio.gather",
        saving=waiting.remote_reward_serial,
        scope="rewards",
        stage="reward",
    ),
    Rule(
        name="reward_not_overlapped",
        symptom="The reward waits for an answer while the engine could draw other groups.",
        needs=("time/reward_s", "cpu/stage/reward", "time/rollout_s", "completions/clipped_ratio"),
        evidence="time/reward_s {time/reward_s:.3g} s of {time/step_s:.3g} s, on {cpu/stage/reward:.2g} cores; "
        "time/rollout_s {time/rollout_s:.3g} s",
        advice="score groups while others are drawn",
        settings={"rollout.score_while_drawing": True},
        saving=waiting.reward_not_overlapped,
        scope="rewards",
        stage="reward",
    ),
    Rule(
        name="small_micro_batches",
        symptom="Forward passes have few positions, so their fixed cost counts.",
        needs=_PASS,
        evidence="{update/micro_batch_tokens:.0f} positions in a pass (update/micro_batch_tokens)",
        advice="compute more rows in a pass",
        settings=_LARGER,
        saving=computing.small_micro_batches,
    ),
    Rule(
        name="prompts_not_shared",
        symptom="Prompts of a group are computed again in each micro-batch.",
        needs=(*_PASS, "rollout/prefill_tokens", "rollout/shared_tokens", "update/shared_tokens"),
        evidence="{update/shared_tokens:.0f} prompt positions are shared in the update (update/shared_tokens), "
        "{rollout/shared_tokens:.0f} while drawing (rollout/shared_tokens)",
        advice="compute whole groups in a pass",
        settings={**_LARGER, "model.share_prefixes": True},
        saving=computing.prompts_not_shared,
        scope="sampling",
    ),
    Rule(
        name="padding",
        symptom="Passes compute padding.",
        needs=("update/padding_share", *_PASS),
        evidence="{update/padding_share:.0%} of the positions of a pass are padding (update/padding_share)",
        advice="sort rows by length, or take a model of a supported family, which is not padded",
        settings={"model.forward": "auto", "sft.bucket_steps": computing.bucket_steps},
        saving=computing.padding,
    ),
    Rule(
        name="gradient_checkpointing",
        symptom="Activations are computed twice although they fit into memory.",
        needs=("setup.estimate_gb.activations", "memory/available_gb"),
        evidence="activations without checkpointing need about 17 times {setup.estimate_gb.activations:.2g} GB, and "
        "{memory/available_gb:.1f} GB are available",
        advice="keep activations",
        settings={"model.gradient_checkpointing": False},
        saving=computing.gradient_checkpointing,
    ),
    Rule(
        name="unneeded_reference",
        symptom="The reference model is computed without need.",
        needs=("recipe.algorithm",),
        evidence="time/reference_s {time/reference_s:.3g} s of {time/step_s:.3g} s",
        advice="leave the reference out: its penalty is below a hundredth of the spread of rewards; for DPO compute "
        "it once, before training",
        settings={"{section}.kl.coef": 0, "dpo.reference": "precomputed"},
        saving=computing.unneeded_reference,
    ),
    Rule(
        name="long_tail",
        symptom="A few long completions are drawn while most slots are empty.",
        needs=("rollout/tail_s", *_LENGTHS),
        evidence="{rollout/tail_s:.3g} s with fewer than a quarter of the slots in use (rollout/tail_s); lengths: mean "
        "{completions/mean_length:.0f}, longest {completions/max_length:.0f} tokens",
        advice="end completions earlier; this changes what is learnt from the longest ones",
        settings={"rollout.max_new_tokens": drawing.length_limit},
        saving=drawing.long_tail,
        scope="sampling",
    ),
    Rule(
        name="unknown_answers",
        symptom="The reward model judges answers that are unlike its votes.",
        needs=("unfamiliar",),
        evidence="on {unfamiliar:.0%} of the completions its heads differ more than on 95 % of the answers of held-out "
        "votes (rewards/<name>/unfamiliar)",
        advice="end the run earlier or go back to a checkpoint, collect votes on its answers, or set `pessimism` of "
        "the reward",
        saving=waiting.unknown_answers,
        scope="rewards",
    ),
    Rule(
        name="slow_tools",
        symptom="The engine has nothing to draw while all trajectories wait for their tools.",
        needs=("time/rollout/reply_s", "environment/reply_mean_s", "environment/reply_max_s"),
        evidence="{time/rollout/reply_s:.3g} s of {time/step_s:.3g} s without a trajectory to draw; a reply takes "
        "{environment/reply_mean_s:.3g} s on average, the slowest {environment/reply_max_s:.3g} s",
        advice=waiting.for_tools,
        saving=waiting.slow_tools,
        scope="environments",
    ),
    Rule(
        name="malformed_calls",
        symptom="Turns go into tool calls that cannot be made.",
        needs=("environment/failed_calls", "environment/calls", "time/rollout_s"),
        evidence="{environment/failed_calls:.0%} of {environment/calls:.2g} calls of a trajectory cannot be read, name "
        "no tool or lack arguments (environment/failed_calls)",
        advice="show the model how to call by a few steps of SFT on rows with `tool_calls`",
        saving=waiting.malformed_calls,
        scope="environments",
    ),
    Rule(
        name="broken_prefixes",
        symptom="The chat template rewrites earlier turns, so they are drawn behind and learnt again.",
        needs=("environment/samples",),
        evidence="a trajectory comes to {environment/samples:.2g} sequences (environment/samples)",
        advice="take a chat template that keeps earlier turns as they are: most rewrite them to leave out reasoning",
        saving=waiting.broken_prefixes,
        scope="environments",
    ),
    Rule(
        name="int8_drawing",
        symptom="Completions are drawn in the model's dtype, and this machine multiplies faster in 8 bits.",
        needs=("setup.products_s.model", "setup.products_s.int8", "time/rollout_s", "setup.num_layers"),
        evidence="products of a decoding step take {setup.products_s.model:.3g} s, and {setup.products_s.int8:.3g} s "
        "in 8 bits (products_s in setup.json); time/rollout_s {time/rollout_s:.3g} s of {time/step_s:.3g} s",
        advice="draw in 8 bits. The trade: tokens come from another distribution than the one that is trained, for "
        "which importance weights correct, and several updates of a rollout need a pass for the old policy, which is "
        "counted here; watch rollout/logp_diff_mean",
        settings={"rollout.weights": "int8"},
        saving=drawing.int8_drawing,
        scope="sampling",
        least=0.1,
    ),
    Rule(
        name="cache_starved",
        symptom="The cache is too small to use all slots.",
        needs=("rollout/starved_s", "rollout/slots_used", *_SLOTS),
        evidence="{rollout/starved_s:.3g} s of decoding with slots free and completions waiting (rollout/starved_s); "
        "{rollout/slots_used:.0%} of the slots in use",
        advice=drawing.larger_cache,
        settings={"rollout.kv_cache_mb": None},
        saving=drawing.cache_starved,
        scope="sampling",
    ),
    Rule(
        name="no_signal_groups",
        symptom="Many groups have equal rewards and teach nothing.",
        needs=("groups/num_drawn", "groups/num_dropped", "reward_std", "time/rollout_s", *_SLOTS),
        evidence="{groups/num_dropped:.3g} of {groups/num_drawn:.3g} groups have equal rewards (groups/num_dropped); "
        "the rewards of a step differ by {reward_std:.3g} (reward_std)",
        advice=drawing.for_signal,
        settings={"rollout.temperature": drawing.livelier_temperature},
        saving=drawing.no_signal_groups,
        scope="groups",
        is_urgent=drawing.teaches_nothing,
    ),
    Rule(
        name="engine_reload",
        symptom="The engine's cache and packed weights are freed and allocated again at each step.",
        needs=("time/rollout/load_s", "memory/available_gb"),
        evidence="time/rollout/load_s {time/rollout/load_s:.3g} s of {time/step_s:.3g} s; {memory/available_gb:.1f} GB "
        "of memory are available",
        advice="keep them during the update",
        settings={"rollout.unload_during_update": False},
        saving=drawing.engine_reload,
        scope="sampling",
    ),
    Rule(
        name="checkpoints",
        symptom="Checkpoints are written often.",
        needs=("time/checkpoint_s", "recipe.run.checkpoint_every"),
        evidence="time/checkpoint_s {time/checkpoint_s:.3g} s of {time/step_s:.3g} s, every "
        "{recipe.run.checkpoint_every:.0f} steps",
        advice="write fewer",
        settings={"run.checkpoint_every": waiting.checkpoint_every},
        saving=waiting.checkpoints,
        stage="checkpoint",
    ),
    Rule(
        name="evaluation",
        symptom="Evaluations take much of the time.",
        needs=("recipe.run.eval_every",),
        evidence="time/evaluate_s {time/evaluate_s:.3g} s of {time/step_s:.3g} s, every {recipe.run.eval_every:.0f} "
        "steps",
        advice="evaluate less often, or hold fewer rows out",
        settings={"run.eval_every": waiting.eval_every},
        saving=waiting.evaluation,
        least=0.05,
        stage="evaluate",
    ),
    Rule(
        name="logging",
        symptom="Recording the steps takes long.",
        needs=("time/log_s",),
        evidence="time/log_s {time/log_s:.3g} s of {time/step_s:.3g} s",
        advice=waiting.less_recorded,
        settings={"run.report_to": waiting.trackers, "run.sample_every": waiting.sample_every},
        saving=waiting.logging,
        stage="log",
    ),
    Rule(
        name="slow_callback",
        symptom="Callbacks take long.",
        needs=("time/callback_s",),
        evidence="time/callback_s {time/callback_s:.3g} s of {time/step_s:.3g} s",
        advice="do less in the callback, or hand the work to another thread",
        saving=waiting.callback,
        stage="callback",
    ),
    Rule(
        name="slow_data",
        symptom="The rows of a step are read slowly.",
        needs=("time/data_s",),
        evidence="time/data_s {time/data_s:.3g} s of {time/step_s:.3g} s",
        advice="put the data on a local disk, and convert it to JSONL or Parquet once",
        saving=waiting.data,
        least=0.05,
        stage="data",
    ),
    Rule(
        name="garbage_collection",
        symptom="Python's garbage collector stops the step.",
        needs=("gc/pause_s",),
        evidence="{gc/pause_s:.3g} s of collections (gc/pause_s) of {time/step_s:.3g} s",
        advice="make fewer objects that live long, or call gc.freeze() after large tables are loaded, as by a reward",
        saving=waiting.garbage_collection,
        least=0.05,
    ),
    Rule(
        name="throttled",
        symptom="The quota of the control group stops the process.",
        needs=("cpu/throttled_s", "setup.cpu_quota", "setup.num_threads", "setup.usable_cores"),
        evidence="throttled for {cpu/throttled_s:.3g} s of {time/step_s:.3g} s (cpu/throttled_s); quota "
        "{setup.cpu_quota} cores, {setup.num_threads:.0f} threads",
        advice="raise the quota of the container, or use no more threads than it gives cores",
        settings={"run.num_threads": waiting.unthrottled_threads},
        saving=waiting.throttled,
        scope="cpu",
    ),
    Rule(
        name="slow_disk",
        symptom="The step waits for a slow disk.",
        needs=("io/fsync_s",),
        evidence="{io/fsync_s:.3g} s in fsync (io/fsync_s) of {time/step_s:.3g} s",
        advice=waiting.local_folder,
        saving=waiting.slow_disk,
        stage="checkpoint",
    ),
    Rule(
        name="memory_growth",
        symptom="Memory grows with every step.",
        needs=("memory/growth_mb",),
        evidence="{memory/growth_mb:.0f} MB more at each step (memory/growth_mb)",
        advice=waiting.what_grows,
        saving=waiting.memory_growth,
        is_urgent=waiting.runs_out,
        least=0.01,
    ),
    Rule(
        name="memory_pressure",
        symptom="Memory is short: pages are read back from disk.",
        needs=("faults/major",),
        evidence="{faults/major:.0f} major page faults in a step (faults/major)",
        advice=waiting.less_memory,
        saving=waiting.memory_pressure,
    ),
    Rule(
        name="gpu_launches",
        symptom="The GPU waits for the launch of short kernels.",
        needs=("gpu/kernel_s",),
        evidence="kernels take {gpu/kernel_s:.3g} s (gpu/kernel_s) of {time/step_s:.3g} s",
        advice="compute more rows in a pass",
        settings=_LARGER,
        saving=waiting.gpu_launches,
        scope="gpu",
        least=0.1,
    ),
    Rule(
        name="gpu_copies",
        symptom="Copies between processor and GPU take long.",
        needs=("gpu/copy_s",),
        evidence="copies take {gpu/copy_s:.3g} s (gpu/copy_s) of {time/step_s:.3g} s",
        advice="compute rewards on the GPU, or draw more completions in a step",
        saving=waiting.gpu_copies,
        scope="gpu",
    ),
    Rule(
        name="gpu_idle",
        symptom="The GPU is idle while rewards are computed.",
        needs=("gpu/busy", "time/reward_s", "time/rollout_s"),
        evidence="busy {gpu/busy:.0%} of the time (gpu/busy); time/reward_s {time/reward_s:.3g} s",
        advice="score groups while others are drawn",
        settings={"rollout.score_while_drawing": True},
        saving=waiting.gpu_idle,
        scope="gpu",
    ),
    Rule(
        name="waiting_ranks",
        symptom="Processes wait for a slower one.",
        needs=("ranks/wait_s",),
        evidence="{ranks/wait_s:.3g} s of waiting (ranks/wait_s)",
        advice="give each the same number of tokens and the same kind of device",
        saving=waiting.waiting_ranks,
        scope="gpu",
    ),
)
