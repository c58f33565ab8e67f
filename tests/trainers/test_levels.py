"""Every level trains, and the settings that levels consist of change how a step is computed, not what it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_steps import build, low_ids
from recipes import PROMPTS, demonstrations, grpo_recipe, pairs, ppo_recipe, training

from tunesmith import train
from tunesmith.base.config.levels import LEVELS, Level
from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.language_model import FullForward, TrunkForward
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.transformers_backend import TransformersEngine

ROLLOUT = {"rollout.max_new_tokens": 6, "rollout.prompts_per_step": 2}


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains(level: Level, tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": "tiny:llama", "level": level, "steps": 2, "progress": False}
    run = {"dir": str(tmp_path), "num_threads": 1}
    drawing: dict[str, Any] = {**common, "prompts": PROMPTS, "reward": low_ids, "run": run, **ROLLOUT}
    results = [
        train.ppo(**drawing),
        train.grpo(**drawing, **{"rollout.completions_per_prompt": 4}),
        train.sft(**common, demonstrations=demonstrations(16), run=run),
        train.dpo(**common, pairs=pairs(16), run=run),
        train.reward(**common, pairs=pairs(16), run=run),
    ]
    for result in results:
        assert len(result.metrics) == 2
        assert all(row["refused_steps"] == 0 and row["grad_norm"] > 0 for row in result.metrics if "grad_norm" in row)
        assert f"level: {level}" in (result.run_dir / "recipe.yaml").read_text()


@pytest.mark.parametrize(("forward", "backend"), [("auto", Decoder), ("padded", TrunkForward), ("full", FullForward)])
def test_the_recipe_says_how_the_policy_is_computed(forward: str, backend: type, tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path, model={"forward": forward, "kernels": "torch"}))
    assert isinstance(state.learner.policy.backend, backend)
    assert state.learner.reference is not None and isinstance(state.learner.reference.backend, backend)
    assert state.learner.policy.kernels.choice == "torch"


@pytest.mark.parametrize("forward", ["auto", "padded", "full"])
def test_the_engine_does_not_depend_on_the_forward_pass_but_its_exactness_does(forward: str, tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path, model={"forward": forward, "dtype": "bfloat16"}))
    engine = state.learner.rollouts.engine
    assert isinstance(engine, NativeEngine)
    assert engine.is_exact == (forward == "auto" and cpu_has_bfloat16())


def test_the_old_policy_is_computed_again_where_the_recipe_wants_it(tmp_path: Path) -> None:
    for recomputes in (False, True):
        cfg = ppo_recipe(tmp_path, model={"dtype": "bfloat16"}, rollout={"recompute_logps": recomputes})
        state = build(cfg)
        assert state.learner.rollouts.is_exact == (state.learner.rollouts.engine.is_exact and not recomputes)


def test_a_backend_of_transformers_is_a_setting_of_the_baseline(tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path, rollout={"backend": "transformers"}))
    assert isinstance(state.learner.rollouts.engine, TransformersEngine)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"forward": "padded"}},
        {"model": {"forward": "full"}},
        {"model": {"kernels": "torch"}},
        {"model": {"share_prefixes": False}},
        {"optimizer": {"fused": False}},
        {"ppo": {"gae": "loop"}},
        {"ppo": {"micro_batch_size": 1_000_000}},
        {"run": {"keep_freed_memory": False}},
        {"rollout": {"recompute_logps": True}},
    ],
    ids=str,
)
def test_a_setting_changes_what_a_run_learns_by_rounding_alone(change: dict[str, Any], tmp_path: Path) -> None:
    more = {"rollout": {"completions_per_prompt": 2, "max_new_tokens": 6}, "ppo": {"critic": "separate"}}
    merged = {name: {**more.get(name, {}), **change.get(name, {})} for name in {*more, *change}}
    runs = [
        training(ppo_recipe(tmp_path / name, **sections), prompts=PROMPTS, rewards=[low_ids])
        for name, sections in (("plain", more), ("changed", merged))
    ]
    plain, changed = (run.metrics[-1] for run in runs)
    for name in ("reward", "loss/policy_avg", "loss/value_avg", "grad_norm", "objective/kl", "policy/approxkl_avg"):
        assert changed[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


def test_prefixes_are_shared_unless_the_recipe_forbids_it(tmp_path: Path) -> None:
    ids_BS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 10]])
    lengths_B, prompts_B = torch.tensor([5, 5]), torch.tensor([3, 3])
    found: dict[bool, torch.Tensor] = {}
    counted: dict[bool, int] = {}
    for shares in (True, False):
        policy = build(grpo_recipe(tmp_path, model={"share_prefixes": shares})).learner.policy
        policy.decoder.architecture.embedding.register_forward_hook(
            lambda _, inputs, __, shares=shares: counted.update({shares: len(inputs[0])})
        )
        found[shares] = token_logps(policy, ids_BS, lengths_B, prompt_lengths_B=prompts_B).logp_BT
    assert counted == {True: 4, False: 8}  # the state after the last token predicts nothing
    torch.testing.assert_close(found[True], found[False])
