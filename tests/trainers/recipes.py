"""Small recipes for tests of the trainers."""

from pathlib import Path
from typing import Any

from tunesmith.base.config.algorithms.best_of_n import BestOfNRecipe
from tunesmith.base.config.algorithms.distill import DistillRecipe
from tunesmith.base.config.algorithms.dpo import DPORecipe
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.online_dpo import OnlineDPORecipe
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.algorithms.sft import SFTRecipe
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, StepResult
from tunesmith.learn.trainers.run import run, task_of
from tunesmith.learn.trainers.setup import RunResult

PROMPTS = ["The film", "A story", "Once more", "They said"]


def ppo_recipe(tmp_path: Path, **sections: Any) -> PPORecipe:
    """Three steps on a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 6},
        "ppo": {"num_epochs": 2, "num_minibatches": 2, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "num_threads": 1},
    }
    return PPORecipe.model_validate(merged(base, sections))


def grpo_recipe(tmp_path: Path, **sections: Any) -> GRPORecipe:
    """Three steps on a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
        "grpo": {"micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "num_threads": 1},
    }
    return GRPORecipe.model_validate(merged(base, sections))


def best_of_n_recipe(tmp_path: Path, **sections: Any) -> BestOfNRecipe:
    """Three steps on a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
        "best_of_n": {"micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "num_threads": 1},
    }
    return BestOfNRecipe.model_validate(merged(base, sections))


def online_dpo_recipe(tmp_path: Path, **sections: Any) -> OnlineDPORecipe:
    """Three steps on a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 6},
        "online_dpo": {"micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "num_threads": 1},
    }
    return OnlineDPORecipe.model_validate(merged(base, sections))


def distill_recipe(tmp_path: Path, **sections: Any) -> DistillRecipe:
    """Three steps of a tiny Llama towards another one; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32", "seed": 1},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
        "distill": {"teachers": [{"model": "tiny:llama"}], "micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "num_threads": 1},
    }
    return DistillRecipe.model_validate(merged(base, sections))


def reward_recipe(tmp_path: Path, **sections: Any) -> RewardRecipe:
    """A reward model on a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "reward_model": {"num_epochs": 3, "pairs_per_step": 8, "micro_batch_size": 8},
        "optimizer": {"learning_rate": 3e-3},
        "run": {"dir": str(tmp_path / "runs"), "num_threads": 1},
    }
    return RewardRecipe.model_validate(merged(base, sections))


def dpo_recipe(tmp_path: Path, **sections: Any) -> DPORecipe:
    """Preferences learnt by a tiny Llama directly; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "dpo": {"num_epochs": 3, "pairs_per_step": 8, "micro_batch_size": 3},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "runs"), "num_threads": 1},
    }
    return DPORecipe.model_validate(merged(base, sections))


def sft_recipe(tmp_path: Path, **sections: Any) -> SFTRecipe:
    """Fine-tuning of a tiny Llama; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "demonstrations": {"heldout_fraction": 0.0},
        "sft": {"demonstrations_per_step": 8, "micro_batch_tokens": 200},
        "optimizer": {"learning_rate": 1e-2},
        "run": {"dir": str(tmp_path / "runs"), "num_threads": 1},
    }
    return SFTRecipe.model_validate(merged(base, sections))


def demonstrations(count: int = 48) -> list[dict[str, object]]:
    """Completions, conversations and texts of several lengths that are easy to learn."""
    rows: list[dict[str, object]] = []
    for i in range(count):
        question = {"role": "user", "content": f"{PROMPTS[i % 4]} {i}?"}
        answer = {"role": "assistant", "content": "yes " * (i % 5 + 1)}
        rows.append({"prompt": f"{PROMPTS[i % 4]} {i}", "completion": " is good." * (i % 3 + 1)})
        if i % 3 == 1:
            rows[-1] = {"messages": [question, answer] * (i % 2 + 1)}
        elif i % 3 == 2:
            rows[-1] = {"text": f"{i} {PROMPTS[i % 4]} is good."}
    return rows


def pairs(count: int = 48) -> list[Pair]:
    """Pairs in which the text with more exclamation marks was preferred."""
    return [
        Pair(Prompt(f"p{i}", f"{PROMPTS[i % 4]} {i}"), chosen="wow!!! so good!", rejected=f"meh, not {i}.")
        for i in range(count)
    ]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: {**base[key], **over[key]} for key in base.keys() & over.keys() if isinstance(over[key], dict)}
    return {**base, **over, **both}


class Started:
    """A task and its learner before the first step; attributes of both, those of the learner first."""

    def __init__(self, cfg: Recipe, **inputs: Any) -> None:
        self.cfg = cfg
        self.task: Any = task_of(cfg, Inputs(**inputs), setup.prepare(cfg))
        self.learner: Any = self.task.build()
        self.identity = self.task.prepare(self.learner, False)

    def step(self, batch: Any, index: int = 0) -> Any:
        return self.learner.step(batch, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner if hasattr(self.learner, name) else self.task, name)


def training(cfg: Recipe, resume: Path | None = None, **inputs: Any) -> RunResult:
    """A run without a progress bar."""
    return run(cfg, Inputs(**inputs), progress=False, resume=resume)


def groups_of(result: StepResult) -> Any:
    """The groups that a step drew."""
    return result.batch.args[0]
