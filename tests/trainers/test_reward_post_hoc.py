"""Reward models whose trend over length is taken off once they are trained."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import forked, go_on, outcome, the_run, train
from recipes import Started, grpo_recipe, pairs, reward_recipe, training

from tunesmith.apps.workflows.evaluation import evaluate_reward
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.engine.models.load import load_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.evaluation.reward_quality import judge, margins
from tunesmith.learn.evaluation.reward_sources import pairs_to_judge
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import samples_of

POST_HOC = {"length": "post_hoc"}


def longer_wins(count: int = 60) -> list[Pair]:
    """Pairs of which mostly the longer answer was preferred."""
    draw = random.Random(0)
    rows: list[Pair] = []
    for i in range(count):
        short, long = draw.randint(1, 8), draw.randint(9, 20)
        sizes = (long, short) if i % 5 else (short, long)
        chosen, rejected = ("".join(draw.choice("abcdef ") for _ in range(size)) + "." for size in sizes)
        rows.append(Pair(Prompt(f"p{i}", f"Question {i}:"), chosen, rejected))
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(A run with a correction, its pairs)."""
    folder = tmp_path_factory.mktemp("post_hoc")
    rows = [{"prompt": one.prompt.content, "chosen": one.chosen, "rejected": one.rejected} for one in longer_wins()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"source": str(folder / "pairs.jsonl"), "heldout_fraction": 0.4}
    cfg = reward_recipe(folder, pairs=section, reward_model={**POST_HOC, "num_epochs": 8}, evaluation={"judge": True})
    return training(cfg).run_dir, folder / "pairs.jsonl"


def quality_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "reward_quality.json").read_text())
    return found


def test_the_trend_is_taken_off_in_metrics_quality_report_and_evaluation(files: tuple[Path, Path]) -> None:
    run_dir, _ = files
    quality, result = quality_of(run_dir), json.loads((run_dir / "result.json").read_text())
    plain = quality["uncorrected"]
    assert plain["slope"] == pytest.approx(result["length_slope"]) and plain["slope"] > 0.2
    assert plain["length_correlation"] > 0.4 > 0.2 > abs(quality["length_correlation"])
    assert plain["accuracy_shorter"] < quality["accuracy_shorter"]
    assert result["eval/accuracy"] == pytest.approx(quality["accuracy"])
    again = evaluate_reward(str(run_dir)).to_json()
    assert again["accuracy"] == quality["accuracy"]
    assert again["uncorrected"]["accuracy"] == plain["accuracy"]  # type: ignore[index]
    assert "Rewards are corrected for length; without that" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("same_tokenizer", [True, False])
def test_a_reward_of_a_policy_is_the_one_that_was_judged(files: tuple[Path, Path], same_tokenizer: bool) -> None:
    run_dir, _ = files
    model = load_reward_model(str(run_dir), dtype=torch.float32)
    assert model.length_trend is not None
    tokenizer = byte_tokenizer() if same_tokenizer else None
    reward = ModelReward(model, "judged", policy_tokenizer=tokenizer)
    assert reward.scores_token_ids == same_tokenizer
    rows = longer_wins(6)
    cfg = reward_recipe(run_dir, pairs={"heldout_fraction": 0.0}, reward_model=POST_HOC)
    data = Started(cfg, pairs=rows).data.train
    lengths = {ids: n for item in data for ids, n in zip(item.sequences, item.answer_lengths, strict=True)}
    for row in rows:
        prompt_ids = tuple(byte_tokenizer()(row.prompt.content)["input_ids"])
        groups = [
            Group(row.prompt, prompt_ids, (Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), text, "length"),), 0)
            for text in (str(row.chosen), str(row.rejected))
            for ids in [tuple(byte_tokenizer()(text)["input_ids"])]
        ]
        scored = reward.outcomes(samples_of(groups))
        sequences = [reward.encode(sample) for sample in samples_of(groups)]
        assert set(sequences) <= lengths.keys()
        plain = [model(torch.tensor([ids]), torch.tensor([len(ids)])).item() for ids in sequences]
        of_length = model.length_trend.at([lengths[ids] for ids in sequences])
        np.testing.assert_allclose(scored.numbers(), np.array(plain) - of_length, atol=1e-5)
        assert scored.logged.means()["rewards/judged/of_length"] == pytest.approx(of_length.mean())


def test_several_heads_keep_their_spread_and_adapters_carry_the_trend(tmp_path: Path) -> None:
    section = {"model": {"lora": {"rank": 2}}, "reward_model": {**POST_HOC, "heads": {"count": 3}}}
    result = training(reward_recipe(tmp_path, **section), pairs=longer_wins())
    assert not (result.run_dir / "final" / "config.json").exists()
    model = load_reward_model(str(result.run_dir), dtype=torch.float32)
    assert model.length_trend is not None and model.length_trend.slope != 0
    source = {"source": str(result.run_dir / "final"), "pessimism": 1.0}
    trained = training(grpo_recipe(tmp_path, reward=[source]), prompts=["The film", "A story", "Once more"])
    for row in trained.metrics:
        name = f"rewards/{result.run_dir.name}"
        assert row[f"{name}/of_length"] != 0 and row[f"{name}/spread"] > 0
        assert row[f"{name}/mean"] < row[f"{name}/mean_of_heads"]


def test_a_model_that_is_trained_on_loses_the_trend_of_its_old_weights(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir, _ = files
    result = training(reward_recipe(tmp_path, model={"name": str(run_dir / "final")}), pairs=longer_wins())
    assert load_reward_model(str(result.run_dir)).length_trend is None
    assert "eval/length_slope" not in result.metrics[-1]


def test_sources_are_judged_by_corrected_rewards(files: tuple[Path, Path]) -> None:
    run_dir, source = files
    model = load_reward_model(str(run_dir), dtype=torch.float32)
    mix = {"sources": [{"name": "a", "source": str(source)}], "heldout_sources": [{"name": "b", "source": str(source)}]}
    cfg = reward_recipe(run_dir, pairs={**mix, "heldout_fraction": 0.5})
    heldout, elsewhere = pairs_to_judge(Started(cfg).data)
    found = judge(model, heldout, elsewhere=elsewhere)
    trend = model.length_trend
    assert trend is not None and [one.name for one in found.sources] == ["a", "b"]
    for one, some in zip(found.sources, (heldout, elsewhere), strict=True):
        of_length = [float(np.diff(trend.at(pair.answer_lengths))[0]) for pair in some]
        corrected_N = margins(model, some)[:, 0] + np.array(of_length)
        assert one.accuracy == pytest.approx((corrected_N > 0).mean())


def test_answers_of_one_length_leave_the_model_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [Pair(Prompt(f"p{i}", f"prompt {i}"), "yes", "no!") for i in range(12)]
    result = training(reward_recipe(tmp_path, reward_model=POST_HOC), pairs=rows)
    assert "equally long" in caplog.text
    assert load_reward_model(str(result.run_dir)).length_trend is None


@pytest.mark.parametrize("place", ["log/metrics:kill:9", "update/optimizer:kill:5"])
def test_a_killed_run_goes_on_to_the_same_trend(tmp_path: Path, place: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, "post_hoc", whole) == 0
    assert forked(train, "post_hoc", killed, fault=place) == -9
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))
    configs = [json.loads((the_run(one) / "final" / "config.json").read_text()) for one in (whole, killed)]
    assert configs[0]["tunesmith_length_trend"] == configs[1]["tunesmith_length_trend"]


def test_lengths_are_those_of_the_answers_also_where_a_dialogue_is_cut(tmp_path: Path) -> None:
    rows = [Pair(Prompt("p", "0123456789" * 3), "the same start, long", "the same end")]
    whole = Started(reward_recipe(tmp_path, pairs={"heldout_fraction": 0.0}), pairs=[*rows, *pairs(4)]).data.train
    cut_section = {"heldout_fraction": 0.0, "max_tokens": 25, "truncate": "left"}
    cut = Started(reward_recipe(tmp_path, pairs=cut_section), pairs=[*rows, *pairs(4)]).data.train
    (one,) = (item for item in whole if item.prompt_id == "p")
    (other,) = (item for item in cut if item.prompt_id == "p")
    assert one.answer_lengths == other.answer_lengths == (21, 13), "with the token that ends them"
    assert len(other.sequences[0]) == 25
