"""DPO on pairs of completions."""

from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def trainer(model: str, rows: list[dict[str, str]], **arguments: Any) -> DPOTrainer:
    """The trainer; `rows` have a prompt, a chosen and a rejected completion."""
    args = DPOConfig(gradient_accumulation_steps=2, **arguments)
    return DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows))
