"""What drawing in 8 bits changes in what is learnt: trainings with `rollout.weights: int8` against exact ones.

Three tasks, each with several seeds: sums by GRPO (the recipe grpo_arithmetic), the demo, and the live loop with
simulated raters. For each seed both trainings begin with the same rows and, in the demo, the same reward model; they
run one after the other. A figure is the accuracy on held-out sums, or the win rate against the base model on held-out
openings, by the lexicon. Times are those of the steps, without evaluations between them.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

from benchmarks import active
from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.apps.workflows import demo as workflow
from tunesmith.apps.workflows.live_simulation import hit
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import PromptsSection
from tunesmith.base.schema.weights import Weights
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import split_by_prompt
from tunesmith.collect.statistics.intervals import mean_interval
from tunesmith.engine.rollout.products import with_weights
from tunesmith.learn.trainers import run as training
from tunesmith.learn.trainers.setup import RunResult

WEIGHTS = get_args(Weights)
SMOOTHED = 5
"""Steps whose mean reward counts as what is reached after them."""

_DRIFT: Mapping[str, str] = {
    "logp_diff_mean": "rollout/logp_diff_mean",
    "logp_diff_max": "rollout/logp_diff_max",
    "cut_share": "sampling/importance_sampling_ratio/cut_share",
    "importance": "sampling/importance_sampling_ratio/mean",
}

_TINY_SUMS: Mapping[str, object] = {
    "model.name": "tiny:llama",
    "model.dtype": "float32",
    "model.num_trainable_layers": None,
    "prompts.skip_bad": True,
    "rollout.prompts_per_step": 4,
    "evaluation.num_prompts": 4,
    "run.steps": 2,
}

Found = dict[str, Any]


def figures_of(result: RunResult) -> Found:
    """The figures of a training's steps: seconds, reward of each, how far the engine's log-probs were off."""
    rows = result.metrics
    drift = {name: fmean(known) for name, key in _DRIFT.items() if (known := [row[key] for row in rows if key in row])}
    # An evaluation within a step is no part of what a step costs.
    seconds = [row["time/step_s"] - row.get("time/evaluate_s", 0.0) for row in rows]
    times = {"step_s": fmean(seconds), "rollout_s": fmean(row["time/rollout_s"] for row in rows)}
    return {**times, **drift, "seconds": seconds, "rewards": [row["reward"] for row in rows]}


def sums(options: Namespace, seed: int, say: Say) -> dict[str, Found]:
    """GRPO on sums: accuracy on held-out ones."""
    found: dict[str, Found] = {}
    for weights in WEIGHTS:
        with tempfile.TemporaryDirectory() as place:
            values: dict[str, object] = {"run.dir": place, "run.seed": seed, "run.num_threads": options.threads}
            values |= {"rollout.weights": weights, **(_TINY_SUMS if options.quick else {})}
            cfg = load_recipe("grpo", recipe="grpo_arithmetic", overrides=values).recipe
            result = training.run(cfg, progress=False)
        found[weights] = {"figure": result.summary["accuracy_after"], **figures_of(result)}
        say(f"sums, seed {seed}, {weights}: {_said(found[weights])}")
    return found


def demo(options: Namespace, seed: int, say: Say) -> dict[str, Found]:
    """The demo, whose PPO follows one reward model twice: win rate against the base model."""
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as place:
        stage = workflow.prepare(workflow.DemoOptions(seed=seed, out=place, quick=options.quick))
        openings = load_prompts("films", PromptsSection())[:: 5 if options.quick else 1]
        split = split_by_prompt(openings, 0.0, seed, num_heldout=workflow.NUM_COMPARED)
        reward_run = workflow.train_reward_model(stage, workflow.collect_votes(stage, split.train))
        for weights in WEIGHTS:
            side = replace(stage, policy_recipe=with_weights(stage.policy_recipe, weights))
            policy_run = workflow.train_policy(side, split.train, reward_run)
            after = workflow.compare_models(stage, split.heldout, reward_run, policy_run)
            hits = [hit(one.score_before, one.score_after) for one in after.samples]
            found[weights] = {"figure": fmean(hits), "kl_per_sequence": after.kl_per_sequence, **figures_of(policy_run)}
            say(f"demo, seed {seed}, {weights}: {_said(found[weights])}")
    return found


def _said(found: Found) -> str:
    return f"{found['figure']:.3f}, {found['step_s']:.2f} s a step"


def live(options: Namespace, seed: int, say: Say) -> dict[str, Found]:
    """The live loop, of random pairs: the win rate against the base model after all votes."""
    found: dict[str, Found] = {}
    for weights in WEIGHTS:
        reached = active.curve("random", seed, options, say, **{"rollout.weights": weights})
        found[weights] = {"figure": fmean(rate for _, rate in reached[-2:]), "curve": reached}
    return found


TASKS: Mapping[str, Callable[[Namespace, int, Say], dict[str, Found]]] = {"sums": sums, "demo": demo, "live": live}


def time_to(found: Found, target: float) -> float | None:
    """Seconds of steps until the mean reward of the last SMOOTHED ones is `target`; None: never."""
    rewards, passed = found["rewards"], 0.0
    for index, seconds in enumerate(found["seconds"]):
        passed += seconds
        window = rewards[max(0, index + 1 - SMOOTHED) : index + 1]
        if len(window) == SMOOTHED and fmean(window) >= target:
            return passed
    return None


def summary(of_seeds: Sequence[Mapping[str, Found]]) -> dict[str, Any]:
    """Figures of both trainings, their difference with its interval over the seeds, and ratios of time."""
    pairs = [(one["model"], one["int8"]) for one in of_seeds]
    gains = [after["figure"] - before["figure"] for before, after in pairs]
    low, high = mean_interval(gains) if len(gains) > 1 else (None, None)
    facts: dict[str, Any] = {
        "model": fmean(one["figure"] for one, _ in pairs),
        "int8": fmean(one["figure"] for _, one in pairs),
        "difference": fmean(gains),
        "low": low,
        "high": high,
    }
    if "step_s" not in pairs[0][0]:
        return facts
    for name in ("step_s", "rollout_s"):
        facts[f"{name.removesuffix('_s')}_speedup"] = fmean(exact[name] / rounded[name] for exact, rounded in pairs)
    for name in _DRIFT:
        facts[name] = fmean(one[name] for _, one in pairs) if name in pairs[0][1] else None
    reached = [(one, fmean(one["rewards"][-SMOOTHED:])) for one, _ in pairs]
    times = [
        (time_to(exact, 0.9 * target), time_to(rounded, 0.9 * target))
        for (exact, target), (_, rounded) in zip(reached, pairs, strict=True)
    ]
    facts["time_to_nine_tenths_s"] = times
    known = [before / after for before, after in times if before and after]
    facts["time_to_speedup"] = fmean(known) if known else None
    return facts


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All tasks and seeds, one after the other."""
    facts: dict[str, object] = head(options, "int8_learning", "quick", "votes", "completions", "pairs")
    tasks: dict[str, object] = {}
    for name in dict.fromkeys(options.task or TASKS):
        of_seeds = [TASKS[name](options, seed, say) for seed in range(options.seed, options.seed + options.seeds)]
        tasks[name] = {**summary(of_seeds), "trainings": of_seeds}
    return {**facts, "tasks": tasks}


def _show(facts: Mapping[str, Any]) -> None:
    columns = ("model", "int8", "difference", "low", "high", "logp_diff_mean", "cut_share", "step_speedup")
    text = lambda value: "" if value is None else f"{value:.3f}"  # noqa: E731
    rows = [[name, *(text(one.get(column)) for column in columns)] for name, one in facts["tasks"].items()]
    print_table(["task", *columns], rows)


main = benchmark(
    measure,
    _show,
    "quick",
    "seed",
    "threads",
    task={"action": "append", "choices": tuple(TASKS), "help": "one task; repeatable. All if left out"},
    seeds={"type": int, "default": 3, "metavar": "N", "help": "trainings of each kind, with other seeds"},
    votes={"type": int, "default": 600, "metavar": "N", "help": "votes of a live loop"},
    every={"type": int, "default": 100, "metavar": "N", "help": "votes of a live loop between two measurements"},
    completions={"type": int, "default": 4, "metavar": "N", "help": "completions of a prompt of the live loop"},
    pairs={"type": int, "default": 400, "metavar": "N", "help": "completions that are compared, about"},
)

if __name__ == "__main__":
    run("int8_learning")
