"""SFT on our decoder: loss, metrics and gradients of TRL's trainer, whatever its labels and its packing."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from same import arguments, assert_same, both, first_batch, model, refuse_trunk, step_of, text, tokenizer

from tunesmith.integrations.trl import SFTTrainer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def texts(num_rows: int = 12) -> Dataset:
    return Dataset.from_list([{"text": text(row, 2 + 5 * row % 11)} for row in range(num_rows)])


def completions(num_rows: int = 8) -> Dataset:
    rows = [{"prompt": text(row, 3) + " ", "completion": text(row + 30, 1 + 3 * row % 7)} for row in range(num_rows)]
    return Dataset.from_list(rows)


def conversations(num_rows: int = 8) -> Dataset:
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": role, "content": text(row + number, 1 + (row + number) % 4)}
                    for number, role in enumerate(("user", "assistant") * (1 + row % 2))
                ]
            }
            for row in range(num_rows)
        ]
    )


def sft(is_ours: bool, folder: Path, rows: Dataset, template: str | None = None, **changes: Any) -> Any:
    sizes = {name: changes.pop(name) for name in ("max_position_embeddings",) if name in changes}
    processing = tokenizer()
    processing.chat_template = template or processing.chat_template
    return (SFTTrainer if is_ours else trl.SFTTrainer)(
        model(0, **sizes),
        trl.SFTConfig(**arguments(folder, **changes)),
        train_dataset=rows,
        processing_class=processing,
    )


CASES = {
    "whole texts": (texts(), {}),
    "completions only": (completions(), {"completion_only_loss": True}),
    "prompts too": (completions(), {"completion_only_loss": False, "pad_to_multiple_of": 16}),
    "dft": (completions(), {"loss_type": "dft"}),
    "assistant only": (conversations(), {"assistant_only_loss": True, "template": TEMPLATE}),
    "packed": (texts(), {"packing": True, "max_length": 64, "per_device_train_batch_size": 4}),
    "wrapped": (texts(), {"packing": True, "packing_strategy": "wrapped", "max_length": 32}),
    "without padding": (completions(), {"padding_free": True, "max_length": None, "pad_to_multiple_of": 16}),
    "without checkpoints": (texts(), {"gradient_checkpointing": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradients_are_those_of_trl(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, changes = CASES[name]
    ours, theirs = both(lambda is_ours: sft(is_ours, tmp_path, rows, **changes))
    batch = first_batch(theirs)
    expected = step_of(theirs, batch)
    refuse_trunk(monkeypatch, ours.model)
    assert_same(step_of(ours, batch), expected)


def test_accumulated_training_logs_what_trl_logs(tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
    logs = []
    for trainer in both(lambda is_ours: sft(is_ours, tmp_path, completions(), **changes)):
        trainer.train()
        logs.append(trainer.state.log_history[:-1])
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_label_smoothing_is_computed_by_trl(tmp_path: Path) -> None:
    ours, theirs = both(lambda is_ours: sft(is_ours, tmp_path, completions(), label_smoothing_factor=0.1))
    assert_same(step_of(ours), step_of(theirs))


def test_rows_longer_than_the_context_are_computed_by_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = both(lambda is_ours: sft(is_ours, tmp_path, texts(), max_position_embeddings=24))
    with caplog.at_level(logging.WARNING, "tunesmith"):
        assert_same(step_of(ours), step_of(theirs))
    assert "longer than the model's context of 24 tokens" in caplog.text


def test_a_model_with_dropout_is_trained_by_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = sft(True, tmp_path, completions())
    trainer.model.model.layers[0].self_attn.attention_dropout = 0.5
    with caplog.at_level(logging.WARNING, "tunesmith"):
        step_of(trainer)
    assert "has a dropout" in caplog.text
    caplog.clear()
    step_of(trainer, train=False)
    assert not caplog.text


def test_rows_without_labels_have_a_gradient_of_zero(tmp_path: Path) -> None:
    trainer = sft(True, tmp_path, texts())
    batch = first_batch(trainer)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    step = step_of(trainer, batch)
    assert step.loss == 0
    assert not any(gradient.any() for gradient in step.gradients.values())


def test_autocast_ends_with_the_call_in_which_a_family_is_proved(tmp_path: Path) -> None:
    args = trl.SFTConfig(**arguments(tmp_path, bf16=True, max_steps=1))
    SFTTrainer(model(0, "olmo2"), args, train_dataset=texts(), processing_class=tokenizer()).train()
    assert not torch.is_autocast_enabled("cpu")
