"""Supervised learning beside the loss of a policy, as further micro-batches of its updates.

PPO-ptx (Ouyang et al. 2022, arXiv 2203.02155, equation 2): a policy forgets what its reward does not see, and the
likelihood of demonstrations holds it. ECHO (Shrivastava et al. 2026, arXiv 2605.24517, section 3): a policy that
predicts what its environment replies learns from trajectories that earn nothing, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tunesmith.base.core.seeds import items_at
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.batch.rollout import Group
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


@dataclass(frozen=True, slots=True)
class ReplyLoss:
    """The term: `coef` times the mean of -log p over the tokens of the replies of an update, at temperature 1, by the
    loss of `sft`; `micro_batch_size` trajectories in a pass.
    """

    coef: float
    sft: SFT
    micro_batch_size: int

    def losses(self, replied: Sequence[LearntSequence]) -> list[MicroLoss]:
        """The losses of the micro-batches of an update that learns the sequences `replied`."""
        num_learnt = sum(one.num_learnt for one in replied)
        return [partial(self.loss, micro, num_learnt) for micro in chunks(replied, self.micro_batch_size)]

    def loss(self, micro: Sequence[LearntSequence], num_tokens: float) -> tuple[torch.Tensor, MicroStats]:
        """The term of one micro-batch, divided by `num_tokens`, and its statistics."""
        loss, stats = self.sft.micro_batch_loss(micro, num_tokens)
        return self.coef * loss, MicroStats(replies=stats)


def replied_sequences(groups: Sequence[Group]) -> list[LearntSequence]:
    """The trajectories of `groups` in which the model read a reply, whose contents are to be learnt."""
    found: list[LearntSequence] = []
    for group in groups:
        for sample in (sample for completion in group.completions for sample in completion.samples):
            front = sample.prompt_ids or group.prompt_token_ids
            ranges = [part for turn in sample.trajectory_turns for part in turn.replies]
            spans = tuple(range(len(front) + part.start, len(front) + part.stop) for part in ranges)
            if spans:
                found.append(LearntSequence(group.prompt.id, front + sample.token_ids, spans))
    return found
