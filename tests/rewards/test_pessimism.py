"""Rewards by a model with several heads: mean, spread and the worst head, without what a head adds to every answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tunesmith.base.config.algorithms.reward import HeadsSection
from tunesmith.base.config.sections import ModelSection, Pessimism, RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Policy
from tunesmith.learn.rewards.scorer import Scorer

GroupMaker = Callable[..., Group]
TEXTS = (" wow!!!", " meh", " zzzz qqqq", " a")


def five_heads() -> RewardModel:
    """A tiny reward model whose heads and their mean differ."""
    model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"), heads=HeadsSection(count=5), seed=1)
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    return model


def rewards_of(model: RewardModel, group: Group) -> torch.Tensor:
    """reward_BK of the completions as the heads were trained, float64."""
    rows = [group.prompt_token_ids + one.token_ids for one in group.completions]
    with torch.no_grad():
        found = [model.heads(torch.tensor([ids]), torch.tensor([len(ids)])) for ids in rows]
    return torch.cat(found).double()


@pytest.mark.parametrize("pessimism", [0.0, 1.5, "worst"])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_reward_is_the_mean_less_the_spread_or_the_worst_head(
    make_group: GroupMaker, pessimism: Pessimism, is_known: bool, tmp_path: Path
) -> None:
    model, group, limit = five_heads(), make_group("The film", *TEXTS), float("inf")
    reward_BK = rewards_of(model, group)
    if is_known:
        known = model.know(reward_BK[:3])
        offset_K = reward_BK[:3].mean(0) - reward_BK[:3].mean()
        assert known.offsets == pytest.approx(offset_K.tolist())
        reward_BK, limit = reward_BK - offset_K, known.common
        assert known.mean == pytest.approx(reward_BK[:3].std(1).mean().item())
    spread_B = reward_BK.std(1)
    right_B = reward_BK.amin(1) if pessimism == "worst" else reward_BK.mean(1) - pessimism * spread_B
    folder = save_final(model, model.tokenizer, tmp_path / "heads", ModelCard("tiny:llama", "reward"))
    for reward in (
        ModelReward(model, "heads", policy_tokenizer=byte_tokenizer(), pessimism=pessimism, micro_batch_size=3),
        RewardSource(source=str(folder), pessimism=pessimism),
    ):
        scorer = Scorer([reward], policy_tokenizer=byte_tokenizer(), dtype=torch.float32)
        scores = scorer.score([group])
        torch.testing.assert_close(scores.total_PG[0].double(), right_B, atol=1e-5, rtol=0)
        metrics = scores.metrics()
        assert metrics["rewards/heads/spread"] == pytest.approx(spread_B.mean().item(), abs=1e-5)
        assert metrics["rewards/heads/mean_of_heads"] == pytest.approx(reward_BK.mean().item(), abs=1e-5)
        assert scores.columns["heads spread"] == pytest.approx(spread_B.tolist(), abs=1e-5)
        if is_known:
            share = (spread_B > limit).double().mean().item()
            assert metrics["rewards/heads/unfamiliar"] == pytest.approx(share)
        else:
            assert "rewards/heads/unfamiliar" not in metrics


@pytest.mark.parametrize("pessimism", [0.0, 1.5, "worst"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e30])
def test_one_damaged_head_is_a_damaged_model(
    make_group: GroupMaker, monkeypatch: pytest.MonkeyPatch, pessimism: Pessimism, value: float
) -> None:
    model = five_heads()
    whole = model.heads

    def heads(ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        reward_BK = whole(ids_BT, lengths_B)
        reward_BK[0, 2] = value
        return reward_BK

    monkeypatch.setattr(model, "heads", heads)
    reward = ModelReward(model, "heads", policy=Policy(on_error="drop"), pessimism=pessimism)
    scores = Scorer([reward]).score([make_group("The film", *TEXTS)])
    assert scores.valid_PG.sum() == 3 and "its weights may be damaged" in scores.failures[0].reason


def test_processes_of_a_reward_model_take_the_same_off(make_group: GroupMaker, tmp_path: Path) -> None:
    model, group = five_heads(), make_group("The film", *TEXTS)
    model.know(rewards_of(model, group))
    folder = save_final(model, model.tokenizer, tmp_path / "heads", ModelCard("tiny:llama", "reward"))
    found = [
        Scorer(
            [RewardSource(source=str(folder), pessimism=2.0, workers=workers)],
            policy_tokenizer=byte_tokenizer(),
            dtype=torch.float32,
        ).score([group])
        for workers in (0, 1)
    ]
    assert torch.equal(found[0].total_PG, found[1].total_PG)
    assert found[0].metrics() == found[1].metrics()
    assert found[0].columns == found[1].columns


def test_one_head_and_functions_have_no_pessimism(tmp_path: Path) -> None:
    one = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"))
    with pytest.raises(RewardError, match=r"pessimism is 1\.0.*has one head.*reward_model\.heads"):
        ModelReward(one, pessimism=1.0)
    folder = save_final(one, one.tokenizer, tmp_path / "one", ModelCard("tiny:llama", "reward"))
    with pytest.raises(RewardError, match="pessimism is worst"):
        Scorer([RewardSource(source=str(folder), pessimism="worst")])
    with pytest.raises(RewardError, match="`pessimism` and `weights` belong to reward models"):
        Scorer([RewardSource(source="length", pessimism=0.5)])
    for wrong in (-1.0, float("inf")):
        with pytest.raises(RewardError, match="give a number from 0 on, or worst"):
            ModelReward(five_heads(), pessimism=wrong)
