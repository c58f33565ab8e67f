"""With activations computed again in the backward pass, every trainer takes the same steps to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import outcome
from recipes import PROMPTS, grpo_recipe, pairs, ppo_recipe, reward_recipe, training

RUNS = ("reward", "ppo", "ppo with a critic of its own", "grpo")
STEPS = 2


def trained(kind: str, folder: Path, *, dtype: str, checkpointed: bool) -> Path:
    model = {"dtype": dtype, "gradient_checkpointing": checkpointed}
    run = {"dir": str(folder), "steps": STEPS}
    torch.manual_seed(0)
    if kind == "reward":
        cfg = reward_recipe(folder, model=model, run=run)
        return training(cfg, pairs=pairs()).run_dir
    if kind == "grpo":
        grpo_cfg = grpo_recipe(folder, model=model, run=run)
        return training(grpo_cfg, prompts=PROMPTS, rewards=[unlike]).run_dir
    critic = "separate" if "critic" in kind else "shared"
    ppo_cfg = ppo_recipe(folder, model=model, run=run, ppo={"critic": critic})
    return training(ppo_cfg, prompts=PROMPTS, rewards=[unlike]).run_dir


def unlike(completion_ids: Any, **_: object) -> list[float]:
    """Different for nearly all completions, and nothing is drawn."""
    return [sum(ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", RUNS)
def test_losses_and_weights_are_those_without_checkpoints(kind: str, dtype: str, tmp_path: Path) -> None:
    plain = trained(kind, tmp_path / "plain", dtype=dtype, checkpointed=False)
    again = trained(kind, tmp_path / "again", dtype=dtype, checkpointed=True)
    assert outcome(again) == outcome(plain)


@pytest.mark.parametrize("kind", RUNS)
def test_layers_are_really_computed_twice(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    original = torch.utils.checkpoint.checkpoint

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return original(*arguments, **options)

    for place in ("transformers.modeling_utils.checkpoint", "tunesmith.engine.models.decoder.checkpoint"):
        monkeypatch.setattr(place, counted)
    trained(kind, tmp_path, dtype="float32", checkpointed=False)
    assert not calls
    trained(kind, tmp_path, dtype="float32", checkpointed=True)
    assert any(calls)
