"""GRPO on sums, with a verifier: 1 for the right number, and 0.2 more for a number at all."""

import re
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 where the first number of a completion is the answer."""
    found = [re.match(r"\s*(\d+)", text) for text in completions]
    return [float(bool(number) and number[1] == right) for number, right in zip(found, answer, strict=True)]


def is_number(completions: list[str], **_: object) -> list[float]:
    """0.2 where a completion begins with a number."""
    return [0.2 * bool(re.match(r"\s*\d", text)) for text in completions]


def trainer(model: str, rows: list[dict[str, str]], **arguments: Any) -> GRPOTrainer:
    """The trainer; `rows` have a prompt and an answer."""
    return GRPOTrainer(
        model=model,
        reward_funcs=[correct, is_number],
        args=GRPOConfig(num_generations=8, gradient_accumulation_steps=4, **arguments),
        train_dataset=Dataset.from_list(rows),
    )
