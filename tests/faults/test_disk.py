"""Disks that are full or cannot be written: older checkpoints stay, training goes on, a resume is exact."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from jobs import forked, go_on, outcome, the_run, train
from spoilt import (
    findings,
    go_on_unspoilt,
    told,
    train_in_a_read_only_folder,
    train_on_a_small_disk,
    train_with_checkpoints_read_only,
    train_with_logs_on_a_full_device,
)

from tunesmith.apps.cli.main import main
from tunesmith.base.runs.checkpoint import list_steps, load

Uninterrupted = Callable[[str], Mapping[str, object]]
KILLED = -9


@pytest.mark.parametrize(
    ("trainer", "place", "visit"),
    [("reward", "checkpoint/tensors", 5), ("ppo", "checkpoint/manifest", 2), ("grpo", "checkpoint/written", 2)],
)
def test_a_disk_full_during_a_save_costs_that_checkpoint_alone(
    trainer: str, place: str, visit: int, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """The second save fails, and before the third the run is killed."""
    fault = f"{place}:disk_full:{visit},log/metrics:kill:6"
    assert forked(train, trainer, tmp_path, fault=fault) == KILLED
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints") == [2]
    assert not list((run_dir / "checkpoints").glob("tmp-*"))
    (finding,) = findings(run_dir, "checkpoint")
    assert (finding["step"], finding["severity"]) == (4, "error")
    assert "No space left on device" in finding["message"]
    assert "or choose another run.dir" in finding["message"]
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


def test_files_that_cannot_grow_cost_checkpoints_until_they_can(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """Really refused by the kernel: tensors are larger than a file may be, until the sixth step."""
    assert forked(train_on_a_small_disk, tmp_path, 50_000, 5) == 0
    run_dir = the_run(tmp_path)
    assert [finding["step"] for finding in findings(run_dir, "checkpoint")] == [2, 4]
    assert "File too large" in findings(run_dir, "checkpoint")[0]["message"]
    kept = list_steps(run_dir / "checkpoints")
    assert kept[-2:] == [8, 10]
    assert all(load(run_dir / "checkpoints" / f"step-{step:06d}").step == step for step in kept)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in kept]
    assert outcome(run_dir) == uninterrupted("ppo")


@pytest.mark.parametrize("log", ["metrics.jsonl", "samples.jsonl"])
def test_a_log_that_cannot_be_written_ends_the_run_and_a_resume_is_exact(
    log: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    message = tmp_path / "message"
    runs = tmp_path / "runs"
    runs.mkdir()
    assert forked(told, message, train_with_logs_on_a_full_device, runs, log, 6) == 1
    (run_dir,) = runs.glob("*/recipe.yaml")
    run_dir = run_dir.parent
    assert f"{run_dir / log} (No space left on device)" in message.read_text()
    assert f"`tunesmith resume {run_dir}` continues the run" in message.read_text()
    (run_dir / log).unlink()
    (runs / log).rename(run_dir / log)  # there is room again
    assert list_steps(run_dir / "checkpoints")[-1] == 6
    assert forked(go_on_unspoilt, run_dir) == 0
    assert outcome(run_dir) == uninterrupted("ppo")


@pytest.mark.parametrize("trainer", ["reward", "grpo"])
def test_a_disk_full_for_metrics_ends_with_code_1_and_a_resume_is_exact(
    trainer: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    assert forked(train, trainer, tmp_path, fault="log/metrics:disk_full:5") == 1
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints") == [2, 4]
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


def test_checkpoints_that_become_read_only_are_recorded_and_training_goes_on(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    assert forked(train_with_checkpoints_read_only, tmp_path, 4) == 0
    run_dir = the_run(tmp_path)
    (run_dir / "checkpoints").chmod(0o700)
    assert [finding["step"] for finding in findings(run_dir, "checkpoint")] == [6, 8, 10]
    assert "Permission denied" in findings(run_dir, "checkpoint")[0]["message"]
    assert list_steps(run_dir / "checkpoints") == [2, 4]
    assert outcome(run_dir) == uninterrupted("ppo")


def test_a_read_only_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o500)
    message = tmp_path / "message"
    assert forked(told, message, train_in_a_read_only_folder, runs) == 2
    assert message.read_text() == f"{runs} cannot be written (Permission denied); choose another folder with --run.dir"
    runs.chmod(0o700)
    assert not list(runs.iterdir())


WORDS = ["--model", "tiny:llama", "--steps", "1"]
POLICY = [*WORDS, "--reward", "length", "--prompts", "prompts.jsonl"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The film was"}\n')
    row = {"prompt": "The film was", "chosen": " good", "rejected": " bad"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({**row, "prompt": f"{i}"}) + "\n" for i in range(9)))
    return tmp_path


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("words", [["ppo", *POLICY], ["grpo", *POLICY], ["reward", *WORDS, "--pairs", "pairs.jsonl"]])
@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nowhere"])
def test_a_place_that_cannot_hold_runs_is_refused_before_training(
    words: list[str], place: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "file").write_text("mine")
    folder = {"a file": "file", "below a file": "file/runs/here"}.get(place, place)
    before = sorted(data.iterdir())
    assert main(["train", *words, "--run.dir", folder]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "--run.dir" in error
    assert "Traceback" not in error
    assert sorted(data.iterdir()) == before
    assert (data / "file").read_text() == "mine"


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("words", [["ppo", *POLICY], ["grpo", *POLICY], ["reward", *WORDS, "--pairs", "pairs.jsonl"]])
def test_a_disk_too_small_for_the_run_is_refused_with_free_and_needed_bytes(
    words: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(data.iterdir())
    assert main(["train", *words, "--run.keep-checkpoints", "1000000000"]) == 2
    error = capsys.readouterr().err
    assert "GB free, but the model and 1000000000 checkpoints need" in error
    assert "free some space, set run.checkpoint_every to 0, or choose another --run.dir" in error
    assert sorted(data.iterdir()) == before


def test_a_resumed_run_on_a_full_disk_changes_nothing(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """The disk is full when the run is to go on; once there is room, it goes on."""
    assert forked(train, "grpo", tmp_path, fault="log/metrics:kill:5") == KILLED
    run_dir = the_run(tmp_path)
    before = {path.name: path.read_bytes() for path in run_dir.glob("*.jsonl")}
    message = tmp_path / "message"
    assert forked(told, message, partial(go_on, run_dir), fault="log/resumes:disk_full") == 1
    assert "resumes.jsonl" in message.read_text()
    assert {path.name: path.read_bytes() for path in run_dir.glob("*.jsonl")} == before
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted("grpo")
