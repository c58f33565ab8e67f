"""Reward models that do not learn length, learn smoothed votes, or have the mean of their last weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import forked, go_on, outcome, the_run, train
from recipes import Started, pairs, reward_recipe, training
from transformers import AutoModelForSequenceClassification

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.collate import collate_pairs
from tunesmith.learn.trainers.averaging import TailAverage


def weights_of(state: Started) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.model.parameters()])


@pytest.mark.parametrize("heads", [1, 3])
def test_the_loss_of_an_expert_is_that_of_the_reward_and_of_length_together(tmp_path: Path, heads: int) -> None:
    rows = [Pair(Prompt(f"p{i}", f"p{i}"), "yes" * (3 if i % 3 else 1), "no no") for i in range(40)]
    several = {"heads": {"count": heads, "bootstrap": "none"}} if heads > 1 else {}
    section: dict[str, Any] = {"length": "expert", **several}
    states = [
        Started(reward_recipe(tmp_path, reward_model=one, pairs={"heldout_fraction": 0.0}), pairs=rows)
        for one in (section, {**section, "length": "none"})
    ]
    for state in states:
        with torch.no_grad():
            torch.nn.init.normal_(state.model.model.score.weight, generator=torch.Generator().manual_seed(0))
    some, plain = (state.data.train for state in states)
    assert [one.sequences for one in some] == [one.sequences for one in plain]
    assert all(one.margin * math.log(one.answer_lengths[0] / one.answer_lengths[1]) < 0 for one in some), "longer wins"
    loss, _ = states[0].learner.micro_batch_loss(some, len(some), trains=True)
    batch = collate_pairs(some, 0)
    with torch.no_grad():
        reward_BK = states[0].model.heads(batch.ids_BT, batch.lengths_B)
    difference_NK = reward_BK[batch.chosen_N] - reward_BK[batch.rejected_N]
    said_N = -torch.tensor([one.margin for one in some])
    torch.testing.assert_close(loss, torch.nn.functional.softplus(-(difference_NK + said_N[:, None])).mean())
    evaluated = [state.learner.micro_batch_loss(some, len(some))[1].metrics() for state in states]
    assert evaluated[0] == evaluated[1], "the reward alone is judged"


def test_an_expert_keeps_margins_that_are_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "yes" * (1 + i % 3), "rejected": "no", "margin": i / 8} for i in range(8)]
    train = {
        how: Started(
            reward_recipe(tmp_path, reward_model={"length": "expert", "margin": how}, pairs={"heldout_fraction": 0.0}),
            pairs=rows,
        ).data.train
        for how in ("none", "column")
    }
    added = [a.margin - b.margin for a, b in zip(train["column"], train["none"], strict=True)]
    assert sorted(added) == pytest.approx([i / 8 for i in range(8)])


def test_balanced_pairs_have_weights_and_smoothed_labels_another_loss(tmp_path: Path) -> None:
    rows = [Pair(Prompt(f"p{i}", f"p{i}"), "yes" * (3 if i % 3 else 1), "no no") for i in range(40)]
    cfg = reward_recipe(tmp_path, reward_model={"length": "balanced"}, pairs={"heldout_fraction": 0.0})
    state = Started(cfg, pairs=rows)
    won = [one.weight for one in state.data.train if len(one.sequences[0]) > len(one.sequences[1])]
    assert sum(won) == pytest.approx(20)

    def loss(share: float) -> float:
        state = Started(reward_recipe(tmp_path, reward_model={"label_smoothing": share}), pairs=pairs())
        with torch.no_grad():
            torch.nn.init.normal_(state.model.model.score.weight)
        some = state.data.train[:8]
        assert state.learner.micro_batch_loss(some, 8)[1].metrics()["loss"] == pytest.approx(plain_loss(state, some))
        return state.step(some).metrics["loss"]

    def plain_loss(state: Started, some: Any) -> float:
        margins = [state.model(*rows_of(one)).diff().neg().item() for one in some]
        return sum(torch.nn.functional.softplus(torch.tensor(-margin)).item() for margin in margins) / len(margins)

    def rows_of(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [len(ids) for ids in one.sequences]
        return torch.tensor([[*ids, *[0] * (max(lengths) - len(ids))] for ids in one.sequences]), torch.tensor(lengths)

    assert loss(0.3) != loss(0.0)


def test_the_final_weights_are_the_mean_of_those_after_the_last_steps(tmp_path: Path) -> None:
    section = {"average_from": 0.5, "num_epochs": 1}
    sections: dict[str, Any] = {"reward_model": section, "pairs": {"heldout_fraction": 0.25}}
    result = training(reward_recipe(tmp_path, **sections), pairs=pairs())
    state = Started(reward_recipe(tmp_path, **sections), pairs=pairs())
    seen = []
    for index in range(state.task.num_steps):
        state.learner.step(state.task.batch(index), index)
        seen.append(weights_of(state))
    first = state.learner.average.first
    assert (first, len(seen)) == (-(-len(seen) // 2), len(result.metrics)) and len(seen) - first > 1
    final = AutoModelForSequenceClassification.from_pretrained(result.run_dir / "final", dtype=torch.float32)
    mean = torch.stack(seen[first:]).mean(0)
    last = weights_of(state)
    metrics = state.task.evaluate(state.learner)
    assert torch.equal(weights_of(state), last), "an evaluation gives the weights back"
    assert metrics["eval/loss"] == result.metrics[-1]["eval/loss"]
    state.task.measure(state.learner, "after")
    torch.testing.assert_close(weights_of(state), mean)
    assert not torch.equal(weights_of(state), last)
    saved, own = final.state_dict(), state.model.model.state_dict()
    assert all(torch.equal(saved[name], own[name]) for name in saved)


@pytest.mark.parametrize(
    ("num_made", "num_steps", "expected"),
    [
        (4, 4, 3.0),  # no step is left, and the mean has not begun: the last weights stay
        (4, 6, 4.5),  # it was to begin a step ago
        (6, 6, 5.0),
        (7, 8, 6.0),  # it goes on
        (7, 10, 7.0),
        (10, 10, 7.0),
        (8, 12, 9.5),  # those that it has are too early
        (10, 20, 14.5),
    ],
)
def test_a_mean_is_of_last_steps_alone_when_their_number_changes(
    num_made: int, num_steps: int, expected: float
) -> None:
    """After `num_made` of ten steps a run goes on to `num_steps`; the weights after step i are i."""
    model = torch.nn.Linear(1, 1, bias=False)

    def mean_after(average: TailAverage | None, steps: range) -> float:
        assert average is not None
        with torch.no_grad():
            for index in steps:
                model.weight.fill_(index)
                average.follow(index)
            with average.written():
                return model.weight.item()

    before, after = (TailAverage.of_run(model, 0.5, number) for number in (10, num_steps))
    mean_after(before, range(num_made))
    assert before is not None and after is not None
    after.load_state_dict(before.state_dict())
    assert mean_after(after, range(num_made, num_steps)) == pytest.approx(expected)
    after.write()
    assert model.weight.item() == pytest.approx(expected)


def test_a_run_that_goes_on_to_fewer_steps_keeps_what_it_has_learnt(tmp_path: Path) -> None:
    """A mean that had not begun was written as the weights that the run began with."""
    assert forked(train, "expert", tmp_path, fault="log/metrics:kill:4") == -9
    ended = go_on(the_run(tmp_path), **{"run.steps": 2})
    final = AutoModelForSequenceClassification.from_pretrained(ended / "final")
    assert final.score.weight.detach().abs().sum() > 0


def test_a_mean_begins_with_the_last_step_at_the_latest() -> None:
    model = torch.nn.Linear(2, 1)
    assert TailAverage.of_run(model, None, 10) is None
    found = [TailAverage.of_run(model, share, 10) for share in (0.0, 0.71, 0.99)]
    assert [one.first for one in found if one is not None] == [0, 8, 9]


@pytest.mark.parametrize("place", ["log/metrics:kill:9"])
def test_a_killed_run_goes_on_with_the_same_margins_and_mean(tmp_path: Path, place: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, "expert", whole) == 0
    assert forked(train, "expert", killed, fault=place) == -9
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))


def test_settings_without_effect_or_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'balanced', 'expert' or 'post_hoc'"):
        load_recipe("reward", overrides={"reward_model.length": "odin"})
    rows = [{"prompt": f"q{i}", "completions": ["a", "b", "c"]} for i in range(4)]
    for section in ({"length": "expert"}, {"length": "balanced"}, {"label_smoothing": 0.1}):
        with pytest.raises(ConfigError, match="needs pairs"):
            cfg = reward_recipe(tmp_path, reward_model=section, pairs={"rankings": "plackett_luce"})
            Started(cfg, pairs=rows)


def test_answers_of_one_length_leave_an_expert_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"q{i}", "chosen": " aa", "rejected": " bb"} for i in range(6)]
    cfg = reward_recipe(tmp_path, reward_model={"length": "expert"}, run={"steps": 2})
    assert all(one.margin == 0 for one in Started(cfg, pairs=rows).data.train)
    result = training(cfg, pairs=rows)
    assert "length says nothing of which is better" in caplog.text
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
