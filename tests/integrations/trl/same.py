"""One step of a TRL trainer and of ours, from equal weights and equal batches, and what must be equal of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model

WORDS = ("the", "film", "was", "a", "joy", "from", "start", "and", "nobody", "in", "it", "is", "dull", "or", "long")


def text(seed: int, num_words: int) -> str:
    return " ".join(WORDS[(seed * 7 + 3 * n * (seed + 1)) % len(WORDS)] for n in range(num_words))


def pairs(num_rows: int = 8) -> Dataset:
    """Preference pairs of different lengths; some prompts are longer than both completions."""
    rows = [
        {
            "prompt": text(row, 2 + 3 * (row % 4)) + " ",
            "chosen": text(row + 50, 1 + row % 5),
            "rejected": text(row + 90, 1 + (3 * row) % 7),
        }
        for row in range(num_rows)
    ]
    return Dataset.from_list(rows)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of every trainer's config: float32 on the CPU, nothing written."""
    fixed = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    plain = {"per_device_train_batch_size": 8, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3}
    return {**fixed, **plain, **changes}


@dataclass(frozen=True)
class Step:
    loss: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def step_of(trainer: Any, batch: dict[str, Any] | None = None, *, train: bool = True) -> Step:
    """Loss, metrics and gradients of one micro-batch, by default the first of the training data."""
    batch = first_batch(trainer) if batch is None else batch
    trainer.model.train(train)
    trainer.model.zero_grad()
    mode = "train" if train else "eval"
    trainer._metrics[mode].clear()
    trainer._total_train_tokens = 0
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {name: values[-1] for name, values in trainer._metrics[mode].items()}
    return Step(loss.item(), metrics, gradients)


def first_batch(trainer: Any) -> dict[str, Any]:
    """The first rows of the training data, in order, as the trainer's collator gives them."""
    trainer._set_signature_columns_if_needed()
    size = trainer.args.per_device_train_batch_size
    columns = [name for name in trainer._signature_columns if name in trainer.train_dataset.column_names]
    rows = [{name: trainer.train_dataset[index][name] for name in columns} for index in range(size)]
    return trainer.data_collator(rows)


def assert_same(ours: Step, theirs: Step, tolerance: float = 1e-5) -> None:
    """Loss within 1e-5, metrics by name and value, and gradients."""
    assert ours.loss == pytest.approx(theirs.loss, rel=tolerance, abs=tolerance)
    assert list(ours.metrics) == list(theirs.metrics)
    for name, value in theirs.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert ours.gradients.keys() == theirs.gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.gradients.values())
    assert scale > 0
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, atol=2e-5 * scale, rtol=1e-3, msg=name)


def refuse_trunk(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Make transformers' own trunk fail, so that what is computed is computed by the decoder."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers' own forward was called")

    monkeypatch.setattr(type(model.base_model), "forward", refused)


def both(build: Callable[[bool], Any]) -> tuple[Any, Any]:
    """(ours, TRL's) trainer, from `build(is_ours)`."""
    return build(True), build(False)


def model(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    return tiny_model(family, seed, **changes).model


def tokenizer() -> Any:
    return byte_tokenizer()
