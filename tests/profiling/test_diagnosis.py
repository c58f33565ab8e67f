"""Diagnosis of run folders: medians, damaged and old files, demos, text and JSON."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from tunesmith import train
from tunesmith.apps.cli.main import main
from tunesmith.base.runs.folder import RunFolder
from tunesmith.observe.profiling.diagnosis import as_json, as_text, diagnoses, slow_findings
from tunesmith.observe.profiling.facts import read_facts

RECIPE = {
    "algorithm": "grpo",
    "reward": [{"source": "length"}],
    "rollout": {
        "backend": "native",
        "prompts_per_step": 4,
        "completions_per_prompt": 4,
        "num_slots": 128,
        "score_while_drawing": False,
    },
    "run": {"checkpoint_every": 1, "eval_every": 0},
}


def make_run(parent: Path, rows: list[dict[str, float]], **recipe: object) -> Path:
    run = RunFolder.create(parent, "grpo", {**RECIPE, **recipe})
    for step, row in enumerate(rows, 1):
        run.append_metrics(step, row)
    return run.path


def steps(*seconds: float, **more: float) -> list[dict[str, float]]:
    return [{"time/step_s": s, "time/rollout_s": s / 2, "time/other_s": 0.01 * s, **more} for s in seconds]


def test_the_first_step_is_left_out_and_the_median_counts(tmp_path: Path):
    facts = read_facts(make_run(tmp_path, steps(60.0, 1.0, 1.0, 1.2, 9.0)))
    assert facts.num_steps == 4
    assert facts.step_s == pytest.approx(1.1)
    assert facts.stage_s("rollout") == pytest.approx(0.55)


def test_work_that_some_steps_have_counts_with_its_mean(tmp_path: Path):
    rows = steps(1.0, 1.0, 3.0, 1.0, 3.0)
    rows[2]["time/checkpoint_s"] = rows[4]["time/checkpoint_s"] = 2.0
    facts = read_facts(make_run(tmp_path, rows))
    assert facts.stage_s("checkpoint") == pytest.approx(1.0)
    assert facts.step_s == pytest.approx(2.0)


def test_memory_that_grows_at_first_is_no_leak(tmp_path: Path):
    def growth(*megabytes: float) -> float:
        rows = [{"time/step_s": 1.0, "memory/growth_mb": one} for one in megabytes]
        return read_facts(make_run(tmp_path, rows)).number("memory/growth_mb")

    assert growth(300.0, 90.0, 40.0, 50.0, 0.2, 30.0, 1.0, 0.0) == 0.0
    assert growth(300.0, 90.0, 40.0, 50.0, 33.0, 30.0, 31.0, 32.0) == 30.0


def test_a_single_step_is_better_than_none(tmp_path: Path):
    assert read_facts(make_run(tmp_path, steps(2.0))).step_s == 2.0


def test_damaged_lines_and_values_cost_themselves_alone(tmp_path: Path):
    run = make_run(tmp_path, steps(5.0, 1.0, 1.0))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time/step_s": "soon"}\n[]\n{"step": 5, "time/step_s": null}\n{"step": 6, "time/st')
    (run / "setup.json").write_text("{not json")
    (run / "recipe.yaml").write_text("a: [")
    (found,) = diagnoses(run)
    assert (found.num_steps, found.step_s) == (2, 1.0)
    assert found.coverage == pytest.approx(0.99)


def test_a_run_without_steps_says_so(tmp_path: Path):
    (found,) = diagnoses(make_run(tmp_path, []))
    assert found.causes == []
    assert "no step is recorded yet" in as_text(found)


def test_an_old_run_abstains_from_what_it_did_not_measure(tmp_path: Path):
    (found,) = diagnoses(make_run(tmp_path, steps(1.0, 1.0)))
    assert "setup.engine" in found.missing["engine_fallback"]
    assert "gil/waiting_share" in found.missing["gil"]
    assert "gpu_copies" not in found.missing, "it trained on no GPU"
    assert "nothing to gain" in as_text(found)
    assert "engine_fallback: setup.engine" in as_text(found)


def test_a_demo_is_the_runs_in_its_folder(tmp_path: Path):
    demo = RunFolder.create(tmp_path, "demo", {"demo": {"seed": 0}}).path
    make_run(demo / "reward", steps(1.0, 1.0), algorithm="reward")
    long = make_run(demo / "ppo", steps(9.0, 9.0), algorithm="ppo")
    found = diagnoses(demo)
    assert found[0].run == long
    shown = as_json(found)
    assert shown["step_s"] == 9.0
    assert isinstance(shown["runs"], list)
    assert len(shown["runs"]) == 2


def test_the_command_prints_causes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path, steps(1.0, 1.0, **{"time/checkpoint_s": 0.4}))
    assert main(["diagnose", str(run)]) == 0
    text = capsys.readouterr().out
    assert "1. checkpoints: Checkpoints are written often." in text
    assert "set          run.checkpoint_every: 50   (--run.checkpoint-every 50)" in text
    assert main(["diagnose", run.name, "--dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["settings"] == {"run.checkpoint_every": 50}
    assert found["causes"][0]["predicted_saving_s"] == pytest.approx(0.4 * (1 - 1 / 50))
    assert {"share", "evidence", "advice", "low", "high"} <= set(found["causes"][0])
    assert found["step_s"] == pytest.approx(1.0)
    assert found["coverage"] == pytest.approx(0.99)


def test_large_causes_are_findings_of_a_run_that_is_long_enough(tmp_path: Path):
    slow = {"time/checkpoint_s": 0.4}
    (finding,) = slow_findings(make_run(tmp_path, steps(*[1.0] * 6, **slow)))
    assert (finding.step, finding.name, finding.severity) == (6, "slow/checkpoints", "note")
    assert "39% of the run could be saved" in finding.message
    assert slow_findings(make_run(tmp_path, steps(*[1.0] * 4, **slow))) == []
    assert slow_findings(make_run(tmp_path, steps(*[1.0] * 6, **{"time/checkpoint_s": 0.05}))) == []


@pytest.mark.usefixtures("own_logging")
def test_a_training_that_waits_says_so_in_findings_report_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_late, args=(listener,), daemon=True).start()

    def judge(completions: list[str], **_: object) -> list[float]:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.recv(1)
        return [float(len(text)) for text in completions]

    settings = {"run.dir": str(tmp_path), "rollout.max_new_tokens": 4}
    result = train.grpo(model="tiny:llama", reward=judge, steps=7, progress=False, **settings)
    listener.shutdown(socket.SHUT_RDWR)  # the thread's `accept` returns
    listener.close()
    findings = [json.loads(line) for line in (result.run_dir / "findings.jsonl").read_text().splitlines()]
    assert "slow/remote_reward_serial" in [finding["name"] for finding in findings]
    report = (result.run_dir / "report.html").read_text()
    assert "The reward waits for one answer after the other." in report
    assert "async def" in report
    assert main(["diagnose", str(result.run_dir)]) == 0
    assert ". remote_reward_serial: " in capsys.readouterr().out


def answer_late(listener: socket.socket) -> None:
    """A service that needs 0.4 s for each answer."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                time.sleep(0.4)
                connection.sendall(b"1")


def test_an_unknown_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", "nothing", "--dir", str(tmp_path)]) == 2
    assert "there is no run 'nothing'" in capsys.readouterr().err
