"""An algorithm of another package is one file and one line of its metadata: all commands and pages know it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server_parts import Server
from tunesmith.base.config.levels import WHOLE
from tunesmith.base.config.schema import SPECS
from tunesmith.base.config.spec import Passes, Spec
from tunesmith.base.core.errors import ConfigError
from tunesmith.collect.web.access import API

HERE = Path(__file__).parent
FEW = ("--rollout.max-new-tokens", "4", "--rollout.prompts-per-step", "2")
SHORT = ("--model", "tiny:llama", "--reward", "./rewards.py:odd", *FEW, "--prompts", "prompts.jsonl", "--steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, and the metadata of an installed package that has the algorithm."""
    path = tmp_path_factory.mktemp("registered")
    metadata = path / "mean_scaled-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-scaled\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tunesmith.algorithms]\nmean_scaled = mean_scaled:SPEC\n")
    (path / "rewards.py").write_text(
        "def odd(completions, **_):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"
    )
    (path / "prompts.jsonl").write_text('{"prompt": "The film"}\n{"prompt": "I think"}\n{"prompt": "We saw"}\n')
    return path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), *sys.path])}


ALL = """
import json, sys
from tunesmith.apps.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
    print("\\0", end="")
"""


def tunesmith(folder: Path, *commands: Sequence[str]) -> list[str]:
    """What each command prints; all in one process, which takes seconds to load what they need."""
    line = [sys.executable, "-c", ALL, json.dumps(commands)]
    done = subprocess.run(line, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def facts(shown: str) -> Any:
    """The object that a command with `--json` prints last."""
    return json.loads(shown.splitlines()[-1])


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    """A run of two steps, with a checkpoint after each."""
    (shown,) = tunesmith(folder, ["train", "mean_scaled", *SHORT, "--run.checkpoint-every", "1", "--json"])
    return folder / facts(shown)["run_dir"]


@pytest.fixture(scope="module")
def shown(folder: Path, run_dir: Path) -> dict[str, str]:
    """What the other commands print about the algorithm, about GRPO and about that run, which goes on."""
    (folder / "own.yaml").write_text("mean_scaled: {kl: 0.1}\nlevel: baseline\n")
    plan = ["plan", "--model", "llama-2-7b", "--json", "--algorithm"]
    commands = {
        "dry run": ["train", "mean_scaled", *SHORT, "--dry-run", "--json"],
        "dry run of GRPO": ["train", "grpo", *SHORT, "--dry-run", "--json"],
        "dry run of own.yaml": ["train", "mean_scaled", "--config", "own.yaml", *SHORT, "--dry-run", "--json"],
        "plan": [*plan, "mean_scaled"],
        "plan of GRPO": [*plan, "grpo"],
        "keys": ["recipes", "keys", "mean_scaled"],
        "help": ["--help"],
        "diagnosis": ["diagnose", str(run_dir), "--json"],
        "resume": ["resume", str(run_dir), "--steps", "3", "--json"],
        "list": ["runs", "ls", "--dir", "runs"],
    }
    return dict(zip(commands, tunesmith(folder, *commands.values()), strict=True))


def test_it_trains_and_goes_on(run_dir: Path, shown: dict[str, str]) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["updates"] == 1
    assert "mean-scaled GRPO" in (run_dir / "final" / "README.md").read_text()
    assert facts(shown["resume"])["steps"] == 3


def test_a_dry_run_and_a_plan_count_its_passes(shown: dict[str, str]) -> None:
    found = facts(shown["dry run"])
    assert found["num_steps"] == 2 and {"reference", "cache"} <= found["memory_gb"].keys() and found["seconds"] > 0
    assert found["memory_gb"] == facts(shown["dry run of GRPO"])["memory_gb"]
    assert facts(shown["plan"]) == facts(shown["plan of GRPO"])


def test_levels_settings_and_help_know_it(shown: dict[str, str]) -> None:
    assert "mean_scaled.floor" in shown["keys"] and "mean_scaled.kl.coef" in shown["keys"]
    recipe = facts(shown["dry run of own.yaml"])["recipe"]
    assert recipe["mean_scaled"]["kl"]["coef"] == 0.1 and recipe["mean_scaled"]["micro_batch_size"] == WHOLE
    assert "scaled by the group's mean reward" in shown["help"]


def test_its_run_is_diagnosed_and_reported(run_dir: Path, shown: dict[str, str]) -> None:
    assert facts(shown["diagnosis"])["num_steps"] > 0
    assert "mean_scaled" in (run_dir / "report.html").read_text()
    assert "mean_scaled" in shown["list"]


def test_the_studio_starts_it(folder: Path) -> None:
    words = [sys.executable, "-m", "tunesmith", "studio", "studio", "--port", "0", "--json", "--allow", str(folder)]
    server = subprocess.Popen(words, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = json.loads(server.stdout.readline())
        admin = Server(folder, url=found["url"], login_url=found["login_url"]).admin()
        assert "mean_scaled.floor" in [row[0] for row in admin.get("/recipes/keys?algorithm=mean_scaled").json]
        given = [("model.name", "tiny:llama"), ("prompts.source", str(folder / "prompts.jsonl")), ("run.steps", "1")]
        given += [("rollout.max_new_tokens", "4"), ("rollout.prompts_per_step", "2"), ("reward.0.source", "length")]
        body = {"algorithm": "mean_scaled", "recipe": "", "settings": given}
        assert admin.send("POST", f"{API}/recipes/check", body).json["problems"] == []
        assert admin.send("POST", f"{API}/jobs", body, {"Idempotency-Key": "a"}).status == 202
        for _ in range(600):
            if list((folder / "studio").glob("*/result.json")):
                break
            time.sleep(0.2)
        assert b"mean_scaled" in admin.get("/runs?algorithm=mean_scaled").body
        assert len(list((folder / "studio").glob("*-mean_scaled-*/result.json"))) == 1
    finally:
        server.terminate()
        server.wait(60)


def test_an_algorithm_that_cannot_be_loaded_is_named_and_the_others_work(folder: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tunesmith.algorithms]\nbroken = mean_scaled:NOWHERE\n")
    path = os.pathsep.join([str(tmp_path), environment(folder)["PYTHONPATH"]])
    command = [sys.executable, "-m", "tunesmith", "train", "mean_scaled", *SHORT, "--dry-run"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "the algorithm broken (mean_scaled:NOWHERE) cannot be loaded" in done.stderr


def test_a_name_is_given_once() -> None:
    grpo = SPECS["grpo"]
    SPECS.add(grpo)
    other = Spec(
        recipe=grpo.recipe,
        title="other",
        code="other:Other",
        headline=(),
        best="reward",
        passes=lambda cfg: Passes.of_drawing(cfg),
    )
    with pytest.raises(ConfigError, match="there is an algorithm 'grpo' already"):
        SPECS.add(other)
    assert SPECS["grpo"] is grpo
