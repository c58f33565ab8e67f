"""Small trainings to which something happens: the disk fills up, memory runs out, a number is not finite.

Each is run in a process of its own, so that limits and patches end with it.
"""

import ctypes
import datetime
import itertools
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jobs import EVERY, NUM_STEPS, noisy, the_run, train
from recipes import PROMPTS, grpo_recipe, ppo_recipe, reward_recipe, training

from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.runs import checkpoint
from tunesmith.base.runs.checkpoint import Checkpoint
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
from tunesmith.learn.trainers import best_of_n, distill, dpo, grpo, ppo, reward, sft
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume

LEARNERS = {
    "sft": sft.SFT,
    "reward": reward.Reward,
    "dpo": dpo.DPO,
    "ppo": ppo.PPO,
    "grpo": grpo.GRPO,
    "best_of_n": best_of_n.BestOfN,
    "distill": distill.Distill,
}
Spoil = Callable[[int], None]
UPDATES_PER_STEP = 4
"""Updates in a step of the PPO runs: two epochs of two minibatches."""


def told(file: Path, target: Callable[..., object], *arguments: object) -> None:
    """`target(*arguments)`; if it ends with an error of Tunesmith, the message goes to `file` too."""
    try:
        target(*arguments)
    except TunesmithError as error:
        file.write_text(str(error), encoding="utf-8")
        raise


def findings(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The findings of that name which a run recorded."""
    file = run_dir / "findings.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["name"] == name]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


SPOILS: list[Spoil] = []
"""What `scored` calls with the index of each step."""


def scored(completion_ids: Sequence[Sequence[int]], trainer_state: Any = None, **_: object) -> list[float]:
    """The scores of `noisy`."""
    if trainer_state is not None:
        for spoil in SPOILS:
            spoil(trainer_state.global_step)
    return noisy(completion_ids)


scored.__name__ = noisy.__name__  # names of metrics


def train_and(folder: Path, spoil: Spoil) -> Path:
    """As `train("ppo", folder)`, but the reward calls `spoil` with the index of each step; its scores stay the same."""
    heldout = {"heldout_fraction": 0.3}
    kl = {"coef": 0.1, "target": 1.0, "horizon": 50}
    cfg = ppo_recipe(folder, run={**EVERY, "dir": str(folder)}, prompts=heldout, ppo={"kl": kl})

    SPOILS[:] = [spoil]
    return training(cfg, prompts=PROMPTS, rewards=[scored]).run_dir


def go_on_unspoilt(run_dir: Path) -> Path:
    """The run of `train_and` in `run_dir`, resumed to its end with the same reward, which calls nothing any more."""
    SPOILS.clear()
    return resume(run_dir, inputs=Inputs(prompts=PROMPTS, rewards=[scored]), progress=False).run_dir


def train_on_a_small_disk(folder: Path, num_bytes: int, until: int) -> None:
    """Until step `until` no file can become larger than `num_bytes`, which is what a full disk does to a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def grow(step: int) -> None:
        if step == until:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    train_and(folder, grow)


def train_with_logs_on_a_full_device(folder: Path, log: str, at: int) -> None:
    """From step `at` on, the file `log` of the run is `/dev/full`, to which every write fails."""

    def fill(step: int) -> None:
        file = the_run(folder) / log
        if step == at and not file.is_symlink():
            file.rename(folder / log)
            file.symlink_to("/dev/full")

    train_and(folder, fill)


def train_with_checkpoints_read_only(folder: Path, at: int) -> None:
    """From step `at` on, the folder of checkpoints cannot be written."""
    give_up_privileges()

    def close(step: int) -> None:
        if step == at:
            wait_for_checkpoint(folder, at)
            (the_run(folder) / "checkpoints").chmod(0o500)

    train_and(folder, close)


def wait_for_checkpoint(folder: Path, step: int) -> None:
    """Return when the checkpoint of `step` is on disk: it is written while the next step runs."""
    while not (the_run(folder) / "checkpoints" / f"step-{step:06d}").exists():
        time.sleep(0.001)


def train_with_saves_that_wait_for_the_next_step(folder: Path, log: Path, kill_at: int | None) -> None:
    """No checkpoint is written before the next step has changed the weights; the last one just waits a second.

    `log` gets a line for each step and each save as it begins to write. In step `kill_at` the process is killed.
    """
    original, update, lock = checkpoint.save, MasterAdamW.step, threading.Condition()
    num_updates = 0

    def updated(self: MasterAdamW, *arguments: Any, **options: Any) -> StepReport:
        nonlocal num_updates
        report = update(self, *arguments, **options)
        with lock:
            num_updates += 1
            lock.notify_all()
        return report

    def held_back(place: Path, checkpoint: Checkpoint) -> Path:
        before = checkpoint.step * UPDATES_PER_STEP
        with lock:
            came = lock.wait_for(lambda: num_updates > before, timeout=1 if checkpoint.step == NUM_STEPS else 60)
        with log.open("a") as file:
            file.write(f"save {checkpoint.step} {came}\n")
        return original(place, checkpoint)

    def reach(step: int) -> None:
        with log.open("a") as file:
            file.write(f"step {step}\n")
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save, MasterAdamW.step = held_back, updated  # type: ignore[method-assign]
    train_and(folder, reach)


def train_in_a_read_only_folder(folder: Path) -> None:
    """A run below a folder that may be read alone."""
    give_up_privileges()
    train("ppo", folder)


def give_up_privileges() -> None:
    """Give up what lets the superuser pass over permission bits; the user of the process stays the same."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    nothing = (ctypes.c_uint32 * 6)()
    header = Header(0x20080522, 0)  # version 3 of the interface, this thread
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def train_in_little_memory(folder: Path, num_bytes: int) -> None:
    """A reward model on long pairs in one micro-batch, with an address space that can grow by `num_bytes` alone."""
    torch.ones(64, 64) @ torch.ones(64, 64)  # the libraries have what they need before the limit holds
    cfg = reward_recipe(
        folder,
        run={"dir": str(folder), "steps": 1},
        model={"name": "scratch"},
        reward_model={"pairs_per_step": 256, "micro_batch_size": 256},
    )
    long = [
        Pair(Prompt(f"p{i}", "A film " * 60), chosen="good " * 80 + str(i), rejected="bad " * 80) for i in range(300)
    ]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, resource.RLIM_INFINITY))
    training(cfg, pairs=long)


def train_poisoned(trainer: str, folder: Path, kind: str, calls: range, run: dict[str, Any]) -> None:
    """A run in which the loss of the micro-batches `calls`, counted from 0, is spoilt in the way that `kind` says.

    `loss`: the loss is NaN, its gradient is not; `gradient`: the gradient of one matrix is NaN; `infinite`: the loss
    and all gradients are infinite.
    """
    learner: Any = LEARNERS[trainer]
    original, visits = learner.micro_batch_loss, iter(range(10**6))

    def spoilt(state: Any, *arguments: Any, **options: Any) -> Any:
        outcome = original(state, *arguments, **options)
        if not torch.is_grad_enabled() or next(visits) not in calls:
            return outcome
        loss = outcome[0] if isinstance(outcome, tuple) else outcome
        bad = _poison(loss, matrix_of(state), kind)
        return (bad, *outcome[1:]) if isinstance(outcome, tuple) else bad

    learner.micro_batch_loss = spoilt
    train(trainer, folder, **run)


def train_with_broken_weights(trainer: str, folder: Path, at: int) -> None:
    """From call `at` of the loss on, one weight of the model is NaN."""
    learner: Any = LEARNERS[trainer]
    original, visits = learner.micro_batch_loss, iter(range(10**6))

    def breaking(state: Any, *arguments: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and next(visits) == at:
            with torch.no_grad():
                matrix_of(state)[0, 0] = torch.nan
        return original(state, *arguments, **options)

    learner.micro_batch_loss = breaking
    train(trainer, folder)


def matrix_of(state: Any) -> torch.nn.Parameter:
    """A matrix of the trained model."""
    trained = state.model.model if hasattr(state, "model") else state.policy.module
    return next(p for name, p in trained.named_parameters() if name.endswith("layers.1.mlp.down_proj.weight"))


def _poison(loss: torch.Tensor, matrix: torch.nn.Parameter, kind: str) -> torch.Tensor:
    if kind == "loss":
        return loss + torch.tensor(torch.nan)
    if kind == "infinite":
        return loss * torch.tensor(torch.inf)
    return loss + _NaNGradient.apply(matrix)


class _NaNGradient(torch.autograd.Function):
    """Zero, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        ctx.shape = matrix.shape
        return matrix.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full(ctx.shape, torch.nan)


def train_until_told(folder: Path, waiting: Path, go: Path) -> None:
    """A run that stops in its third step, makes the file `waiting`, and goes on when the file `go` is there."""

    def wait(step: int) -> None:
        if step == 2 and not waiting.exists():
            wait_for_checkpoint(folder, 2)
            waiting.touch()
            while not go.exists():
                time.sleep(0.02)

    train_and(folder, wait)


def grpo_with(folder: Path, rewards: Sequence[Any], **sections: Any) -> Path:
    """Three steps of GRPO with other rewards."""
    return training(grpo_recipe(folder, **sections), prompts=PROMPTS, rewards=rewards).run_dir


def ppo_with(folder: Path, rewards: Sequence[Any], **sections: Any) -> Path:
    """Three steps of PPO with other rewards."""
    return training(ppo_recipe(folder, **sections), prompts=PROMPTS, rewards=rewards).run_dir


def train_while_the_clock_runs_back(trainer: str, folder: Path) -> None:
    """A run in which each look at the wall clock finds it an hour earlier than the last."""
    earlier, now = itertools.count(1), time.time()

    class Backwards(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(now - 3600 * next(earlier), tz)

    time.time = lambda: now - 3600 * next(earlier)
    datetime.datetime = Backwards  # type: ignore[misc]
    train(trainer, folder)
    assert next(earlier) > 1, "nothing looked at the clock"
