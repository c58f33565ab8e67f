"""Policies that learn from trajectories: the trainer's log-probs are the engine's, and nothing that was not sampled is
learnt."""

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.environments.played import Talks
from tunesmith import train
from tunesmith.base.core.errors import EnvironmentFailedError, InputError, RunError
from tunesmith.base.runs.folder import MEASURED
from tunesmith.engine.batch.rollout import StopReason
from tunesmith.learn.environments.contract import Reply, Said
from tunesmith.observe.reports.text import answer_text
from tunesmith.train import RunResult


class TalksSlowly(Talks):
    delays = random.Random(0)

    def step(self, said: Said) -> Reply:
        time.sleep(self.delays.choice((0.0, 0.01, 0.03)))
        return super().step(said)


def run(algorithm: str, folder: Path, steps: int = 3, **given: Any) -> RunResult:
    options = {
        "environment": {"max_turns": 3, "max_reply_tokens": 16},
        "rollout.max_new_tokens": 8,
        "rollout.prompts_per_step": 3,
        "run.dir": str(folder),
        "optimizer.learning_rate": 1e-3,
        "model.dtype": "float32",
        "environment_factory": Talks,
        **given,
    }
    return getattr(train, algorithm)(
        model="tiny:llama", prompts=["a", "b", "c"], steps=steps, progress=False, **options
    )


def digest(result: RunResult) -> bytes:
    return (result.run_dir / "final" / "model.safetensors").read_bytes()


def timeless(result: RunResult) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in result.metrics]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "best_of_n", "online_dpo"])
def test_what_was_sampled_is_learnt_with_the_engines_log_probs(algorithm, tmp_path) -> None:
    result = run(algorithm, tmp_path)
    rows = result.metrics
    assert len(rows) == 3
    assert all(row["environment/turns"] > 1 for row in rows)
    assert all(row["environment/errors"] == 0 for row in rows)
    if algorithm in ("grpo", "ppo"):
        assert all(row["rollout/logp_diff_max"] == 0.0 for row in rows)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_delays_and_workers_change_nothing(algorithm, tmp_path) -> None:
    once = run(algorithm, tmp_path / "once")
    slow = run(algorithm, tmp_path / "slow", environment_factory=TalksSlowly)
    assert digest(once) == digest(slow)
    assert timeless(once) == timeless(slow)


def test_workers_draw_the_same_trajectories(tmp_path) -> None:
    once = run("grpo", tmp_path / "once")
    both = run("grpo", tmp_path / "both", **{"scale.workers": 2})
    assert digest(once) == digest(both)


def test_turns_are_compared_with_those_of_the_same_place(tmp_path) -> None:
    whole = run("grpo", tmp_path / "whole")
    turns = run("grpo", tmp_path / "turns", **{"grpo.turn_advantages": True})
    assert whole.metrics[0]["reward"] == turns.metrics[0]["reward"]
    assert digest(whole) != digest(turns)


class TalksOnce(Talks):
    """Raises in the third step, as a run ends that is killed between two turns of a trajectory."""

    is_fatal = False
    num_resets = 0

    def step(self, said: Said) -> Reply:
        if self.is_fatal and self.num_resets > 6 and self.num == 1:
            raise KeyboardInterrupt
        return super().step(said)

    def reset(self, row: Mapping[str, object]) -> str:
        type(self).num_resets += 1
        return super().reset(row)


def test_a_run_that_ends_inside_of_a_trajectory_goes_on_as_if_it_had_not(tmp_path) -> None:
    options: dict[str, Any] = {
        "rollout.completions_per_prompt": 2,
        "rollout.prompts_per_step": 3,
        "run.checkpoint_every": 1,
    }
    options["environment_factory"] = TalksOnce
    whole = run("grpo", tmp_path / "whole", **options)
    TalksOnce.is_fatal, TalksOnce.num_resets = True, 0
    with pytest.raises(KeyboardInterrupt):
        run("grpo", tmp_path / "cut", **options)
    TalksOnce.is_fatal = False
    (cut,) = (tmp_path / "cut").iterdir()
    again = train.resume(cut, prompts=["a", "b", "c"], environment_factory=TalksOnce, progress=False)
    assert digest(again) == digest(whole)
    assert timeless(again)[-1] == timeless(whole)[-1]


def test_the_environments_reward_stands_beside_those_of_the_recipe_once(tmp_path) -> None:
    def names(**given: Any) -> set[str]:
        row = run("grpo", tmp_path, steps=1, **given).metrics[0]
        return {name.split("/")[1] for name in row if name.startswith("rewards/") and name.endswith("/mean")}

    assert names() == {"environment"}
    assert names(reward="environment") == {"environment"}
    assert names(reward="unique_chars") == {"unique_chars", "environment"}
    assert names(reward=lambda completions, **_: [1.0] * len(completions)) == {"<lambda>", "environment"}
    (tmp_path / "own.yaml").write_text("reward: unique_chars\n")
    assert names(config=str(tmp_path / "own.yaml")) == {"unique_chars", "environment"}


def test_what_a_run_was_given_must_be_given_again(tmp_path) -> None:
    class Other(Talks):
        def reward(self) -> float | None:
            return 1.0

    first = run("grpo", tmp_path, steps=1)
    with pytest.raises(RunError, match="the environment"):
        train.resume(first.run_dir, prompts=["a", "b", "c"], environment_factory=Other, steps=2, progress=False)


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt, ZeroDivisionError, EnvironmentFailedError])
def test_every_episode_is_closed_however_the_run_ends(ends, tmp_path) -> None:
    made: list[Talks] = []

    class Counted(Talks):
        num_closed = 0

        def __init__(self) -> None:
            made.append(self)

        def step(self, said: Said) -> Reply:
            if ends is not None and len(made) > 6:
                raise ends
            return super().step(said)

        def close(self) -> None:
            self.num_closed += 1

    options: dict[str, Any] = {"rollout.completions_per_prompt": 2, "environment_factory": Counted}
    if ends is None:
        run("grpo", tmp_path, steps=1, **options)
        assert len(made) == 6
    else:
        with pytest.raises(EnvironmentFailedError if ends is ZeroDivisionError else ends):
            run("grpo", tmp_path, steps=1, **{**options, "rollout.completions_per_prompt": 4})
        assert len(made) == 12
    assert [one.num_closed for one in made] == [1] * len(made)


def test_what_is_wrong_with_an_environment_is_said_before_a_run_folder_is_made(tmp_path) -> None:
    class NoHints:
        def reset(self, **row: object) -> None:
            return None

        def look(self, place):
            """Look."""

    for given, message in (
        ({"environment_factory": NoHints}, "tool `look` has no schema"),
        ({"environment_factory": Talks, "environment": {"source": "./x.py:Env"}}, "give one of them"),
        ({"environment_factory": Talks()}, "give a class, or a function that makes one"),
        ({"tools": ["calculater"], "environment_factory": None}, "is none of calculator, search, python"),
        ({"environment": "textrena:Wordle-v0", "environment_factory": None}, "did you mean `textarena:Wordle-v0`"),
    ):
        with pytest.raises(InputError, match=message):
            run("grpo", tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_the_report_shows_turns_calls_and_rewards(tmp_path) -> None:
    result = run("grpo", tmp_path)
    row = json.loads((result.run_dir / "samples.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in row["messages"]][:2] == ["assistant", "user"]
    assert row["stop_reason"] in get_args(StopReason)
    text = answer_text(row)
    assert "[reward " in text and f"[ended: {row['stop_reason']}]" in text
