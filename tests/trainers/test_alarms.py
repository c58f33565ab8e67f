"""Alarms speak when something begins, stay silent while it lasts, and speak again when it comes back."""

from collections.abc import Mapping, Sequence

import pytest

from tunesmith.base.config.sections import AlarmsSection
from tunesmith.learn.trainers.alarms import alarms

DEFAULTS = AlarmsSection()


def steps_of(rows: Sequence[Mapping[str, float]], name: str, section: AlarmsSection = DEFAULTS) -> list[int]:
    """The steps at which the alarm `name` is recorded, when the rows come one after the other as in a run."""
    numbered = [{"step": float(step), **row} for step, row in enumerate(rows, start=1)]
    found = [finding for end in range(1, len(rows) + 1) for finding in alarms(numbered[:end], section)]
    assert all(finding.severity == "warning" for finding in found)
    return [finding.step for finding in found if finding.name == name]


def column(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value} for value in values]


def test_a_calm_run_gives_no_alarm() -> None:
    calm = {"objective/kl": 3.0, "completions/mean_length": 20.0, "entropy": 2.0, "frac_reward_zero_std": 0.5}
    assert all(not steps_of([calm] * 8, name) for name in ("kl", "length", "entropy", "no_signal"))


def test_an_alarm_is_recorded_when_it_begins_and_again_when_it_comes_back() -> None:
    rows = column("objective/kl", 1, 60, 70, 60, 10, 50, 51, 52)
    assert steps_of(rows, "kl") == [2, 7]
    rows = column("frac_reward_zero_std", 1.0, 1.0, 0.99, 1.0)
    assert steps_of(rows, "no_signal") == [1, 4]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"environment/errors": 0.25}, "broke 25% of the trajectories"),
        ({"environment/failed_calls": 0.75}, "75% of the tool calls could not be made"),
        ({"environment/ended/max_turns": 0.4, "environment/ended/max_tokens": 0.3}, "70% of the trajectories ended at"),
        ({"environment/samples": 1.5}, "comes to 1.5 sequences"),
    ],
)
def test_what_goes_wrong_with_an_environment_is_told_once(figures: dict[str, float], message: str) -> None:
    assert steps_of([{}, figures, figures, {}, figures], "environment") == [2, 5]
    (finding,) = alarms([{"step": 1.0, **figures}], DEFAULTS)
    assert message in finding.message


def test_an_environment_that_gives_nothing_is_told_after_three_steps() -> None:
    names = ("environment/rewarded_turns", "rewards/environment/mean", "rewards/environment/std")
    nothing = dict.fromkeys(names, 0.0)
    assert steps_of([nothing] * 5, "nothing_earned") == [3]
    for name in names:
        assert steps_of([nothing, nothing, {**nothing, name: 0.1}, nothing, nothing], "nothing_earned") == []
    assert steps_of([{}] * 5, "nothing_earned") == []


def test_growth_and_fall_of_the_length_are_measured_from_the_mean_of_the_first_three_steps() -> None:
    rows = column("completions/mean_length", 8, 10, 12, 30, 31, 32, 20, 3, 3)
    assert steps_of(rows, "length") == [5, 8]
    messages = [alarms([{"step": 1.0, **row} for row in rows[:end]], DEFAULTS)[0].message for end in (5, 8)]
    assert "grew from 10 to 31" in messages[0]
    assert "shrank from 10 to 3" in messages[1]


def test_the_first_steps_give_no_alarm_about_themselves() -> None:
    assert steps_of(column("completions/mean_length", 10, 100, 1), "length") == []
    assert steps_of(column("entropy", 2.0, 0.01, 0.01), "entropy") == []


def test_the_entropy_is_compared_with_a_share_of_that_of_the_first_steps() -> None:
    rows = column("entropy", 2, 2, 2, 0.2, 0.19, 0.1, 1.0, 0.1)
    assert steps_of(rows, "entropy") == [5, 8]


@pytest.mark.parametrize(
    ("name", "rows", "setting"),
    [
        ("kl", column("objective/kl", 1e6), {"max_kl": None}),
        ("length", column("completions/mean_length", 1, 1, 1, 100), {"length_factor": None}),
        ("entropy", column("entropy", 2, 2, 2, 0.0), {"min_entropy_share": None}),
    ],
)
def test_an_alarm_can_be_set_off(name: str, rows: list[dict[str, float]], setting: dict[str, None]) -> None:
    assert steps_of(rows, name)
    assert not steps_of(rows, name, AlarmsSection(**setting))


def test_a_bound_of_the_recipe_is_the_bound_of_the_alarm() -> None:
    rows = column("objective/kl", 1.0, 2.0, 3.0)
    assert steps_of(rows, "kl", AlarmsSection(max_kl=1.5)) == [2]
    assert "above 1.5 (alarms.max_kl)" in alarms([{"step": 1.0, **rows[1]}], AlarmsSection(max_kl=1.5))[0].message


def test_a_kl_that_is_no_number_is_an_alarm() -> None:
    assert steps_of(column("objective/kl", 1.0, float("nan")), "kl") == [2]


def test_rows_without_the_figure_give_no_alarm() -> None:
    rows: list[dict[str, float]] = [{"reward": 1.0}] * 6
    assert all(not steps_of(rows, name) for name in ("kl", "length", "entropy", "no_signal"))


def test_alarms_that_begin_together_are_all_recorded() -> None:
    calm = {"objective/kl": 1.0, "entropy": 2.0, "completions/mean_length": 10.0}
    wild = {"objective/kl": 99.0, "entropy": 0.01, "completions/mean_length": 99.0}
    rows = [{"step": float(step), **row} for step, row in enumerate([calm, calm, calm, wild], start=1)]
    assert [finding.name for finding in alarms(rows, DEFAULTS)] == ["kl", "length", "entropy"]


def test_a_policy_that_leaves_what_the_heads_know_is_told_and_one_that_began_outside_too() -> None:
    shares = [0.05, 0.1, 0.0, 0.4, 0.6, 0.8, 0.9, 0.2, 0.1, 0.0]
    rows = [{"step": float(step), "rewards/votes/unfamiliar": share} for step, share in enumerate(shares, start=1)]
    found = [one for end in range(1, len(rows) + 1) for one in alarms(rows[:end], DEFAULTS)]
    assert [(one.step, one.name) for one in found] == [(6, "unfamiliar")]
    assert "has left what the reward model knows" in found[0].message
    assert "on 60% of the completions the heads of the reward model votes" in found[0].message
    outside = [{"step": float(step), "rewards/votes/unfamiliar": 0.9} for step in range(1, 6)]
    (first,) = (one for end in range(1, 6) for one in alarms(outside[:end], DEFAULTS))
    assert first.step == 3 and "it judges text unlike its votes" in first.message
    assert steps_of(outside, "unfamiliar", AlarmsSection(max_unfamiliar=0.95)) == []
    assert steps_of(outside, "unfamiliar", AlarmsSection(max_unfamiliar=None)) == []
    assert steps_of([{}] * 5, "unfamiliar") == []


def test_draws_too_far_from_the_policy_to_be_corrected_are_told_with_what_to_change() -> None:
    cut, difference = "sampling/importance_sampling_ratio/cut_share", "rollout/logp_diff_mean"
    near, far = {cut: 0.001, difference: 0.1}, {cut: 0.4, difference: 0.2}
    rows = [near, near, far, far, near, near, near, {**near, difference: 0.8}, {cut: 0.4}, {}]
    assert steps_of(rows, "mismatch") == [3, 8]
    assert steps_of([{**near, difference: 0.5}] * 4, "mismatch") == [3]
    assert steps_of([{**far, difference: 0.5}] * 4, "mismatch", AlarmsSection(max_cut_share=0.5)) == [3]
    off = AlarmsSection(max_cut_share=None, max_logp_difference=None)
    assert steps_of([{**far, difference: 0.5}] * 4, "mismatch", off) == []
    (found,) = alarms([{"step": float(step), **far} for step in (1, 2, 3)], DEFAULTS)
    assert found.message.startswith("40% of the importance weights are cut")
    assert "0.2 nats from the trainer's" in found.message and "train with rollout.weights model" in found.message
