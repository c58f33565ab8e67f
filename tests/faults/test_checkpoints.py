"""Checkpoints that are damaged, half written or of another version, and runs that find something else on resume."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from jobs import forked, go_on, noisy, outcome, the_run, train
from recipes import PROMPTS
from spoilt import findings

from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.checkpoint import list_steps
from tunesmith.learn.trainers.resume import Inputs, resume

Uninterrupted = Callable[[str], Mapping[str, object]]
Damage = Callable[[Path], None]
KILLED = -9


def flip(file: Path, at: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0x10
    file.write_bytes(content)


def other_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))


def half_written(folder: Path) -> None:
    """As a power cut leaves it where the file system forgot the end of the folder."""
    for name in ("manifest.json", "state.json"):
        (folder / name).unlink()
    shutil.copytree(folder, folder.parent / "tmp-000008-12345")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut short": (lambda folder: os.truncate(folder / "policy.safetensors", 1000), "cut short"),
    "empty file": (lambda folder: os.truncate(folder / "optimizer.safetensors", 0), "cut short"),
    "a bit at the start": (lambda folder: flip(folder / "policy.safetensors", 0.0), "SHA-256"),
    "a bit in the middle": (lambda folder: flip(folder / "optimizer.safetensors", 0.5), "SHA-256"),
    "a bit at the end": (lambda folder: flip(folder / "generators.safetensors", 1.0), "SHA-256"),
    "a bit of the state": (lambda folder: flip(folder / "state.json", 0.5), "SHA-256"),
    "a file is missing": (lambda folder: (folder / "state.json").unlink(), "missing"),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "no readable manifest"),
    "a list for a manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "no readable manifest",
    ),
    "another version": (other_version, "version 99, this release reads version 1"),
    "half written": (half_written, "no readable manifest"),
    "an empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()] and None, "no readable manifest"),
    "another step's name": (lambda folder: folder.rename(folder.with_name("step-000009")) and None, "was altered"),
}


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 9, with checkpoints of the steps 6 and 8."""
    folder = tmp_path_factory.mktemp("killed")
    assert forked(train, "grpo", folder, fault="log/metrics:kill:9") == KILLED
    assert list_steps(the_run(folder) / "checkpoints")[-2:] == [6, 8]
    return the_run(folder)


@pytest.fixture
def run_dir(killed_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run, tmp_path / killed_run.name))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_gives_the_same_end(
    damage: str, run_dir: Path, uninterrupted: Uninterrupted
) -> None:
    make, reason = DAMAGES[damage]
    make(run_dir / "checkpoints" / "step-000008")
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted("grpo")
    (finding,) = findings(run_dir, "checkpoint")
    assert finding["step"] == 6
    assert finding["message"].startswith("passed over a damaged checkpoint: ")
    assert reason in finding["message"]
    assert not list((run_dir / "checkpoints").glob("tmp-*"))


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rollout.temperature", "0.5"], "rollout.temperature: 1.0 -> 0.5"),
        (["--run.seed", "7"], "run.seed: 0 -> 7"),
        (["--model.name", "tiny:gpt2"], "model.name: 'tiny:llama' -> 'tiny:gpt2'"),
        (["--rollout.temprature", "0.5"], "did you mean rollout.temperature?"),
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate: -1 given; must be greater than"),
        ([], "was given its prompts and rewards as Python objects"),
    ],
)
def test_another_recipe_is_refused_with_the_difference_and_nothing_changes(
    words: list[str], problem: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}
    assert main(["resume", str(run_dir), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert problem in error
    after = {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}
    assert after == {path: content for path, content in before.items() if path.name != "lock.json"}


def test_other_prompts_on_resume_are_refused_and_nothing_is_cut(run_dir: Path) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"the prompts .* changed since its checkpoint"):
        resume(run_dir, inputs=Inputs(prompts=[*PROMPTS, "One more"], rewards=[noisy]), progress=False)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("trainer", ["grpo", "reward"])
def test_a_model_or_data_that_changed_on_disk_is_refused_on_resume(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that a recipe names hold something else when the run goes on."""
    monkeypatch.chdir(tmp_path)
    words = ["--model.name", "model", "--steps", "1", "--run.checkpoint-every", "1", "--run.name", "changed"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The film was"}\n{"prompt": "A story"}\n')
    row = {"chosen": " good", "rejected": " bad"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prompt": f"Film {i}", **row}) + "\n" for i in range(9)))
    policy = ["--prompts", "prompts.jsonl", "--reward", "length"]
    assert main(["train", "grpo", "--model", "tiny:llama", "--steps", "1", "--run.dir", "base", *policy]) == 0
    shutil.copytree(next((tmp_path / "base").iterdir()) / "final", tmp_path / "model")
    data = ["--pairs", "pairs.jsonl"] if trainer == "reward" else policy
    assert main(["train", trainer, *words, *data]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    file = tmp_path / ("pairs.jsonl" if trainer == "reward" else "prompts.jsonl")
    good = file.read_text()
    file.write_text(good.replace("Film 3", "Film X").replace("story", "play"))
    assert main(["resume", str(run), "--steps", "2"]) == 2
    assert "changed since its checkpoint; put it back, or start a new run" in capsys.readouterr().err
    file.write_text(good)
    flip(tmp_path / "model" / "model.safetensors", 0.9)
    assert main(["resume", str(run), "--steps", "2"]) == 2
    assert "the model (was " in capsys.readouterr().err
    flip(tmp_path / "model" / "model.safetensors", 0.9)
    assert main(["resume", str(run), "--steps", "2"]) == 0


REWARD = "def fn(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
@pytest.mark.parametrize("source", ["./mine.py:fn", "mine:fn"])
def test_a_reward_function_that_changed_on_disk_is_refused_on_resume(
    trainer: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    words = ["--model", "tiny:llama", "--reward", source, "--rollout.max-new-tokens", "4", "--steps", "1"]
    assert main(["train", trainer, *words]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    file.write_text(REWARD.replace("float(len(text))", "-float(len(text))"))
    assert main(["resume", str(run), "--steps", "2"]) == 2
    place = source.rpartition(":")[0]
    assert f"the reward's file {place} (was " in capsys.readouterr().err
    file.write_text(REWARD)
    assert main(["resume", str(run), "--steps", "2"]) == 0


@pytest.mark.usefixtures("own_logging")
def test_a_reward_model_that_changed_on_disk_is_refused_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"chosen": " good", "rejected": " bad"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prompt": f"Film {i}", **row}) + "\n" for i in range(9)))
    words = ["--model", "tiny:llama", "--pairs", "pairs.jsonl", "--steps", "1", "--run.dir", "rewards"]
    assert main(["train", "reward", *words, "--model.lora.rank", "2"]) == 0
    (judge,) = (tmp_path / "rewards").iterdir()
    judge.rename(tmp_path / "judge")
    words = ["--model", "tiny:llama", "--reward", "judge", "--rollout.max-new-tokens", "4", "--steps", "1"]
    assert main(["train", "ppo", *words]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    flip(tmp_path / "judge" / "final" / "adapter_model.safetensors", 0.9)
    assert main(["resume", str(run), "--steps", "2"]) == 2
    assert "the reward model judge (was " in capsys.readouterr().err
    flip(tmp_path / "judge" / "final" / "adapter_model.safetensors", 0.9)
    assert main(["resume", str(run), "--steps", "2"]) == 0
