"""`tunesmith eval` says what is wrong with its flags, and what to install where lm-eval is missing."""

import sys

import pytest

from tunesmith.apps.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing: "),
        (["--tasks", "arc_easy"], "missing: "),
        (["smollm2", "--tasks", " , "], "--tasks names none; give some between commas"),
        (["smollm2", "--tasks", "a", "--include-path", "none"], "--include-path is none, which is no folder"),
        (["smollm2", "--tasks", "a", "--limit", "0"], "--limit is 0; it must be at least 1"),
        (["smollm2", "--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot is -1; it must be at least 0"),
        (["smollm2", "--tasks", "a", "--alone", "--against", "base"], "--alone and --against are given"),
        (["smollm2", "--tasks", "a", "--against", "base"], "smollm2 is no run folder, so its base is not known"),
        (["reward", "--num-bins", "x"], "--num-bins: 'x' is no whole number"),
    ],
)
def test_wrong_flags_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("lm_eval", "tunesmith.integrations.lm_eval"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tunesmith.apps.workflows.benchmarks", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "tiny:llama", "--tasks", "arc_easy"]) == 2
    assert "needs the package lm_eval, which is not installed; run `pip install 'tunesmith[eval]'`" in (
        capsys.readouterr().err
    )
