"""`tunesmith chat`: answers while they are drawn, Ctrl-C, and what is refused before a model is loaded."""

import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_parts import Server
from tunesmith import train
from tunesmith.apps.cli.chat import Remote, Speaker
from tunesmith.apps.cli.main import main
from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import InputError
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.environments.chat import Partner
from tunesmith.learn.environments.sources import opener

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


TOOLS = """
import time


def multiply(a: int, b: int) -> int:
    \"\"\"Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    if a == 13:
        time.sleep(30)
    return a * b


class Game:
    def reset(self, seed=None):
        self.num = 0
        return "Say a word.", {}

    def step(self, action):
        self.num += 1
        return "Another.", 0.5, self.num == 2, False, {}
"""


def call(a: int) -> str:
    return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": 7}}}}</tool_call>'


class Scripted:
    """An engine that says given texts, as a model would that has learnt to call tools; what is asked is in `asked`."""

    name, is_exact = "scripted", True

    def __init__(self, tokenizer, texts: list[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self.asked: list[str] = []

    def generate(self, prompts, n, sampling, *, on_text=None, **_functions):
        ids = encode_prompt(self._tokenizer, prompts[0])
        self.asked.append(self._tokenizer.decode(ids))
        text = self._texts.pop(0)
        drawn = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        logps = (0.0,) * len(drawn)
        on_text(0, 0, text)
        return [Group(prompts[0], ids, (Completion(drawn, logps, logps, text, "length"),), 0)]


def with_tools(tmp_path: Path, *texts: str, **section: object) -> Speaker:
    (tmp_path / "mine.py").write_text(TOOLS)
    loaded, given = tiny_model("llama"), EnvironmentSection(**section)
    given = given if given.is_given else given.model_copy(update={"tools": (f"{tmp_path}/mine.py:multiply",)})
    partner = Partner(opener(given), loaded.tokenizer, given)
    return Speaker("tiny", Scripted(loaded.tokenizer, [*texts]), has_template=True, partner=partner)


def test_a_call_is_made_and_shown_and_the_model_goes_on(tmp_path: Path) -> None:
    asked, pieces = with_tools(tmp_path, call(6), "It is 42.", "Bye."), []
    answer = asked.answer("What is 6 times 7?", SamplingParams(8), pieces.append)
    assert answer.text == "".join(pieces)
    assert answer.text.splitlines() == [call(6), '[call multiply {"a": 6, "b": 7}]', "[answer 42]", "It is 42."]
    assert [one["role"] for one in asked.history] == ["user", "assistant", "tool", "assistant"]
    assert asked.answer("Thanks.", SamplingParams(8)).text == "Bye."
    assert "42" in asked.engine.asked[1] and "It is 42." in asked.engine.asked[2]
    assert all("Multiply two numbers" in prompt for prompt in asked.engine.asked)


def test_what_cannot_be_called_is_told_to_the_model(tmp_path: Path) -> None:
    asked = with_tools(tmp_path, call(6).replace("multiply", "divide"), "<tool_call>{oops</tool_call>", "I give up.")
    text = asked.answer("6 by 7?", SamplingParams(8)).text
    assert "there is no tool 'divide'" in text and text.endswith("I give up.")
    assert text.count("[answer Error: ") == 2


def test_the_model_stops_at_its_turns_and_the_person_goes_on(tmp_path: Path) -> None:
    asked = with_tools(tmp_path, call(1), call(2), "Well.", max_turns=2)
    assert "2 turns (environment.max_turns), so it is your turn" in asked.answer("hi", SamplingParams(8)).text
    assert asked.answer("And?", SamplingParams(8)).text == "Well."


def test_a_call_that_hangs_ends_at_its_limit_and_the_conversation_goes_on(tmp_path: Path) -> None:
    asked = with_tools(tmp_path, call(13), call(6), "42", timeout_s=0.2)
    with pytest.raises(InputError, match=r"longer than 0.2 s \(environment.timeout_s\)"):
        asked.answer("What is 13 times 7?", SamplingParams(8))
    assert [one["role"] for one in asked.history] == ["user"]
    assert asked.answer("And 6?", SamplingParams(8)).text.endswith("[answer 42]\n42")


def test_ctrl_c_leaves_a_call_that_runs(tmp_path: Path) -> None:
    asked = with_tools(tmp_path, call(13), "Hello.")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    answer = asked.answer("What is 13 times 7?", SamplingParams(8))
    assert answer.is_cut and answer.text == call(13)
    assert asked.answer("hello", SamplingParams(8)).text == "Hello."
    assert [one["content"] for one in asked.history] == ["What is 13 times 7?", "hello", "Hello."]


def test_a_game_is_played_to_its_end_and_begins_anew(tmp_path: Path) -> None:
    asked = with_tools(tmp_path, "one", "two", "three", "four", source=f"{tmp_path}/mine.py:Game")
    first = asked.answer("Play.", SamplingParams(8)).text
    assert first.startswith("[environment Say a word.]\none\n[environment Another.]\n[reward 0.5]\ntwo")
    assert first.endswith("[ended: tool_ended, reward 1; your next line begins anew]") and not asked.history
    again = asked.answer("Again.", SamplingParams(8)).text
    assert again == first.replace("two", "four").replace("one", "three", 1)


def test_a_run_has_the_environment_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TOOLS)
    settings = {"rollout.max_new_tokens": 4, "rollout.prompts_per_step": 1, "run.dir": str(tmp_path / "runs")}
    environment = {"source": f"{file}:Game", "max_turns": 2}
    run = train.grpo(
        model="tiny:llama", prompts=["a"], environment=environment, steps=1, progress=False, **settings
    ).run_dir
    words = ["chat", str(run), "--max-new-tokens", "4", "--seed", "1"]

    def said(*flags: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main([*words, *flags]) == 0
        return capsys.readouterr().err

    assert f"was trained with {file}:Game, which it has here too; --no-tools" in said()
    assert "trained with" not in said("--no-tools")
    assert "trained with" not in said("--environment", f"{file}:Game")
    file.unlink()
    assert "which is left out: " in said()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tools", "nothing"], "tool 'nothing' is none of calculator"),
        (["--tools", "calculator", "--no-tools"], "--no-tools leaves them out; give one of both"),
        (["--environment", "./nowhere.py:Game"], "nowhere.py"),
        (["--tools", "calculator", "--environment.timeout-s", "-1"], "environment.timeout_s: -1 given"),
        (["--tool", "calculator"], "'--tool' is no flag of `tunesmith chat`; did you mean --tools?"),
    ],
)
def test_bad_tools_are_refused_before_a_model_is_loaded(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "no/such/model", *flags]) == 2
    assert message in capsys.readouterr().err


def test_tools_need_a_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = tiny_model("llama")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.chat_template = None
    loaded.tokenizer.save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path), "--tools", "calculator"]) == 2
    assert "this one has none; take an instruction-tuned model" in capsys.readouterr().err


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("served"), ("--openai", "tiny:llama")).start()
    yield made
    made.kill()


def test_a_server_answers_in_pieces_and_hears_what_was_said_before(server: Server) -> None:
    asked, pieces = Speaker("served", Remote(f"{server.url}/v1/", server.facts["key"]), has_template=True), []
    answer = asked.answer("hello", SamplingParams(30, seed=1), pieces.append)
    assert len([piece for piece in pieces if piece]) > 1 and "".join(pieces) == answer.text
    asked.answer("again", SamplingParams(5, seed=1, stop_strings=("x",), min_p=0.1, repetition_penalty=1.1))
    with VoteReader.open(server.folder / "votes.db") as store:
        first, second = store.inferences_after(0)
    assert first.choices[0].text == answer.text.replace("\x00", "\ufffd")  # which no database can hold
    assert [message["content"] for message in second.prompt] == ["hello", answer.text, "again"]
    assert (second.options["min_p"], second.options["stop_strings"]) == (0.1, ["x"])


def test_the_command_talks_to_a_server_with_the_key_of_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", server.facts["key"])
    words = ["chat", server.url, "--seed", "3", "--max-new-tokens", "10"]
    said = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].strip()


@pytest.mark.parametrize(
    ("address", "flags", "message"),
    [
        ("{url}", ["--key", "sk-wrong"], "answers 401"),
        ("http://127.0.0.1:1", [], "cannot be asked"),
        ("http://127.0.0.1:port", [], "cannot be asked"),
        ("no/such/model", ["--key", "sk-1"], "--key is for a server"),
        ("{url}", ["--key", "sk-\u20ac"], "cannot be asked"),
        ("http://", [], "names no server"),
        ("{url}", ["--key", "{key}", "--tools", "calculator"], "tools are called by a model that is loaded here"),
    ],
)
def test_a_server_that_cannot_be_talked_to_is_an_error(
    address: str, flags: list[str], message: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(url=server.url, key=server.facts["key"]) for word in (address, *flags)]
    assert main(["chat", *given]) == 2
    assert message in capsys.readouterr().err


def test_what_a_server_refuses_is_told_and_the_conversation_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 9000}\nhello\n"))
    assert main(["chat", server.url, "--key", server.facts["key"], "--seed", "3", "--max-new-tokens", "10"]) == 0
    shown = capsys.readouterr()
    assert "answers 400" in shown.err and "context" in shown.err and shown.out.strip()
