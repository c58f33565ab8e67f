"""`tunesmith plan` against measurements: a published table, and runs on this machine.

`published`: each row of NeMo-Aligner's table, predicted with the factor of the other row that is worst for it.
`local`: PPO steps of 1 to 4 ranks, predicted from the run with 1. Leave the machine alone meanwhile.
"""

import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Say, command, parser, print_table, run
from tunesmith.core.errors import InputError
from tunesmith.planning.calibration import PUBLISHED, published_factor, published_step
from tunesmith.planning.from_run import read_measured
from tunesmith.planning.planner import Planner


def published() -> list[dict[str, float]]:
    """Each published step, and its prediction from each other row that is furthest off."""
    rows: list[dict[str, float]] = []
    for nodes, measured_s in PUBLISHED.items():
        others = [published_step(nodes, published_factor(other)).total_s for other in PUBLISHED if other != nodes]
        worst_s = max(others, key=lambda seconds: abs(seconds - measured_s))
        rows.append({"nodes": nodes, "predicted_s": worst_s, "published_s": measured_s})
    return rows


def local(model: str, num_steps: int, max_ranks: int, say: Say) -> list[dict[str, float]]:
    """The step of each number of ranks, measured, and predicted from the run with one."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
        runs = {ranks: _trained(model, num_steps, ranks, Path(folder), say) for ranks in range(1, max_ranks + 1)}
        first = read_measured(runs[1])
        planner = Planner(first.shape, first.calibration.factors, data_parallel=True)
        for ranks, path in runs.items():
            step_s = planner.best(first.work, first.cluster(1, ranks, 0)).time.total_s
            rows.append({"ranks": ranks, "predicted_s": step_s, "measured_s": read_measured(path).step_s})
    return rows


def _trained(model: str, num_steps: int, ranks: int, folder: Path, say: Say) -> Path:
    """The run folder of `num_steps` steps in `ranks` processes of one thread each."""
    say(f"{num_steps} steps of {ranks} ranks")
    place = folder / str(ranks)
    sizes = {"rollout.prompts-per-step": 64, "rollout.max-new-tokens": 96, "ppo.num-epochs": 1}
    flags = {**sizes, "model": model, "reward": "length", "steps": num_steps, "scale.ranks": ranks, "run.dir": place}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "tunesmith", "train", "ppo", *words, "--run.num-threads", "1", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the run with {ranks} ranks failed: {done.stderr.strip().splitlines()[-1:]}")
    return next(place.iterdir())


def measure(options: Namespace, say: Say) -> Mapping[str, object]:
    """The figures."""
    say("published steps")
    plain = {nodes: published_step(nodes).total_s for nodes in PUBLISHED}
    ratios = {str(nodes // 8): plain[8] / plain[nodes] for nodes in (16, 32)}
    sizes = ("tiny:llama", 3, 2) if options.quick else (options.model, 6, 4)
    return {"published": published(), "published_ratios": ratios, "local": local(*sizes, say)}


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


def main(words: Sequence[str]) -> int:
    """The command line."""
    flags = parser("plan", __doc__, "model", "quick", "json", "out", "quiet", model={"default": "scratch"})
    return command(flags, words, measure, show)


if __name__ == "__main__":
    run("plan")
