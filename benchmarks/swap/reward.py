"""A reward model from pairs of completions."""

from typing import Any

from datasets import Dataset
from trl import RewardConfig, RewardTrainer


def trainer(model: str, rows: list[dict[str, str]], **arguments: Any) -> RewardTrainer:
    """The trainer; `rows` have a prompt, a chosen and a rejected completion."""
    args = RewardConfig(gradient_accumulation_steps=2, **arguments)
    return RewardTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows))
