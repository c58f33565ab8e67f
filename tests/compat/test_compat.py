"""Run folders, votes and recipes that the previous version wrote; README.md says how they were made."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.config.load import load_recipe
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.observe.reports.html import write_run_report

FILES = Path(__file__).parent
RUN = "20260101-120000-train-50a9"
RESOLVED = json.loads((FILES / "resolved.json").read_text(encoding="utf-8"))
# Values that shipped recipes have changed by intent.
POLICY_OF_DEMO = {
    ("optimizer", "schedule"): "linear",
    ("rollout", "temperature"): 0.7,
    ("rollout", "repetition_penalty"): 1.25,
}
RETUNED = {
    "demo_ppo": {**POLICY_OF_DEMO, ("ppo", "lam"): 1.0, ("optimizer", "learning_rate"): 1.1e-4},
    "demo_grpo": POLICY_OF_DEMO,
    "demo_reward": {
        ("model", "num_trainable_layers"): 4,
        ("reward_model", "num_layers"): 4,
        ("reward_model", "num_epochs"): 2,
        ("reward_model", "pairs_per_step"): 72,
        ("reward_model", "micro_batch_size"): 72,
    },
    "grpo_gsm8k": {("grpo", "clip_high"): 0.2},  # a single update has no ratio to clip
    "dpo_demo": {("dpo", "num_epochs"): 1, ("dpo", "pairs_per_step"): 72, ("dpo", "micro_batch_size"): 72},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files in the current folder, because a recipe names its prompts and rewards relative to it."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON object that a command prints."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def assert_holds(found: Any, expected: Any, path: str = "") -> None:
    """`found` has all that `expected` has; new keys with defaults may be beside it."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in found, f"{path}.{key} is gone"
            assert_holds(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            assert_holds(found[index], value, f"{path}[{index}]")
    else:
        assert found == expected, path


def test_a_run_goes_on_as_if_it_had_never_been_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed(capsys, "resume", f"runs/{RUN}", "--steps", "4")
    assert result["steps"] == 4
    expected = json.loads((FILES / "uninterrupted.json").read_text(encoding="utf-8"))
    rows = read_jsonl(folder / "runs" / RUN / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, known in zip(rows[2:], expected["metrics"], strict=True):
        # Sums of float32 depend on the processor's vector width.
        assert {name: row[name] for name in known} == pytest.approx(known, rel=1e-3, abs=1e-5)
    samples = [row for row in read_jsonl(folder / "runs" / RUN / "samples.jsonl") if int(str(row["step"])) > 2]
    assert samples == expected["samples"]


def test_a_run_is_listed_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = printed(capsys, "runs", "ls")["runs"]
    assert (run["name"], run["algorithm"], run["status"], run["num_steps"]) == (RUN, "grpo", "finished", 2)
    shown = printed(capsys, "runs", "show", RUN)
    assert shown["status"] == "finished"
    assert main(["runs", "show", RUN]) == 0


def test_a_run_has_a_report_and_is_compared_with_its_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rewards/share/mean" in write_run_report(folder / "runs" / RUN).read_text(encoding="utf-8")
    words = ["--before", "tiny:llama", "--after", f"runs/{RUN}", "--prompts", "prompts.jsonl", "-n", "2"]
    found = printed(capsys, "compare", *words, "--scorer", "./letters.py:share", "--max-new-tokens", "4")
    assert found["num_prompts"] == 4
    assert found["kl_per_sequence"] != 0


def test_votes_are_counted_read_and_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = printed(capsys, "votes", "stats", "--dir", ".")
    assert (stats["num_votes"], stats["num_ties"]) == (4, 1)
    imported = printed(capsys, "votes", "import", "votes.jsonl", "--labels", "votes", "--dir", "other")
    assert imported["num_new"] == 4
    assert printed(capsys, "votes", "stats", "--dir", "other")["num_votes"] == 4
    rows = read_jsonl(FILES / "votes.jsonl")
    exported = printed(capsys, "votes", "export", "again.jsonl", "--dir", ".")
    assert exported["num_rows"] == 4
    # Votes that were imported before have no side: it was drawn when they were stored.
    assert read_jsonl(folder / "again.jsonl") == [{**row, "chosen_side": None, "selection": ""} for row in rows]


@pytest.mark.parametrize("name", RESOLVED)
def test_a_recipe_resolves_to_the_same_values(name: str) -> None:
    known = RESOLVED[name]
    recipe = load_recipe(known["algorithm"], file=FILES / "recipes" / f"{name}.yaml").recipe
    assert_holds(recipe.model_dump(mode="json"), known["resolved"])
    shipped = load_recipe(known["algorithm"], recipe=name).recipe
    expected = copy.deepcopy(known["resolved"])
    for (section, key), value in RETUNED.get(name, {}).items():
        expected[section][key] = value
    assert_holds(shipped.model_dump(mode="json"), expected)


def test_a_dry_run_of_a_runs_own_recipe_shows_its_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f"runs/{RUN}/recipe.yaml"
    shown = printed(capsys, "train", "grpo", "--config", recipe, "--dry-run")
    assert_holds(shown["recipe"], load_recipe("grpo", file=folder / recipe).recipe.model_dump(mode="json"))
    assert shown["recipe"]["grpo"]["kl"]["coef"] == 0.02
