"""Small trainings in processes of their own, forked from one that has torch loaded, so that they can be killed."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
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
    training,
)

from server_parts import context
from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.core.faults import VARIABLE
from tunesmith.base.runs.folder import MEASURED
from tunesmith.learn.trainers.resume import Inputs, resume

TRAINERS = ("sft", "reward", "dpo", "ppo", "grpo", "best_of_n", "distill")
NUM_STEPS = 10
BASE = "tiny:llama"
"""The model that is trained."""
DPO_VARIANTS = {"kto": {"loss": "kto"}, "live": {"reference": "live"}}
"""What the trainer of preferences does otherwise than in its own job."""
ALARMS = {"max_kl": 1e-3}
"""So low that there is a finding."""

EVERY = {"checkpoint_every": 2, "eval_every": 3, "sample_every": 2, "keep_checkpoints": 2, "steps": NUM_STEPS}


def noisy(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Easy to learn, and drawn in part from every global generator: a resumed run must find them as they were."""
    noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
    return [sum(token < 130 for token in ids) / len(ids) + 0.01 * noise * len(set(ids)) for ids in completion_ids]


def train(
    trainer: str, folder: Path, dtype: str = "float32", lora: Mapping[str, object] | None = None, **run: Any
) -> Path:
    """A run of ten steps below `folder`, of adapters if `lora` is given, whose `base` may be int8; its run folder."""
    section = {**EVERY, "dir": str(folder), **run}
    keys = dict(lora or {})
    model = {"name": BASE, "dtype": dtype, "base": keys.pop("base", "model"), "lora": keys}
    heldout = {"heldout_fraction": 0.3}
    if trainer in ("reward", "heads", "expert", "post_hoc"):
        several: dict[str, object] = {"heads": {"count": 3 if trainer in ("heads", "post_hoc") else 1}}
        if trainer == "expert":
            several |= {"length": "expert", "average_from": 0.4}
        if trainer == "post_hoc":
            several |= {"length": "post_hoc", "average_from": 0.4}
        cfg = reward_recipe(folder, model=model, run=section, pairs=heldout, reward_model=several)
        return training(cfg, pairs=pairs()).run_dir
    if trainer == "sft":
        buckets = {"bucket_steps": 3, "micro_batch_tokens": 2000}
        cfg = sft_recipe(folder, model=model, run=section, demonstrations=heldout, sft=buckets)
        return training(cfg, demonstrations=demonstrations()).run_dir
    if trainer in ("dpo", *DPO_VARIANTS):
        cfg = dpo_recipe(folder, model=model, run=section, pairs=heldout, dpo=DPO_VARIANTS.get(trainer, {}))
        return training(cfg, pairs=pairs()).run_dir
    if trainer == "ppo":
        kl = {"coef": 0.1, "target": 1.0, "horizon": 50}
        cfg = ppo_recipe(folder, model=model, run=section, prompts=heldout, ppo={"kl": kl}, alarms=ALARMS)
        return training(cfg, prompts=PROMPTS, rewards=[noisy]).run_dir
    if trainer == "best_of_n":
        section_of_n = {"num_minibatches": 2, "kl": {"coef": 0.1, "target": 1.0, "horizon": 50}}
        cfg = best_of_n_recipe(folder, model=model, run=section, prompts=heldout, best_of_n=section_of_n, alarms=ALARMS)
        return training(cfg, prompts=PROMPTS, rewards=[noisy]).run_dir
    if trainer == "distill":
        student = {**model, "seed": 1}
        alarms, options = {"length_factor": 1.01}, {"num_minibatches": 2}
        cfg = distill_recipe(folder, model=student, run=section, prompts=heldout, distill=options, alarms=alarms)
        return training(cfg, prompts=PROMPTS).run_dir
    names_weights = trainer in ("model", "int8", "auto")  # auto takes 8 bits for one update of a rollout alone
    grpo_section = {"num_minibatches": 1 if names_weights else 2}
    rollout = {"weights": trainer} if names_weights else {"recompute_logps": True}
    parts = {"evaluation": {"correct_at": 0.5}, "alarms": ALARMS, "rollout": rollout}
    cfg = grpo_recipe(folder, model=model, run=section, prompts=heldout, grpo=grpo_section, **parts)
    return training(cfg, prompts=PROMPTS, rewards=[noisy]).run_dir


def go_on(run_dir: Path, **overrides: Any) -> Path:
    """The run in `run_dir`, resumed to its end."""
    known = {
        "reward": Inputs(pairs=pairs()),
        "dpo": Inputs(pairs=pairs()),
        "sft": Inputs(demonstrations=demonstrations()),
    }
    algorithm = (run_dir / "recipe.yaml").read_text().partition("algorithm: ")[2].split()[0]
    inputs = known.get(algorithm, Inputs(prompts=PROMPTS, rewards=[noisy]))
    return resume(run_dir, overrides=overrides, inputs=inputs, progress=False).run_dir


def start(target: Any, *arguments: Any, fault: str = "") -> BaseProcess:
    """`target(*arguments)` in a forked process, with a fault planned."""
    process = context().Process(target=_run, args=(target, arguments, fault), daemon=True)
    process.start()
    return process


def forked(target: Any, *arguments: Any, fault: str = "") -> int:
    """The exit code of `target(*arguments)` in a forked process: negative for a signal that ended it."""
    process = start(target, *arguments, fault=fault)
    process.join(timeout=600)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def the_run(folder: Path) -> Path:
    """The one run folder below `folder`."""
    (found,) = [path for path in folder.iterdir() if (path / "recipe.yaml").exists()]
    return found


def outcome(run_dir: Path) -> Mapping[str, object]:
    """What must not depend on whether a run was interrupted: weights, metrics without times, sampled tokens."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().split("\n") if line]
    samples = run_dir / "samples.jsonl"
    (weights,) = (run_dir / "final").glob("*model.safetensors")  # of a model, or of adapters
    return {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows],
        "samples": samples.read_text() if samples.exists() else "",
    }


def _run(target: Any, arguments: Sequence[Any], fault: str) -> None:
    os.environ[VARIABLE] = fault
    try:
        target(*arguments)
    except TunesmithError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
