"""The estimate of a run's time: what it counts, and that its trial leaves no trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipes import PROMPTS, Started, dpo_recipe, pairs, ppo_recipe, reward_recipe

from tunesmith.base.config.recipe import Recipe
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.restart import fingerprint_of_tensors
from tunesmith.learn.trainers.run import cost_of, task_of
from tunesmith.learn.trainers.work import Rows, RunWork, Work


def test_steps_count_as_often_as_they_come_and_the_rest_once():
    work = RunWork(
        Rows(4, 2), Work(trained=10, updates=1), Work(scored=7), once=Work(scored=100), preparation=Work(scored=1e6)
    )
    assert work.remaining(5, eval_every=0) == Work(scored=107, trained=50, updates=5)  # the last step is evaluated
    assert work.remaining(5, eval_every=2) == Work(scored=121, trained=50, updates=5)
    assert work.remaining(5, eval_every=2).seconds(Work(scored=0.5, trained=2, updates=3)) == 175.5


def test_a_prompt_that_completions_share_counts_once():
    assert Rows(prompt=10, completion=3, per_prompt=4).tokens(8) == 2 * 10 + 8 * 3
    assert Work.drawing(5, 3, num_slots=2) == Work(rounds=9, drawn=15)


@pytest.mark.parametrize(("recipe", "name"), [(reward_recipe, "reward_model"), (dpo_recipe, "dpo")])
def test_a_micro_batch_has_no_more_pairs_than_a_step(recipe: Callable[..., Recipe], name: str, tmp_path: Path):
    """With micro-batches of 10^9 a run of 40 pairs was said to need 115,328 GB."""

    def memory_of(num_pairs: int, **section: int) -> dict[str, float]:
        cfg = recipe(tmp_path, **{name: section}, pairs={"heldout_fraction": 0.0})
        return dict(Started(cfg, pairs=pairs(num_pairs)).task.estimate().memory_gb)

    assert memory_of(12, pairs_per_step=6, micro_batch_size=99) == memory_of(12, pairs_per_step=6, micro_batch_size=6)
    assert memory_of(3, pairs_per_step=64, micro_batch_size=64) == memory_of(3, pairs_per_step=64, micro_batch_size=3)


def test_a_trial_changes_no_bit_of_the_run(tmp_path: Path):
    cfg = ppo_recipe(tmp_path)
    task = task_of(cfg, Inputs(prompts=PROMPTS, rewards=[lambda completions, **_: [1.0]]), torch.device("cpu"))
    module = task.build().modules["policy"]
    before, generator = fingerprint_of_tensors(module), torch.get_rng_state()
    cost = cost_of(cfg, task, task.estimate())
    assert min(cost.scored, cost.trained, cost.rounds + cost.drawn, cost.updates) > 0
    assert fingerprint_of_tensors(module) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in module.parameters())
