"""The recipe for GPUs without bfloat16, in float16 on a CPU: the loss is scaled, and a step is that of float32."""

from pathlib import Path

import pytest
import torch
from recipes import PROMPTS, Started, training

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.learn.trainers.estimate import Estimate, announce
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.work import Rows, RunWork, Work

DRAW = GRPO.draw
SMALL = {
    "model.name": "tiny:llama",
    "rollout.prompts_per_step": 2,
    "rollout.completions_per_prompt": 4,
    "rollout.max_new_tokens": 8,
    "run.num_threads": 1,
    "run.steps": 3,
}


def shipped(folder: Path, **more: object) -> GRPORecipe:
    """The recipe `grpo_v100` on a tiny model; in keys of `more`, `__` stands for a dot."""
    given = {key.replace("__", "."): value for key, value in more.items()}
    recipe = load_recipe("grpo", recipe="grpo_v100", overrides={**SMALL, "run.dir": str(folder), **given}).recipe
    assert isinstance(recipe, GRPORecipe)
    return recipe


def first_gradients(state: Started) -> dict[str, torch.Tensor]:
    """The clipped gradient of each parameter, from the first moments after one update."""
    (decay, _) = state.cfg.optimizer.betas
    tensors = state.optimizer.state_dict().tensors
    return {
        key.partition("/")[2]: tensor / (1 - decay) for key, tensor in tensors.items() if key.startswith("exp_avg/")
    }


def one_step(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> dict[str, Started]:
    """States of float16 and float32 after one step from the same weights on the same completions."""
    narrow = Started(shipped(folder, **more), prompts=PROMPTS)
    others = {name: value for name, value in more.items() if name != "optimizer__loss_scale"}
    wide = Started(shipped(folder, **others, model__dtype="float32"), prompts=PROMPTS)
    wide.policy.module.load_state_dict(narrow.policy.module.state_dict())
    wide.reference.module.load_state_dict(narrow.reference.module.state_dict())
    drawn = narrow.draw(narrow.data.train[:2], 0)
    monkeypatch.setattr(GRPO, "draw", lambda *_: drawn)
    for state in (narrow, wide):
        assert state.step(state.data.train[:2]).report is not None
    return {"float16": narrow, "float32": wide}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of `b`, over all tensors together."""
    assert a.keys() == b.keys()
    flat_a, flat_b = (torch.cat([tensors[name].flatten().double() for name in b]) for tensors in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm())


def test_the_recipe_computes_in_float16_scales_the_loss_and_skips_what_overflows(tmp_path: Path):
    result = training(shipped(tmp_path, optimizer__loss_scale=2.0**24), prompts=PROMPTS)
    scales = [row["loss_scale"] for row in result.metrics if "loss_scale" in row]
    overflowed = [row["overflowed_steps"] for row in result.metrics if "overflowed_steps" in row]
    assert scales[0] == 2.0**24
    assert overflowed[0] == 1
    assert scales[-1] < scales[0]
    assert all(row["refused_steps"] == 0 for row in result.metrics)


def test_a_step_in_float16_is_that_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    states = one_step(tmp_path, monkeypatch)
    narrow, wide = states["float16"], states["float32"]
    assert {parameter.dtype for parameter in narrow.policy.module.parameters()} == {torch.float16}
    assert narrow.optimizer.weight_version == wide.optimizer.weight_version == 1
    assert distance(first_gradients(narrow), first_gradients(wide)) < 0.02


def test_without_the_scale_a_small_gradient_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same step with advantages a hundred thousandth as large, as where rewards hardly differ."""
    compare = GRPO.compare
    monkeypatch.setattr(GRPO, "compare", lambda *given: 1e-5 * compare(*given))
    errors = {}
    for scale in (1.0, 65536.0):
        states = one_step(tmp_path, monkeypatch, optimizer__loss_scale=scale)
        errors[scale] = distance(first_gradients(states["float16"]), first_gradients(states["float32"]))
        monkeypatch.setattr(GRPO, "draw", DRAW)
    assert errors[65536.0] < 0.02 < 0.2 < errors[1.0]


def test_memory_is_printed_by_part_and_by_stage(capsys: pytest.CaptureFixture[str]):
    parts = {"weights": 1.0, "optimizer": 2.0, "activations": 4.0, "logits": 8.0, "cache": 16.0}
    work = RunWork(Rows(1, 1), Work())
    estimate = Estimate(10, 10, parts, torch.float32, work)
    assert estimate.stage_gb == {"rollout": 19.0, "update": 31.0}
    announce(estimate, True, torch.device("cpu"))
    assert "memory by stage: rollout 19.0 GB, update 31.0 GB" in capsys.readouterr().err
    learnt_from_rows = Estimate(10, 10, {"weights": 1.0, "activations": 4.0}, torch.float32, work)
    assert learnt_from_rows.stage_gb == {"update": 5.0}
