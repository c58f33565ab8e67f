"""Trainings in several processes that are started once."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from recipes import (
    PROMPTS,
    best_of_n_recipe,
    demonstrations,
    distill_recipe,
    dpo_recipe,
    grpo_recipe,
    pairs,
    ppo_recipe,
    reward_recipe,
    sft_recipe,
)
from safetensors.torch import load_file

from tunesmith.base.config.recipe import ENVIRONMENT_REWARD, Recipe
from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.base.config.sections import RewardSource
from tunesmith.engine.batch.rollout import Trajectory
from tunesmith.engine.distributed.launch import ranks_of
from tunesmith.engine.distributed.ranks import rank
from tunesmith.engine.models import load
from tunesmith.learn.environments.contract import Reply, Said
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import follow, lead
from tunesmith.learn.trainers.session import open_session
from tunesmith.learn.trainers.setup import RunResult

Runs = list[tuple[Recipe, Inputs]]

HELDOUT = {"heldout_fraction": 0.3}
KL = {"coef": 0.1, "target": 1.0, "horizon": 50}


def few_low(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """The share of low token ids: a function of each completion alone."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


class Plays:
    """Begins alike for all prompts, answers by what is said, and sometimes breaks or ends."""

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self.seed, self.said = row["seed"], ""
        return [{"role": "user", "content": "Play."}]

    def step(self, said: Said) -> Reply:
        self.said += said.text
        code = sum(map(ord, said.text)) + self.seed
        if code % 13 == 0:
            raise RuntimeError("it broke")
        return Reply(({"role": "user", "content": "abc"[: code % 4]},), code % 5 / 10, code % 7 == 0)

    def reward(self) -> float | None:
        return None

    def close(self) -> None:
        return None


def said(environments: Sequence[Plays], trajectories: Sequence[Trajectory]) -> list[float]:
    """The length of what was said to the instance of each trajectory."""
    for one, trajectory in zip(environments, trajectories, strict=True):
        assert one.said == "".join(str(said["content"]) for said in trajectory.messages if said["role"] == "assistant")
    return [len(one.said) / 100 for one in environments]


def runs_of_all(folder: Path) -> dict[str, tuple[Recipe, Inputs]]:
    """Three steps of each algorithm, with what it has of statistics over the whole batch."""
    run = {"steps": 3, "eval_every": 2, "checkpoint_every": 2}
    averaged = {"teachers": [{"model": "self"}], "self_weights": "ema", "num_minibatches": 2}
    told = Inputs(prompts=[{"prompt": text, "privileged_context": f"{text}?"} for text in PROMPTS])
    drawn, preferred = Inputs(prompts=PROMPTS, rewards=[few_low]), Inputs(pairs=pairs())
    ppo = {"kl": KL, "whiten_rewards": True, "target_kl": 0.2}
    refilled = {"num_minibatches": 2, "dynamic_sampling": 1, "kl": {"coef": 0.1}}
    return {
        "sft": (sft_recipe(folder, run=run, demonstrations=HELDOUT), Inputs(demonstrations=demonstrations())),
        "reward": (reward_recipe(folder, run=run, pairs=HELDOUT, reward_model={"micro_batch_size": 3}), preferred),
        "dpo": (dpo_recipe(folder, run=run, pairs=HELDOUT, dpo={"reference": "live"}), preferred),
        "kto": (dpo_recipe(folder, run=run, dpo={"loss": "kto"}), preferred),
        "ppo": (ppo_recipe(folder, run=run, prompts=HELDOUT, ppo=ppo), drawn),
        "critic": (ppo_recipe(folder, run=run, ppo={"critic": "separate"}, optimizer={"state": "int8"}), drawn),
        "grpo": (grpo_recipe(folder, run=run, prompts=HELDOUT, grpo=refilled, evaluation={"correct_at": 0.5}), drawn),
        "frozen": (grpo_recipe(folder, run=run, model={"num_trainable_layers": 1}, grpo=refilled), drawn),
        "repeated": (grpo_recipe(folder, run=run, rollout={"prompts_per_step": 6}), drawn),
        "environment": (
            grpo_recipe(folder, run=run, prompts=HELDOUT, environment={"max_turns": 3}),
            Inputs(prompts=PROMPTS, environment_factory=Plays, rewards=[RewardSource(**ENVIRONMENT_REWARD), said]),
        ),
        "best_of_n": (best_of_n_recipe(folder, run=run, best_of_n={"keep": 3, "kl": KL}), drawn),
        "distill": (distill_recipe(folder, run=run, prompts=HELDOUT, distill={"num_minibatches": 2}), drawn),
        "self": (distill_recipe(folder, run=run, prompts=HELDOUT, distill=averaged), told),
    }


def several(runs: Runs, dtype: torch.dtype | None = None) -> list[RunResult]:
    """The results of `runs`, one after the other, on this rank; with weights of `dtype`, which no recipe may have."""
    with patch.object(load, "compute_dtype", lambda *_: dtype) if dtype else nullcontext():
        return [_one(cfg, inputs) for cfg, inputs in runs]


def _one(cfg: Recipe, inputs: Inputs) -> RunResult:
    if rank() > 0:
        return follow(cfg, inputs, None)
    return lead(cfg, inputs, None, partial(open_session, cfg, provenance=None, show_progress=False))


_PATIENCE_S = 300.0
"""For another rank. On a busy machine 60 s were too few: rank 0 alone writes checkpoints and reports."""


def trained(num_ranks: int, runs: Runs, dtype: torch.dtype | None = None, **scale: Any) -> list[RunResult]:
    """The results of `runs` by `num_ranks` processes."""
    with ranks_of(ScaleSection(ranks=num_ranks, rank_timeout_s=_PATIENCE_S, **scale), partial(several, runs, dtype)):
        return several(runs, dtype)


def on_ranks(num_ranks: int, work: Callable[[], Any], timeout_s: float = _PATIENCE_S, **scale: Any) -> Any:
    """The result of `work()` on rank 0, while each other rank calls it too."""
    with ranks_of(ScaleSection(ranks=num_ranks, rank_timeout_s=timeout_s, **scale), work):
        return work()


def weights_of(result: RunResult) -> dict[str, torch.Tensor]:
    """The tensors of `final/`."""
    files = sorted((result.run_dir / "final").glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def difference(one: RunResult, other: RunResult) -> float:
    """The distance of the final weights, as a share of their norm."""
    mine, others = weights_of(one), weights_of(other)
    assert mine.keys() == others.keys()
    squares = sum((mine[name].double() - others[name].double()).square().sum() for name in mine)
    norm = sum(tensor.double().square().sum() for tensor in mine.values())
    return float((squares / norm).sqrt())


def samples_of(result: RunResult) -> list[str]:
    """The completions in `samples.jsonl`."""
    file = result.run_dir / "samples.jsonl"
    return [json.loads(line)["completion"] for line in file.read_text().splitlines()] if file.exists() else []
