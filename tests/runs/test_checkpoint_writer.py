"""The thread that writes checkpoints: what it writes, whom it makes wait, and how it says that it failed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tunesmith.runs import checkpoint_writer
from tunesmith.runs.checkpoint import Checkpoint, list_steps, load, save
from tunesmith.runs.checkpoint_writer import CheckpointWriter, Settled, snapshot


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(tmp_path, keep=2)
    yield made
    made.close()


def of(step: int, tensor: torch.Tensor) -> Checkpoint:
    return Checkpoint(step, {"policy": {"w": tensor}}, {"step": step})


def test_a_checkpoint_holds_what_the_tensors_held_when_it_was_begun(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def held_back(folder: Path, checkpoint: Checkpoint) -> Path:
        assert may_write.wait(timeout=30)
        return save(folder, checkpoint)

    monkeypatch.setattr(checkpoint_writer, "save", held_back)
    weight = torch.arange(1000.0)
    writer.begin(of(1, weight), in_background=True)
    weight.zero_()
    assert list_steps(tmp_path) == []
    may_write.set()
    assert writer.settle() == Settled(1)
    assert torch.equal(load(tmp_path / "step-000001").tensors["policy"]["w"], torch.arange(1000.0))
    assert writer.settle() is None


@pytest.mark.parametrize("in_background", [True, False])
def test_old_checkpoints_go_and_a_failure_is_told_by_its_step(in_background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, keep=2)
    for step in range(1, 5):
        writer.begin(of(step, torch.ones(3)), in_background=in_background)
        assert writer.settle() == Settled(step)
    assert list_steps(folder) == [3, 4]
    folder.rename(tmp_path / "away")
    folder.write_text("a file where a folder should be")
    writer.begin(of(5, torch.ones(3)), in_background=in_background)
    settled = writer.settle()
    assert settled is not None
    assert settled.step == 5
    assert "cannot write the checkpoint of step 5" in settled.problem
    assert list_steps(tmp_path / "away") == [3, 4]
    writer.close()


def test_in_the_foreground_it_is_on_disk_when_begin_returns(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer.begin(of(1, torch.ones(3)), in_background=False)
    assert list_steps(tmp_path) == [1]
    assert writer.settle() == Settled(1)


def test_without_room_for_a_copy_it_is_written_at_once_and_that_is_said_once(
    writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_SPARE", 1e15)
    for step in (1, 2):
        writer.begin(of(step, torch.ones(3)), in_background=True)
        assert list_steps(tmp_path)[-1] == step
        assert writer.settle() == Settled(step)
    (record,) = caplog.records
    assert "checkpoints are written before training goes on" in record.message


def test_a_snapshot_shares_no_memory() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    copied = snapshot(of(1, weight)).tensors["policy"]["w"]
    assert copied.data_ptr() != weight.data_ptr()
    assert not copied.requires_grad
