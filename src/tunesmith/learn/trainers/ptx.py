"""Supervised learning beside PPO's or GRPO's loss: PPO-ptx (Ouyang et al. 2022, arXiv 2203.02155, equation 2).

A policy forgets what its reward does not see. The likelihood of demonstrations, learnt in each update, holds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tunesmith.base.core.seeds import items_at
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.learn.trainers.metrics import MicroStats
from tunesmith.learn.trainers.sft import SFT

MicroLoss = Callable[[], tuple[torch.Tensor, MicroStats]]
"""The loss of a micro-batch, a scalar with gradients, and its statistics."""


@dataclass(frozen=True, slots=True)
class Ptx:
    """The term: `coef` times the mean of -log p over the learnt tokens of the demonstrations of an update, by the loss
    of `sft`, whose section says how many they are.
    """

    coef: float
    sft: SFT
    demonstrations: Sequence[LearntSequence]
    seed: int

    def losses(self, update: int) -> list[MicroLoss]:
        """The losses of the micro-batches of update `update` (from 0, over the whole run)."""
        num = len(self.demonstrations)
        size = min(self.sft.cfg.demonstrations_per_step, num)
        chosen = [self.demonstrations[i] for i in items_at(self.seed, update * size, size, num)]
        num_learnt = sum(one.num_learnt for one in chosen)
        return [partial(self.loss, micro, num_learnt) for micro in self.sft.micro_batches(chosen)]

    def loss(self, micro: Sequence[LearntSequence], num_tokens: float) -> tuple[torch.Tensor, MicroStats]:
        """The term of one micro-batch, divided by `num_tokens`, and its statistics."""
        loss, stats = self.sft.micro_batch_loss(micro, num_tokens)
        return self.coef * loss, MicroStats(ptx=stats)
