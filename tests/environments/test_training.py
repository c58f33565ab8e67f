"""Policies that learn from trajectories: the trainer's log-probs are the engine's, and nothing that was not sampled is
learnt."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.environments.played import Talks
from tunesmith import train
from tunesmith.base.core.errors import EnvironmentFailedError, InputError, RunError
from tunesmith.base.runs.folder import MEASURED
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group, StopReason, Trajectory, Turn
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.learn.environments.contract import Reply, Said, ToolEpisode
from tunesmith.learn.trainers import metrics
from tunesmith.learn.trainers.grpo import turn_states
from tunesmith.observe.reports.text import answer_text
from tunesmith.train import RunResult

A = [{"prompt": "a", "environment": "a"}]


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
    given = {"model": "tiny:llama", "prompts": ["a", "b", "c"], "steps": steps, "progress": False}
    return getattr(train, algorithm)(**{**given, **options})


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


def test_turns_are_compared_by_their_place_or_by_their_state(tmp_path) -> None:
    given = ("none", False, "place", True, "anchor")
    runs = [run("grpo", tmp_path / str(one), steps=1, **{"grpo.turn_advantages": one}) for one in given]
    assert len({one.metrics[0]["reward"] for one in runs}) == 1
    none, off, place, on, anchor = map(digest, runs)
    assert none == off and place == on and len({none, place, anchor}) == 3
    assert 0 < runs[-1].metrics[0]["groups/anchored_turns"] <= 1
    whole = run("grpo", tmp_path, steps=1, **{"grpo.turn_advantages": "anchor", "grpo.anchor_coef": 0.0})
    assert digest(whole) == none


def trajectory(*answers: str, rewards: Sequence[float | None]) -> Completion:
    """A completion of turns of one token each, answered so."""
    said: list[Mapping[str, object]] = []
    for answer in (*answers, None):
        said += [{"role": "assistant", "content": "a"}, *([{"role": "user", "content": answer}] if answer else [])]
    turns = tuple(Turn(2 * place, 2 * place + 1, reward) for place, reward in enumerate(rewards))
    logps = (0.0,) * (2 * len(rewards))
    return Completion((1,) * len(logps), logps, logps, "a", "stop", trajectory=Trajectory(turns, said, "completed"))


def test_turns_that_answer_the_same_have_the_same_state_in_their_group() -> None:
    first = trajectory("left", "right", "left", rewards=(0, 0, 0, 1))
    second = trajectory("right", rewards=(0, None))
    groups = [Group(Prompt(name, "b"), (1,), (first, second), 0) for name in "cd"]
    start, left, right = 0, 1, 2
    assert turn_states(groups, 4).tolist() == [[[start, left, right, left], [start, right, 0, 0]]] * 2


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


class Silent(Talks):
    """Gives nothing to trajectories that begin with some words, and breaks others, if told to."""

    breaks = False

    def step(self, said: Said) -> Reply:
        self.is_odd = sum(map(ord, said.text)) % 2
        if self.breaks and self.is_odd:
            raise ValueError("odd")
        return Reply(done=True)

    def reward(self) -> float | None:
        return None if self.is_odd else 0.25


class Breaking(Silent):
    breaks = True


@pytest.mark.parametrize(("environment", "num_dropped"), [(Silent, 0), (Breaking, 1)])
def test_a_trajectory_without_a_reward_has_the_others_alone_and_a_broken_one_none(
    environment: type[Silent], num_dropped: int, tmp_path
) -> None:
    row = run("grpo", tmp_path, steps=1, environment_factory=environment).metrics[0]
    beside = {"environment_factory": environment, "reward": lambda completions, **_: [2.0] * len(completions)}
    both = run("grpo", tmp_path, steps=1, **beside).metrics[0]
    assert row["rewards/num_dropped"] > 0 and row["reward"] == 0.25, "nothing applies to the others"
    assert both["rewards/num_dropped"] == num_dropped * row["rewards/num_dropped"]
    assert both["rewards/environment/mean"] == 0.25 and both["rewards/<lambda>/mean"] == 2.0
    assert (both["reward"] == 2.25) == (environment is Breaking)


def test_without_get_reward_an_episode_is_worth_what_its_turns_earned() -> None:
    class Shop:
        def reset(self, **row: object) -> None:
            return None

    class Judged(Shop):
        def get_reward(self) -> float | None:
            return None

    assert [ToolEpisode(one, [], lambda result: result).reward() for one in (Shop(), Judged(), None)] == [
        0.0,
        None,
        0.0,
    ]


def test_what_a_run_was_given_must_be_given_again(tmp_path) -> None:
    class Other(Talks):
        def reward(self) -> float | None:
            return 1.0

    first = run("grpo", tmp_path, steps=1)
    with pytest.raises(RunError, match="the environment"):
        train.resume(first.run_dir, prompts=["a", "b", "c"], environment_factory=Other, steps=2, progress=False)


def test_a_run_with_a_reward_of_its_own_is_resumed_with_both(tmp_path) -> None:
    given = {"reward": lambda completions, **_: [1.0] * len(completions), "environment_factory": Talks}
    first = run("grpo", tmp_path, steps=1, **given)
    again = train.resume(first.run_dir, prompts=["a", "b", "c"], steps=2, progress=False, **given)
    assert {"rewards/<lambda>/mean", "rewards/environment/mean"} <= again.metrics[-1].keys()


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


class Shop:
    """An environment in TRL's form, which counts its instances."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, prompt: object, **row: object) -> str:
        assert "environment" not in row
        return " apples"

    def get_reward(self) -> float:
        return 5.0


class LongShop(Shop):
    """An environment whose tool fills the context of a tiny model."""

    def buy(self, number: int) -> str:
        """Buy apples.

        Args:
            number: How many.
        """
        return "bought"


@pytest.mark.parametrize("processes", [0, 1])
def test_each_row_has_the_environment_that_it_names(processes, tmp_path) -> None:
    rows = [{"prompt": "a", "environment": "shop"}, {"prompt": "b", "environment": "talk"}]
    given: dict[str, Any] = {"environment_factory": {"shop": Shop, "talk": Talks}, "prompts": rows}
    Shop.made = 0
    options: dict[str, Any] = {"environment": {"max_turns": 3, "max_reply_tokens": 16, "processes": processes}}
    result = run("grpo", tmp_path, steps=1, **given, **options, **{"rollout.prompts_per_step": 2})
    assert processes or Shop.made == 9, "eight trajectories, and the one with which all are tried"
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    of_shop = [row for row in samples if "apples" in row["prompt"]]
    assert of_shop and all(row["reward"] == 5.0 for row in of_shop)
    assert len(of_shop) < len(samples) and all(row["reward"] < 5.0 for row in samples if row not in of_shop)
    with pytest.raises(RunError, match="environment talk"):
        changed = {"shop": Shop, "talk": TalksSlowly}
        train.resume(result.run_dir, prompts=rows, environment_factory=changed, steps=2, progress=False)


def test_trajectories_without_room_for_a_turn_are_left_out(tmp_path) -> None:
    rows = [{"prompt": "a", "environment": "shop"}, {"prompt": "b", "environment": "talk"}]
    given: dict[str, Any] = {"environment_factory": {"shop": LongShop, "talk": Talks}, "prompts": rows}
    result = run("grpo", tmp_path, steps=1, **given, **{"rollout.prompts_per_step": 2})
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["stop_reason"] for row in samples if "apples" in row["prompt"]} == {"context_full"}
    assert all(bool(row["tokens"]["parts"]) == ("apples" not in row["prompt"]) for row in samples)
    with pytest.raises(RunError, match="environment talk"):
        changed = {"shop": Shop, "talk": TalksSlowly}
        train.resume(result.run_dir, prompts=rows, environment_factory=changed, steps=2, progress=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"environment": "shap"}, "has `environment` 'shap'; name one of 'shop', 'talk'"), ({}, "has no `environment`")],
)
def test_a_row_that_names_no_environment_is_refused_before_anything_is_drawn(row, message, tmp_path) -> None:
    rows = [{"prompt": "a", "environment": "shop"}, {"prompt": "b", **row}]
    with pytest.raises(InputError, match=message):
        run("grpo", tmp_path, environment_factory={"shop": Shop, "talk": Talks}, prompts=rows)
    assert list(tmp_path.iterdir()) == []


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
        ({"environment_factory": {"a": Talks, "b": Talks()}}, r"environment_factory\['b'\] is of type Talks"),
        ({"environment_factory": {}}, "environment_factory is empty"),
        ({"environment_factory": {1: Talks}}, r"environment_factory has the key 1 of type int; give texts"),
        ({"environment_factory": {None: Talks}}, r"has the key None of type NoneType"),
        ({"environment_factory": {"a": Talks, "b": NoHints}, "prompts": A}, "tool `look` has no schema"),
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


def test_the_reward_of_a_factory_has_an_origin_and_the_recipe_s_own_keep_theirs(tmp_path) -> None:
    (tmp_path / "own.yaml").write_text("reward: unique_chars\n")
    result = run("grpo", tmp_path, steps=1, config=str(tmp_path / "own.yaml"))
    origins = json.loads((result.run_dir / "provenance.json").read_text())
    assert origins["reward.0.source"].startswith("file ") and origins["reward.1.source"] == (
        "argument environment_factory"
    )
    alone = json.loads((run("grpo", tmp_path, steps=1).run_dir / "provenance.json").read_text())
    assert alone["reward.0.source"] == "argument environment_factory" and "reward.1.source" not in alone


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_samples_have_the_tokens_of_each_turn_and_what_they_are_learnt_with(algorithm, tmp_path) -> None:
    result = run(algorithm, tmp_path, **{"grpo.turn_advantages": True} if algorithm == "grpo" else {})
    rows = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        parts = row["tokens"]["parts"]
        turns = [part for part in parts if "turn" in part]
        assert [part["turn"] for part in turns] == list(range(1, len(turns) + 1))
        assert sum(len(part["pieces"]) for part in turns) == row["num_tokens"]
        assert all(len(part["pieces"]) == len(part["logps"]) and max(part["logps"]) <= 0 for part in turns)
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        assert [part.get("reward") for part in turns] == [message.get("reward") for message in said]
        assert row["tokens"]["left_out"] == 0
    learnt = [part["advantage"] for row in rows for part in row["tokens"]["parts"] if "advantage" in part]
    assert learnt and not any("advantage" in part for row in rows for part in row["tokens"]["parts"][1::2])
    assert {isinstance(one, list) for one in learnt} == ({True, False} if algorithm == "ppo" else {False})


def test_the_tokens_of_a_sample_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "MOST_TOKENS", 10)
    result = run("grpo", tmp_path, steps=1)
    for line in (result.run_dir / "samples.jsonl").read_text().splitlines():
        tokens = json.loads(line)["tokens"]
        assert sum(len(part["pieces"]) for part in tokens["parts"]) == 10
        assert tokens["left_out"] > 0


def test_held_out_prompts_are_evaluated_by_trajectories(tmp_path) -> None:
    settings = {"prompts": ["a", "b", "c", "d"], "prompts.heldout_fraction": 0.5, "run.eval_every": 1}
    result, again = (run("grpo", tmp_path / name, steps=2, **settings) for name in ("one", "two"))
    for row in result.metrics:
        assert row["eval/environment/turns"] > 1 and row["eval/environment/errors"] == 0
        assert sum(value for name, value in row.items() if name.startswith("eval/environment/ended/")) == 1.0
    assert timeless(again) == timeless(result)


def test_an_environment_given_from_python_is_in_the_estimate(tmp_path, capsys) -> None:
    result = run("grpo", tmp_path, steps=1, progress=True)
    assert "3 turns of 8 tokens with replies of 16, 72 tokens at most" in capsys.readouterr().err
    alone = run("grpo", tmp_path, steps=1, environment_factory=None, environment={}, reward="length")
    of_both = [json.loads((one.run_dir / "setup.json").read_text())["estimate_gb"] for one in (result, alone)]
    assert of_both[0]["logits"] > of_both[1]["logits"]


def test_the_time_of_a_resumed_run_is_estimated_by_its_steps(tmp_path, capsys) -> None:
    first = run("grpo", tmp_path, steps=2, progress=True)
    assert "for 2 steps, by a trial of this model" in capsys.readouterr().err
    train.resume(first.run_dir, prompts=["a", "b", "c"], environment_factory=Talks, steps=5, progress=True)
    assert "for 3 steps, by 2 steps that this run has made" in capsys.readouterr().err


def test_tokens_of_a_rewritten_history_are_those_of_both_sequences() -> None:
    ids = tuple(tiny_model("llama").tokenizer("abcdef", add_special_tokens=False)["input_ids"])
    logps = (-0.5, -1.0, 0.0, 0.0, -2.0, -3.0)

    def part(start: int, stop: int, *turns: Turn, **more: Any) -> Completion:
        told = Trajectory(turns, ({"role": "assistant", "content": "ab"},), "completed", 1.0)
        return Completion(ids[start:stop], logps[start:stop], logps[start:stop], "ef", "stop", trajectory=told, **more)

    first = part(0, 4, Turn(0, 2, reward=1.0))
    both = part(4, 6, Turn(0, 2), earlier=(first,), prompt_ids=(1, 2))
    learnt = metrics.Learnt((0, 0), torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]]))
    group = Group(Prompt("a", "a"), (1,), (both,), 0)
    (row,) = metrics.sample_rows([group], None, 1, tokenizer=tiny_model("llama").tokenizer, learnt=learnt)
    assert row["tokens"] == {
        "parts": [
            {"turn": 1, "pieces": ["a", "b"], "logps": [-0.5, -1.0], "reward": 1.0, "advantage": 0.5},
            {"pieces": ["c", "d"]},
            {"turn": 2, "pieces": ["e", "f"], "logps": [-2.0, -3.0], "advantage": [1.0, 2.0], "sample": 2},
        ],
        "left_out": 0,
    }
    (row,) = metrics.sample_rows([group], None, 1, tokenizer=tiny_model("llama").tokenizer)
    assert not any("advantage" in one for one in row["tokens"]["parts"])
