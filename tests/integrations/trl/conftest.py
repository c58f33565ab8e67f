"""Tiny models on disk, and TRL's own trainers as the oracle of ours; the helper modules here can be imported."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from tunesmith.engine.models.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parent))

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["one", "a longer prompt", "two words", "x"]
MAX_TOKENS = 8


def token_sum(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward that differs within a group."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder with the tiny model of a family."""
    base, made = tmp_path_factory.mktemp("tiny"), set[str]()

    def folder(family: str) -> str:
        if family not in made:
            loaded = tiny_model(family)
            loaded.model.save_pretrained(base / family)
            loaded.tokenizer.save_pretrained(base / family)
            made.add(family)
        return str(base / family)

    return folder


@dataclass
class Seen(TrainerCallback):
    """Gradients of the first optimizer step before clipping, by name, and everything that was logged."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        named = objects["model"].named_parameters()
        self.gradients = self.gradients or {
            name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None
        }

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.logs.append(dict(objects["logs"]))


def given_completions(trainer: Any) -> None:
    """Let the trainer draw fixed completions of its prompts: the oracle and ours then see the same tokens."""
    count = 0

    def draw(prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> Any:
        nonlocal count
        drawn = []
        for ids in prompt_ids:
            count += 1
            length = 1 + (count + len(ids)) % MAX_TOKENS
            tokens = [(7 * count + 13 * index + len(ids)) % 250 + 3 for index in range(length)]
            drawn.append(tokens if length == MAX_TOKENS else [*tokens, 2])
        return drawn if isinstance(trainer, trl.RLOOTrainer) else (drawn, None)

    trainer._generate_single_turn = draw


@pytest.fixture
def build(folders: Callable[[str], str], tmp_path: Path) -> Callable[..., tuple[Any, Seen]]:
    """Builds a trainer of the given class on a tiny model; `given` completions are the same for every class."""

    def make(
        trainer_class: type,
        family: str = "llama",
        *,
        given: bool = False,
        model: Any = None,
        arguments: dict[str, Any] | None = None,
        **config: Any,
    ) -> tuple[Any, Seen]:
        config_class = trl.RLOOConfig if issubclass(trainer_class, trl.RLOOTrainer) else trl.GRPOConfig
        settings = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": MAX_TOKENS,
            "max_steps": 1,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "max_grad_norm": 100.0,
            **config,
        }
        seen = Seen()
        rows = datasets.Dataset.from_dict({"prompt": PROMPTS})
        trainer = trainer_class(
            model=model or AutoModelForCausalLM.from_pretrained(folders(family)),
            reward_funcs=token_sum,
            args=config_class(**settings),
            **{"train_dataset": rows, "eval_dataset": rows, "callbacks": [seen], **(arguments or {})},
        )
        if given:
            given_completions(trainer)
        return trainer, seen

    return make
