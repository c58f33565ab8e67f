"""Reward functions that are given the instances that trajectories were played with: TRL's argument `environments`."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environments.played import Talks
from tunesmith import train
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import InputError
from tunesmith.engine.batch.rollout import Trajectory
from tunesmith.learn.environments.contract import Reply, Said
from tunesmith.train import RunResult


class Shop:
    """An environment in TRL's form whose value is that of its row."""

    def reset(self, prompt: Sequence[dict[str, str]], **row: object) -> str:
        self.value = float(ord(prompt[-1]["content"][0]))
        return " apples"

    def get_reward(self) -> float:
        return self.value


class Breaks(Talks):
    """Breaks in the first turn of about every other trajectory."""

    def step(self, said: Said) -> Reply:
        if sum(map(ord, said.text)) % 2:
            raise ValueError("odd")
        return super().step(said)


def run(folder: Path, steps: int = 2, **given: Any) -> RunResult:
    options = {
        "environment": {"max_turns": 3, "max_reply_tokens": 16},
        "rollout.max_new_tokens": 8,
        "rollout.prompts_per_step": 3,
        "rollout.completions_per_prompt": 3,
        "run.dir": str(folder),
        "model.dtype": "float32",
        "environment_factory": Talks,
        "prompts": ["a", "b", "c"],
        **given,
    }
    return train.grpo(**{"model": "tiny:llama", "steps": steps, "progress": False, **options})


def turns_of(environments: Sequence[Talks], trajectories: Sequence[Trajectory]) -> list[float]:
    """The turns that each instance counted, which are those of its own trajectory."""
    assert [one.num for one in environments] == [len(one.turns) for one in trajectories]
    assert len(set(map(id, environments))) == len(environments)
    return [float(one.num) for one in environments]


def by_keyword(completions: Sequence[object], **given: Any) -> list[float]:
    return [float(one.num) for one in given["environments"]]


async def asynchronous(environments: Sequence[Talks], **_: object) -> list[float]:
    return [float(one.num) for one in environments]


@pytest.mark.parametrize("reward", [turns_of, by_keyword, asynchronous])
@pytest.mark.parametrize("while_drawing", [False, True])
def test_a_function_has_the_instance_of_each_trajectory_as_it_was_at_the_end(
    reward: Callable[..., Any], while_drawing: bool, tmp_path: Path
) -> None:
    result = run(tmp_path, reward=reward, **{"rollout.score_while_drawing": while_drawing})
    for row in result.metrics:
        assert row[f"rewards/{reward.__name__}/mean"] == pytest.approx(row["environment/turns"])
        assert row["environment/turns"] > 1


def test_greedy_trajectories_are_played_with_other_instances(tmp_path: Path) -> None:
    result = run(tmp_path, reward=turns_of, **{"grpo.baseline": "greedy", "grpo.scale": "none"})
    assert all(row["rewards/turns_of/mean"] == pytest.approx(row["environment/turns"]) for row in result.metrics)


def test_of_several_environments_it_is_that_of_the_row(tmp_path: Path) -> None:
    seen: list[str] = []

    def kinds(prompts: Sequence[Any], environments: Sequence[object]) -> list[float]:
        seen.extend(type(one).__name__ for one in environments)
        assert [isinstance(one, Shop) for one in environments] == ["apples" in str(prompt) for prompt in prompts]
        return [1.0] * len(environments)

    rows = [{"prompt": "a", "environment": "shop"}, {"prompt": "b", "environment": "talk"}]
    given = {"environment_factory": {"shop": Shop, "talk": Talks}, "prompts": rows}
    run(tmp_path, steps=1, reward=kinds, **given, **{"rollout.prompts_per_step": 2})
    assert seen.count("Shop") == seen.count("Talks") == 3


@pytest.mark.parametrize("has_own_reward", [False, True])
def test_a_function_is_not_asked_about_what_the_environment_broke(has_own_reward: bool, tmp_path: Path) -> None:
    def turns(environments: Sequence[Talks]) -> list[float]:
        return [float(one.num) for one in environments]

    source = {} if has_own_reward else {"environment_factory": None}
    section = {"max_turns": 3, "max_reply_tokens": 16, **({} if has_own_reward else {"source": f"{__name__}:Breaks"})}
    row = run(tmp_path, 1, reward=turns, environment=section, **{"environment_factory": Breaks, **source}).metrics[0]
    assert 0 < row["environment/errors"] < 1
    assert row["rewards/num_dropped"] == pytest.approx(9 * row["environment/errors"])
    assert row["rewards/turns/mean"] >= 1
    assert ("rewards/environment/mean" in row) == has_own_reward


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment_factory": None}, "no environment is in this process"),
        ({"environment": {"processes": 1}}, "leave environment.processes at 0"),
        (
            {"reward": RewardSource(source=f"{__name__}:turns_of", workers=1)},
            "its processes have none of the environment's instances; remove its `workers`",
        ),
    ],
)
def test_where_there_are_none_a_function_that_names_them_is_refused(given, message, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path, **{"reward": turns_of, **given})
    assert list(tmp_path.iterdir()) == []


def test_without_an_environment_it_is_a_column(tmp_path: Path) -> None:
    def said(environments: Sequence[object]) -> list[float]:
        assert set(environments) <= {"left", "right"}
        return [float(one == "left") for one in environments]

    rows = [{"prompt": "a", "environments": "left"}, {"prompt": "b", "environments": "right"}]
    result = run(tmp_path, 1, reward=said, prompts=rows, environment_factory=None)
    assert 0 < result.metrics[0]["rewards/said/mean"] < 1


def test_another_process_is_sent_no_instance() -> None:
    trajectory = Trajectory((), (), "completed", 1.0, None, lambda: None)
    sent = pickle.loads(pickle.dumps(trajectory))
    assert sent == trajectory and sent.environment is None
