"""`tunesmith generate`: what is shown while tokens are drawn, stop strings, and Ctrl-C."""

import json
import signal
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.core.log import visible
from tunesmith.engine.rollout.transformers_backend import TransformersEngine

WORDS = ["generate", "tiny:llama", "--backend", "transformers", "--seed", "3"]


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_one_completion_is_shown_while_it_is_drawn_and_is_the_one_that_is_stored(terminal, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = [*WORDS, "--prompt", "a [b]", "--max-new-tokens", "12"]
    assert terminal.run(words) == 0
    assert main([*words, "--out", str(out)]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    end = "" if row["finish_reason"] == "stop" else " ..."
    assert terminal.shown == f"a [b]{visible(row['completion'])}{end}\n\n"


def test_several_completions_are_shown_when_they_are_drawn(terminal) -> None:
    assert terminal.run([*WORDS, "--prompt", "PROMPT", "-n", "2", "--max-new-tokens", "4", "--quiet"]) == 0
    assert terminal.shown.count("PROMPT") == 2


def test_a_stop_text_ends_a_completion(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--prompt", "a", "--max-new-tokens", "30", "--json"]
    assert main(words) == 0
    (whole,) = rows(capsys)["completions"]  # type: ignore[misc]
    stop = whole["completion"][5]
    assert main([*words, "--stop", "never", "--stop", stop]) == 0
    (row,) = rows(capsys)["completions"]  # type: ignore[misc]
    assert row["finish_reason"] == "stop"
    assert row["completion"] == whole["completion"].partition(stop)[0]


def test_min_p_and_repetition_penalty_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--prompt", "a", "--max-new-tokens", "4", "--json"]
    assert main([*words, "--min-p", "0.999999"]) == 0
    (row,) = rows(capsys)["completions"]  # type: ignore[misc]
    assert row["logps"] == [0.0] * 4
    assert main([*words, "--repetition-penalty", "1.5"]) == 0
    (row,) = rows(capsys)["completions"]  # type: ignore[misc]
    assert row["logps"] != row["raw_logps"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-p", "1"], "min_p is 1.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--stop", ""], "'' is no stop string"),
        (["--backend", "vllm"], "vllm"),
    ],
)
def test_bad_settings_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such/model", "--prompt", "a", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def ctrl_c_at_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed when the fifth completion is finished."""
    generate = TransformersEngine.generate

    def pressed(self, *args, on_progress, **kwargs):
        def press(done: int, total: int) -> None:
            on_progress(done, total)
            if done == 5:
                signal.raise_signal(signal.SIGINT)

        return generate(self, *args, on_progress=press, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", pressed)


@pytest.mark.usefixtures("ctrl_c_at_5")
def test_ctrl_c_prints_what_is_finished_and_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--prompt", "PROMPT", "-n", "8", "--max-new-tokens", "4"]
    assert main(words) == 130
    captured = capsys.readouterr()
    assert captured.out.count("PROMPT") == 5
    assert "5 of 8 completions were finished" in captured.err and "interrupted" in captured.err


@pytest.mark.usefixtures("ctrl_c_at_5")
def test_ctrl_c_stores_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    words = [*WORDS, "--prompt", "a", "--prompt", "b", "-n", "4", "--max-new-tokens", "4"]
    assert main([*words, "--out", str(out), "--json"]) == 130
    facts = rows(capsys)
    assert facts["interrupted"] is True
    stored = [json.loads(line) for line in out.read_text().splitlines()]
    assert stored == facts["completions"]
    assert [row["prompt"] for row in stored] == ["a"] * 4 + ["b"]


def test_ctrl_c_leaves_the_text_that_was_shown(terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.press_ctrl_c_at("PROMPT.")
    assert terminal.run([*WORDS, "--prompt", "PROMPT", "--max-new-tokens", "240"]) == 130
    shown = terminal.shown
    assert shown.startswith("PROMPT") and not shown.endswith("\n\n")
    assert "0 of 1 completions were finished" in capsys.readouterr().err
