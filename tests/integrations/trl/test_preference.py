"""DPO and KTO on our decoder: loss, metrics and gradients of TRL's trainers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from same import Step, arguments, assert_same, both, first_batch, model, pairs, refuse_trunk, step_of, text, tokenizer

from tunesmith.integrations.trl import DPOTrainer, KTOTrainer, accelerate
from tunesmith.integrations.trl.optimizer import FusedAdamW

DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)


def dpo(is_ours: bool, folder: Path, family: str = "llama", policy: Any = None, **changes: Any) -> Any:
    kind = DPOTrainer if is_ours else trl.DPOTrainer
    peft_config = changes.pop("peft_config", None)
    reference = changes.pop("ref_model", None if peft_config else model(1, family))
    return kind(
        policy or model(0, family),
        reference,
        trl.DPOConfig(**arguments(folder, label_smoothing=0.1, **changes)),
        train_dataset=pairs(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("dpo")
    return both(lambda is_ours: dpo(is_ours, folder))


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_every_dpo_loss_is_that_of_trl(loss_type: str, trainers: tuple[Any, Any]) -> None:
    steps: list[Step] = []
    for trainer in trainers:
        trainer.loss_types = [loss_type]
        steps.append(step_of(trainer))
    assert_same(*steps)


def test_several_losses_ld_alpha_and_divergences_are_those_of_trl(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    for trainer in trainers:
        for name, value in {"loss_types": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3], "ld_alpha": 0.5}.items():
            monkeypatch.setattr(trainer, name, value)
        monkeypatch.setattr(trainer, "f_divergence_type", "js_divergence")
        steps.append(step_of(trainer))
    assert_same(*steps)


def test_transformers_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = dpo(True, tmp_path)
    batch = first_batch(trainer)
    refuse_trunk(monkeypatch, trainer.model)
    with caplog.at_level(logging.WARNING, "tunesmith"):
        step_of(trainer, batch)
    assert not caplog.text
    with pytest.raises(AssertionError, match="own forward was called"):
        trainer.model(input_ids=batch["input_ids"])


def test_a_trainer_that_exists_is_accelerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = dpo(False, tmp_path)
    batch = first_batch(trainer)
    expected = step_of(trainer, batch)
    assert accelerate(accelerate(trainer)) is trainer
    refuse_trunk(monkeypatch, trainer.model)
    assert_same(step_of(trainer, batch), expected)
    assert isinstance(trainer, trl.DPOTrainer)
    assert type(trainer.create_optimizer()) is FusedAdamW


def test_the_prompt_of_a_pair_is_computed_once(tmp_path: Path) -> None:
    trainer = dpo(True, tmp_path)
    batch, lengths = first_batch(trainer), []
    embedding = trainer.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].numel()))
    step_of(trainer, batch)
    handle.remove()
    both_sides = int(batch["attention_mask"].sum())
    prompts = int((batch["attention_mask"] - batch["completion_mask"]).sum()) // 2
    # Pairs may have more than their prompt in common, and no pass needs the last token of a completion.
    assert lengths[0] <= both_sides - prompts - len(batch["input_ids"])


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3"])
def test_families_and_truncated_prompts(family: str, tmp_path: Path) -> None:
    build = {"max_length": 40, "truncation_mode": "keep_end", "disable_dropout": True}
    assert_same(*map(step_of, both(lambda is_ours: dpo(is_ours, tmp_path, family, **build))))


def test_lora_with_the_base_as_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(is_ours: bool) -> Any:
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        return dpo(is_ours, tmp_path, peft_config=config)

    ours, theirs = both(build)
    batch = first_batch(theirs)
    steps = step_of(ours, batch), step_of(theirs, batch)
    assert_same(*steps)
    assert steps[0].metrics["rewards/margins"] != 0
    assert "Tunesmith leaves" not in caplog.text


def test_reference_log_probs_computed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        reference = model(1)
        refuse_trunk(patch, reference)
        ours = dpo(True, tmp_path / "ours", ref_model=reference, precompute_ref_log_probs=True)
    theirs = dpo(False, tmp_path / "theirs", precompute_ref_log_probs=True)
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert ours.train_dataset[name] == pytest.approx(theirs.train_dataset[name], abs=1e-4)
    assert_same(step_of(ours), step_of(theirs))


def test_evaluation_and_training_log_what_trl_logs(tmp_path: Path) -> None:
    logs = []
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}
    changes |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    for trainer in both(lambda is_ours: dpo(is_ours, tmp_path, **changes)):
        trainer.train()
        logs.append([*trainer.state.log_history, trainer.evaluate(pairs(4))])
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        for name, value in theirs.items():
            if "runtime" not in name and "per_second" not in name:
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_under_autocast_the_loss_is_that_of_trl_within_bfloat16(tmp_path: Path) -> None:
    steps = [step_of(prepared(t)) for t in both(lambda is_ours: dpo(is_ours, tmp_path, bf16=True))]
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=0.02)
    for name, value in steps[1].metrics.items():
        assert steps[0].metrics[name] == pytest.approx(value, rel=0.05, abs=0.1), name
    for name, gradient in steps[1].gradients.items():
        assert float((steps[0].gradients[name] - gradient).norm()) < 0.1 * float(gradient.norm()) + 1e-3, name


def prepared(trainer: Any) -> Any:
    """The trainer with its model under accelerate's autocast, as training has it."""
    trainer.accelerator.prepare_model(trainer.model)
    return trainer


def test_what_we_cannot_do_goes_the_way_of_trl_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = both(lambda is_ours: dpo(is_ours, tmp_path, use_weighting=True))
    with caplog.at_level(logging.WARNING, "tunesmith"):
        assert_same(step_of(ours), step_of(theirs))
        step_of(ours)
    assert caplog.text.count("use_weighting") == 1


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_is_that_of_trl(loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prompt": text(row, 3 + row % 4) + " ", "completion": text(row + 40, 1 + row % 6), "label": row % 3 != 0}
        for row in range(8)
    ]

    def build(is_ours: bool) -> Any:
        return (KTOTrainer if is_ours else trl.KTOTrainer)(
            model(0),
            model(1),
            trl.KTOConfig(**arguments(tmp_path, loss_type=loss_type)),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    ours, theirs = both(build)
    batch = first_batch(theirs)
    expected = step_of(theirs, batch)
    refuse_trunk(monkeypatch, ours.model)
    assert_same(step_of(ours, batch), expected)
