"""Layers that are not trained are computed once for all passes over a rollout, and no bit changes by that."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, best_of_n_recipe, grpo_recipe, ppo_recipe, training

from tunesmith.engine.batch.pack import FrozenStates
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import decoder as flat
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import freeze_lower_layers
from tunesmith.engine.models.logprob import frozen_states, token_logps
from tunesmith.engine.models.lora import frozen_copy
from tunesmith.engine.models.tiny import FAMILIES, tiny_model
from tunesmith.learn.trainers.setup import RunResult

ONE_LAYER: dict[str, Any] = {"num_trainable_layers": 1}
RECIPES = {
    "ppo": lambda folder: ppo_recipe(folder, model=ONE_LAYER),
    "ppo, old policy": lambda folder: ppo_recipe(folder, model=ONE_LAYER, rollout={"recompute_logps": True}),
    "grpo": lambda folder: grpo_recipe(folder, model=ONE_LAYER, grpo={"num_epochs": 2, "kl": {"coef": 0.1}}),
    "best_of_n": lambda folder: best_of_n_recipe(folder, model=ONE_LAYER, best_of_n={"kl": {"coef": 0.1}}),
}


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def figures_of(result: RunResult) -> list[dict[str, float]]:
    computed = ("loss", "reward", "objective/", "policy/", "val/", "grad_norm", "learning_rate")
    return [{key: value for key, value in row.items() if key.startswith(computed)} for row in result.metrics]


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_has_the_bits_of_one_that_computes_them_in_every_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = training(RECIPES[name](tmp_path / "once"), prompts=PROMPTS, rewards=[low_ids])
    monkeypatch.setattr(Decoder, "num_frozen", 0)
    anew = training(RECIPES[name](tmp_path / "anew"), prompts=PROMPTS, rewards=[low_ids])
    assert all("time/frozen_s" in row for row in once.metrics)
    assert not any("time/frozen_s" in row for row in anew.metrics)
    assert figures_of(once) == figures_of(anew)
    assert {"reward", "objective/kl", "grad_norm"} <= figures_of(once)[-1].keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_have_the_same_bits_whatever_rows_are_together(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family).model
    freeze_lower_layers(model, 1)
    policy, reference = (language_model(one, Kernels()) for one in (model, frozen_copy(model)))
    assert policy.decoder is not None
    ids_BS = torch.randint(0, 259, (6, 12), generator=torch.Generator().manual_seed(0))
    ids_BS[1:4, :5] = ids_BS[0, :5]  # three rows with the prompt of the first
    lengths_B, prompts_B = torch.tensor([12, 9, 7, 6, 11, 2]), torch.tensor([5, 5, 5, 5, 3, 1])
    states = FrozenStates(1, frozen_states(policy.decoder, ids_BS, lengths_B))
    computed, block = [], flat._block
    monkeypatch.setattr(flat, "_block", lambda layer, *rest: (computed.append(layer), block(layer, *rest))[1])
    for rows in ([0, 1, 2, 3, 4, 5], [4, 1, 3], [5, 0]):
        width = int(lengths_B[rows].max())
        chosen = replace(states, x_BSH=states.x_BSH[rows, :width])
        for scored in (policy, reference):
            found = []
            for frozen in (None, chosen):
                computed.clear()
                scores = token_logps(
                    scored, ids_BS[rows, :width], lengths_B[rows], prompt_lengths_B=prompts_B[rows], frozen=frozen
                )
                assert computed == ([0, 1] if frozen is None else [1])
                if scored is policy:
                    model.zero_grad()
                    (scores.logp_BT.sum() + scores.entropy_BT.sum()).backward()
                gradients = [one.grad.clone() for one in model.parameters() if one.requires_grad and scored is policy]
                found.append((scores.logp_BT, scores.entropy_BT, *gradients))
            assert len(found[0]) == len(found[1])
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_what_is_frozen_is_seen_in_the_model() -> None:
    model = tiny_model("llama").model
    decoder = Decoder(model, Kernels())
    assert decoder.num_frozen == 0
    freeze_lower_layers(model, 1)
    assert decoder.num_frozen == 1
    model.get_input_embeddings().requires_grad_(True)
    assert decoder.num_frozen == 0
