"""A judge over HTTP: verdicts, the file of answers, limits of cost, and the faults of servers."""

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from judge_server import JudgeServer
from tunesmith.base.config.judge import judge_settings
from tunesmith.base.core.errors import InputError, StoreError
from tunesmith.learn.judges.answers import Answers, PeopleAgreement
from tunesmith.learn.judges.judge import AnswerText, Grade, Judge, PairText, PairVerdict, Unjudged, said_of

JudgeMaker = Callable[..., Judge]
EXPECTED = ["b", "a", "tie", "b", "a", "tie"]


def preferences(found: list[PairVerdict | Unjudged]) -> list[str]:
    return [one.preference if isinstance(one, PairVerdict) else one.kind for one in found]


def test_a_pair_is_shown_in_both_orders_and_asked_once(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]
):
    found = judge_of().pairs([*pairs, pairs[0]])
    assert preferences(found) == [*EXPECTED, "b"]
    assert server.num_requests == 12, "equal questions are one"
    assert all(one.reasons.startswith("Because") for one in found if isinstance(one, PairVerdict))
    body = server.bodies[0]
    assert body["model"] == "rater-1" and body["temperature"] == 0 and body["max_tokens"] == 512
    again = judge_of()
    assert preferences(again.pairs(pairs)) == EXPECTED and server.num_requests == 12
    assert (again.answers.costs.num_requests, again.answers.costs.num_tokens) == (12, server.num_tokens)
    assert server.most_running <= again.settings.concurrency


def test_what_the_order_decides_is_a_tie(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.verdict = lambda *_: "A"
    found = judge_of().pairs(pairs)
    assert all(isinstance(one, PairVerdict) and one.preference == "tie" and one.order_decided for one in found)
    server.verdict = lambda *_: "C"
    found = judge_of(rubric="Another.").pairs(pairs)
    assert all(isinstance(one, PairVerdict) and one.preference == "tie" and not one.order_decided for one in found)


def test_equal_answers_are_a_tie_without_a_request(server: JudgeServer, judge_of: JudgeMaker):
    (found,) = judge_of().pairs([PairText("p", "same ", " same")])
    assert found == PairVerdict("tie", order_decided=False) and server.num_requests == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rubric": "The shorter one is better."},
        {"served_model": "rater-2"},
        {"options": {"top_p": 0.5}},
        {"temperature": 0.5},
        {"seed": 1},
        {"explain": False},
    ],
)
def test_an_answer_belongs_to_model_rubric_texts_and_options(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], change: dict[str, object]
):
    judge_of().pairs(pairs[:1])
    other = judge_of(**change)
    other.pairs(pairs[:1])
    assert server.num_requests == 4
    assert other.identity != judge_of().identity
    assert judge_of(most_requests=5, concurrency=1, timeout_s=9).identity == judge_of().identity


def test_grades_are_from_0_to_1(server: JudgeServer, judge_of: JudgeMaker):
    server.grade = lambda text: {"bad": 1, "good": "4.0", "best": "5/5", "off": 9}[text]
    judge = judge_of(mode="graded", tries=1)
    given = [AnswerText("p", text) for text in ("bad", "good", "best", "off")]
    found = judge.grades(given)
    assert [one.value for one in found if isinstance(one, Grade)] == [0.0, 0.75, 1.0]
    assert isinstance(found[3], Unjudged) and found[3].kind == "unreadable"
    pair, tie = judge.preferences([PairText("p", "bad", "best"), PairText("p", "good", "good ")])
    assert preferences([pair, tie]) == ["b", "tie"]


FAULTS = (
    "drop",
    "restart",
    "cut",
    "twice",
    "garbage",
    "nonsense",
    "both",
    "empty",
    "limited",
    "overloaded",
    "no usage",
    "null usage",
    "no tokens",
    "minus",
    "many tokens",
    "deep",
    "endless",
    "created",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_changes_no_verdict_and_loses_none(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], fault: str
):
    server.faults = dict.fromkeys((0, 5, 9), fault)
    most = 30 if fault == "restart" else 15  # where others lose their connections too
    judge = judge_of(most_requests=most)
    assert preferences(judge.pairs(pairs)) == EXPECTED
    assert server.num_requests <= most
    costs = judge.answers.costs
    # A request that was lost before the server saw it is counted all the same.
    assert costs.num_requests >= server.num_requests and costs.num_tokens >= server.num_tokens
    assert preferences(judge_of().pairs(pairs)) == EXPECTED
    assert judge.answers.costs == costs


@pytest.mark.parametrize("model", [None, "", 7, {"name": "rater-1"}])
def test_a_server_whose_model_has_no_name_is_not_asked(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], model: object
):
    server.model = model
    (found,) = judge_of(patience_s=0).pairs(pairs[:1])
    assert isinstance(found, Unjudged) and found.kind == "away" and "lists no model" in found.message
    assert server.num_requests == 0


def test_a_name_of_a_model_that_is_no_unicode_is_kept(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.model = "rater \ud800"
    assert preferences(judge_of().pairs(pairs)) == EXPECTED
    assert judge_of().name == "rater ?"


def test_a_slow_server_is_given_up_and_asked_again(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {0: "hang", 3: "dribble"}
    judge = judge_of(timeout_s=2)
    assert preferences(judge.pairs(pairs)) == EXPECTED
    assert server.num_requests == 14


@pytest.mark.parametrize("fault", ["slow header", "continue"])
def test_a_time_limit_is_one_of_the_whole_answer(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], fault: str
):
    server.faults = {-1: fault}
    (found,) = judge_of(timeout_s=1, patience_s=0).pairs(pairs[:1])
    assert isinstance(found, Unjudged) and found.kind == "away" and "no answer in 1 s" in found.message


def test_a_server_that_sends_on_is_not_followed(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {-1: "moved"}
    found = judge_of(concurrency=1).pairs(pairs)
    assert preferences(found) == ["fatal"] * 6 and server.num_requests == 1
    assert "it sends on to https://elsewhere.example/v1: give the address that answers" in str(found[0])


def test_a_server_that_asks_to_wait_is_left_alone(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults, server.retry_after = {0: "limited"}, "1"
    judge = judge_of(concurrency=1)
    began_s = time.monotonic()
    assert preferences(judge.pairs(pairs[:1])) == ["b"]
    assert time.monotonic() - began_s >= 1 and server.num_requests == 3
    server.faults, server.retry_after = {-1: "limited"}, "3600"
    (found,) = judge_of(rubric="Another.").pairs(pairs[:1])
    assert isinstance(found, Unjudged) and found.kind == "away" and "asks to wait 3600 s" in found.message


def test_a_server_that_dies_leaves_what_it_said(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {5: "die"}
    settings = {"patience_s": 1, "concurrency": 1, "served_model": "rater-1"}
    found = judge_of(**settings).pairs(pairs)
    assert preferences(found) == ["b", "a", "away", "away", "away", "away"]
    unjudged = [one for one in found if isinstance(one, Unjudged)]
    assert said_of(unjudged, 6).startswith("4 of 6 were not judged (4 away: http")
    server.faults = {}
    server.start()
    assert preferences(judge_of(**settings).pairs(pairs)) == EXPECTED
    assert server.num_requests == 5 + 1 + 7


@pytest.mark.parametrize("concurrency", [1, 8])
def test_requests_never_exceed_their_limit_and_what_was_said_is_kept(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], concurrency: int
):
    server.faults = dict.fromkeys((1, 2), "nonsense")
    seen = 0
    for most in (7, 9, 14):
        found = judge_of(most_requests=most, concurrency=concurrency).pairs(pairs)
        assert server.num_requests <= most
        seen = server.num_requests
    assert preferences(found) == EXPECTED and seen == 14
    found = judge_of(most_requests=14, rubric="Another.").pairs(pairs[:1])
    assert preferences(found) == ["limit"] and server.num_requests == 14
    assert "14 of 14 requests (most_requests) are used up" in str(found[0])


def test_tokens_never_exceed_their_limit(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {0: "drop", 4: "garbage"}
    judge = judge_of(most_tokens=6000, answer_tokens=100)
    found = judge.pairs(pairs)
    assert "limit" in preferences(found)
    assert 0 < server.num_tokens <= judge.answers.costs.num_tokens <= 6000
    assert preferences(judge_of(most_tokens=60_000, answer_tokens=100).pairs(pairs)) == EXPECTED


def test_a_question_that_is_refused_is_left_out(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {0: "too long"}
    found = judge_of(concurrency=1).pairs(pairs)
    assert preferences(found) == ["refused", *EXPECTED[1:]]
    server.faults = {-1: "too long"}
    many = [PairText(f"p {i}", "one", "other") for i in range(20)]
    found = judge_of(rubric="Another.", concurrency=1).pairs(many)
    assert {one.kind for one in found if isinstance(one, Unjudged)} == {"refused", "fatal"}
    assert server.num_requests == 12 + 8


def test_a_key_comes_from_the_environment(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], monkeypatch: pytest.MonkeyPatch
):
    server.key = "secret"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (found,) = judge_of().pairs(pairs[:1])
    assert isinstance(found, Unjudged) and found.kind == "fatal"
    assert "its key is read from OPENAI_API_KEY, which is not set" in found.message
    monkeypatch.setenv("RATER_KEY", "secret")
    assert preferences(judge_of(key_variable="RATER_KEY").pairs(pairs[:1])) == ["b"]
    assert b"secret" not in (Path(judge_of().settings.answers)).read_bytes()


def test_a_key_is_shown_nowhere(
    server: JudgeServer,
    judge_of: JudgeMaker,
    pairs: list[PairText],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.faults = {-1: "echo"}
    (found,) = judge_of(served_model="m").pairs(pairs[:1])
    assert isinstance(found, Unjudged) and "answers 401" in found.message
    for key in ("sk-very\n-secret", "sk-very\u2026-secret"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(InputError, match="OPENAI_API_KEY has a line break or another character") as caught:
            judge_of().pairs(pairs[:1])
        assert "secret" not in str(caught.value)
    for source in ("http://me:very-secret@127.0.0.1:1", "http://127.0.0.1:1/v1?key=very-secret"):
        with pytest.raises(InputError, match=r"leave (them|it) out") as caught:
            judge_settings(f"judge:{source}")
        assert "secret" not in str(caught.value)
    assert "secret" not in found.message and "secret" not in caplog.text


def test_any_text_is_judged(server: JudgeServer, judge_of: JudgeMaker):
    """Half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    found = judge_of().pairs([PairText("p \ud800", "a \ud800", "longer \0 \udc00")])
    assert preferences(found) == ["b"]


def test_a_server_that_is_not_there_is_an_input_error(judge_of: JudgeMaker):
    with pytest.raises(InputError, match=r"the judge cannot be asked: http://127\.0\.0\.1:9"):
        _ = judge_of(model="http://127.0.0.1:9", patience_s=0).name
    with pytest.raises(InputError, match="`model` is 'http://'; give one such as http"):
        judge_settings("judge:http://")


def test_a_file_that_is_no_file_of_answers_is_refused(judge_of: JudgeMaker, tmp_path: Path):
    (tmp_path / "text.db").write_text("no database at all, but some text" * 40)
    with pytest.raises(StoreError, match=r"text\.db cannot be used as a file of answers"):
        judge_of(answers=str(tmp_path / "text.db"))


def test_a_damaged_file_of_answers_is_refused(judge_of: JudgeMaker, pairs: list[PairText], tmp_path: Path):
    judge = judge_of()
    judge.pairs(pairs[:1])
    judge.set_agreement(PeopleAgreement(0.5, 0.4, 0.6, 10, 5, None, "somewhere"))
    damages = {
        "UPDATE agreements SET facts = '[]'": "an agreement with people in it is damaged",
        "UPDATE answers SET text = x'00ff'": "an answer in it is no text",
        "UPDATE costs SET num_requests = -5": "its costs are damaged",
        "DROP TABLE answers; CREATE TABLE votes (id)": "it is another database, with votes",
    }
    judge.answers.close()
    whole = judge.answers.path.read_bytes()
    for damage, message in damages.items():
        judge.answers.path.write_bytes(whole)
        connection = sqlite3.connect(judge.answers.path)
        connection.executescript(damage)
        connection.close()
        with pytest.raises(StoreError, match=message):
            again = judge_of()
            _ = again.pairs(pairs[:1]), again.agreement, again.answers.costs
    connection = sqlite3.connect(judge.answers.path)
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'answers'").fetchall() == []


ASKING = """
import json, sys
from tunesmith.base.config.judge import JudgeSettings
from tunesmith.learn.judges.judge import PairText, open_judge
settings, pairs = json.loads(sys.argv[1])
judge = open_judge(JudgeSettings.model_validate(settings))
for verdict in judge.pairs([PairText(*pair) for pair in pairs]):
    print(getattr(verdict, "preference", "none"), flush=True)
"""


def test_a_killed_process_goes_on_and_its_requests_stay_counted(
    server: JudgeServer, judge_of: JudgeMaker, tmp_path: Path
):
    pairs = [(f"prompt {i}", "x" * (i + 1), "y" * (2 * i + 2)) for i in range(20)]
    server.verdict = lambda a, b: (time.sleep(0.02), "A" if len(a) > len(b) else "B")[1]
    settings = {"model": server.url, "answers": str(tmp_path / "answers.db"), "most_requests": 70, "concurrency": 4}
    words = [sys.executable, "-c", ASKING, json.dumps([settings, pairs])]
    for num_seen in (5, 17):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ)
        while server.num_requests < num_seen and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    out = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert out.split() == ["b"] * 20
    costs = Answers(tmp_path / "answers.db").costs
    assert 40 <= server.num_requests <= costs.num_requests <= 40 + 2 * 4
    assert costs.num_tokens >= server.num_tokens


def test_several_processes_share_a_limit(server: JudgeServer, judge_of: JudgeMaker, tmp_path: Path):
    pairs = [(f"prompt {i}", "x" * (i + 1), "y" * (2 * i + 2)) for i in range(12)]
    settings = {"model": server.url, "answers": str(tmp_path / "answers.db"), "most_requests": 15, "concurrency": 4}
    sets = (pairs[:8], pairs[4:])
    words = [[sys.executable, "-c", ASKING, json.dumps([settings, some])] for some in sets]
    started = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in words]
    said = [process.communicate()[0].split() for process in started]
    assert all(process.returncode == 0 for process in started)
    assert server.num_requests == 15
    assert set(itertools.chain(*said)) == {"b", "none"}


def test_what_one_process_asks_others_do_not(server: JudgeServer, judge_of: JudgeMaker, tmp_path: Path):
    pairs = [(f"prompt {i}", "x" * (i + 1), "y" * (2 * i + 2)) for i in range(12)]
    server.verdict = lambda a, b: (time.sleep(0.05), "A" if len(a) > len(b) else "B")[1]
    settings = {"model": server.url, "answers": str(tmp_path / "answers.db"), "concurrency": 3}
    words = [sys.executable, "-c", ASKING, json.dumps([settings, pairs])]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].split() for process in started] == [["b"] * 12] * 2
    assert server.num_requests == 24 == Answers(tmp_path / "answers.db").costs.num_requests


def test_an_interrupt_ends_what_runs(server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]):
    server.faults = {-1: "hang"}
    judge = judge_of(timeout_s=300)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        judge.pairs(pairs)
    assert time.monotonic() - began_s < 100
