"""A reward model with several heads: trained, saved, loaded and resumed; and a policy that is rewarded by it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import forked, go_on, outcome, the_run, train
from recipes import Started, grpo_recipe, pairs, ppo_recipe, reward_recipe, training
from transformers import AutoModelForSequenceClassification

from tunesmith.base.config.algorithms.reward import HeadsSection
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ConfigError, ModelError, TrainingError
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.engine.models.load import load_reward_model, new_reward_model

HEADS = {"count": 4}
IDS = torch.tensor([[50, 60, 70, 2], [51, 61, 71, 2]])
LENGTHS = torch.tensor([4, 4])


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with 4 heads, judged on held-out pairs."""
    section = {"pairs": {"heldout_fraction": 0.25}, "reward_model": {"heads": HEADS}, "evaluation": {"judge": True}}
    result = training(reward_recipe(tmp_path_factory.mktemp("heads"), **section), pairs=pairs())
    assert result.summary["eval/accuracy"] == 1.0
    assert result.summary["num_heads"] == 4
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert all(row["margin_spread"] > 0 for row in result.metrics)
    return result.run_dir


def quality_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "reward_quality.json").read_text())
    return found


def test_one_head_is_what_it_is_without_the_setting(tmp_path: Path) -> None:
    states = [
        Started(reward_recipe(tmp_path / str(number), reward_model=section), pairs=pairs())
        for number, section in enumerate(({}, {"heads": {"count": 1, "bootstrap": "pairs", "prior_scale": 3.0}}))
    ]
    for state in states:
        assert state.step(state.data.train[:8]).metrics.keys().isdisjoint({"margin_spread"})
    first, second = (state.model.state_dict() for state in states)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_mean_of_the_heads_begins_as_the_score_was_and_they_differ() -> None:
    section = ModelSection(name="tiny:llama", dtype="float32")
    model = new_reward_model(section, heads=HeadsSection(count=5, prior_scale=2.0), seed=1)
    with torch.no_grad():
        reward_BK = model.heads(IDS, LENGTHS)
        torch.testing.assert_close(model(IDS, LENGTHS), torch.zeros(2), atol=1e-6, rtol=0)
    assert reward_BK.shape == (2, 5) and (reward_BK.std(1) > 0.1).all()
    again, other = (new_reward_model(section, heads=HeadsSection(count=5), seed=seed) for seed in (1, 2))
    torch.testing.assert_close(2 * again.model.score.weight, model.model.score.weight)
    assert not torch.equal(other.model.score.weight, again.model.score.weight)
    assert model.known is None


def test_the_folder_is_a_standard_classifier_whose_logits_are_the_heads(reward_run: Path) -> None:
    plain = AutoModelForSequenceClassification.from_pretrained(reward_run / "final", dtype=torch.float32)
    ours = load_reward_model(str(reward_run), dtype=torch.float32)
    assert ours.num_heads == plain.config.num_labels == 4
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, ours.heads(IDS, LENGTHS))
        torch.testing.assert_close(plain(IDS).logits.mean(-1), ours(IDS, LENGTHS))
        third = load_reward_model(str(reward_run), label=2, dtype=torch.float32)
        torch.testing.assert_close(plain(IDS).logits[:, 2], third(IDS, LENGTHS))
    assert third.num_heads == 1
    known = ours.known
    assert known is not None and known.num_answers == 2 * quality_of(reward_run)["num_pairs"]
    assert sum(known.offsets) == pytest.approx(0, abs=1e-9)
    assert 0 < known.median <= known.common


def test_the_report_has_the_calibration_and_where_the_heads_agree(reward_run: Path) -> None:
    quality = quality_of(reward_run)
    heads = quality["heads"]
    assert heads["num_heads"] == 4
    assert heads["num_agreed"] + heads["num_split"] == quality["num_pairs"] > 5
    assert 0 <= quality["ece"] <= 1
    assert "How sure it is, and how often right" in (reward_run / "report.html").read_text()


def test_a_run_that_begins_with_it_keeps_its_heads_and_refuses_another_number(reward_run: Path, tmp_path: Path) -> None:
    name = str(reward_run / "final")
    trained = load_reward_model(name, dtype=torch.float32)
    state = Started(reward_recipe(tmp_path, model={"name": name}, reward_model={"heads": HEADS}), pairs=pairs(8))
    torch.testing.assert_close(state.model.model.score.weight, trained.model.score.weight)
    for count in (1, 8):
        with pytest.raises(ModelError, match=f"has 4 heads, and {count} were asked for; set their count to 4"):
            other = {"heads": {"count": count}}
            Started(reward_recipe(tmp_path, model={"name": name}, reward_model=other), pairs=pairs(8))


def test_adapters_carry_the_heads_and_what_is_known_of_them(tmp_path: Path) -> None:
    section = {"model": {"lora": {"rank": 2}}, "reward_model": {"heads": HEADS}}
    result = training(reward_recipe(tmp_path, **section), pairs=pairs(16))
    ours = load_reward_model(str(result.run_dir), dtype=torch.float32)
    assert ours.num_heads == 4 and ours.known is not None
    with torch.no_grad():
        assert (ours.heads(IDS, LENGTHS).std(1) > 0).all()


def test_adapters_with_one_head_are_trained_on_with_several(tmp_path: Path) -> None:
    result = training(reward_recipe(tmp_path, model={"lora": {"rank": 2}}), pairs=pairs(16))
    name = str(result.run_dir / "final")
    one = load_reward_model(name, dtype=torch.float32)
    cfg = reward_recipe(tmp_path, model={"name": name}, reward_model={"heads": HEADS})
    state = Started(cfg, pairs=pairs(8))
    with torch.no_grad():
        reward_BK = state.model.heads(IDS, LENGTHS)
        torch.testing.assert_close(reward_BK.mean(1), one(IDS, LENGTHS))
    assert reward_BK.shape == (2, 4) and (reward_BK.std(1) > 0).all()
    state.step(state.data.train[:8])
    assert state.model.model.score.weight.requires_grad


def test_weights_of_the_bootstrap_hold_for_all_pairs_of_a_prompt(tmp_path: Path) -> None:
    rows = [Pair(Prompt(f"p{i}", f"prompt {i % 3}"), chosen=f"yes {i}", rejected=f"no {i}") for i in range(9)]

    def weights(kind: str) -> torch.Tensor:
        section = {"heads": {"count": 16, "bootstrap": kind}}
        state = Started(reward_recipe(tmp_path, reward_model=section, pairs={"heldout_fraction": 0.0}), pairs=rows)
        order = sorted(state.data.train, key=lambda pair: pair.prompt_id)
        assert [pair.prompt_id for pair in order] == [row.prompt.id for row in rows]
        return state.learner.weights(order, torch.device("cpu"))

    by_prompt, by_pair = weights("prompts"), weights("pairs")
    assert torch.equal(by_prompt[0], by_prompt[3]) and torch.equal(by_prompt[1], by_prompt[7])
    assert not torch.equal(by_prompt[0], by_prompt[1])
    assert not torch.equal(by_pair[0], by_pair[3])


@pytest.mark.parametrize("recipe", [ppo_recipe, grpo_recipe])
def test_a_training_has_the_spread_in_its_metrics_and_samples(reward_run: Path, tmp_path: Path, recipe) -> None:
    source = {"source": str(reward_run / "final"), "pessimism": 1.0}
    result = training(recipe(tmp_path, reward=[source]), prompts=["The film", "A story", "Once more", "They said"])
    name = reward_run.name
    for row in result.metrics:
        assert row[f"rewards/{name}/spread"] > 0
        assert row[f"rewards/{name}/mean"] < row[f"rewards/{name}/mean_of_heads"]
        assert 0 <= row[f"rewards/{name}/unfamiliar"] <= 1
    samples = (result.run_dir / "samples.jsonl").read_text()
    assert f"{name} spread" in samples


def test_damaged_facts_of_the_heads_are_refused(reward_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reward_run / "final", tmp_path / "final"))
    config = json.loads((folder / "config.json").read_text())
    config["tunesmith_reward_heads"]["offsets"] = [0.0, float("inf")]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tunesmith_reward_heads in config\.json is damaged"):
        load_reward_model(str(folder))


@pytest.mark.parametrize("section", [{"heads": {"count": 3}}, {"length": "post_hoc"}])
def test_a_training_that_diverged_is_said_to_have(section: dict[str, Any], tmp_path: Path) -> None:
    """The run ended with `... in config.json is damaged or that of another model; get the model again`."""
    state = Started(reward_recipe(tmp_path, reward_model=section), pairs=pairs(8))
    torch.nn.init.constant_(state.model.model.score.weight, float("nan"))
    with pytest.raises(TrainingError, match=r"of \d+ answers are not finite.* has diverged; lower optimizer"):
        state.task.measure(state.learner, "after")
    with pytest.raises(ConfigError, match="less than or equal to 1000"):
        load_recipe("reward", overrides={"reward_model.heads.prior_scale": 1e300})


@pytest.mark.parametrize("place", ["log/metrics:kill:7", "update/optimizer:kill:5"])
def test_a_run_that_is_killed_and_resumed_has_the_same_heads_to_the_bit(tmp_path: Path, place: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, "heads", whole) == 0
    assert forked(train, "heads", killed, fault=place) == -9
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))
    configs = [json.loads((the_run(one) / "final" / "config.json").read_text()) for one in (whole, killed)]
    assert configs[0]["tunesmith_reward_heads"] == configs[1]["tunesmith_reward_heads"]
