"""`tunesmith chat`: answers while they are drawn, Ctrl-C, and what is refused before a model is loaded."""

import io

import pytest

from tunesmith.apps.cli.chat import Speaker
from tunesmith.apps.cli.main import main
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine

WORDS = ["chat", "tiny:llama", "--backend", "transformers", "--seed", "3"]


def speaker() -> Speaker:
    loaded = tiny_model("llama")
    return Speaker("tiny", open_engine(loaded.model, loaded.tokenizer, backend="transformers"), has_template=True)


def test_an_answer_comes_in_pieces_and_joins_the_history() -> None:
    asked, pieces = speaker(), []
    answer = asked.answer("hello", SamplingParams(30, seed=1), pieces.append)
    assert len(pieces) > 1 and "".join(pieces) == answer.text and not answer.is_cut
    assert asked.history == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer.text}]


def test_of_an_answer_that_is_cut_what_was_said_joins_the_history() -> None:
    asked, pieces = speaker(), []

    def press(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    answer = asked.answer("hello", SamplingParams(60, seed=1), press)
    assert answer.is_cut and answer.text == "".join(pieces)
    assert asked.history[1] == {"role": "assistant", "content": answer.text}
    whole = speaker().answer("hello", SamplingParams(60, seed=1)).text
    assert whole.startswith(answer.text) and len(whole) > len(answer.text)


def test_an_answer_that_is_cut_before_its_first_word_was_never_asked_for() -> None:
    class Interrupted:
        def generate(self, *_args: object, **_kwargs: object) -> None:
            raise KeyboardInterrupt

    asked = Speaker("tiny", Interrupted(), has_template=True)  # type: ignore[arg-type]
    assert asked.answer("hello", SamplingParams()).is_cut
    assert asked.history == []


def test_a_conversation_on_a_terminal_shows_what_a_pipe_gets(
    terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.type("hello\nagain\n/quit\n")
    assert terminal.run([*WORDS, "--max-new-tokens", "20"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main([*WORDS, "--max-new-tokens", "20"]) == 0
    piped = capsys.readouterr().out
    answers = terminal.shown.split("> ", 1)[1].replace("> ", "")
    assert answers == piped


def test_ctrl_c_cuts_an_answer_and_the_conversation_goes_on(terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.press_ctrl_c_at("> .")
    terminal.type("hello\n/reset\nagain\n/quit\n")
    assert terminal.run([*WORDS, "--max-new-tokens", "220"]) == 0
    asked = terminal.shown.split("\n> ", 1)[1].split("> ")
    assert len(asked) == 4 and asked[0] and asked[1] == "" and asked[2]
    assert capsys.readouterr().err.count("stopped") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-p", "1"], "min_p is 1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--stop", ""], "'' is no stop string"),
        (["--backend", "vllm"], "vllm"),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "no/such/model", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_stop_text_ends_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def say(*flags: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main([*WORDS, "--max-new-tokens", "30", *flags]) == 0
        return capsys.readouterr().out.strip("\n")

    whole = say()
    stop = whole[8]
    assert say("--stop", stop) == whole.partition(stop)[0].strip()
