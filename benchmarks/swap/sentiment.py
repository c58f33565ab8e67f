"""GRPO towards texts that a reward model of sentiment likes."""

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def trainer(model: str, rows: list[dict[str, str]], reward_model: str, **arguments: Any) -> GRPOTrainer:
    """The trainer; `rows` have a prompt, `reward_model` is a folder."""
    return GRPOTrainer(
        model=model,
        reward_funcs=reward_model,
        args=GRPOConfig(num_generations=8, gradient_accumulation_steps=4, beta=0.01, **arguments),
        train_dataset=Dataset.from_list(rows),
    )
