"""Reward functions that change what they are given, return what has no order, or change between a run and its
resume."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunesmith import Completion, Group, Prompt, Scorer, train
from tunesmith.base.core.errors import RewardError, RunError
from tunesmith.learn.rewards.functions import identity_of

MESSAGES = ({"role": "user", "content": "Hi"},)


def group(**columns: object) -> Group:
    """A group of two completions of one prompt with these columns."""
    one = Completion((1,), logps=(-0.5,), raw_logps=(-0.5,), text="Yes.", finish_reason="stop")
    return Group(Prompt("p:1", MESSAGES, columns), (5,), (one, one), weight_version=0)


def grows(prompts: Any, completions: Any, answer: Any, nested: Any, **_: object) -> list[float]:
    """Changes all that it is given; the length of `answer` as it came."""
    lengths = [float(len(one)) for one in answer]
    for row, deep, prompt, completion in zip(answer, nested, prompts, completions, strict=True):
        row.append("seen")
        deep["list"].append(1)
        prompt[0]["content"] = completion[0]["content"] = ""
    return lengths


class Judge:
    """An object as a reward that changes the columns of its samples."""

    name = "judge"

    def score(self, samples: Sequence[Any]) -> list[float | None]:
        """As `grows`."""
        lengths: list[float | None] = [float(len(one.prompt.columns["answer"])) for one in samples]
        for one in samples:
            one.prompt.columns["answer"].append("seen")
            one.prompt.columns["nested"] = None
            one.prompt.content[0]["content"] = ""
        return lengths


@pytest.mark.parametrize("reward", [grows, Judge()], ids=["function", "object"])
def test_a_reward_cannot_change_the_data_set(reward: Any) -> None:
    """It appended to a list of its column, which was longer at each step. Reported: issue 45.7."""
    given, scorer = group(answer=["a"], nested={"list": [0]}), Scorer([reward])
    assert [scorer.score([given]).total_PG.tolist() for _ in range(3)] == [[[1.0, 1.0]]] * 3
    assert given.prompt == Prompt("p:1", MESSAGES, {"answer": ["a"], "nested": {"list": [0]}})


def test_the_rows_of_the_caller_stay_as_they_are(tmp_path: Path) -> None:
    """The same over the steps of a run, and in the list that was given. Reported: issue 45.7."""
    seen: list[list[int]] = []

    def note(completions: list[str], answer: list[list[str]]) -> list[float]:
        seen.append([len(one) for one in answer])
        for one in answer:
            one.append("seen")
        return [float(index) for index, _ in enumerate(completions)]

    rows = [{"prompt": "The cat", "answer": ["a"]}, {"prompt": "The dog", "answer": ["b"]}]
    rollout = {"prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 2}
    options = {"rollout": rollout, "run": {"dir": str(tmp_path)}, "progress": False}
    train.grpo(model="tiny:llama", prompts=rows, reward=note, steps=3, **options)  # type: ignore[arg-type]
    assert seen == [[1, 1, 1, 1]] * 3
    assert [row["answer"] for row in rows] == [["a"], ["b"]]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_rewards_in_a_set_are_refused(kind: Callable[[Any], object]) -> None:
    """A set of scores has no order, and forgets equal ones. Reported: issue 45.7."""
    with pytest.raises(RewardError, match=r"an object of type (frozen)?set, which has no order"):
        Scorer([lambda completions, **_: kind([1.0, 2.0])]).score([group()])  # type: ignore[list-item]


def closing_over(number: int) -> Callable[..., list[float]]:
    """A reward that returns `number`."""

    def constant(completions: list[str], **_: object) -> list[float]:
        return [float(number) for _ in completions]

    return constant


def test_a_function_is_told_by_its_source_and_its_constants() -> None:
    """`train.resume` went on with another function. Reported: issue 45.8."""
    assert identity_of(closing_over(1)) == identity_of(closing_over(1)) != identity_of(closing_over(2))
    assert identity_of(functools.partial(grows, n=1)) != identity_of(functools.partial(grows, n=2))
    assert identity_of(lambda completions: [0.0]) != identity_of(lambda completions: [1.0])
    assert identity_of(Judge()) == identity_of(Judge())


def test_a_run_goes_on_with_its_own_function_alone(tmp_path: Path) -> None:
    """The docs say that another one is refused. Reported: issue 45.8."""
    rollout = {"prompts_per_step": 2, "max_new_tokens": 2}
    options = {"rollout": rollout, "run": {"dir": str(tmp_path)}, "progress": False}
    started = train.ppo(model="tiny:llama", prompts=["a", "b"], reward=closing_over(1), steps=1, **options)  # type: ignore[arg-type]
    for other in (closing_over(2), "length", [closing_over(1), "length"]):
        with pytest.raises(RunError, match=r"cannot be resumed: the reward"):
            train.resume(started.run_dir, prompts=["a", "b"], reward=other, steps=2, progress=False)  # type: ignore[arg-type]
    again = train.resume(started.run_dir, prompts=["a", "b"], reward=closing_over(1), steps=2, progress=False)
    assert [row["step"] for row in again.metrics] == [1, 2]


def test_a_function_that_changes_the_working_directory_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People's rewards run code in other folders; the run could not write any more. Reported: a tester."""
    monkeypatch.chdir(tmp_path)
    away = tmp_path / "away"

    def wanders(completions: Sequence[str], **_: object) -> list[float]:
        away.mkdir(exist_ok=True)
        os.chdir(away)
        return [float(len(completion)) for completion in completions]

    result = train.grpo(model="tiny:llama", prompts=["a", "b"], reward=wanders, steps=2, progress=False)
    assert Path.cwd() == tmp_path and len(result.metrics) == 2 and not list(away.iterdir())


def test_a_reward_whose_square_is_no_number_is_refused() -> None:
    """People's rewards grow without bound; the deviation was infinite, and nothing was learnt. Reported: a tester."""
    scorer = Scorer([lambda completions, **_: [1e20 for _ in completions]])
    with pytest.raises(RewardError, match="a finite number of at most 1e18 in size"):
        scorer.score([group()])
