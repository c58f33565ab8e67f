"""SFT on prompts and completions."""

from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def trainer(model: str, rows: list[dict[str, str]], **arguments: Any) -> SFTTrainer:
    """The trainer; `rows` have a prompt and a completion."""
    args = SFTConfig(gradient_accumulation_steps=2, **arguments)
    return SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows))
