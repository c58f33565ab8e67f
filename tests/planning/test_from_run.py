"""A run is the calibration of its own plan."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import RunError
from tunesmith.observe.planning.from_run import read_measured
from tunesmith.observe.planning.memory import Layout
from tunesmith.observe.planning.step_time import StepModel, StepTime

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = ["--model", "tiny:llama", "--reward", "length", "--steps", "4", "--rollout.max_new_tokens", "12"]
    words += ["--rollout.prompts_per_step", "16", "--run.dir", str(folder), "--run.num_threads", "1", "--quiet"]
    assert main(["train", "ppo", *words]) == 0
    return next(folder.iterdir())


def predicted(run_dir: Path, workers: int, *, cores: float = 8.0) -> StepTime:
    run = replace(read_measured(run_dir), cores=cores)
    cluster = run.cluster(1, 1, workers)
    return StepModel(run.shape, run.work, cluster, Layout(workers=workers), run.calibration.factors).step()


def test_on_its_own_machine_the_plan_is_the_run(run_dir: Path):
    run = read_measured(run_dir)
    assert predicted(run_dir, 0).total_s == pytest.approx(run.step_s)
    assert run.work.num_rows == 16
    assert 0 < run.work.mean_new_tokens <= 12
    assert run.work.prompt_tokens > 1
    assert run.shape.num_parameters == 26880


def test_rank_0_records_its_own_share_of_the_prompts(run_dir: Path, tmp_path: Path):
    shutil.copytree(run_dir, tmp_path / "run")
    setup = tmp_path / "run" / "setup.json"
    setup.write_text(json.dumps({**json.loads(setup.read_text()), "num_ranks": 2}))
    assert read_measured(tmp_path / "run").work.prompt_tokens == 2 * read_measured(run_dir).work.prompt_tokens


def test_what_auto_chose_is_what_the_run_draws_with(run_dir: Path, tmp_path: Path):
    shutil.copytree(run_dir, tmp_path / "run")
    setup = tmp_path / "run" / "setup.json"
    setup.write_text(json.dumps({**json.loads(setup.read_text()), "rollout_weights": "int8"}))
    assert read_measured(tmp_path / "run").work.draws_in_int8 and not read_measured(run_dir).work.draws_in_int8


def test_workers_draw_at_once_while_there_are_cores(run_dir: Path):
    steps = [predicted(run_dir, workers).stages for workers in (1, 2, 4)]
    assert steps[0]["update"] == steps[1]["update"]
    assert steps[0]["rollout"] >= steps[1]["rollout"] >= steps[2]["rollout"]
    assert predicted(run_dir, 4, cores=1).stages["rollout"] == pytest.approx(4 * steps[2]["rollout"])


def test_the_command_prints_the_plan_of_a_run(run_dir: Path, capsys: Capture):
    words = ["plan", "--from", run_dir.name, "--dir", str(run_dir.parent)]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step_s"] == pytest.approx(read_measured(run_dir).step_s)
    assert main([*words, "--workers", "2"]) == 0
    assert "calibrated on 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--new-tokens", "4"], "--new-tokens is given with --from"), (["--ppo.num-epochs", "1"], "--ppo.num-epochs is")],
)
def test_flags_of_the_work_are_refused_beside_a_run(run_dir: Path, words: list[str], named: str, capsys: Capture):
    assert main(["plan", "--from", str(run_dir), *words]) == 2
    assert named in capsys.readouterr().err


def test_a_run_without_steps_is_refused(run_dir: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text((run_dir / "recipe.yaml").read_text())
    with pytest.raises(RunError, match=r"has no completions/mean_length \(of metrics\.jsonl\)"):
        read_measured(tmp_path)
