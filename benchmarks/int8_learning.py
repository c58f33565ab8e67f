"""What drawing in 8 bits changes in what is learnt: trainings with `rollout.weights: int8` against exact ones.

Three tasks, each with several seeds: sums by GRPO (the recipe grpo_arithmetic), the demo's PPO against a reward model
of simulated votes, and the live loop with simulated raters. Of a seed both trainings have the same rows, votes and
reward model, and one follows the other. A figure is the accuracy on held-out sums, or the win rate against the base
model on held-out openings, by the lexicon. Threads count: times are of the steps alone, and of the same thread.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import active, pessimism, reasons
from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import PromptsSection
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import split_by_prompt
from tunesmith.collect.statistics.intervals import mean_interval
from tunesmith.learn.trainers import run as training
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.setup import RunResult

WEIGHTS = ("model", "int8")
SMOOTHED = 5
"""Steps whose mean reward counts as what is reached after them."""

_DRIFT: Mapping[str, str] = {
    "logp_diff_mean": "rollout/logp_diff_mean",
    "logp_diff_max": "rollout/logp_diff_max",
    "cut_share": "sampling/importance_sampling_ratio/cut_share",
    "importance": "sampling/importance_sampling_ratio/mean",
}

Found = dict[str, Any]


def trained(folder: Path, inputs: Inputs, options: Namespace, **values: Any) -> tuple[RunResult, Found]:
    """A training, and the figures of its steps: seconds, reward of each, how far the engine's log-probs were off."""
    algorithm, recipe = values.pop("algorithm"), values.pop("recipe")
    values |= {"run.dir": str(folder), "run.num_threads": options.threads, **_tiny(algorithm, options)}
    cfg = load_recipe(algorithm, recipe=recipe, overrides=values).recipe
    result = training.run(cfg, inputs, progress=False)
    rows = result.metrics
    drift = {name: fmean(known) for name, key in _DRIFT.items() if (known := [row[key] for row in rows if key in row])}
    # An evaluation within a step is no part of what a step costs.
    seconds = [row["time/step_s"] - row.get("time/evaluate_s", 0.0) for row in rows]
    times = {"step_s": fmean(seconds), "rollout_s": fmean(row["time/rollout_s"] for row in rows)}
    return result, {**times, **drift, "seconds": seconds, "rewards": [row["reward"] for row in rows]}


def _tiny(algorithm: str, options: Namespace) -> dict[str, object]:
    if not options.quick:
        return {}
    small = {"run.steps": 2, "rollout.prompts_per_step": 4, "rollout.max_new_tokens": 4, "prompts.skip_bad": True}
    sums = {"evaluation.num_prompts": 4} if algorithm == "grpo" else {}
    return {"model.name": "tiny:llama", "model.dtype": "float32", "model.num_trainable_layers": None, **small, **sums}


def sums(options: Namespace, seed: int, say: Say) -> dict[str, Found]:
    """GRPO on sums: accuracy on held-out ones."""
    found: dict[str, Found] = {}
    for weights in WEIGHTS:
        with tempfile.TemporaryDirectory() as place:
            values = {"run.seed": seed, "rollout.weights": weights}
            result, figures = trained(
                Path(place), Inputs(), options, algorithm="grpo", recipe="grpo_arithmetic", **values
            )
        found[weights] = {"figure": result.summary["accuracy_after"], **figures}
        say(f"sums, seed {seed}, {weights}: {found[weights]['figure']:.3f}, {figures['step_s']:.2f} s a step")
    return found


def demo(options: Namespace, seed: int, say: Say) -> dict[str, Found]:
    """PPO of the demo, both times with the same reward model: win rate against the base model."""
    split = split_by_prompt(load_prompts("films", PromptsSection()), 0.0, 0, num_heldout=40)
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as place:
        plain = pessimism.recipe_of("ppo", Namespace(quick=options.quick, steps=1), Path(place), seed)
        pairs = pessimism.voted(plain, split.train, options.demo_votes, seed, by_length=options.quick)  # type: ignore[arg-type]
        reward = pessimism.recipe_of("reward", options, Path(place), seed)
        judge = training.run(reward, Inputs(pairs=pairs), progress=False)
        for weights in WEIGHTS:
            values = {
                "run.seed": seed,
                "rollout.weights": weights,
                "reward": [{"source": str(judge.run_dir / "final")}],
            }
            inputs = Inputs(prompts=split.train)
            result, figures = trained(
                Path(place) / weights, inputs, options, algorithm="ppo", recipe="demo_ppo", **values
            )
            after = reasons.compared(str(result.run_dir / "final"), options, seed)
            hits = after["hits"]
            found[weights] = {"figure": fmean(hits), "kl_per_sequence": after["kl_per_sequence"], **figures}
            say(f"demo, seed {seed}, {weights}: {fmean(hits):.3f}, {figures['step_s']:.2f} s a step")
    return found


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
    facts: dict[str, object] = head(options, "int8_learning", "quick", "votes", "demo_votes", "completions", "pairs")
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
    model={"help": "model of the demo's comparison"},
    task={"action": "append", "choices": tuple(TASKS), "help": "one task; repeatable. All if left out"},
    seeds={"type": int, "default": 3, "metavar": "N", "help": "trainings of each kind, with other seeds"},
    demo_votes={"type": int, "default": 400, "metavar": "N", "help": "votes that the demo's reward model learns"},
    votes={"type": int, "default": 600, "metavar": "N", "help": "votes of a live loop"},
    every={"type": int, "default": 100, "metavar": "N", "help": "votes of a live loop between two measurements"},
    completions={"type": int, "default": 4, "metavar": "N", "help": "completions of a prompt of the live loop"},
    pairs={"type": int, "default": 400, "metavar": "N", "help": "completions that are compared, about"},
)

if __name__ == "__main__":
    run("int8_learning")
