"""A step learns the same whether the logits of a micro-batch are kept or computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe

from tunesmith.learn.trainers import grpo, ppo


@pytest.mark.parametrize("trainer", [grpo, ppo])
def test_a_step_whose_logits_do_not_fit_learns_the_same(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is tiny, so the limit is lowered until the logits of a micro-batch do not fit."""
    found = []
    for chunk_bytes in (2**26, 2**12):
        monkeypatch.setattr("tunesmith.engine.kernels.logprob.head.CPU_CHUNK_BYTES", chunk_bytes)
        recipe = {grpo: grpo_recipe, ppo: ppo_recipe}[trainer]
        state = Started(recipe(tmp_path, run={"steps": 1}), prompts=PROMPTS, rewards=[low_ids])
        asked = state.batch(0)
        result = state.step(asked, 0)
        found.append((result.metrics, list(state.policy.module.parameters())))
    (whole, weights), (chunked, others) = found
    assert chunked["entropy"] == pytest.approx(whole["entropy"], rel=1e-5)
    assert chunked["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-3) for a, b in zip(weights, others, strict=True))


def low_ids(completion_ids: Any, **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]
