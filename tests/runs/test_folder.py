"""A run's folder: readable by anything, safe against names and numbers that JSON or a file system cannot hold."""

import json
from pathlib import Path

import pytest

from tunesmith.base.core.errors import MissingDependencyError, RunError
from tunesmith.base.runs.environment import cpu_flags, environment, peak_rss_gb, rss_gb, usable_cores
from tunesmith.base.runs.folder import RunFolder, add_row, read_jsonl
from tunesmith.base.runs.listing import read_rows
from tunesmith.base.runs.progress import format_rate, progress
from tunesmith.base.runs.trackers import check_trackers, tracking


def test_a_new_folder_holds_recipe_provenance_and_environment(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "my run/../x", {"algorithm": "ppo"}, {"algorithm": "default"})
    assert run.path.parent == tmp_path
    assert (run.path / "recipe.yaml").read_text() == "algorithm: ppo\n"
    assert json.loads((run.path / "provenance.json").read_text()) == {"algorithm": "default"}
    assert json.loads((run.path / "environment.json").read_text())["packages"]["torch"]


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, "a", {}).path != RunFolder.create(tmp_path, "a", {}).path


def test_metrics_read_back_and_nan_becomes_null(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    run.append_metrics(1, {"reward": 0.5, "kl": float("nan")})
    run.append_metrics(2, {"reward": float("inf")})
    assert read_jsonl(run.path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5, "kl": None},
        {"step": 2, "reward": None},
    ]
    assert read_jsonl(run.path / "absent.jsonl") == []


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run\.dir"):
        RunFolder.create(tmp_path / "file", "a", {})


def test_tensorboard_receives_the_metrics(tmp_path: Path) -> None:
    with tracking("tensorboard", tmp_path, {"algorithm": "ppo"}) as track:
        track(1, {"reward": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("reward")] == [0.5]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        check_trackers(["wandb"])


def test_the_environment_is_plain_json_with_positive_figures() -> None:
    assert json.loads(json.dumps(environment()))["num_cores"] == usable_cores() >= 1
    assert peak_rss_gb() >= rss_gb() * 0.99 > 0
    assert all(flag == flag.strip() for flag in cpu_flags())


def test_progress_writes_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 2) as reporter:
        reporter.update(1)
        reporter.update(2, {"reward": 0.25})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "train 2/2" in captured.err
    assert "reward 0.250" in captured.err
    assert (format_rate(20, 2.0), format_rate(2, 30.0), format_rate(0, 1.0)) == ("10.0/s", "15.0 s each", "")
    with progress("train", 2, enabled=False) as reporter:
        reporter.update(2)
    assert capsys.readouterr().err == ""


def test_a_line_behind_one_that_a_kill_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add_row(path, {"a": 1, "b": float("nan")})
    add_row(path, {"a": 2})
    assert read_jsonl(path) == [{"a": 1, "b": None}, {"a": 2}]
    path.write_text(path.read_text()[:-4])
    add_row(path, {"a": 3})
    assert read_rows(path) == [{"a": 1, "b": None}, {"a": 3}]
