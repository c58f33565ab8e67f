"""A checkpoint is whole or it is refused."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tunesmith.base.core.errors import CheckpointError
from tunesmith.base.runs import checkpoint
from tunesmith.base.runs.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Settled,
    list_steps,
    load,
    newest,
    prune,
    remove_unfinished,
    save,
    snapshot,
)


def _checkpoint(step: int = 3) -> Checkpoint:
    tensors = {
        "policy": {"w": torch.arange(4.0), "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {"m": torch.ones(1)},
    }
    return Checkpoint(step, tensors, {"kl": {"coef": 0.1}})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, _checkpoint()))
    assert loaded.step == 3
    assert loaded.state == {"kl": {"coef": 0.1}}
    assert torch.equal(loaded.tensors["policy"]["w"], torch.arange(4.0))
    assert loaded.tensors["policy"]["half"].dtype == torch.bfloat16


def test_the_newest_and_the_best_are_kept_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "tmp-000009-1").mkdir()
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, None), (5, 0.3)):
        save(tmp_path, Checkpoint(step, {}, {}, score))
        prune(tmp_path, keep=2)
    assert list_steps(tmp_path) == [2, 4, 5]
    remove_unfinished(tmp_path)
    assert not (tmp_path / "tmp-000009-1").exists()


def test_the_newest_whole_one_is_found_and_damaged_ones_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, _checkpoint(step))
    (tmp_path / "step-000003" / "policy.safetensors").unlink()
    manifest = tmp_path / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"score": null', '"score": 9.0'))
    found = newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert "missing" in found.skipped[0]
    assert "was altered" in found.skipped[1]
    assert newest(tmp_path / "nowhere").checkpoint is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, _checkpoint())
    save(tmp_path, Checkpoint(3, {}, {"kl": {"coef": 0.2}}))
    assert load(tmp_path / "step-000003").state == {"kl": {"coef": 0.2}}


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint()) / "policy.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(path.parent)


def test_a_cut_or_missing_file_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint()) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        load(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load(path.parent)


def test_another_version_and_a_folder_without_manifest_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint()) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        load(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load(path.parent)


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

    monkeypatch.setattr(checkpoint, "save", held_back)
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
    monkeypatch.setattr(checkpoint, "_SPARE", 1e15)
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
