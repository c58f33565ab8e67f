"""`benchmarks.trl_suite` on a tiny checkout of its own: what counts as passed, lost, skipped, without a stand-in."""

import json
from pathlib import Path

import pytest

from benchmarks.trl_plugin import read_log, started, write_log
from benchmarks.trl_suite import main
from tunesmith.base.runs.environment import package_version

pytest.importorskip("trl")

TESTS = """
import os

import pytest
import trl
from datasets import load_dataset
from trl.import_utils import is_some_library_available
from trl.trainer.grpo_trainer import a_function_of_older_versions


def test_a_data_set_has_a_stand_in(lazy_shared_datadir):
    assert lazy_shared_datadir.name == "data"
    assert load_dataset("trl-internal-testing/zen", "lines", split="train[:2]")["text"] == ["beautiful", "explicit"]
    stream = load_dataset("trl-internal-testing/zen", "lines", streaming=True)
    assert [row["text"] for row in stream["train"]] == ["beautiful", "explicit", "simple"]


def test_that_ours_fails():
    assert "GRPOTrainer" not in vars(trl)


def test_that_ends_the_process_of_ours():
    if "GRPOTrainer" in vars(trl):
        os._exit(7)


@pytest.mark.skipif(not is_some_library_available(), reason="lacks it")
def test_that_is_skipped():
    pass


def test_that_needs_another_data_set():
    load_dataset("trl-internal-testing/zen-image", split="train")


@pytest.mark.slow
def test_that_is_slow():
    pass


def test_that_both_fail():
    a_function_of_older_versions(1, name="two")
"""
SCRIPT = """
from datasets import Dataset

def main(test_size, push_to_hub, repo_id):
    rows = Dataset.from_dict({"text": ["beautiful", "explicit", "simple", "flat"]})
    rows.train_test_split(test_size=1, shuffle=False).push_to_hub(repo_id, config_name="lines")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "tests").mkdir(parents=True)
    (folder / "scripts").mkdir()
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_grpo_trainer.py").write_text(TESTS)
    (folder / "scripts" / "generate_zen_dataset.py").write_text(SCRIPT)
    (folder / "trl").mkdir()
    (folder / "trl" / "__init__.py").write_text("raise RuntimeError('the TRL of the checkout')\n")
    (folder / "VERSION").write_text("7.3.0\n")
    (tmp_path / "ours.py").write_text("class GRPOTrainer: pass\n")
    return folder


@pytest.mark.slow  # six processes that import torch, datasets and TRL
def test_tests_are_run_on_both_classes_and_counted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--source", str(source), "--suite", "grpo", "--work", str(tmp_path / "work"), "--threads", "1", "--json"]
    assert main([*words, "--ours", "ours", "--minutes", "0"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["grpo"]
    assert (row["not_run"], row["runnable"], row["lost"]) == ({"ours": 6, "trl": 6}, 0, [])

    assert main([*words, "--ours", "ours"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["grpo"]
    assert row["not_run"] == {"ours": 0, "trl": 0}
    assert row["lost"] == ["test_that_ends_the_process_of_ours", "test_that_ours_fails"]
    assert (row["trl_passed"], row["ours_passed"]) == (3, 1)
    assert (row["runnable"], row["skipped"], row["without_standin"]) == (4, 1, 1)
    assert row["tests_of"] == "7.3.0"

    logs = list((tmp_path / "work").glob("grpo-*.jsonl"))
    sizes = [log.stat().st_size for log in logs]
    assert len(logs) == 2
    last = (tmp_path / "work" / f"grpo-trl-{package_version('trl')}.jsonl").read_text().splitlines()[-1]
    assert "test_a_data_set_has_a_stand_in" in last  # the one that ours passed is the last one of TRL's side
    assert "died" in {outcome for log in logs for outcome in read_log(log).values()}
    passing = TESTS.replace('a_function_of_older_versions(1, name="two")', "pass")
    (source / "tests" / "test_grpo_trainer.py").write_text(passing)
    out = tmp_path / "out.json"
    out.write_text('{"dpo": {"lost": []}}')
    assert main([*words, "--ours", "ours", "--out", str(out)]) == 0  # finished: nothing is run again
    assert json.loads(out.read_text()) == {"dpo": {"lost": []}, "grpo": row}
    assert [log.stat().st_size for log in logs] == sizes


def test_an_interrupted_test_is_told_from_one_that_died(tmp_path: Path):
    log = tmp_path / "log"
    for test in ("one", "two"):
        write_log(log, test, "started")
    write_log(log, "one", "passed")
    assert started(log) == ["two"]


def test_what_is_missing_is_said_with_the_command_that_fetches_it(source: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--suite", "grpo"]) == 2
    assert "git clone --depth 1 --branch v" in capsys.readouterr().err
    assert main(["--suite", "dpo", "--source", str(source)]) == 2
    assert f"{source} has no tests/test_dpo_trainer.py" in capsys.readouterr().err
    assert main(["--suite", "gpro", "--source", str(source)]) == 2
    assert "give grpo, rloo" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_module_without_the_trainer_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (source / "tests" / "test_grpo_trainer.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "standins.json").write_text("{}")
    words = ["--source", str(source), "--suite", "grpo", "--work", str(tmp_path / "work"), "--threads", "1"]
    assert main([*words, "--ours", "json"]) == 2
    assert "json has no GRPOTrainer" in capsys.readouterr().err
