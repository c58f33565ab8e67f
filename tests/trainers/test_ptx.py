"""Supervised learning beside a policy's loss: its gradient, its order, and where it is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder, double
from grpo_steps import low_ids, moved_apart
from recipes import PROMPTS, Started, best_of_n_recipe, groups_of, grpo_recipe, online_dpo_recipe, ppo_recipe

from tunesmith import train
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.recipe import ENVIRONMENT_REWARD
from tunesmith.base.core.errors import ConfigError, DataError, InputError
from tunesmith.learn.environments.contract import Reply, Said
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.ptx import replied_sequences
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


class Answers:
    """Replies twice to what is said, in words that depend on it."""

    tools: tuple[dict[str, Any], ...] = ()

    def reset(self, row: Mapping[str, object]) -> None:
        self.num = 0

    def step(self, said: Said) -> Reply:
        self.num += 1
        content = f"reply {sum(map(ord, said.text)) % 9}"
        return Reply(({"role": "user", "content": content},), float(content[-1]), done=self.num > 2)

    def reward(self) -> None:
        return None

    def close(self) -> None:
        return None


class AnswersAlike(Answers):
    def step(self, said: Said) -> Reply:
        return replace(super().step(said), reward=1.0)


def conversing(cfg: Any, environment: type[Answers] = Answers) -> Started:
    state = Started(cfg, prompts=PROMPTS, environment_factory=environment)
    moved_apart(state)
    return state


def recipe_with_replies(tmp_path: Path, make: Any = grpo_recipe, coef: float = 0.5, **sections: Any) -> Any:
    given = {"max_turns": 3, "reply_loss_coef": coef}
    return make(tmp_path, environment=given, reward=[ENVIRONMENT_REWARD], **sections)


@pytest.mark.parametrize("environment", [Answers, AnswersAlike])
def test_the_gradient_of_replies_is_that_of_their_likelihood(environment: type[Answers], tmp_path: Path) -> None:
    """Also in a step whose rewards are all equal, so that nothing else is learnt."""
    state, without = (conversing(recipe_with_replies(tmp_path, coef=coef), environment) for coef in (0.5, 0.0))
    model, recorder, other = double(state.policy.module), Recorder(state), Recorder(without)
    result = state.step(state.batch(0), 0)
    without.step(without.batch(0), 0)
    logps, texts = [], []
    for group in groups_of(result):
        for one in group.completions:
            ids = [*group.prompt_token_ids, *one.token_ids]
            logp_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for turn in one.trajectory.turns:
                for part in turn.replies:
                    texts.append(state.tokenizer.decode(one.token_ids[part.start : part.stop]))
                    places = [len(group.prompt_token_ids) + place for place in part]
                    logps += [logp_TV[place - 1, ids[place]] for place in places]
    assert len(texts) == 2 * 8 and {text[:-1] for text in texts} == {"reply "}
    loss = -torch.stack(logps).mean()
    (0.5 * loss).backward()
    assert result.metrics["replies/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert bool(other.updates) == (environment is Answers)
    before = other.updates[0].gradients if other.updates else {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gained = recorder.updates[0].gradients[name].double() - before.get(name, torch.zeros(())).double()
            size = parameter.grad.abs().max().item()
            torch.testing.assert_close(gained, parameter.grad, atol=1e-4 * size + 1e-7, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [ppo_recipe, best_of_n_recipe, online_dpo_recipe])
def test_every_algorithm_that_draws_learns_replies_each_once_in_an_epoch(make: Any, tmp_path: Path) -> None:
    cfg = recipe_with_replies(tmp_path, make)
    state = conversing(cfg)
    result = state.step(state.batch(0), 0)
    replied = replied_sequences(groups_of(result))
    assert len(replied) == cfg.rollout.prompts_per_step * cfg.rollout.completions_per_prompt
    updates = range(cfg.section.num_minibatches)
    learnt = [one for update in updates for loss in state.losses_beside(0, update, replied) for one in loss.args[0]]
    assert sorted(learnt, key=replied.index) == replied
    assert 0 < result.metrics["replies/loss"] < 20


def test_replies_without_an_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no environment replies"):
        run(grpo_recipe(tmp_path, environment={"reply_loss_coef": 0.1}), Inputs(prompts=PROMPTS, rewards=[low_ids]))
