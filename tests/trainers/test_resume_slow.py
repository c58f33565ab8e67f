"""Runs that are killed at random moments, saves included, and resumed until they end: the outcome is exact."""

import random
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from jobs import NUM_STEPS, TRAINERS, go_on, outcome, start, the_run, train

from tunesmith.base.runs.checkpoint import list_steps

NUM_KILLS = 20
NUM_KILLS_IN_SAVES = 5
KILLED = -9

OFTEN = partial(train, checkpoint_every=1)


@dataclass
class Tally:
    """What the kills of one trainer hit; the seconds are those of a whole run."""

    duration_s: float
    num_runs: int = 0
    num_kills: int = 0
    num_in_saves: int = 0
    num_before_the_folder: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_kills} kills over {self.num_runs} runs of {self.duration_s:.2f} s, {self.num_in_saves} inside "
            f"of a save, {self.num_before_the_folder} before the run folder was whole"
        )


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_at_random_moments_and_resumed_every_run_ends_the_same(trainer: str, tmp_path: Path) -> None:
    """Twenty kills at any moment, then as many as it takes until five have come into the middle of a save."""
    seconds_of_a_run(trainer, tmp_path / "first")  # the first process loads what the others share
    tally = Tally(seconds_of_a_run(trainer, tmp_path / "whole"))
    expected = outcome(the_run(tmp_path / "whole"))
    draw = random.Random(f"kills of {trainer}")

    while tally.num_kills < NUM_KILLS:
        end_with_kills(trainer, tmp_path / f"any-{tally.num_runs}", expected, tally, draw, NUM_KILLS, in_save=False)
    print(f"\n{trainer}, at any moment: {tally}")
    assert tally.num_runs > 1

    aimed = Tally(tally.duration_s)
    while aimed.num_in_saves < NUM_KILLS_IN_SAVES and aimed.num_runs < 40:
        end_with_kills(trainer, tmp_path / f"save-{aimed.num_runs}", expected, aimed, draw, 10**6, in_save=True)
    print(f"{trainer}, aimed at saves: {aimed}")
    assert aimed.num_in_saves >= NUM_KILLS_IN_SAVES


def end_with_kills(
    trainer: str, folder: Path, expected: object, tally: Tally, draw: random.Random, max_kills: int, *, in_save: bool
) -> None:
    """One run, killed and resumed until it has ended or there were enough kills, after which it runs to its end."""
    folder.mkdir()
    tally.num_runs += 1
    run_dir: Path | None = None
    while run_dir is None or not (run_dir / "result.json").exists():
        process = start(OFTEN, trainer, folder) if run_dir is None else start(go_on, run_dir)
        if tally.num_kills < max_kills:
            process.join(timeout=draw.uniform(0.0, tally.duration_s))
            if in_save:
                wait_for_a_save(process, folder)
            process.kill()
        process.join()
        assert process.exitcode in (0, KILLED)
        run_dir = whole_run_below(folder)
        if process.exitcode == KILLED:
            tally.num_kills += 1
            tally.num_before_the_folder += run_dir is None
            tally.num_in_saves += run_dir is not None and bool(list((run_dir / "checkpoints").glob("tmp-*")))
    assert outcome(run_dir) == expected, str(tally)
    assert list_steps(run_dir / "checkpoints")[-1] == NUM_STEPS
    assert not list((run_dir / "checkpoints").glob("tmp-*"))


def seconds_of_a_run(trainer: str, folder: Path) -> float:
    """How long a whole run takes, its process included."""
    folder.mkdir()
    begin_s = time.monotonic()
    process = start(OFTEN, trainer, folder)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - begin_s


def wait_for_a_save(process: BaseProcess, folder: Path) -> None:
    """Return when a checkpoint is being written, or when the process has ended.

    What an earlier kill left of a save lies there until the run is resumed, so that its age does not count.
    """
    left = set(folder.glob("*/checkpoints/tmp-*"))
    while process.is_alive() and not set(folder.glob("*/checkpoints/tmp-*")) - left:
        time.sleep(0.0005)


def whole_run_below(folder: Path) -> Path | None:
    """The run folder; None if the process was killed before it had made one: what it left is no run yet."""
    names = ("recipe.yaml", "environment.json")
    found = [path for path in folder.iterdir() if all((path / name).exists() for name in names)]
    return found[0] if found else None
