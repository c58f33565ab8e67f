"""Several processes: two rollout workers and two ranks against one, a queue against a static split of uneven work on
uneven workers, and a critic in a process of its own.

`rollout`: `ratio_2` is the time of one worker over that of two, for the same completions of equal length.
`step`: `ratio_2` is the time of a PPO step of one rank over that of two: medians over the steps of runs in alternation.
`critic`: the same, of a step with a separate critic, in one process over that with `ppo.critic_process`; `update_ratio`
is of its updates alone.
`uneven`: completions of 8 to 512 tokens, two workers of which one has half of each millisecond. The ideal is the time
of one undisturbed worker over 1.5; shares are this ideal over the time that was measured. In a static split each
worker gets one half of the prompts. Lengths are not known before.
`staleness` (only if it is named): `grpo_arithmetic` with one worker that draws 0, 1 and 4 steps ahead, a seed for each
round: accuracy on held-out sums before and after, and the seconds of a step and of both sides' waiting in it, medians
over the steps. `step_ratio` is the time of a step of staleness 0 over that of this one.
Every process has one thread. Leave the machine alone meanwhile.
"""

import contextlib
import os
import signal
import statistics
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.common import (
    Say,
    Spread,
    benchmark,
    in_turns,
    load_warning,
    machine_facts,
    paired,
    print_table,
    run,
    seconds_of,
    spread_text,
)
from benchmarks.plan import trained
from tunesmith import train
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers
from tunesmith.learn.trainers.setup import RunResult

_SLICE_S = 0.02
_N = 4
"""Completions of a prompt."""

ACCURACIES = ("accuracy_before", "accuracy_after")
TIMES = ("step_ratio", "time/step_s", "rollout/wait_s", "rollout/worker_idle_s")


def prompts_of(count: int) -> list[Prompt]:
    """Different prompts of about as many tokens."""
    return [
        Prompt(str(number), f"Report {number:03}: when the film began, everybody in the room")
        for number in range(count)
    ]


def open_workers(loaded: LoadedModel, workers: Workers) -> WorkerEngine:
    """An engine of `workers`, which have drawn a little."""
    engine = open_engine(loaded.model, loaded.tokenizer, backend=workers)
    assert isinstance(engine, WorkerEngine)
    engine.generate(prompts_of(2 * workers.count), _N, SamplingParams(max_new_tokens=4, seed=0))
    return engine


@contextlib.contextmanager
def half_speed(process: int) -> Iterator[None]:
    """Stop `process` for every second slice of time inside the block."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.wait(_SLICE_S):
            os.kill(process, signal.SIGSTOP)
            ended.wait(_SLICE_S)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seconds_line(answers: Mapping[str, Sequence[float]]) -> str:
    """The newest seconds of each side."""
    return ", ".join(f"{name}: {times[-1]:.1f} s" for name, times in answers.items())


def measure_rollout(options: Namespace, say: Say) -> dict[str, object]:
    """One worker and two, in alternation."""
    loaded = load_policy(ModelSection(name=options.model))
    num_prompts, num_tokens = (4, 8) if options.quick else (32, 48)
    sampling = SamplingParams(max_new_tokens=num_tokens, min_new_tokens=num_tokens, seed=1)
    engines = {count: open_workers(loaded, Workers(count)) for count in (1, 2)}

    def side(count: int) -> float:
        return seconds_of(lambda: engines[count].generate(prompts_of(num_prompts), _N, sampling))

    answers, load = in_turns({"1": lambda _: side(1), "2": lambda _: side(2)}, options.rounds, say, seconds_line)
    ratio = paired(answers["1"], answers["2"])
    return {"ratio_2": ratio.median, **ratio.facts("ratio"), "load": load}


def measure_steps(
    sides: Mapping[str, Mapping[str, object]], options: Namespace, say: Say
) -> tuple[dict[str, list[Any]], Any]:
    """Metrics of the steps of PPO runs with the flags of each side, in turns, without their first; and the load."""
    sizes = {"steps": 3, "rollout.prompts-per-step": 8} if options.quick else {"steps": 6}

    def side(flags: Mapping[str, object], _: int) -> list[dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder:
            path = trained(Path(folder), model=options.step_model, **sizes, **flags)
            return cast(list[dict[str, float]], read_jsonl(path / "metrics.jsonl")[1:])

    def line(answers: Mapping[str, list[list[dict[str, float]]]]) -> str:
        return ", ".join(f"{name}: {typical(runs[-1], 'time/step_s'):.2f} s" for name, runs in answers.items())

    return in_turns({name: partial(side, flags) for name, flags in sides.items()}, options.rounds, say, line)


def typical(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Median of a metric over steps."""
    return statistics.median(row[name] for row in rows)


def ratio_of(answers: Mapping[str, list[Any]], name: str) -> Spread:
    """The metric `name` of the first side over that of the second."""
    first, second = ([typical(rows, name) for rows in runs] for runs in answers.values())
    return paired(first, second)


def measure_step(options: Namespace, say: Say) -> dict[str, object]:
    """One rank and two."""
    answers, load = measure_steps({"1": {"scale.ranks": 1}, "2": {"scale.ranks": 2}}, options, say)
    ratio = ratio_of(answers, "time/step_s")
    return {"ratio_2": ratio.median, **ratio.facts("ratio"), "load": load}


def measure_critic(options: Namespace, say: Say) -> dict[str, object]:
    """A separate critic in the process of the policy, and in one of its own."""
    sides = {str(own): {"ppo.critic": "separate", "ppo.critic_process": own} for own in ("false", "true")}
    answers, load = measure_steps(sides, options, say)
    step, update = ratio_of(answers, "time/step_s"), ratio_of(answers, "time/update_s")
    return {
        "step_ratio": step.median,
        **update.facts("update_ratio"),
        "update_ratio": update.median,
        "load": load,
    }


def measure_uneven(options: Namespace, say: Say) -> dict[str, object]:
    """The queue, a static split, and one undisturbed worker, in alternation."""
    loaded = load_policy(ModelSection(name=options.uneven_model))
    num_prompts, longest = (4, 32) if options.quick else (64, 512)
    prompts = prompts_of(num_prompts)
    both, fast, slow = (open_workers(loaded, Workers(count, lease=_N)) for count in (2, 1, 1))

    def sampling(index: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=longest, min_new_tokens=8, seed=index)

    def queue(index: int) -> float:
        with half_speed(both.process_of(1)):
            return seconds_of(lambda: both.generate(prompts, _N, sampling(index)))

    def static(index: int) -> float:
        half = len(prompts) // 2
        parts = ((fast, prompts[:half]), (slow, prompts[half:]))
        threads = [threading.Thread(target=one.generate, args=(part, _N, sampling(index))) for one, part in parts]
        with half_speed(slow.process_of(0)):
            return seconds_of(lambda: [*map(threading.Thread.start, threads), *map(threading.Thread.join, threads)])

    def alone(index: int) -> float:
        return seconds_of(lambda: fast.generate(prompts, _N, sampling(index)))

    answers, load = in_turns({"alone": alone, "queue": queue, "static": static}, options.rounds, say, seconds_line)
    ideal = [seconds / 1.5 for seconds in answers["alone"]]
    queue_share, static_share = paired(ideal, answers["queue"]), paired(ideal, answers["static"])
    return {
        "queue_share": queue_share.median,
        "static_share": static_share.median,
        **queue_share.facts("queue_share"),
        **static_share.facts("static_share"),
        "load": load,
    }


def measure_staleness(options: Namespace, say: Say) -> dict[str, object]:
    """Runs of staleness 0, 1 and 4 in alternation, each round with another seed."""

    trained: dict[str, Any] = {"model.num_trainable_layers": 1 if options.quick else 10}  # tiny models have two

    def side(staleness: int, index: int) -> RunResult:
        with tempfile.TemporaryDirectory() as folder:
            return train.grpo(
                recipe="grpo_arithmetic",
                model=options.model,
                steps=options.steps,
                rollout={"prompts_per_step": 8},
                optimizer={"learning_rate": 1e-4},
                evaluation={"num_prompts": 4 if options.quick else 128},
                scale={"workers": 1, "staleness": staleness},
                run={"dir": folder, "seed": index, "num_threads": 1, "checkpoint_every": options.steps},
                progress=False,
                **trained,
            )

    def line(answers: Mapping[str, list[RunResult]]) -> str:
        return ", ".join(
            f"{name}: {runs[-1].summary['accuracy_after']:.3f}, {typical(runs[-1].metrics, 'time/step_s'):.1f} s a step"
            for name, runs in answers.items()
        )

    sides = {str(staleness): partial(side, staleness) for staleness in (0, 1, 4)}
    answers, load = in_turns(sides, options.rounds, say, line)
    first = [typical(run.metrics, "time/step_s") for run in answers["0"]]
    figures: dict[str, object] = {}
    for name, runs in answers.items():
        figures[name] = {
            **{key: [run.summary[key] for run in runs] for key in ACCURACIES},
            "step_ratio": paired(first, [typical(run.metrics, "time/step_s") for run in runs]).median,
            **{key: statistics.median(typical(run.metrics, key) for run in runs) for key in TIMES[1:]},
        }
    return {"steps": options.steps, "by_staleness": figures, "load": load}


PARTS = {
    "rollout": measure_rollout,
    "step": measure_step,
    "critic": measure_critic,
    "uneven": measure_uneven,
    "staleness": measure_staleness,
}


def measure(options: Namespace, say: Say) -> Mapping[str, object]:
    """The figures of each part."""
    figures: dict[str, Any] = {}
    for name in options.part or (name for name in PARTS if name != "staleness"):
        say(f"{name}:")
        figures[name] = PARTS[name](options, say)
        say("\n".join(f"  {label}: {text}" for label, text in lines(name, figures[name])))
    return {"model": options.model, **figures, **machine_facts()}


def lines(part: str, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The main figures of a part, each with its label."""
    if part in ("rollout", "step"):
        return [("two processes over one", spread_text(figures))]
    if part == "critic":
        return [
            ("time saved, in a step", f"{figures['step_ratio']:.2f}x"),
            ("update", f"{figures['update_ratio']:.2f}x"),
        ]
    if part == "uneven":
        return [(f"share of the ideal, {side}", f"{figures[f'{side}_share']:.2f}") for side in ("queue", "static")]
    return [
        (
            f"staleness {name}",
            ", ".join(
                [f"{key} {statistics.mean(row[key]):.3f}" for key in ACCURACIES]
                + [f"{key} {row[key]:.2f}" for key in TIMES]
            ),
        )
        for name, row in figures["by_staleness"].items()
    ]


def show(facts: Mapping[str, Any]) -> None:
    """Print the figures."""
    measured = [name for name in PARTS if name in facts]
    rows = [[name, *line] for name in measured for line in lines(name, facts[name])]
    print_table(["part", "", "figure"], rows)
    print(*{load_warning(facts[name]) for name in measured}, sep="")


main = benchmark(
    measure,
    show,
    *("model", "rounds", "quick"),
    part={"action": "append", "choices": PARTS, "help": "one part; repeatable. All but staleness if left out"},
    uneven_model={
        "default": "scratch",
        "metavar": "ID",
        "help": "model of the uneven work; its completions end by chance",
    },
    step_model={"default": "scratch", "metavar": "ID", "help": "model of `step` and `critic`"},
    steps={"type": int, "default": 12, "metavar": "N", "help": "steps of each run of `staleness`"},
)


if __name__ == "__main__":
    run("scale")
