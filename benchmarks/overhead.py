"""The cost of measuring a training, and the share of its steps that the named stages cover.

`overhead`: blocks of GRPO steps with and without the meter (`run.measure`), in alternation, in one process, by the loop
that takes every step: the median over rounds of the ratio of their times, less 1. Each step draws as many tokens.
`coverage`: for each trainer, the sum of the stages over the time of its steps, without the first.
Leave the machine alone meanwhile; with smollm2 on two cores it takes about ten minutes.
"""

import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Say, benchmark, head, in_turns, load_warning, paired, print_table, run
from tunesmith.base.config.schema import RECIPES, SPECS
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, Metrics
from tunesmith.learn.trainers.computing import rates_of
from tunesmith.learn.trainers.run import run as train
from tunesmith.learn.trainers.run import take_step, task_of
from tunesmith.learn.trainers.session import Job, Session, open_session
from tunesmith.observe.profiling.meter import metering

BLOCK_S = 3.0
"""A block has as many steps as take this long: the meter reads some figures only four times a second."""

_MANY_STEPS = 1_000_000
_PROMPTS = ("The old house at the end", "My favourite part of the trip", "She opened the letter", "In my opinion,")


def token_sum(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward that differs between completions and costs nothing."""
    return [float(sum(ids) % 1000) for ids in completion_ids]


def recipe(algorithm: str, model: str, folder: Path, num_tokens: int, num_steps: int, num_threads: int) -> Any:
    """A small recipe of `algorithm` whose steps all draw as many tokens."""
    drawn = {"prompts_per_step": 4, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    if algorithm != "ppo":
        drawn["completions_per_prompt"] = 4
    sections: dict[str, Any] = {
        "sft": {"sft": {"demonstrations_per_step": 8}},
        "reward": {"reward_model": {"pairs_per_step": 8}},
        "dpo": {"dpo": {"pairs_per_step": 8}},
        "distill": {"rollout": drawn, "distill": {"teachers": [{"model": model}]}},
    }
    run_section = {"dir": str(folder), "steps": num_steps, "num_threads": num_threads, "checkpoint_every": 0}
    both = {"model": {"name": model}, "run": run_section, **sections.get(algorithm, {"rollout": drawn})}
    return RECIPES[algorithm].model_validate(both)


def inputs(algorithm: str) -> Inputs:
    """Data of `algorithm`, of about twenty tokens a row."""
    texts = [f"{start} {index}" for index in range(16) for start in _PROMPTS]
    if algorithm == "sft":
        return Inputs(demonstrations=[{"prompt": text, "completion": " was good." * 5} for text in texts])
    if algorithm in ("reward", "dpo"):
        return Inputs(pairs=[{"prompt": text, "chosen": " so good" * 5, "rejected": " meh" * 5} for text in texts])
    return Inputs(prompts=texts, rewards=None if algorithm == "distill" else [token_sum])


class Steps:
    """Steps of a GRPO run, taken and recorded by the loop of every training."""

    def __init__(self, task: Any, learner: Any, session: Session, rates: Callable[..., Metrics]) -> None:
        self._task, self._learner, self._session, self._rates = task, learner, session, rates
        self._index = 0

    def block(self, num_steps: int, *, measures: bool) -> float:
        """Seconds of one of `num_steps` steps; the meter's begin and end are not among them."""
        with metering() if measures else nullcontext() as meter:
            self._session.meter = meter
            start_s = time.perf_counter()
            for _ in range(num_steps):
                take_step(self._task, self._learner, self._session, self._rates, self._index)
                self._index += 1
            return (time.perf_counter() - start_s) / num_steps


def overhead(options: Namespace, folder: Path, num_tokens: int, say: Say) -> dict[str, object]:
    """Ratios of steps with and without the meter."""
    cfg = recipe("grpo", options.model, folder, num_tokens, _MANY_STEPS, options.threads)
    device = setup.prepare(cfg)
    task = task_of(cfg, inputs("grpo"), device)
    learner, rates = task.build(), partial(rates_of, cfg, task.estimate(), device)
    job = Job(learner, task.num_steps, {})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"measure": False})})
    with open_session(cfg, job, provenance=None, show_progress=False, data=task.data.facts) as session:
        session.steps()
        steps = Steps(task, learner, session, rates)
        steps.block(2, measures=True)
        num_steps = 1 if options.quick else max(1, math.ceil(BLOCK_S / steps.block(2, measures=False)))
        say(f"blocks of {num_steps} steps")
        seconds, load = in_turns(
            {
                "with": lambda _: steps.block(num_steps, measures=True),
                "without": lambda _: steps.block(num_steps, measures=False),
            },
            options.rounds,
            say,
            lambda done: f"{done['with'][-1]:.3f} s with, {done['without'][-1]:.3f} s without",
        )
    spread = paired(seconds["with"], seconds["without"])
    return {
        "overhead": spread.median - 1,
        **spread.facts("ratio"),
        "step_s": min(seconds["without"]),
        "steps_per_block": num_steps,
        "load": load,
    }


def coverage(algorithm: str, options: Namespace, folder: Path, num_tokens: int) -> float:
    """The stages' share of the steps of a short run."""
    cfg = recipe(algorithm, options.model, folder, num_tokens, 3 if options.quick else 5, options.threads)
    result = train(cfg, inputs(algorithm), progress=False)
    rows: Any = read_jsonl(result.run_dir / "metrics.jsonl")[1:]
    return 1 - sum(row["time/other_s"] for row in rows) / sum(row["time/step_s"] for row in rows)


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark."""
    num_tokens = 4 if options.quick else 16
    covered: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tunesmith-overhead-") as folder:
        figures = overhead(options, Path(folder), num_tokens, say)
        for algorithm in SPECS:
            covered[algorithm] = coverage(algorithm, options, Path(folder), num_tokens)
            say(f"coverage of {algorithm}: {covered[algorithm]:.4f}")
    return {
        **head(options, "overhead", "model", "quick", "rounds"),
        **figures,
        "coverage": covered,
    }


def show(figures: Mapping[str, Any]) -> None:
    """Print the figures."""
    low, high = figures["ratio_min"] - 1, figures["ratio_max"] - 1
    print(f"overhead {figures['overhead']:.2%} ({low:.2%} to {high:.2%}) of a step of {figures['step_s']:.3f} s")
    print_table(("trainer", "coverage"), [(name, f"{share:.2%}") for name, share in figures["coverage"].items()])
    print(load_warning(figures), end="")


main = benchmark(measure, show, *("model", "threads", "rounds", "quick"), rounds={"default": 40})


if __name__ == "__main__":
    run("overhead")
