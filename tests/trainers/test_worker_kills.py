"""Rollout workers that are killed or stopped at random times while a run draws ahead: it ends as one without faults."""

import contextlib
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from jobs import outcome, the_run
from recipes import PROMPTS, grpo_recipe

from tunesmith.base.core.errors import ServerError
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.run import run


def few_low(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


class Faults:
    """A reward that, in each step, kills or stops a random worker a random time later."""

    def __init__(self, seed: int) -> None:
        self.__name__ = few_low.__name__  # which metrics and samples name
        self._chance, self.num = random.Random(seed), 0
        self._timers: list[threading.Timer] = []

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        self._timers.append(threading.Timer(0.3 * self._chance.random(), self._strike))
        self._timers[-1].start()
        return few_low(completion_ids)

    def wait(self) -> None:
        for timer in self._timers:
            timer.join()

    def _strike(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launchers = [
                child for child in psutil.Process().children() if "tunesmith.engine.rollout" in str(child.cmdline())
            ]
            if workers := [worker for launcher in launchers for worker in launcher.children()]:
                how = self._chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                self._chance.choice(workers).send_signal(how)
                self.num += 1


def trained(folder: Path, reward: object) -> object:
    """The outcome of twelve steps below `folder`, resumed where the workers were lost too often in a row."""
    inputs = Inputs(prompts=PROMPTS, rewards=[reward])  # type: ignore[list-item]
    scale = {"workers": 2, "lease": 2, "staleness": 3, "swap_tokens": 2, "timeout_s": 2}
    section = {"dir": str(folder), "steps": 12, "num_threads": 1, "checkpoint_every": 1, "sample_every": 1}
    try:
        run(grpo_recipe(folder, run=section, scale=scale, optimizer={"learning_rate": 1e-2}), inputs, progress=False)
    except ServerError:
        for left in reversed(range(10)):
            with contextlib.suppress(*([ServerError] if left else [])):
                resume(the_run(folder), inputs=inputs, progress=False)
                break
    return outcome(the_run(folder))


@pytest.mark.slow
def test_a_hundred_random_faults_of_workers_change_nothing(tmp_path: Path) -> None:
    expected, num_faults = trained(tmp_path / "whole", few_low), 0
    for attempt in range(100):
        faults = Faults(attempt)
        assert trained(tmp_path / str(attempt), faults) == expected
        faults.wait()
        num_faults += faults.num
        if num_faults >= 100:
            return
    pytest.fail(f"only {num_faults} workers were there to be killed")
