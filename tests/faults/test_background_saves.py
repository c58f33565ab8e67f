"""Checkpoints written while the next step runs: nothing of that step is in them, and a kill costs one alone."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from jobs import NUM_STEPS, forked, go_on, outcome, the_run, train
from spoilt import go_on_unspoilt, train_with_saves_that_wait_for_the_next_step

from tunesmith.base.runs.checkpoint import list_steps, load

Uninterrupted = Callable[[str], Mapping[str, object]]
KILLED = -9


def test_the_next_step_runs_while_a_checkpoint_is_written(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    log, runs, plain = tmp_path / "log", tmp_path / "runs", tmp_path / "plain"
    runs.mkdir()
    plain.mkdir()
    assert forked(train_with_saves_that_wait_for_the_next_step, runs, log, None) == 0
    lines = log.read_text().splitlines()
    for step in range(2, NUM_STEPS, 2):
        assert lines.index(f"step {step}") < lines.index(f"save {step} True") < lines.index(f"step {step + 1}")
    assert outcome(the_run(runs)) == uninterrupted("ppo")
    assert forked(train_in_the_foreground, plain) == 0
    for step in list_steps(the_run(runs) / "checkpoints"):
        ours, theirs = (load(the_run(folder) / "checkpoints" / f"step-{step:06d}") for folder in (runs, plain))
        assert {group: sorted(named) for group, named in ours.tensors.items()} == {
            group: sorted(named) for group, named in theirs.tensors.items()
        }
        for group, named in ours.tensors.items():
            assert all((tensor == theirs.tensors[group][name]).all() for name, tensor in named.items())


def train_in_the_foreground(folder: Path) -> None:
    train("ppo", folder, checkpoint_in_background=False)


def test_a_kill_before_it_is_on_disk_leaves_the_older_one(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    assert forked(train_with_saves_that_wait_for_the_next_step, runs, tmp_path / "log", 6) == KILLED
    run_dir = the_run(runs)
    assert list_steps(run_dir / "checkpoints") == [2, 4]
    assert forked(go_on_unspoilt, run_dir) == 0
    assert outcome(run_dir) == uninterrupted("ppo")


@pytest.mark.parametrize(
    "place", ["checkpoint/tensors:kill:5", "checkpoint/written:kill:3", "checkpoint/renamed:kill:3"]
)
def test_a_run_in_the_foreground_is_resumed_as_well(place: str, tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    assert forked(train_in_the_foreground, tmp_path, fault=place) == KILLED
    assert forked(go_on, the_run(tmp_path)) == 0
    assert outcome(the_run(tmp_path)) == uninterrupted("ppo")


def test_a_checkpoint_is_on_disk_before_the_next_step_is_recorded(tmp_path: Path) -> None:
    assert forked(train, "grpo", tmp_path, fault="log/metrics:kill:7") == KILLED
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints")[-1] == 6
    assert not list((run_dir / "checkpoints").glob("tmp-*"))


def test_an_error_that_nobody_expects_ends_the_run_and_not_in_silence(tmp_path: Path) -> None:
    assert forked(train, "grpo", tmp_path, fault="checkpoint/manifest:raise:1") == 1
    assert not (the_run(tmp_path) / "result.json").exists()
