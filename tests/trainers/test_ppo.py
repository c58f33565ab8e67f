"""PPO: the step is what the paper says, it learns, and the same seed gives the same weights."""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from recipes import PROMPTS, Started, groups_of, ppo_recipe, training
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.runs.checkpoint import list_steps, load
from tunesmith.base.runs.folder import MEASURED, read_jsonl

NAMES = (
    *("reward", "reward_std", "rewards/low_ids/mean", "objective/kl", "policy/approxkl_avg", "entropy", "lr"),
    *("tokens_per_s", "grad_norm", "completions/mean_length", "val/ratio", "rollout/logp_diff_max", "memory/rss_gb"),
)


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary: easy to learn, and rarely equal for two completions."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def _weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_seed_gives_the_same_weights_metrics_and_tokens(tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path)
    first = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    again = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    assert _weights(first.run_dir) == _weights(again.run_dir)
    assert (first.run_dir / "samples.jsonl").read_text() == (again.run_dir / "samples.jsonl").read_text()
    timeless = [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in first.metrics]
    assert timeless == [{k: again.metrics[i][k] for k in row} for i, row in enumerate(timeless)]


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first = training(ppo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    other = training(ppo_recipe(tmp_path, run={"seed": 1}), prompts=PROMPTS, rewards=[low_ids])
    assert _weights(first.run_dir) != _weights(other.run_dir)


def test_the_reward_rises_while_the_kl_stays_bounded(tmp_path: Path) -> None:
    cfg = ppo_recipe(
        tmp_path,
        rollout={"prompts_per_step": 32, "max_new_tokens": 8},
        ppo={"num_epochs": 4, "num_minibatches": 1, "micro_batch_size": 32, "kl": {"coef": 0.001}},
        optimizer={"learning_rate": 5e-3},
        run={"steps": 30},
    )
    result = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    rewards = [row["reward"] for row in result.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert math.isfinite(result.metrics[-1]["objective/kl"])


def test_a_run_leaves_a_folder_that_plain_transformers_loads(tmp_path: Path) -> None:
    result = training(ppo_recipe(tmp_path, run={"checkpoint_every": 2}), prompts=PROMPTS, rewards=[low_ids])
    model = AutoModelForCausalLM.from_pretrained(result.run_dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir / "final")
    ids = tokenizer("The film", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    assert tokenizer.chat_template
    assert list_steps(result.run_dir / "checkpoints") == [2, 3]
    saved = load(result.run_dir / "checkpoints" / "step-000003")
    name, weight = next(iter(model.named_parameters()))
    assert torch.equal(saved.tensors["policy"][name], weight)
    report = (result.run_dir / "report.html").read_text()
    assert "<html" in report
    assert {row["step"] for row in read_jsonl(result.run_dir / "samples.jsonl")} == {1, 2, 3}
    facts = json.loads((result.run_dir / "result.json").read_text())
    assert (facts["steps"], facts["findings"]) == (3, len(read_jsonl(result.run_dir / "findings.jsonl")))
    assert isinstance(result.generate("The film", max_new_tokens=4), str)


def test_metrics_have_the_field_s_names_and_stages_sum_to_the_step(tmp_path: Path) -> None:
    result = training(ppo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    row = result.metrics[0]
    for name in NAMES:
        assert math.isfinite(row[name]), name
    stages = [name for name in row if name.startswith("time/") and name.count("/") == 1 and name != "time/step_s"]
    assert sum(row[name] for name in stages) == pytest.approx(row["time/step_s"])
    assert row["objective/kl"] == 0.0
    assert row["rollout/logp_diff_max"] < 1e-4
    assert result.metrics[-1]["objective/kl"] > 0


def test_without_kl_there_is_no_reference_model(tmp_path: Path) -> None:
    state = Started(ppo_recipe(tmp_path, ppo={"kl": {"coef": 0.0}}), prompts=PROMPTS, rewards=[low_ids])
    assert state.reference is None
    result = state.step(state.data.train, 0)
    assert result.metrics["objective/kl"] == 0.0
    assert "time/reference_s" not in result.metrics


def test_the_reference_does_not_move_with_the_policy(tmp_path: Path) -> None:
    state = Started(ppo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    assert state.reference is not None
    before = [parameter.clone() for parameter in state.reference.module.parameters()]
    state.step(state.data.train, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, state.reference.module.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, state.policy.module.parameters(), strict=True))


def test_whitened_rewards_have_variance_one_and_keep_their_mean(tmp_path: Path) -> None:
    def rewards(whiten: bool) -> torch.Tensor:
        """The reward of each token, from returns that are plain sums: lambda and gamma are 1."""
        options = {"whiten_rewards": whiten, "gamma": 1.0, "lam": 1.0, "kl": {"coef": 0.1}}
        state, batches = Started(ppo_recipe(tmp_path, ppo=options), prompts=PROMPTS, rewards=[low_ids]), []
        update = state.learner.update
        state.learner.update = lambda batch, *rest: batches.append(batch) or update(batch, *rest)
        state.step(state.data.train, 0)
        (batch,) = batches
        return_BT = torch.nn.functional.pad(batch.return_BT.double(), (0, 1))
        return (return_BT[:, :-1] - return_BT[:, 1:])[batch.sequences.mask_BT]

    plain_N, found_N = rewards(whiten=False), rewards(whiten=True)
    assert plain_N.var() != pytest.approx(1, rel=0.5)
    expected_N = (plain_N - plain_N.mean()) / plain_N.std() + plain_N.mean()
    torch.testing.assert_close(found_N, expected_N, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_micro_batches_do_not_change_the_update(tmp_path: Path, micro_batch_size: int) -> None:
    def updated(size: int) -> torch.Tensor:
        cfg = ppo_recipe(tmp_path, ppo={"num_epochs": 1, "num_minibatches": 1, "micro_batch_size": size})
        state = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
        state.step(state.data.train, 0)
        return torch.cat([parameter.detach().flatten() for parameter in state.policy.module.parameters()])

    # Adam's first step has the size of the learning rate whatever the gradient's, so rounding shows only where it is
    # near 0.
    difference = (updated(micro_batch_size) - updated(2)).abs()
    assert (difference > 1e-5).float().mean() < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"critic": "separate"},
        {"kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}},
        {"kl": {"coef": 0.1, "target": 2.0, "horizon": 100}},
        {"entropy_coef": 0.01, "value_clip": None, "whiten_rewards": True, "whiten_advantages": False},
    ],
)
def test_every_variant_trains_with_finite_figures(tmp_path: Path, options: dict[str, object]) -> None:
    result = training(ppo_recipe(tmp_path, ppo=options), prompts=PROMPTS, rewards=[low_ids])
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
    assert all(row["policy/stopped_early"] == 0.0 for row in result.metrics)


def test_updates_stop_early_once_the_kl_to_the_rollout_policy_is_too_large(tmp_path: Path) -> None:
    cfg = ppo_recipe(
        tmp_path, ppo={"num_epochs": 50, "target_kl": 1e-4}, optimizer={"learning_rate": 1e-2}, run={"steps": 1}
    )
    result = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    assert result.metrics[0]["policy/stopped_early"] == 1.0
    assert result.metrics[0]["updates"] < 100


def test_only_the_top_layers_move_when_the_rest_is_frozen(tmp_path: Path) -> None:
    state = Started(ppo_recipe(tmp_path, model={"num_trainable_layers": 1}), prompts=PROMPTS, rewards=[low_ids])
    before = {name: parameter.clone() for name, parameter in state.policy.module.named_parameters()}
    state.step(state.data.train, 0)
    named = dict(state.policy.module.named_parameters())
    moved = {name for name, parameter in named.items() if not torch.equal(parameter, before[name])}
    assert moved
    assert all(".layers.1." in name or name.endswith("model.norm.weight") for name in moved)


def test_a_gradient_that_is_not_finite_is_refused_and_its_parameter_named(tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, ppo={"num_epochs": 1})
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
    before = [parameter.clone() for parameter in state.policy.module.parameters()]
    handle = state.policy.module.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * float("nan"))
    result = state.step(state.data.train, 0)
    handle.remove()
    assert result.metrics["refused_steps"] == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, state.policy.module.parameters(), strict=True))
    assert result.report is not None
    assert result.report.num_refused_in_row == 2
    assert "layers.1.mlp.down_proj" in result.report.bad_part


def test_refused_steps_in_a_row_stop_the_run_and_leave_the_batch_behind(tmp_path: Path) -> None:
    # The loss overflows in every step.
    cfg = ppo_recipe(tmp_path, optimizer={"max_refused_steps": 4}, ppo={"num_epochs": 1, "value_coef": 1e300})
    with pytest.raises(TrainingError, match="4 optimizer steps in a row were not finite"):
        training(cfg, prompts=PROMPTS, rewards=[low_ids])
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [row["refused_steps"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [2.0, 2.0]
    batch = read_jsonl(run_dir / "refused" / "step-000001.jsonl")
    assert sorted(str(row["prompt"]) for row in batch) == sorted(PROMPTS)
    assert all(len(row["token_ids"]) == len(row["logps"]) > 0 for row in batch)
    assert [row["name"] for row in read_jsonl(run_dir / "findings.jsonl")].count("refused") == 2
    assert not (run_dir / "result.json").exists()


def test_held_out_prompts_are_never_trained_on_and_are_evaluated_at_the_end(tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, prompts={"heldout_fraction": 0.5})
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
    train, heldout = state.data.train, state.data.heldout
    assert not {p.content for p in train} & {p.content for p in heldout}
    assert len(train) + len(heldout) == len(PROMPTS)
    result = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    assert "eval/reward" in result.metrics[-1]
    assert "eval/reward" not in result.metrics[0]


def test_a_dropped_completion_is_left_out_of_the_update_and_counted(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def picky(prompts, completion_ids, **_):\n"
        "    shares = [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]\n"
        "    return [float('nan') if p == 'The film' else share for p, share in zip(prompts, shares)]\n"
    )
    dropping = RewardSource(source=f"{tmp_path / 'picky.py'}:picky", on_error="drop")
    cfg = ppo_recipe(tmp_path, ppo={"num_epochs": 1, "num_minibatches": 1})
    state, other = (
        Started(cfg, prompts=PROMPTS, rewards=[dropping]),
        Started(cfg, prompts=PROMPTS, rewards=[low_ids]),
    )
    result = state.step(state.data.train, 0)
    # The other state is given the same completions without the one that was dropped.
    kept = [group for group in groups_of(result) if group.prompt.content != "The film"]
    other.rollouts.engine.generate = lambda *_, **__: kept  # type: ignore[method-assign]
    expected = other.step(other.data.train, 0)
    assert len(kept) == 3
    assert result.metrics["rewards/num_dropped"] == 1.0
    for name in ("reward", "objective/kl", "entropy", "val/mean", "grad_norm"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-5), name
    for after, alone in zip(state.policy.module.parameters(), other.policy.module.parameters(), strict=True):
        assert ((after - alone).abs() > 1e-5).float().mean() < 0.01


def test_bad_input_makes_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"num_trainable_layers is 9"):
        training(ppo_recipe(tmp_path, model={"num_trainable_layers": 9}), prompts=PROMPTS, rewards=[low_ids])
    with pytest.raises(InputError, match="wandb"):
        training(ppo_recipe(tmp_path, run={"report_to": ["wandb"]}), prompts=PROMPTS, rewards=[low_ids])
    assert not (tmp_path / "runs").exists()


def test_the_first_steps_may_train_the_critic_alone(tmp_path: Path) -> None:
    state = Started(
        ppo_recipe(tmp_path, ppo={"critic": "separate", "value_steps": 1}), prompts=PROMPTS, rewards=[low_ids]
    )

    def copied() -> dict[str, list[torch.Tensor]]:
        return {name: [p.detach().clone() for p in module.parameters()] for name, module in state.modules.items()}

    weights = [copied()]
    for index in range(2):
        assert state.step(state.batch(index), index).metrics["updates"] == 4
        weights.append(copied())
    for name, moved in (("policy", [False, True]), ("critic", [True, True])):
        for (before, after), is_moved in zip(itertools.pairwise(weights), moved, strict=True):
            equal = [torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True)]
            assert all(equal) != is_moved


@pytest.mark.parametrize("options", [{"lam_per_length": 0.3}, {"value_lam": 1.0}])
def test_lambdas_of_advantages_and_of_values_are_apart(tmp_path: Path, options: dict[str, float]) -> None:
    found = []
    for given in ({}, options):
        ppo = {"whiten_advantages": False, "lam": 0.5, "num_epochs": 1, "num_minibatches": 1, **given}
        state, seen = Started(ppo_recipe(tmp_path, ppo=ppo), prompts=PROMPTS, rewards=[low_ids]), []
        with torch.no_grad():
            state.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        update = state.learner.update
        state.learner.update = lambda batch, *rest, seen=seen, update=update: seen.append(batch) or update(batch, *rest)
        state.step(state.data.train, 0)
        found += seen
    plain, apart = found
    assert torch.equal(plain.old_value_BT, apart.old_value_BT)
    assert torch.equal(plain.advantage_BT, apart.advantage_BT) == ("value_lam" in options)
    assert torch.equal(plain.return_BT, apart.return_BT) == ("lam_per_length" in options)
