"""The reward trainer on our trunk decoder: loss, metrics and gradients of TRL's trainer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from same import arguments, assert_same, both, first_batch, model, pairs, refuse_trunk, step_of, tokenizer
from transformers import AutoModelForSequenceClassification

from tunesmith.integrations.trl import RewardTrainer


def classifier(family: str) -> Any:
    config = model(0, family).config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)


def reward(is_ours: bool, folder: Path, family: str = "llama", **changes: Any) -> Any:
    rows = pairs()
    peft_config = changes.pop("peft_config", None)
    if "margin" in changes:
        rows = rows.add_column("margin", [0.1 * row for row in range(changes.pop("margin"))])
    torch.manual_seed(0)
    return (RewardTrainer if is_ours else trl.RewardTrainer)(
        classifier(family),
        trl.RewardConfig(**arguments(folder, **changes)),
        train_dataset=rows,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {"center_rewards_coefficient": 0.01}),
        ("gpt2", {"margin": 8}),
        ("gemma2", {"gradient_checkpointing": False}),
    ],
)
def test_loss_metrics_and_gradients_are_those_of_trl(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = both(lambda is_ours: reward(is_ours, tmp_path, family, **changes))
    batch = first_batch(theirs)
    expected = step_of(theirs, batch)
    forward = ours.model.forward
    refuse_trunk(monkeypatch, ours.model)
    assert_same(step_of(ours, batch), expected)
    assert ours.model.forward == forward


def test_lora_with_a_trained_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    ours, theirs = both(lambda is_ours: reward(is_ours, tmp_path, peft_config=config))
    assert_same(step_of(ours), step_of(theirs))
    assert "Tunesmith leaves" not in caplog.text


def test_training_and_evaluation_log_what_trl_logs(tmp_path: Path) -> None:
    logs = []
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    for trainer in both(lambda is_ours: reward(is_ours, tmp_path, **changes)):
        trainer.train()
        logs.append([*trainer.state.log_history[:-1], trainer.evaluate(pairs(4))])
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        for name, value in theirs.items():
            if "runtime" not in name and "per_second" not in name:
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_family_that_is_not_known_goes_the_way_of_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = both(lambda is_ours: reward(is_ours, tmp_path))
    for trainer in (ours, theirs):
        trainer.model.model.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "tunesmith"):
        assert_same(step_of(ours), step_of(theirs))
        step_of(ours)
    assert caplog.text.count("Tunesmith leaves") == 1
