"""The term of supervised learning beside a policy's loss: its gradient, its order, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder, double
from grpo_steps import low_ids, moved_apart
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe

from tunesmith import train
from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError, DataError, InputError
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import run

ROWS = [
    {"prompt": "The film", "completion": " was warm"},
    {"prompt": "A story", "completion": " of two"},
    {"prompt": "Once", "completion": " more, and slower"},
]
PTX = {"coef": 0.5, "demonstrations_per_update": 2, "micro_batch_tokens": 1}


def gradients_of_step(cfg: Any) -> tuple[list[Any], Any, Started]:
    """The updates of the first step, and the policy in float64 before it."""
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids], demonstrations=ROWS if cfg.ptx.coef else None)
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))
    moved_apart(state)
    before, recorder = double(state.policy.module), Recorder(state)
    state.step(state.data.train, 0)
    return recorder.updates, before, state


def test_the_gradient_is_that_of_the_policy_loss_and_of_the_likelihood_of_the_demonstrations(tmp_path: Path) -> None:
    (with_ptx,), model, state = gradients_of_step(grpo_recipe(tmp_path, ptx=PTX))
    (without,), *_ = gradients_of_step(grpo_recipe(tmp_path))
    ptx = state.learner.ptx
    chosen = {one.id for loss in ptx.losses(0) for one in loss.args[0]}
    assert len(chosen) == 2
    logps = []
    for one in ptx.demonstrations:
        if one.id in chosen:
            ids = torch.tensor([one.ids])
            logp_T = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            logps += [logp_T[place - 1] for part in one.spans for place in range(part.start, part.stop)]
    (-PTX["coef"] * torch.stack(logps).mean()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gained = with_ptx.gradients[name].double() - without.gradients[name].double()
            size = parameter.grad.abs().max().item()
            torch.testing.assert_close(gained, parameter.grad, atol=1e-4 * size + 1e-7, rtol=1e-3, msg=name)


def test_every_update_of_a_run_learns_the_next_demonstrations_and_all_of_them_in_an_epoch(tmp_path: Path) -> None:
    state = Started(ppo_recipe(tmp_path, ptx=PTX), prompts=PROMPTS, rewards=[low_ids], demonstrations=ROWS)
    ptx = state.learner.ptx
    drawn = [one.id for update in range(3) for loss in ptx.losses(update) for one in loss.args[0]]
    assert len(drawn) == 6 and all(drawn.count(one.id) == 2 for one in ptx.demonstrations)
    assert [one.id for loss in ptx.losses(1) for one in loss.args[0]] == drawn[2:4], "a function of the update alone"
    result = state.step(state.data.train, 0)
    assert result.metrics["updates"] == 4 and 0 < result.metrics["ptx/loss"] < 10


def test_the_critic_s_own_steps_learn_no_demonstrations(tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, ptx=PTX, ppo={"critic": "separate", "value_steps": 1})
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids], demonstrations=ROWS)
    assert "ptx/loss" not in state.step(state.data.train, 0).metrics
    assert "ptx/loss" in state.step(state.data.train, 1).metrics


def test_a_term_without_demonstrations_is_refused_and_one_without_a_weight_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="demonstrations"):
        run(grpo_recipe(tmp_path, ptx=PTX), Inputs(prompts=PROMPTS, rewards=[low_ids]))
    with pytest.raises(ConfigError, match=r"ptx\.coef is 0"):
        load_recipe("grpo", overrides={"ptx.demonstrations_per_update": 4})
    with pytest.raises(ConfigError, match="no demonstrations are evaluated here"):
        load_recipe("grpo", overrides={"ptx": 0.5, "demonstrations.heldout_source": "more.jsonl"})
    with pytest.raises(InputError, match="would not learn them"):
        run(grpo_recipe(tmp_path), Inputs(prompts=PROMPTS, rewards=[low_ids], demonstrations=ROWS))
    with pytest.raises(InputError, match=r"demonstrations are given as rows and as demonstrations\.source"):
        train.grpo(demonstrations=ROWS, **{"demonstrations.source": "some.jsonl", "ptx.coef": 1.0})
