import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.calling import FunctionReward, function_name
from tunesmith.learn.rewards.functions import load_function
from tunesmith.learn.rewards.outcome import Sample, samples_of

GroupMaker = Callable[..., Group]
USER = {"role": "user", "content": "Hello"}


@pytest.fixture
def samples(make_group: GroupMaker) -> list[Sample]:
    return samples_of([make_group("It was", " good", " bad", id="p.jsonl:7", columns={"answer": 4})])


def test_functions_are_found_in_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "helper_of_rewards.py").write_text("BONUS = 2.0\n")
    (tmp_path / "my_rewards_file.py").write_text(
        "import helper_of_rewards\n"
        "def bonus(completions, **kwargs):\n"
        "    return [helper_of_rewards.BONUS] * len(completions)\n"
        "class Holder:\n"
        "    inner = bonus\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for place in (
        "./my_rewards_file.py",
        "my_rewards_file.py",
        str(tmp_path / "my_rewards_file.py"),
        "my_rewards_file",
    ):
        assert load_function(f"{place}:bonus")(completions=["a", "b"]) == [2.0, 2.0]
    assert load_function("my_rewards_file:Holder.inner")(completions=["a"]) == [2.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./absent.py:score", r"the file absent.py does not exist; write `./file.py:name`"),
        (
            "no_such_package.rewards:score",
            "there is no module `no_such_package`; for a file write `./no_such_package.py",
        ),
        ("json.nothing:dumps", "fails to import: ModuleNotFoundError"),
        ("a b:score", "'a b' is no module path"),
        (":score", "names no function"),
        ("./rewards.py:", "names no function"),
        ("./rewards.py:scor", r"has no `scor`; did you mean `score`\?"),
        ("./rewards.py:zzz", "has no `zzz`; it has `score`"),
        ("./rewards.py:LIMIT", "is of type int, which cannot be called"),
        ("./rewards.py:Thing", "is a class; name a function"),
        ("./broken.py:score", r"fails to import: SyntaxError"),
        ("./raising.py:score", r"fails to import: ZeroDivisionError: division by zero \(raising.py, line 2\)"),
    ],
)
def test_what_cannot_be_loaded_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str):
    (tmp_path / "rewards.py").write_text("LIMIT = 3\nclass Thing: ...\ndef score(completions): return []\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "raising.py").write_text("x = 0\n1 / x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RewardError, match=message):
        load_function(source)


def test_the_call_is_trls(samples: list[Sample]):
    seen: dict[str, object] = {}

    def record(prompts, completions, completion_ids, answer, **kwargs):
        seen.update(locals())
        return [1.0, None]

    assert FunctionReward(record).score(samples, {"trainer_state": "state"}) == [1.0, None]
    assert seen["prompts"] == ["It was", "It was"]
    assert seen["completions"] == [" good", " bad"]
    assert seen["completion_ids"] == [list(sample.completion.token_ids) for sample in samples]
    assert seen["answer"] == [4, 4]
    kwargs = seen["kwargs"]
    assert isinstance(kwargs, dict) and kwargs.keys() == {"trainer_state", "log_extra", "log_metric"}
    assert kwargs["trainer_state"] == "state"


def test_conversations_are_lists_of_messages(make_group: GroupMaker):
    seen: dict[str, object] = {}

    def record(**kwargs):
        seen.update(kwargs)
        return [0.0]

    FunctionReward(record).score(samples_of([make_group((USER,), "Hi")]))
    assert seen["prompts"] == [[USER]]
    assert seen["completions"] == [[{"role": "assistant", "content": "Hi"}]]


def test_a_row_without_a_column_gives_none_and_trls_own_columns_are_left_out(make_group: GroupMaker):
    groups = [
        make_group("a", "x", columns={"answer": 1, "completion": "gold"}),
        make_group("b", "y", columns={"level": 2}),
    ]
    seen: dict[str, object] = {}

    def record(answer, level, **kwargs):
        seen.update(answer=answer, level=level, kwargs=kwargs)
        return [0.0, 0.0]

    FunctionReward(record).score(samples_of(groups))
    assert (seen["answer"], seen["level"]) == ([1, None], [None, 2])
    assert "completion" not in seen["kwargs"]


def test_a_function_without_kwargs_receives_what_it_names(samples: list[Sample]):
    def only(completions, answer, scale=3.0):
        return [scale * len(text) for text in completions]

    assert FunctionReward(only).score(samples, {"trainer_state": None}) == [15.0, 12.0]


def test_a_missing_column_is_named(samples: list[Sample]):
    def needs(completions, solution, **kwargs):
        return []

    with pytest.raises(
        RewardError, match=r"reward `needs` needs `solution`, but the prompts have no such column; .*`answer`"
    ):
        FunctionReward(needs).score(samples)


def test_what_one_function_changes_the_next_does_not_see(samples: list[Sample]):
    def clear(completions, **kwargs):
        completions.clear()
        return [0.0, 0.0]

    FunctionReward(clear).score(samples)
    assert FunctionReward(lambda completions: [len(c) for c in completions], "count").score(samples) == [5.0, 4.0]


def test_names_are_those_of_the_functions():
    def named(completions):
        return []

    class Judge:
        def __call__(self, completions):
            return []

    assert function_name(named) == "named"
    assert function_name(functools.partial(functools.partial(named), completions=[])) == "named"
    assert function_name(Judge()) == "Judge"
