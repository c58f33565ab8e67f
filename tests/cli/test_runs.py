"""`tunesmith runs` on real run folders, with real locks and checkpoints."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tunesmith.apps.cli.main import main
from tunesmith.base.runs.checkpoint import Checkpoint, save
from tunesmith.base.runs.folder import RunFolder
from tunesmith.base.runs.listing import folder_bytes, list_runs, resolve_run
from tunesmith.base.runs.lock import RunLock

Capture = pytest.CaptureFixture[str]
RECIPE = {
    "algorithm": "ppo",
    "model": {"name": "tiny:llama"},
    "optimizer": {"learning_rate": 0.001},
    "reward": [{"source": "length"}, {"source": "sentiment"}],
    "run": {"steps": 10, "seed": 3},
}


def make_run(parent: Path, name: str = "20260102-030405-ppo-1a2b", **recipe: object) -> Path:
    """A run of three steps that has no checkpoint and no result, at a fixed name."""
    run = RunFolder.create(parent, "ppo", {**RECIPE, **recipe}, {"run.steps": "command line --steps", "x": "default"})
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward": step / 10, "kl": 0.5, "time/step_s": 20.0})
    return run.path.rename(parent / name)


def give_checkpoint(run: Path, step: int) -> Path:
    return save(run / "checkpoints", Checkpoint(step, {"policy": {"w": torch.arange(1000.0)}}, {"a": 1}))


def finish(run: Path) -> None:
    RunFolder(run).write_json("result.json", {"minutes": 2.5, "steps": 3})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@contextmanager
def in_use(run: Path) -> Iterator[None]:
    """A second process that holds the lock of `run`."""
    code = (
        "import sys; from pathlib import Path; from tunesmith.base.runs.lock import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(run)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.communicate("")


def listed(capsys: Capture, *words: str) -> list[dict[str, object]]:
    assert main(["runs", "ls", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def shown(capsys: Capture, name: str) -> dict[str, object]:
    assert main(["runs", "show", name, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *words: str) -> str:
    assert main(["runs", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    return captured.err


def test_the_four_states_of_a_run_are_told_apart(runs: Path, capsys: Capture) -> None:
    names = {status: f"2026010{day}-000000-a-{day}" for day, status in enumerate(("failed", "stopped", "finished"), 1)}
    for name in names.values():
        make_run(runs, name)
    give_checkpoint(runs / names["stopped"], 2)
    finish(runs / names["finished"])
    assert {row["status"]: row["name"] for row in listed(capsys)} == names
    with RunLock(runs / names["finished"]):
        assert listed(capsys)[0]["status"] == "running"
    (runs / names["finished"] / "run.lock").write_text("left behind")
    assert listed(capsys)[0]["status"] == "finished"


def test_the_list_is_newest_first_and_sums_each_run_up(runs: Path, capsys: Capture) -> None:
    make_run(runs, "20260101-000000-old-1111")
    finish(make_run(runs, "20260201-123000-new-2222", run={"steps": None}))
    newest, oldest = listed(capsys)
    assert (newest["name"], newest["minutes"], newest["total_steps"]) == ("20260201-123000-new-2222", 2.5, 3)
    assert (oldest["num_steps"], oldest["total_steps"], oldest["minutes"]) == (3, 10, 1.0)
    assert (oldest["figure_name"], oldest["figure"]) == ("reward", 0.3)
    assert oldest["num_bytes"] == folder_bytes(runs / "20260101-000000-old-1111")
    assert newest["started"] == "2026-02-01T12:30:00"
    assert main(["runs", "ls"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "ALGORITHM", "STATUS", "STEPS", "FIGURE", "MINUTES", "SIZE", "STARTED"]
    assert first.split()[:7] == ["20260201-123000-new-2222", "ppo", "finished", "3/3", "reward", "0.3", "2.5"]
    assert second.split()[:4] == ["20260101-000000-old-1111", "ppo", "failed", "3/10"]


def test_runs_inside_of_a_demo_are_found_and_keep_it_running(runs: Path, capsys: Capture) -> None:
    demo = RunFolder.create(runs, "demo", {"demo": {"seed": 1}}).path.rename(runs / "20260101-000000-demo-aaaa")
    inner = make_run(demo, "20260101-000001-ppo-bbbb")
    deepest = make_run(runs / "a" / "b", "20260101-000002-ppo-cccc")
    make_run(runs / "a" / "b" / "c", "20260101-000003-ppo-too-deep")
    (inner / "final").mkdir()
    (inner / "final" / "recipe.yaml").write_text("no run of its own")
    (runs / "link").symlink_to(inner)
    found = [str(row["name"]) for row in listed(capsys)]
    assert found == [str(path.relative_to(runs)) for path in (deepest, inner, demo)]
    assert [row["algorithm"] for row in listed(capsys)] == ["ppo", "ppo", "demo"]
    with RunLock(inner):
        assert {row["status"] for row in listed(capsys)} == {"running", "failed"}
        assert next(row for row in listed(capsys) if row["algorithm"] == "demo")["status"] == "running"


def test_an_empty_folder_lists_nothing_and_a_missing_one_is_an_error(runs: Path, capsys: Capture) -> None:
    assert listed(capsys) == []
    assert main(["runs", "ls"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"
    assert "name the one that holds the runs with --dir" in refused(capsys, "ls", "--dir", "elsewhere")


def test_damaged_files_cost_a_figure_not_the_list(runs: Path, capsys: Capture) -> None:
    run = make_run(runs)
    (run / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\nnonsense\n[1]\n{"step": 2, "rew')
    (run / "provenance.json").write_text("[" * 100_000)
    (run / "findings.jsonl").write_bytes(b'\xff{}\n{"step": 1}\n')
    (row,) = listed(capsys)
    assert (row["algorithm"], row["num_steps"], row["figure"], row["total_steps"]) == ("?", 1, 0.5, None)
    assert main(["runs", "show", run.name]) == 0
    assert "recipe.yaml cannot be read" in capsys.readouterr().out


def test_show_says_what_a_run_is_and_how_to_go_on(runs: Path, capsys: Capture) -> None:
    run = make_run(runs)
    give_checkpoint(run, 2)
    damaged = give_checkpoint(run, 3)
    weights = damaged / "policy.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    row = {"step": 2, "name": "kl_high", "severity": "warning", "message": "kl is 31, more than 10"}
    (run / "findings.jsonl").write_text(json.dumps(row) + "\n")
    facts = shown(capsys, str(run))
    assert facts["changed"] == {"run.steps": "command line --steps"}
    assert facts["findings"] == [row]
    assert facts["last_metrics"]["step"] == 3  # type: ignore[index]
    newest, older = facts["checkpoints"]  # type: ignore[misc]
    assert (newest["step"], older["step"], older["problem"]) == (3, 2, "")
    assert "policy.safetensors does not match its SHA-256" in newest["problem"]
    assert facts["next"] == {"go on": f"tunesmith resume {run}", "why slow": f"tunesmith diagnose {run}"}
    assert main(["runs", "show", str(run)]) == 0
    text = capsys.readouterr().out
    for part in (
        "  model.name: tiny:llama\n",
        "  reward: length, sentiment\n",
        "  run.steps: 10  # command line --steps\n",
        "  step 2  warning  kl_high: kl is 31, more than 10\n",
        "damaged: ",
        "whole\n",
        f"tunesmith resume {run}",
    ):
        assert part in text
    assert "time/step_s" not in text


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing or cut short"),
        (lambda folder: os.truncate(folder / "policy.safetensors", 100), "policy.safetensors is missing or cut short"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                (folder / "manifest.json").read_text().replace('"step": 2', '"step": 3')
            ),
            "manifest.json was altered",
        ),
        (lambda folder: (folder / "manifest.json").write_text('{"version": 99}'), "has version 99"),
    ],
    ids=["no manifest", "file missing", "cut short", "manifest altered", "future version"],
)
def test_a_damaged_checkpoint_is_named_with_its_reason(
    runs: Path, capsys: Capture, damage: object, problem: str
) -> None:
    run = make_run(runs)
    damage(give_checkpoint(run, 2))  # type: ignore[operator]
    facts = shown(capsys, run.name)
    (checkpoint,) = facts["checkpoints"]  # type: ignore[misc]
    assert problem in checkpoint["problem"]
    assert list(facts["next"]) == ["start again", "why slow"]  # type: ignore[call-overload]


def test_a_finished_run_names_its_report_and_its_use(runs: Path, capsys: Capture) -> None:
    policy, reward = make_run(runs), make_run(runs, "20260101-000000-reward-9999", algorithm="reward")
    finish(policy)
    finish(reward)
    assert shown(capsys, "1a2b")["next"] == {
        "report": "runs/20260102-030405-ppo-1a2b/report.html",
        "use it": "tunesmith chat runs/20260102-030405-ppo-1a2b --against base",
        "why slow": "tunesmith diagnose runs/20260102-030405-ppo-1a2b",
    }
    assert "train ppo --reward" in shown(capsys, "9999")["next"]["use it"]  # type: ignore[index]


def test_a_run_goes_by_path_name_or_the_end_of_its_name(runs: Path, capsys: Capture) -> None:
    run, other = make_run(runs), make_run(runs, "20260103-000000-ppo-3c4d")
    for given in (str(run), f"runs/{run.name}", run.name, "1a2b", "ppo-1a2b"):
        assert shown(capsys, given)["name"] == run.name
    nested = make_run(run, "20260104-000000-ppo-3c4d")
    assert "names 2 runs below runs" in refused(capsys, "show", "3c4d")
    assert shown(capsys, f"{run.name}/{nested.name}")["path"] == f"runs/{run.name}/{nested.name}"
    assert f"did you mean {other.name}?" in refused(capsys, "show", "20260103-000000-ppo-3c4e")
    assert "is no run folder: it has no recipe.yaml" in refused(capsys, "show", "runs")


def test_names_and_texts_with_control_characters_are_shown_escaped(runs: Path, capsys: Capture) -> None:
    name = "20260101-000000-\x1b[31mred\n-\u202e-1a2b"
    run = make_run(runs, name, model={"name": "evil\x1b[2J\nx"})
    (run / "findings.jsonl").write_text(
        json.dumps({"step": 1, "name": "a", "severity": "x", "message": "\x1b]0;t\x07"})
    )
    for words in (["ls"], ["show", "1a2b"], ["rm", "1a2b", "--yes"]):
        assert main(["runs", *words]) == 0
        text = capsys.readouterr().out
        assert not {"\x1b", "\u202e", "\x07"} & set(text)
        assert "\\x1b[31mred\\n-\\u202e-1a2b" in text
    assert not run.exists()


def test_a_name_that_is_no_text_does_not_break_the_list(runs: Path, capsys: Capture) -> None:
    make_run(runs).rename(os.fsdecode(os.fsencode(runs) + b"/20260101-000000-\xff-1a2b"))
    assert listed(capsys)[0]["status"] == "failed"
    assert main(["runs", "ls"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_rm_removes_a_run_and_says_what_it_freed(runs: Path, capsys: Capture) -> None:
    run, other = make_run(runs), make_run(runs, "20260103-000000-ppo-3c4d")
    give_checkpoint(run, 2)
    size = folder_bytes(run)
    assert main(["runs", "rm", "1a2b", "--yes"]) == 0
    assert f"{size:,} bytes freed" in capsys.readouterr().out
    assert not run.exists()
    assert main(["runs", "rm", str(other), str(other), "--yes", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["removed"] == [str(other)]
    assert facts["freed_bytes"] > 0
    assert list(runs.iterdir()) == []


def test_rm_of_checkpoints_keeps_the_run(runs: Path, capsys: Capture) -> None:
    run = make_run(runs)
    nested = make_run(run, "20260104-000000-ppo-5e6f")
    give_checkpoint(run, 2)
    give_checkpoint(nested, 1)
    assert main(["runs", "rm", "1a2b", "--checkpoints-only", "--yes"]) == 0
    assert "bytes freed" in capsys.readouterr().out
    assert not (run / "checkpoints").exists()
    assert not (nested / "checkpoints").exists()
    assert (run / "metrics.jsonl").exists()
    assert main(["runs", "rm", "1a2b", "--checkpoints-only", "--yes"]) == 0
    assert "removed nothing" in capsys.readouterr().out


def test_rm_asks_on_a_terminal_and_needs_yes_without_one(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = make_run(runs)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "give --yes to do so" in refused(capsys, "rm", "1a2b")
    for answer in ("n\n", "\n", "", "no\n"):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert main(["runs", "rm", "1a2b"]) == 2
        assert "nothing was removed" in capsys.readouterr().err
    assert run.exists()
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["runs", "rm", "1a2b"]) == 0
    assert f"remove runs/{run.name} (" in capsys.readouterr().err
    assert not run.exists()


def test_rm_keeps_a_run_that_a_process_uses_and_all_that_were_named_with_it(runs: Path, capsys: Capture) -> None:
    run, other = make_run(runs), make_run(runs, "20260103-000000-ppo-3c4d")
    inner = make_run(run, "20260104-000000-ppo-5e6f")
    with in_use(inner):
        for words in (["rm", "3c4d", "1a2b", "--yes"], ["rm", "5e6f", "--yes", "--checkpoints-only"]):
            message = refused(capsys, *words)
            assert "is in use by process" in message
            assert "stop it first" in message
    assert run.exists()
    assert other.exists()
    assert main(["runs", "rm", "3c4d", "1a2b", "--yes"]) == 0
    assert list(runs.iterdir()) == []


def test_rm_refuses_what_is_no_run_and_what_lies_elsewhere(
    runs: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(runs)
    outside = make_run(tmp_path / "elsewhere")
    (runs / "plain").mkdir()
    (runs / "link").symlink_to(outside)
    (runs / "way-out").symlink_to(outside.parent)
    assert "no run folder" in refused(capsys, "rm", "runs/plain", "--yes")
    assert "no run folder" in refused(capsys, "rm", "plain", "--yes")
    assert "there is no run 'none'" in refused(capsys, "rm", "none", "--yes")
    assert "no run folder" in refused(capsys, "rm", "/", "--yes")
    assert "no run is named" in refused(capsys, "rm", "--yes")
    assert "is a link; give the run folder itself" in refused(capsys, "rm", "runs/link", "--yes")
    for given in (str(outside), f"runs/way-out/{outside.name}", f"runs/../elsewhere/{outside.name}"):
        assert "is not below runs; name the folder that holds it with --dir" in refused(capsys, "rm", given, "--yes")
    assert "is not below" in refused(capsys, "rm", str(run), "--dir", str(run), "--yes")
    monkeypatch.chdir(run)
    assert "holds the current folder" in refused(capsys, "rm", str(run), "--dir", str(runs), "--yes")
    assert run.exists()
    assert outside.exists()
    assert main(["runs", "rm", str(outside), "--dir", str(outside.parent), "--yes"]) == 0
    assert not outside.exists()


def test_rm_follows_no_link_inside_of_a_run(runs: Path, tmp_path: Path) -> None:
    run = make_run(runs)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (run / "final").symlink_to(precious)
    (run / "checkpoints").symlink_to(precious)
    (run / "file").symlink_to(precious / "file")
    assert main(["runs", "rm", "1a2b", "--yes", "--checkpoints-only"]) == 0
    assert main(["runs", "rm", "1a2b", "--yes"]) == 0
    assert (precious / "file").read_text() == "x"
    assert not run.exists()


def test_the_lists_of_python_and_of_the_command_line_agree(runs: Path) -> None:
    run = make_run(runs)
    (facts,) = list_runs(runs)
    assert (facts.path, facts.status) == (run, "failed")
    assert resolve_run("1a2b", runs) == run


def test_runs_load_nothing_heavy(runs: Path) -> None:
    give_checkpoint(make_run(runs), 2)
    code = (
        "import sys\nfrom tunesmith.apps.cli.main import main\n"
        "for words in (['ls'], ['show', '1a2b'], ['rm', '1a2b', '--yes']):\n    assert main(['runs', *words]) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
