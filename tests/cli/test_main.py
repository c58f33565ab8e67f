"""The command line as a user meets it: separate processes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import COMMANDS, main

HEAVY = ("torch", "transformers", "numpy", "pandas", "scipy", "safetensors", "datasets", "trl", "plotly")

NOTHING_HEAVY = f"""
import json, sys
from tunesmith.apps.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    print("\\0", end="")
    if loaded := [name for name in {HEAVY!r} if name in sys.modules]:
        sys.exit(f"{{words}} imported {{loaded}}")
    print(*words, code, file=sys.stderr)
"""


def outputs(commands: Sequence[Sequence[str]], cwd: Path | None = None) -> tuple[list[str], list[str]]:
    """What each of `commands` prints, and its words and exit code with what else is on stderr; the first that imports a
    heavy module ends their process.
    """
    script = [sys.executable, "-c", NOTHING_HEAVY, json.dumps(commands)]
    result = subprocess.run(script, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1], result.stderr.splitlines()


def run(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tunesmith", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **variables})


def test_help_of_every_command_loads_nothing_heavy() -> None:
    commands = [[*command.split(), "--help"] for command in ("", *COMMANDS, "train", "recipes", "runs")]
    shown, ended = outputs(commands)
    assert ended == [" ".join([*words, "0"]) for words in commands]
    assert all(text.startswith("usage: tunesmith") for text in shown)


def test_what_needs_no_model_loads_nothing_heavy(tmp_path: Path) -> None:
    commands = [["validate", "--all"], ["recipes", "ls"], ["recipes", "keys", "ppo"], ["train", "ppo", "--lr", "1"]]
    outputs(commands, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("tunesmith 0.")


def test_a_misspelt_key_ends_with_code_2_a_suggestion_and_nothing_created(tmp_path: Path) -> None:
    result = run("train", "ppo", "--model", "tiny:llama", "--rollout.max_new_tokenz", "3", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    expected = "rollout.max_new_tokenz: unknown key; did you mean rollout.max_new_tokens?"
    assert result.stderr == f"error: {expected} (command line --rollout.max_new_tokenz)\n"
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_only_thing_on_stdout() -> None:
    result = run("validate", "--all", "--json", "--verbose")
    assert result.returncode == 0
    assert json.loads(result.stdout)["num_wrong"] == 0
    assert result.stdout.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m tunesmith recipes keys ppo | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.returncode in (0, 141)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


COMPARE = ["compare", "--before", "tiny:llama", "--after", "tiny:llama", "--prompts", "films"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "rollout"], "python -m benchmarks.<name>"),
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["train"], "one word is missing; there are `tunesmith train sft`, `tunesmith train reward`"),
        (["train", "pop"], "there is no `train pop`; did you mean ppo?"),
        (["recipes", "show"], "missing: NAME"),
        (["compare", "--before", "a"], "missing: --after B, --prompts FILE"),
        (["generate", "--prompt", "x", "--top-p", "high"], "--top-p: 'high' is no number"),
        (["generate", "--prompt", "x", "-n", "2.5"], "-n/--num-completions: '2.5' is no whole number"),
        (["validate", "--al"], "'--al' is no flag of `tunesmith validate`; did you mean --all?"),
        (["validate"], "nothing to check"),
        (["recipes", "ls", "extra"], "'extra' is no flag of `tunesmith recipes ls`"),
        (["train", "ppo", "extra"], "'extra' belongs to no flag"),
        (["train", "ppo", "--config", "/nowhere.yaml"], "/nowhere.yaml does not exist"),
        (["train", "ppo", "--recipe", "demo_pop"], "there is no recipe 'demo_pop'; did you mean demo_ppo?"),
        (["generate"], "give either --prompt TEXT or --prompts FILE"),
        (["generate", "a", "--model", "b", "--prompt", "x"], "two models are given, a and --model b"),
        (["generate", "--prompt", "x", "--prompts", "y"], "give either --prompt TEXT or --prompts FILE"),
        (["chat", "tiny:llama", "--against", "base"], "tiny:llama is no run folder"),
        (COMPARE, "nothing scores the completions; name a reward with --scorer"),
        ([*COMPARE, "--reward", "environment"], "nothing scores the completions"),
        ([*COMPARE, "--tools", "calculatr"], "tool 'calculatr' is none of calculator, search, python"),
        ([*COMPARE, "--tools", "search"], "the tool `search` needs a folder; set environment.search_folder"),
        ([*COMPARE, "--environment", "./nowhere.py:Game"], "nowhere.py"),
        ([*COMPARE, "--tools", "calculator", "--environment.max-turns", "0"], "environment.max_turns: 0 given"),
        ([*COMPARE, "--tools", "calculator", "--environment.max-turn", "2"], "environment.max_turn"),
        ([*COMPARE, "--tools", "calculator", "--max-turns", "2"], "'--max-turns' is no flag of `tunesmith compare`"),
        (["compare", "--before", "base", *COMPARE[3:], "--tools", "calculator"], "tiny:llama is no run folder"),
        (["export", "/nowhere", "x"], "/nowhere is no folder"),
    ],
)
def test_bad_input_is_one_error_on_stderr_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_ctrl_c_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("tunesmith.apps.cli.recipes.shipped_names", interrupted)
    assert main(["recipes", "ls"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
