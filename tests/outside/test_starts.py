"""What must be refused before a run begins, and by `--dry-run` too, with a message that names the cause."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunesmith import train
from tunesmith.config.load import load_recipe
from tunesmith.core.errors import ConfigError, DataError, MissingDependencyError, RewardError, RunError, TunesmithError
from tunesmith.trainers.run import preview

TIES = [{"prompt": prompt, "chosen": "b", "rejected": "c", "tie": True} for prompt in ("a", "d")]
LABELS = [
    {"prompt": "a", "completion": "b", "label": True},
    {"prompt": "d", "completion": "c", "label": False},
]


def options(folder: Path) -> dict[str, Any]:
    """Arguments of a short training that writes to `folder`."""
    return {"model": "tiny:llama", "steps": 1, "progress": False, "run": {"dir": str(folder / "runs")}}


def test_rows_that_are_all_ties(tmp_path: Path) -> None:
    """The message blamed the held-out share. Reported: issue 45.26."""
    with pytest.raises(DataError, match=r"are ties, which dpo\.ties: drop leaves out.* set dpo\.ties: half"):
        train.dpo(pairs=TIES, **options(tmp_path))
    with pytest.raises(DataError, match="are ties, from which a reward model learns that everything is equal"):
        train.reward(pairs=TIES, **options(tmp_path))
    with pytest.raises(DataError, match="are ties, which have no label for kto"):
        train.dpo(pairs=TIES, dpo="kto", **options(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_kto_says_that_its_second_prompt_is_held_out(tmp_path: Path) -> None:
    """Two prompts were given, and the message asked for two. Reported: issue 45.26."""
    with pytest.raises(DataError, match=r"held out: give more prompts, or set pairs\.heldout_fraction: 0"):
        train.dpo(pairs=LABELS, dpo="kto", **options(tmp_path))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "best_of_n", "distill"])
def test_a_completion_as_long_as_the_context(algorithm: str, tmp_path: Path) -> None:
    """Every prompt was called too long. Reported: issue 45.26."""
    others = {"teacher": "tiny:llama"} if algorithm == "distill" else {"reward": "length"}
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is 256, but the model's context holds 256 tokens"):
        getattr(train, algorithm)(prompts=["a"], rollout={"max_new_tokens": 256}, **others, **options(tmp_path))


def dry_run(folder: Path, **overrides: object) -> None:
    """What `--dry-run` of PPO with these keys does."""
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    (folder / "needs.py").write_text("def answer(completions, answer):\n    return [1.0] * len(answer)\n")
    given = {"model": "tiny:llama", "prompts": str(folder / "prompts.jsonl"), "rollout.max_new_tokens": 4}
    preview(load_recipe("ppo", overrides={**given, "run.dir": str(folder / "runs"), **overrides}).recipe)


def test_a_dry_run_finds_what_the_run_would(tmp_path: Path) -> None:
    """A column, a package and a folder that are missing were found after the start alone. Reported: issue 45.26."""
    (tmp_path / "file").touch()
    cases: list[tuple[dict[str, object], type[TunesmithError], str]] = [
        (
            {"reward": f"{tmp_path}/needs.py:answer"},
            RewardError,
            "`answer` needs `answer`, but the prompts have no such",
        ),
        ({"run.dir": str(tmp_path / "file" / "runs")}, RunError, "file cannot be written"),
    ]
    for overrides, kind, message in cases:
        with pytest.raises(kind, match=message):
            dry_run(tmp_path, **overrides)
    before = sorted(tmp_path.rglob("*"))
    dry_run(tmp_path, reward="length")
    assert sorted(tmp_path.rglob("*")) == before  # the check of the folder leaves nothing behind


@pytest.mark.parametrize(
    ("package", "keys"), [("wandb", {"run.report_to": ["wandb"]}), ("vllm", {"rollout.backend": "vllm"})]
)
def test_a_dry_run_names_a_package_that_is_missing(
    package: str, keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker, or vLLM in this process, that is not installed. Reported: issue 45.26."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=package):
        dry_run(tmp_path, reward="length", **keys)


def test_evaluations_without_held_out_data_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`eval_every` did nothing, in silence. Reported: issue 45.8."""
    dry_run(tmp_path, reward="length", **{"run.eval_every": 2})
    assert "run.eval_every is 2, which has no effect: no prompts are held out" in caplog.text


def tunesmith(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command `tunesmith words`."""
    command = [sys.executable, "-m", "tunesmith", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)


def test_a_seed_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    """Seeds from a clock in nanoseconds or a hash. Reported: issue 45.26."""
    for seed in (2**63, 2**64):
        with pytest.raises(ConfigError, match=r"run\.seed: .*less than or equal to 9223372036854775807"):
            train.ppo(prompts=["a"], reward="length", **{"run.seed": seed}, **options(tmp_path))
        done = tunesmith("generate", "tiny:llama", "--prompt", "a", "--seed", str(seed))
        assert done.returncode == 2
        assert b"it must be a whole number in [0, 9223372036854775807]" in done.stderr


def test_stdout_that_cannot_encode_a_character(tmp_path: Path) -> None:
    """A pipe or terminal whose encoding is ASCII. Reported: issue 45.26."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "caf\u00e9 \u2713"}\n', encoding="utf-8")
    words = ("generate", "tiny:llama", "--prompts", str(tmp_path / "rows.jsonl"), "--max-new-tokens", "2")
    done = tunesmith(*words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"caf\\xe9 \\u2713" in done.stdout
