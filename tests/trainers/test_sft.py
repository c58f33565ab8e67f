"""Supervised fine-tuning learns completions alone, agrees with TRL's trainer, and does not depend on packing."""

import copy
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from recipes import Started, demonstrations, sft_recipe, training
from transformers import AutoModelForCausalLM

from tunesmith.base.core.errors import DataError
from tunesmith.base.runs.progress import Reporter
from tunesmith.engine.models.language_model import FullForward, LanguageModel
from tunesmith.learn.trainers import sft


def gradients(state: Started, indices: list[int]) -> list[torch.Tensor]:
    """The gradients of one step's loss, before the optimizer takes them."""
    chosen = [state.data.train[i] for i in indices]
    num_tokens = sum(one.num_learnt for one in chosen)
    for micro in state.learner.micro_batches(chosen):
        state.learner.micro_batch_loss(micro, num_tokens)[0].backward()
    found = [p.grad.clone() for p in state.policy.module.parameters() if p.grad is not None]
    state.policy.module.zero_grad()
    return found


def test_it_learns_on_demonstrations_it_has_not_seen(tmp_path: Path) -> None:
    cfg = sft_recipe(tmp_path, demonstrations={"heldout_fraction": 0.25}, run={"steps": 12})
    result = training(cfg, demonstrations=demonstrations())
    assert result.summary["eval/loss"] < 0.7 * result.summary["eval/loss_before"]  # type: ignore[operator]
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert result.metrics[-1]["eval/mean_token_accuracy"] > 0.2
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
    assert (result.run_dir / "report.html").exists()


def test_progress_is_shown_as_often_as_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(Reporter, "update", lambda _, step, facts: shown.append(step))
    training(sft_recipe(tmp_path, run={"steps": 5, "log_every": 2}), demonstrations=demonstrations())
    assert shown == [2, 4]


def test_the_final_folder_is_read_by_transformers_and_has_the_loss_that_was_measured(tmp_path: Path) -> None:
    cfg = sft_recipe(tmp_path, demonstrations={"heldout_fraction": 0.25})
    result = training(cfg, demonstrations=demonstrations())
    plain = AutoModelForCausalLM.from_pretrained(result.run_dir / "final", dtype=torch.float32)
    loss, count = 0.0, 0
    for one in Started(cfg, demonstrations=demonstrations()).data.heldout:
        with torch.no_grad():
            logp_SV = plain(torch.tensor([one.ids])).logits[0].log_softmax(-1)
        loss -= sum(logp_SV[i - 1, one.ids[i]].item() for span in one.spans for i in span)
        count += one.num_learnt
    assert result.summary["eval/num_learnt_tokens"] == count
    assert result.summary["eval/loss"] == pytest.approx(loss / count, rel=1e-5)
    assert result.generate("The film", max_new_tokens=4)


@pytest.mark.parametrize("padded", [False, True])
def test_the_token_budget_does_not_change_the_gradients(padded: bool, tmp_path: Path) -> None:
    def of_budget(budget: int) -> list[torch.Tensor]:
        state = Started(sft_recipe(tmp_path, sft={"micro_batch_tokens": budget}), demonstrations=demonstrations())
        if padded:
            state.learner.policy = LanguageModel(state.policy.module, FullForward(), state.policy.kernels)
        return gradients(state, [0, 1, 2, 3, 4, 5])

    whole = of_budget(10_000)
    for small in (of_budget(1), of_budget(90)):
        for one, other in zip(small, whole, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm() + 1e-9


def test_packed_and_padded_gradients_agree(tmp_path: Path) -> None:
    state = Started(sft_recipe(tmp_path), demonstrations=demonstrations())
    packed = gradients(state, list(range(8)))
    state.learner.policy = LanguageModel(state.policy.module, FullForward(), state.policy.kernels)
    for one, other in zip(packed, gradients(state, list(range(8))), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-8


def test_a_long_demonstration_weighs_as_much_as_its_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "long " * 10}]
    state = Started(sft_recipe(tmp_path), demonstrations=rows)
    losses = [state.learner.micro_batch_loss([one], one.num_learnt)[0].item() for one in state.data.train]
    weights = [one.num_learnt for one in state.data.train]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    metrics = state.step(state.data.train).metrics
    assert metrics["loss"] == pytest.approx(mean, rel=1e-6)
    assert metrics["num_learnt_tokens"] == sum(weights)
    assert metrics["num_tokens"] == sum(len(one.ids) for one in state.data.train)


def test_the_prompt_is_not_learnt(tmp_path: Path) -> None:
    """Tokens of the prompt may be any as long as the model does not see them: the loss is that of the completion."""
    state = Started(sft_recipe(tmp_path), demonstrations=[{"prompt": "abc", "completion": "de"}])
    (one,) = state.data.train
    state.policy.module.zero_grad()
    embedding = state.policy.module.get_output_embeddings().weight
    before = copy.deepcopy(state.policy.module)
    state.learner.micro_batch_loss([one], 1)[0].backward()
    logits_SV = before(torch.tensor([one.ids])).logits[0]
    targets = torch.tensor(one.ids)[1:].clone()
    targets[: one.spans[0].start - 1] = -100
    torch.nn.functional.cross_entropy(logits_SV[:-1], targets, ignore_index=-100, reduction="sum").backward()
    expected = before.get_output_embeddings().weight.grad
    assert embedding.grad is not None and expected is not None
    assert (embedding.grad - expected).norm() < 1e-5 * expected.norm()


def test_buckets_change_the_order_and_nothing_else(tmp_path: Path) -> None:
    state = Started(sft_recipe(tmp_path, sft={"bucket_steps": 3}), demonstrations=demonstrations())
    drawn = [one.id for index in range(state.num_steps) for one in state.batch(index)]
    assert sorted(drawn) == sorted(one.id for one in state.data.train)
    lengths = [[one.num_used for one in state.batch(index)] for index in range(3)]
    assert sum(max(step) - min(step) for step in lengths) < 3 * (max(map(max, lengths)) - min(map(min, lengths)))


def test_the_epochs_of_fewer_demonstrations_than_a_step_holds_are_a_step_each(tmp_path: Path) -> None:
    cfg = sft_recipe(tmp_path, sft={"num_epochs": 3, "demonstrations_per_step": 100})
    assert Started(cfg, demonstrations=demonstrations()).num_steps == 3


def test_no_demonstrations_are_an_error_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no demonstrations"):
        training(sft_recipe(tmp_path), demonstrations=[])
    assert not (tmp_path / "runs").exists()


def test_a_refused_step_shows_what_was_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Started(sft_recipe(tmp_path), demonstrations=[{"prompt": "abc", "completion": "de"}])
    (row,) = sft.batch_rows(state.tokenizer, state.data.train)
    assert row == {"id": "demonstrations[0]", "text": "abcde", "learnt": ["de"]}
    json.dumps(row)


def test_checkpointed_activations_give_the_same_loss(tmp_path: Path) -> None:
    def loss(on: bool) -> float:
        cfg = sft_recipe(tmp_path, model={"gradient_checkpointing": on})
        state = Started(cfg, demonstrations=demonstrations())
        return state.step(state.data.train[:4]).metrics["loss"]

    assert loss(True) == loss(False)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_loss_accuracy_entropy_and_update_are_those_of_trl(num_micro_batches: int, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    state = Started(sft_recipe(tmp_path, optimizer={"learning_rate": 1e-3}), demonstrations=demonstrations(8))
    theirs = copy.deepcopy(state.policy.module)
    rows = [
        {
            "input_ids": list(one.ids),
            "completion_mask": [int(any(i in s for s in one.spans)) for i in range(len(one.ids))],
        }
        for one in state.data.train
    ]
    arguments = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=8 // num_micro_batches,
        gradient_accumulation_steps=num_micro_batches,
        max_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=state.cfg.optimizer.betas[1],
        max_grad_norm=state.cfg.optimizer.max_grad_norm,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        completion_only_loss=True,
    )
    trainer = SFTTrainer(theirs, arguments, train_dataset=Dataset.from_list(rows), processing_class=state.tokenizer)
    trainer.train()
    logged = next(row for row in trainer.state.log_history if "loss" in row)
    ours = state.step(state.data.train).metrics
    assert ours["loss"] == pytest.approx(logged["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-4)
    assert ours["num_tokens"] == logged["num_tokens"]
    for mine, other in zip(state.policy.module.parameters(), trainer.model.parameters(), strict=True):
        assert ((mine - other).abs() > 1e-5).float().mean() < 0.01
    if num_micro_batches == 1:  # of several TRL takes the mean of their means
        assert ours["entropy"] == pytest.approx(logged["entropy"], rel=1e-5)
        assert ours["mean_token_accuracy"] == pytest.approx(logged["mean_token_accuracy"], rel=1e-5)
