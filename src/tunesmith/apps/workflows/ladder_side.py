"""One side of the ladder: a PPO or GRPO learner in a process of its own, which works only when it is called.

So memory is counted apart, no side inherits the allocator's settings of another, and sides can alternate.
"""

import gc
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.core.errors import TrainingError, TunesmithError
from tunesmith.base.core.trace import trace
from tunesmith.base.runs.environment import peak_rss_since_reset_gb, reset_peak_rss
from tunesmith.engine.batch.pack import PolicyBatch, pack
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.trainers import passes, setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.policy_step import update_size
from tunesmith.learn.trainers.ppo import PPO
from tunesmith.learn.trainers.run import run, task_of
from tunesmith.observe.profiling.meter import metering, usable_cpu

_CLOSE_S = 60


@dataclass(frozen=True, slots=True)
class Taken:
    """A step: seconds, tokens of prompts and completions, share of the usable cores, and mean wait for the
    interpreter's lock if it can be measured here.
    """

    seconds: float
    num_tokens: int
    cpu_util: float
    gil_wait_ms: float | None


@dataclass(frozen=True, slots=True)
class Lesson:
    """Completions that all sides learn from, with the log-probs `[B][T]` of the first side, whose gradients are written
    to `gradients`, where the others read them. After an update by all of them, `num_updates` follow by the first group
    alone: enough for float32 masters to move 16-bit weights.
    """

    groups: Sequence[Group]
    logps: Sequence[Sequence[float]]
    gradients: Path
    num_updates: int


@dataclass(frozen=True, slots=True)
class Learnt:
    """A lesson as one side computes it: the first loss; the distance of the first gradient to that in the file relative
    to its norm; the mean difference in nats to the log-probs of the lesson; the gain of all updates together, the mean
    of advantage times change of log-prob over the first group.
    """

    loss: float
    gradient_distance: float
    logp_difference: float
    gain: float


class Side:
    """Learners on given prompts, one after the other."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._cfg: Any = None
        self._task: Any = None
        self._learner: Any = None

    def build(self, cfg: PolicyRecipe) -> None:
        """The learner of a recipe, before its first step, in place of the one before."""
        self._task = self._learner = None
        gc.collect()
        self._cfg, self._task = cfg, task_of(cfg, Inputs(prompts=self._prompts), setup.prepare(cfg))
        self._learner = self._task.build()

    @property
    def _section(self) -> Any:
        return self._cfg.section

    def draw(self) -> list[Group]:
        """Completions of all prompts."""
        return self._learner.rollouts.draw(self._task.batch(0), "lesson", 0)[0]

    def logps(self, groups: Sequence[Group]) -> list[list[float]]:
        """The policy's log-probs of their tokens."""
        drawing, size = self._learner.rollouts.cfg, self._section.micro_batch_size
        return passes.logps(self._learner.policy, pack(groups, pad_id=0), drawing.temperature, size).tolist()

    def step(self, index: int) -> Taken:
        """The training step `index`, from 0."""
        prompts = self._task.batch(index)
        with metering() as meter, trace():
            start_s = time.perf_counter()
            result = self._learner.step(prompts, index)
            seconds = time.perf_counter() - start_s
            measured = meter.step()
        groups: Sequence[Group] = result.batch.args[0]
        return Taken(
            seconds,
            sum(len(group.prompt_token_ids) + len(one.token_ids) for group in groups for one in group.completions),
            measured["cpu/process"] / usable_cpu(),
            measured.get("gil/wait_ms"),
        )

    def learn(self, lesson: Lesson) -> Learnt:
        """The lesson, by the learner's own loss and optimizer, starting from the current weights."""
        before_BT = torch.tensor(self.logps(lesson.groups))
        batch = _batch(lesson, with_values=isinstance(self._learner, PPO))
        loss = self._update(batch)
        distance = self._compare(lesson.gradients)
        part = batch.select(range(len(lesson.groups[0].completions)))
        for _ in range(lesson.num_updates):
            self._update(part)
        after_BT = torch.tensor(self.logps(lesson.groups[:1]))
        num_rows, num_columns = after_BT.shape
        change_BT = after_BT - before_BT[:num_rows, :num_columns]
        difference_BT = (before_BT - torch.tensor(lesson.logps)).abs() * batch.sequences.mask_BT
        reset_peak_rss()
        return Learnt(
            loss,
            distance,
            float(difference_BT.sum()) / batch.sequences.num_tokens,
            float((part.advantage_BT * change_BT).sum()) / part.sequences.num_tokens,
        )

    def _update(self, batch: Any) -> float:
        """An update by all of `batch`, in the recipe's micro-batches; its loss."""
        size, losses = self._section.micro_batch_size, []
        whole = update_size(batch.sequences, size)

        def loss_of(micro: Any) -> tuple[torch.Tensor, None]:
            loss, _ = self._learner.micro_batch_loss(micro, whole, is_first=False)
            losses.append(loss.item())
            return loss, None

        passes.accumulate_rows(self._learner.optimizer, batch, size, loss_of, math.inf)
        return sum(losses)

    def train(self, cfg: PolicyRecipe, prompts: Sequence[str]) -> float:
        """The gain in reward of a short run of its own: its last five steps against the first five."""
        with tempfile.TemporaryDirectory() as folder:
            placed = cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": folder})})
            rewards = [row["reward"] for row in run(placed, Inputs(prompts=prompts), progress=False).metrics]
        return (sum(rewards[-5:]) - sum(rewards[:5])) / 5

    def peak_gb(self) -> float:
        """Largest resident memory since the lesson, in GB."""
        return peak_rss_since_reset_gb()

    def _compare(self, file: Path) -> float:
        """Write the gradient, or its distance to the one in the file. After a first update AdamW's first moment is
        the gradient times a constant.
        """
        tensors = self._learner.optimizer.state_dict().tensors
        moments = {name: tensor for name, tensor in tensors.items() if name.startswith("exp_avg/")}
        if not file.exists():
            save_file({name: tensor.contiguous() for name, tensor in moments.items()}, file)
            return 0.0
        with safe_open(file, "pt") as known:
            pairs = ((tensor.double(), known.get_tensor(name).double()) for name, tensor in moments.items())
            sums = [(float((ours - theirs).square().sum()), float(theirs.square().sum())) for ours, theirs in pairs]
        return math.sqrt(sum(error for error, _ in sums) / sum(norm for _, norm in sums))


def _batch(lesson: Lesson, *, with_values: bool) -> PolicyBatch:
    """The lesson with numbers drawn around its log-probs, so that neither ratios nor the KL are trivial: advantages of
    each completion; log-probs of old policy and reference, for PPO values and returns too, of each token.
    """
    sequences = pack(lesson.groups, pad_id=0)
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    shape, logp_BT = sequences.mask_BT.shape, torch.tensor(lesson.logps)
    advantage_BT = noise(shape[0], 1) * sequences.mask_BT
    old_BT, reference_BT = (logp_BT + 0.1 * noise(shape) * sequences.mask_BT for _ in range(2))
    if not with_values:
        return PolicyBatch(sequences, old_BT, reference_BT, advantage_BT)
    value_BT, return_BT = (0.1 * noise(shape) * sequences.mask_BT for _ in range(2))
    return PolicyBatch(sequences, old_BT, reference_BT, advantage_BT, value_BT, return_BT)


class Worker(AbstractContextManager["Worker"]):
    """A `Side` in a process of its own; `call` is a call of one of its methods.

    Raises:
        TunesmithError: what the side raises.
        TrainingError: its process ended.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        context = get_context("forkserver")  # imports once for all sides, and forks none of them from another
        context.set_forkserver_preload([__name__])
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, prompts), daemon=True)
        self._process.start()
        there.close()

    def call(self, method: str, *arguments: object) -> Any:
        """The answer of the side."""
        self._connection.send((method, arguments))
        try:
            answer = self._connection.recv()
        except EOFError as error:
            self._process.join(_CLOSE_S)
            raise TrainingError(
                f"a process of the ladder ended with exit code {self._process.exitcode}; -9 is a lack of memory"
            ) from error
        if isinstance(answer, TunesmithError):
            raise answer
        return answer

    def __exit__(self, *_: object) -> None:
        """End the process; it may be ended already."""
        self._connection.close()  # which ends the loop of the process
        self._process.join(_CLOSE_S)
        self._process.kill()


def _serve(connection: Connection, prompts: Sequence[str]) -> None:
    """Answer calls until the other end is closed."""
    sys.stdout = sys.stderr  # the command's own output may be one JSON object
    try:
        side = Side(prompts)
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(side, method)(*arguments))
    except EOFError:
        return
    except TunesmithError as error:
        connection.send(error)
