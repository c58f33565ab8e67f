"""`tunesmith plan` against measurements: a published table, and runs on this machine.

`published`: each row of NeMo-Aligner's table, predicted with the factor of the other row that is worst for it.
`local`: PPO steps of 1 to 4 ranks, each predicted from the run with one rank less, that of 1 from the run with 2. Leave
the machine alone meanwhile.
`queue`: the published work with our queue: how much faster 2 and 4 times as many engines draw, and the whole step is;
if the queue knows the lengths of completions, as of prompts that were drawn before, and if it does not.
"""

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Say, benchmark, machine_facts, print_table, run
from benchmarks.process import tunesmith
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.engine.rollout.workers.queue import WorkQueue
from tunesmith.observe.planning.calibration import PUBLISHED, published_factor, published_model, published_step
from tunesmith.observe.planning.from_run import MeasuredRun, read_measured
from tunesmith.observe.planning.planner import Planner
from tunesmith.observe.planning.simulation import draw_s, run_queue, sample_lengths


def published() -> list[dict[str, float]]:
    """Each published step, and its prediction from each other row that is furthest off."""
    rows: list[dict[str, float]] = []
    for nodes, measured_s in PUBLISHED.items():
        others = [published_step(nodes, published_factor(other)).total_s for other in PUBLISHED if other != nodes]
        worst_s = max(others, key=lambda seconds: abs(seconds - measured_s))
        rows.append({"nodes": nodes, "predicted_s": worst_s, "published_s": measured_s})
    return rows


def queue_ratios() -> dict[str, dict[str, float]]:
    """Time of the published step, and of its rollout, on 8 nodes, over those on 16 and 32, with our queue."""
    found: dict[str, dict[str, float]] = {}
    for name, is_known in (("known", True), ("unknown", False)):
        rollout = {nodes: statistics.fmean(_drawn_s(nodes, is_known, seed) for seed in range(8)) for nodes in PUBLISHED}
        stages = {nodes: published_step(nodes).stages for nodes in PUBLISHED}
        step = {nodes: sum({**stages[nodes], "rollout": drawn_s}.values()) for nodes, drawn_s in rollout.items()}
        for part, times in (("rollout", rollout), ("step", step)):
            found[f"{part}_{name}"] = {str(nodes // 8): times[8] / times[nodes] for nodes in (16, 32)}
    return found


def _drawn_s(nodes: int, is_known: bool, seed: int) -> float:
    model = published_model(nodes)
    work = model.work
    lengths = sample_lengths(work.num_rows, work.mean_new_tokens, work.new_tokens, seed)
    leases = [lengths[start : start + work.lease] for start in range(0, len(lengths), work.lease)]
    prefill_s = work.prompt_tokens * model.token_s(work.prompt_tokens) / model.layout.engine_tensor
    seconds = [draw_s(lease, work.slots, model.decode_step_s) + len(lease) * prefill_s for lease in leases]
    tokens = [float(sum(lease)) for lease in leases]
    queue = WorkQueue(tokens if is_known else [1.0] * len(leases))
    return run_queue(queue, seconds, [1.0] * model.layout.num_engines, tokens)[-1].at_s


def local(model: str, num_steps: int, max_ranks: int, say: Say) -> list[dict[str, float]]:
    """The step of each number of ranks, measured, and predicted from the run with one less."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
        runs: dict[int, MeasuredRun] = {}
        for ranks in range(1, max_ranks + 1):
            say(f"{num_steps} steps of {ranks} ranks")
            place = Path(folder) / str(ranks)
            runs[ranks] = read_measured(trained(place, model=model, steps=num_steps, **{"scale.ranks": ranks}))
        for ranks, run in runs.items():
            other = runs[ranks - 1 or 2]
            planner = Planner(other.shape, other.calibration.factors, data_parallel=True)
            step_s = planner.best(other.work, other.cluster(1, ranks, 0)).time.total_s
            rows.append({"ranks": ranks, "predicted_s": step_s, "measured_s": run.step_s})
    return rows


def trained(place: Path, **flags: object) -> Path:
    """The run folder, below `place`, of a PPO training in processes of one thread each."""
    sizes = {"rollout.prompts-per-step": 64, "rollout.max-new-tokens": 96, "ppo.num-epochs": 1, "reward": "length"}
    given = {**sizes, **flags, "run.dir": place, "run.num-threads": 1}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    try:
        return Path(tunesmith("train", "ppo", *words)["run_dir"])
    except TrainingError as error:
        raise InputError(f"the run with {flags} failed: {error}") from error


def measure(options: Namespace, say: Say) -> Mapping[str, object]:
    """The figures."""
    say("published steps")
    plain = {nodes: published_step(nodes).total_s for nodes in PUBLISHED}
    ratios = {str(nodes // 8): plain[8] / plain[nodes] for nodes in (16, 32)}
    sizes = ("tiny:llama", 3, 2) if options.quick else (options.model, 6, 4)
    rows = local(*sizes, say)
    figures = {"published": published(), "published_ratios": ratios, "queue": queue_ratios(), "local": rows}
    return {**figures, **machine_facts()}


def show(facts: Mapping[str, Any]) -> None:
    """Print the figures."""
    for name, key, told in (("published", "nodes", "published_s"), ("local", "ranks", "measured_s")):
        rows = [
            [
                str(row[key]),
                f"{row['predicted_s']:.3g}",
                f"{row[told]:.3g}",
                f"{row['predicted_s'] / row[told] - 1:+.1%}",
            ]
            for row in facts[name]
        ]
        print_table([key, "predicted s", f"{name} s", "error"], rows)
    ratios = facts["published_ratios"]
    print(f"ratios of the published rows: {ratios['2']:.2f} and {ratios['4']:.2f}, published 1.77 and 3.13")
    rows = [[name, f"{found['2']:.2f}", f"{found['4']:.2f}"] for name, found in facts["queue"].items()]
    print_table(["our queue: lengths", "2 times the nodes", "4 times"], rows)


main = benchmark(measure, show, "model", "quick", model={"default": "scratch"})


if __name__ == "__main__":
    run("plan")
