"""Ranks that are killed or stopped at random times: the resumed run ends as one without kills, to the bit."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import context, outcome, the_run
from on_ranks import few_low
from recipes import PROMPTS, grpo_recipe

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.core.faults import VARIABLE
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.run import run

NUM_STEPS = 12


def recipe(folder: Path, num_ranks: int) -> GRPORecipe:
    run = {"dir": str(folder), "steps": NUM_STEPS, "num_threads": 1, "checkpoint_every": 1, "sample_every": 1}
    return grpo_recipe(folder, run=run, scale={"ranks": num_ranks, "reduction": "exact", "rank_timeout_s": 20})


def trained(folder: Path) -> None:
    """A run below `folder` on two ranks, or the rest of it if it has begun; an error is written to a file."""
    inputs = Inputs(prompts=PROMPTS, rewards=[few_low])
    try:
        if begun := [file.parent for file in folder.glob("*/environment.json")]:
            resume(begun[0], inputs=inputs, progress=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # killed before it was a run
            run(recipe(folder, 2), inputs, progress=False)
    except TunesmithError as error:
        folder.with_suffix(".error").write_text(str(error))
        raise SystemExit(error.exit_code) from error


def result(run_dir: Path) -> Mapping[str, object]:
    """What follows from the recipe for any number of ranks."""
    found = outcome(run_dir)
    rows: Any = found["metrics"]
    of_a_rank = ("update/shared_tokens", "update/micro_batch_tokens")
    return {**found, "metrics": [{k: v for k, v in row.items() if k not in of_a_rank} for row in rows]}


def num_rows(folder: Path) -> int:
    """The number of steps that the run below `folder` has recorded."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*/metrics.jsonl"))


def ranks_of(process: BaseProcess) -> list[psutil.Process]:
    """The ranks of the run that `process` leads, itself the first: it has started a server that forks the others."""
    leader = psutil.Process(process.pid)
    return [leader, *(child for child in leader.children(recursive=True) if child.ppid() != leader.pid)]


def attempt(folder: Path, chance: random.Random, how: signal.Signals | None, victim: int) -> bool:
    """Train until the end, or send `how` to a rank at a random time; True if the run ended: the signal may come behind
    its last step.
    """
    process = context().Process(target=trained, args=(folder,))
    process.start()
    others: list[psutil.Process] = []
    # Kills may come while the ranks start; one that stops is named only after it has started.
    wanted = num_rows(folder) + chance.randrange(3) + (how == signal.SIGSTOP)
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        while how is not None:
            leader, *others = ranks_of(process)
            if others and num_rows(folder) >= wanted:
                time.sleep(0.2 * chance.random())
                [leader, *others][victim].send_signal(how)
                break
            time.sleep(0.01)
    process.join(timeout=120)
    assert process.exitcode is not None, "the leader hangs"
    _, left = psutil.wait_procs(others, timeout=30)
    assert not left, "a rank outlives the others"
    return process.exitcode == 0 or any(folder.glob("*/result.json"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The outcome of one process, which is that of any number of ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return result(run(recipe(folder, 1), Inputs(prompts=PROMPTS, rewards=[few_low]), progress=False).run_dir)


def test_a_run_whose_ranks_are_killed_at_random_times_ends_as_without(expected: object, tmp_path: Path) -> None:
    folder, chance = tmp_path / "runs", random.Random(1)
    assert any(
        attempt(folder, chance, how, rank) for how, rank in ((signal.SIGKILL, 1), (signal.SIGKILL, 0), (None, 0))
    )
    assert result(the_run(folder)) == expected


def on_a_full_disk(folder: Path, place: str) -> None:
    os.environ[VARIABLE] = f"{place}:disk_full:2"
    trained(folder)


@pytest.mark.parametrize("place", [pytest.param("checkpoint/written", marks=pytest.mark.nightly), "checkpoint/rank_1"])
def test_a_full_disk_of_one_rank_costs_one_checkpoint(expected: object, tmp_path: Path, place: str) -> None:
    process = context().Process(target=on_a_full_disk, args=(tmp_path / "runs", place))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    run_dir = the_run(tmp_path / "runs")
    found = [json.loads(line) for line in (run_dir / "findings.jsonl").read_text().splitlines()]
    assert [(one["step"], one["severity"]) for one in found if "No space left" in one["message"]] == [(2, "error")]
    assert result(run_dir) == expected


def faults_of_a_run(folder: Path, expected: object) -> int:
    """The number of faults after which the run below `folder` ended as expected: ten, or fewer if a signal came behind
    its last step.
    """
    chance, num_faults = random.Random(folder.name), 0
    for _ in range(10):
        how, victim = chance.choice([(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1)])
        if attempt(folder, chance, how, victim):
            break
        num_faults += 1
        if how == signal.SIGSTOP:
            error = folder.with_suffix(".error").read_text()
            assert re.search("rank 1 (did not arrive|arrived and answers no more)", error)
    else:
        assert attempt(folder, chance, None, 0)
    assert result(the_run(folder)) == expected
    shutil.rmtree(folder)
    return num_faults


@pytest.mark.slow
def test_a_hundred_random_faults_of_ranks_change_nothing(expected: object, tmp_path: Path) -> None:
    num_runs = num_faults = 0
    with ThreadPoolExecutor(2) as pool:  # a stopped rank is given up after 20 idle seconds
        while num_faults < 100:
            folders = [tmp_path / f"run-{num_runs + i}" for i in range(4)]
            num_faults += sum(pool.map(faults_of_a_run, folders, [expected] * 4))
            num_runs += 4
