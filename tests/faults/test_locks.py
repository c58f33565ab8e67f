"""One run folder belongs to one process; what a dead one left behind stops nobody."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from jobs import forked, go_on, outcome, start, the_run, train
from spoilt import train_until_told

from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import RunError
from tunesmith.learn.trainers.resume import Inputs, resume

Uninterrupted = Callable[[str], Mapping[str, object]]
KILLED = -9


@pytest.mark.usefixtures("own_logging")
def test_a_second_process_on_a_run_that_trains_is_refused_and_the_first_is_not_disturbed(
    tmp_path: Path, uninterrupted: Uninterrupted, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, waiting, go = tmp_path / "runs", tmp_path / "waiting", tmp_path / "go"
    runs.mkdir()
    process = start(train_until_told, runs, waiting, go)
    try:
        while not waiting.exists():
            assert process.is_alive()
            time.sleep(0.02)
        run_dir = the_run(runs)
        before = contents(run_dir)
        remove = ["runs", "rm", str(run_dir), "--yes", "--dir", str(runs)]
        for words in (["resume", str(run_dir)], ["resume", str(run_dir), "--steps", "20"], remove):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert error.count("error: ") == 1
            assert f"process {process.pid}" in error
        with pytest.raises(RunError, match=f"in use by process {process.pid} "):
            resume(run_dir, inputs=Inputs(), progress=False)
        assert contents(run_dir) == before
    finally:
        go.touch()
        process.join(timeout=60)
        process.kill()
    assert process.exitcode == 0
    assert outcome(run_dir) == uninterrupted("ppo")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "left",
    [
        {"pid": 1, "host": "elsewhere", "started": "2099-01-01T00:00:00"},
        {"pid": 2**22 + 1, "host": "here", "started": "1999-01-01T00:00:00"},
        {},
    ],
    ids=["a living pid, in the future", "a dead pid", "unreadable"],
)
def test_the_lock_of_a_killed_run_is_reclaimed_whatever_it_says(
    left: dict[str, object], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    assert forked(train, "grpo", tmp_path, fault="log/metrics:kill:5") == KILLED
    run_dir = the_run(tmp_path)
    assert (run_dir / "run.lock").exists()
    (run_dir / "lock.json").write_text(json.dumps(left) if left else "{")
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted("grpo")
    assert not (run_dir / "lock.json").exists()


def test_two_runs_of_one_name_at_one_time_have_folders_of_their_own(tmp_path: Path) -> None:
    """A new run never writes into the folder of another, whatever its recipe."""
    jobs = [start(train, "grpo", tmp_path), start(train, "grpo", tmp_path)]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    first, second = (path for path in tmp_path.iterdir())
    assert first.name != second.name
    assert outcome(first) == outcome(second)
