"""A training step beside a program that keeps one core busy, as a share of its speed on a machine that is idle.

A GRPO step (4 prompts x 8 completions x 64 tokens) of our learner as it is, of our learner with the spinning that
OpenMP does by default ("before"), and of TRL's trainer, each without and with the program beside it, in alternation.
On two cores the machine's fair share is 0.5. `--spin` measures other counts of spins too. Leave the machine alone
meanwhile; with smollm2 on two cores it takes a quarter to half an hour.
"""

import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common import Say, benchmark, head, in_turns, load_warning, paired, print_table, run
from benchmarks.plants.spin import __file__ as SPIN
from benchmarks.process import Process
from benchmarks.step import PROMPTS, OurStep
from benchmarks.trl import Taken, exported
from tunesmith.base.core.system import SPIN_COUNT

_STAGES = {"rollout": "time/rollout_s", "update": "time/update_s"}
_DEFAULT_OF_OPENMP = "300000"
_Steps = Mapping[str, list[tuple[Taken, Taken]]]


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark.

    Raises:
        InputError: for an unknown model, or if TRL is not installed; before anything is measured.
    """
    ours = OurStep(options.model, *((4, 8) if options.quick else (8, 64)), options.threads, options.seed)
    counts = {
        "ours": SPIN_COUNT,
        "before": _DEFAULT_OF_OPENMP,
        **{f"spin {count}": str(count) for count in options.spin or ()},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(exported(options.model))
        processes = {
            **{
                name: Process(
                    "benchmarks.trl:Ours", ours, num_threads=options.threads, variables={"GOMP_SPINCOUNT": count}
                )
                for name, count in counts.items()
            },
            "trl": ours.trl(str(folder)).start(),
        }
        for process in processes.values():
            stack.enter_context(process)
            process.call("take")  # the first step compiles and touches memory for the first time
        sides = {name: lambda _, process=process: _both(process) for name, process in processes.items()}
        done, load = in_turns(sides, options.rounds, say, _line)
    return {
        **head(options, "busy", "model", "quick", "rounds", packages=("torch", "transformers", "trl", "numpy")),
        "prompts": len(PROMPTS),
        **_stage_facts(done),
        "sides": {name: _facts(taken) for name, taken in done.items()},
        "load": load,
    }


def _both(process: Process) -> tuple[Taken, Taken]:
    """A step alone, and one beside a program that spins."""
    alone = process.call("take")
    with spinning():
        return alone, process.call("take")


@contextmanager
def spinning() -> Iterator[None]:
    """Keep one core busy by a process of the same priority."""
    program = subprocess.Popen([sys.executable, SPIN], env={**os.environ, "PLANTED_SPIN": "1"})
    try:
        yield
    finally:
        program.kill()
        program.wait()


def _seconds(taken: Taken, stage: str) -> float:
    return taken.seconds if stage == "step" else taken.stages_s.get(_STAGES[stage], float("nan"))


def _pairs(taken: list[tuple[Taken, Taken]], stage: str) -> tuple[list[float], list[float]]:
    """Seconds of the stage alone, and beside another program, in each round."""
    alone, beside = ([_seconds(pair[index], stage) for pair in taken] for index in (0, 1))
    return alone, beside


def _stage_facts(done: _Steps) -> dict[str, object]:
    """For rollout, update and step: our share of the speed alone, and our speed alone over that with long spinning."""
    facts: dict[str, object] = {}
    for stage in (*_STAGES, "step"):
        alone, beside = _pairs(done["ours"], stage)
        share, quiet = paired(alone, beside), paired(_pairs(done["before"], stage)[0], alone)
        facts[stage] = {"share": share.median, **share.facts("share"), **quiet.facts("quiet")}
    return facts


def _facts(taken: list[tuple[Taken, Taken]]) -> dict[str, object]:
    facts: dict[str, object] = {}
    for stage in (*_STAGES, "step"):
        alone, beside = map(statistics.median, _pairs(taken, stage))
        facts[stage] = {"alone_s": alone, "beside_s": beside, "share": paired(*_pairs(taken, stage)).median}
    return facts


def _line(done: Mapping[str, list[Any]]) -> str:
    """Seconds alone and beside of each side in the newest round."""
    return ", ".join(f"{name} {pairs[-1][0].seconds:.1f}/{pairs[-1][1].seconds:.1f} s" for name, pairs in done.items())


def _show(facts: Mapping[str, Any]) -> None:
    print_table(
        ["side", *(f"{stage} {what}" for stage in (*_STAGES, "step") for what in ("alone s", "share"))],
        [
            [name, *(f"{side[stage][key]:.2f}" for stage in (*_STAGES, "step") for key in ("alone_s", "share"))]
            for name, side in facts["sides"].items()
        ],
    )
    print(f"speed alone over that before: {facts['step']['quiet_median']:.2f}{load_warning(facts)}")


main = benchmark(
    measure,
    _show,
    *("model", "threads", "rounds", "seed", "quick"),
    spin={"type": int, "action": "append", "metavar": "N", "help": "measure with GOMP_SPINCOUNT=N too; repeatable"},
)


if __name__ == "__main__":
    run("busy")
