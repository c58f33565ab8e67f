"""The work of a step by its recipe: rows that are not learnt, or not drawn, are counted as what they are."""

import pytest

from tunesmith.base.config.load import load_recipe
from tunesmith.observe.planning.hardware import HARDWARE
from tunesmith.observe.planning.memory import Layout
from tunesmith.observe.planning.shape import read_shape
from tunesmith.observe.planning.step_time import Cluster, StepModel, StepTime
from tunesmith.observe.planning.workload import workload_of


def step_of(algorithm: str, **overrides: object) -> StepTime:
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    work = workload_of(load_recipe(algorithm, overrides=given).recipe, 100.0, 50.0)
    return StepModel(read_shape("smollm2"), work, Cluster(HARDWARE["h100"], 1, 1), Layout()).step()


def test_an_update_takes_the_time_of_the_completions_that_are_learnt():
    drawing = {"rollout__completions_per_prompt": 8, "rollout__prompts_per_step": 32}
    whole = step_of("grpo", **drawing).stages["update"]
    kept = step_of("grpo", **drawing, grpo__keep=2).stages["update"]
    assert kept / whole == pytest.approx(0.25, rel=0.1)
    assert step_of("best_of_n", **drawing, best_of_n__keep=4).stages["update"] / whole == pytest.approx(0.5, rel=0.1)


def test_a_pass_of_the_reference_is_over_what_is_learnt_unless_the_kl_is_in_the_reward():
    options = {"rollout__completions_per_prompt": 8, "grpo__keep": 2}
    learnt, drawn = (
        step_of("grpo", **options, grpo__kl__place=place).stages["scoring"] for place in ("loss", "reward")
    )
    assert learnt / drawn == pytest.approx(0.25)


def test_demonstrations_are_learnt_and_not_drawn():
    plain, more = step_of("ppo"), step_of("ppo", ptx__coef=1.0, ptx__demonstrations_per_update=16)
    assert more.stages["rollout"] == plain.stages["rollout"]
    assert more.stages["update"] > 1.5 * plain.stages["update"]


def test_replies_are_one_more_pass_over_what_was_drawn():
    environment = {"source": "./mine.py:Store"}
    plain = step_of("grpo", environment=environment)
    more = step_of("grpo", environment={**environment, "reply_loss_coef": 0.05})
    assert more.stages["rollout"] == plain.stages["rollout"]
    assert more.stages["update"] / plain.stages["update"] == pytest.approx(2, rel=0.1)


def test_the_greedy_completions_of_a_baseline_are_drawn_and_not_learnt():
    plain, remax = (step_of("grpo", grpo__scale="none", grpo__baseline=one) for one in ("mean", "greedy"))
    assert remax.stages["rollout"] > plain.stages["rollout"]
    assert remax.stages["update"] == pytest.approx(plain.stages["update"])
