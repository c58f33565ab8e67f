"""Best-of-n distillation: draw n completions of each prompt, keep the best by the reward, learn them as SFT does.

RAFT (Dong et al. 2023, arXiv 2304.06767), also known as rejection-sampling fine-tuning; the baseline that PPO and GRPO
are compared with. Shape legend: P prompts, G completions per prompt, B kept sequences, T completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from tunesmith.algorithms import kl
from tunesmith.algorithms.kl import Controller
from tunesmith.batch.pack import PolicyBatch, pack
from tunesmith.config.algorithms.best_of_n import BestOfNSection
from tunesmith.config.recipe import PolicyRecipe
from tunesmith.core.seeds import derive
from tunesmith.core.trace import span
from tunesmith.models.division import divide
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.loaded import PreTrainedTokenizerBase
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.rewards.scorer import Scores
from tunesmith.schema.records import Prompt
from tunesmith.trainers import metrics, passes, rollouts, setup
from tunesmith.trainers.api import StepResult
from tunesmith.trainers.rollouts import DrawingPolicy, PolicyTask, Rollouts


@dataclass(slots=True)
class BestOfN(DrawingPolicy):
    """The learner: `step` changes the policy, the optimizer and the KL controller."""

    cfg: BestOfNSection
    rollouts: Rollouts
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: MasterAdamW
    kl: Controller
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def build(cls, task: PolicyTask, cfg: PolicyRecipe) -> Self:
        """The learner before its first step."""
        policy, reference, controller = task.policy_and_reference(cfg.section.kl)
        divide(policy, reference, draws=True)
        optimizer = task.optimizer(policy.module, policy.kernels)
        drawing = task.rollouts(policy, optimizer)
        return cls(cfg.section, drawing, policy, reference, optimizer, controller, task.loaded.tokenizer)

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """Step `index` (from 0): draw n completions of each prompt, score them, keep the best, learn their tokens."""
        cfg, temperature = self.cfg, self.rollouts.cfg.temperature
        groups, scores = self.rollouts.draw(prompts, "rollout", index)
        batch_rows = (partial(metrics.batch_rows, groups, scores), partial(metrics.sample_rows, groups, scores))
        reward_PG, reference_logp_BT = scores.total_PG, None
        if self.reference is not None and cfg.kl.place == "reward":
            reference_logp_BT, kl_PG = passes.sequence_kl(
                self.reference, groups, cfg.kl, temperature, cfg.micro_batch_size, self.uploader
            )
            reward_PG = reward_PG - self.kl.value * kl_PG.to(reward_PG)
        with span("pack"):
            rows = best_rows(reward_PG, scores, cfg.keep)
        with span("metrics"):
            figures = {**scores.metrics(), **metrics.completion_metrics(groups, rows)}
            figures["num_tokens"] = float(sum(len(one.token_ids) for group in groups for one in group.completions))
        if not rows:  # every reward failed
            return StepResult({**figures, "updates": 0.0, "refused_steps": 0.0}, None, *batch_rows)

        with span("pack"):
            sequences = setup.sent(pack(groups, pad_id=0, rows=rows), self.uploader)
        sequences = passes.with_frozen_states(self.policy, sequences, cfg.micro_batch_size)
        if reference_logp_BT is not None:
            reference_logp_BT = reference_logp_BT[rows, : sequences.mask_BT.shape[1]]
        elif self.reference is not None:
            with span("reference"):
                reference_logp_BT = passes.logps(self.reference, sequences, temperature, cfg.micro_batch_size)
        # A likelihood loss is a policy gradient with advantage 1 on every kept token.
        batch = PolicyBatch(sequences, sequences.raw_logp_BT, reference_logp_BT, sequences.mask_BT.float())

        stats = metrics.UpdateStats()
        with span("update"):
            nll = self.update(batch, index, stats)
        with span("metrics"):
            if reference_logp_BT is not None:
                nats = metrics.kl_per_sequence(sequences.raw_logp_BT, reference_logp_BT, sequences.mask_BT)
                self.kl.update(nats, len(rows))
                figures |= {"objective/kl": nats, "objective/kl_coef": self.kl.value}
            kept = scores.total_PG.flatten()[rows].mean().item()
            figures |= {"reward/kept": kept, "loss": nll, **stats.metrics()}
        return StepResult(figures, metrics.worst_report(stats.reports), *batch_rows)

    def update(self, batch: PolicyBatch, index: int, stats: metrics.UpdateStats) -> float:
        """Optimizer steps on the minibatches of each epoch over `batch`; returns the mean -log p of a token."""
        cfg = self.cfg
        nlls: list[float] = []
        num_learnt = 0
        for minibatch in rollouts.minibatches(batch, cfg, derive(self.rollouts.seed, "minibatches", index)):
            num_tokens = minibatch.sequences.num_tokens  # one global denominator: every rank knows the whole minibatch
            num_learnt += num_tokens
            loss_of = partial(self.micro_batch_loss, num_tokens=num_tokens, is_first=not stats.reports)
            report, micros = passes.accumulate_rows(self.optimizer, minibatch, cfg.micro_batch_size, loss_of)
            stats.add(report, [micro for _, micro in micros])
            nlls += [nll for nll, _ in micros]
        return sum(nlls) / num_learnt

    def micro_batch_loss(
        self, micro: PolicyBatch, num_tokens: float, *, is_first: bool
    ) -> tuple[torch.Tensor, tuple[float, metrics.MicroStats]]:
        """Loss of one micro-batch divided by `num_tokens`, a scalar; the sum of its tokens' -log p, and its statistics.

        The negative log-likelihood of all completion tokens, at the temperature of the rollout, and the KL to the
        reference if its place is the loss.
        """
        sequences = micro.sequences
        new = passes.completion_scores(self.policy, sequences, self.rollouts.cfg.temperature)
        nll = -(new.logp_BT * sequences.mask_BT).sum()
        loss = nll / num_tokens
        if self.cfg.kl.place == "loss" and micro.reference_logp_BT is not None:
            kl_BT = kl.penalty(self.cfg.kl.estimator, new.logp_BT, micro.reference_logp_BT, sequences.mask_BT)
            loss = loss + self.kl.value * (kl_BT.sum() / num_tokens)
        first = metrics.FirstPass.of_batch(sequences, new.logp_BT, new.entropy_BT) if is_first else None
        return loss, (nll.item(), metrics.MicroStats(first=first))


def best_rows(reward_PG: torch.Tensor, scores: Scores, num_kept: int) -> list[int]:
    """Indices, over all groups and ascending, of the `num_kept` completions of each group with the highest reward.

    Completions whose reward failed are never kept; of equal rewards the first drawn is kept.
    """
    ranked_PG = reward_PG.masked_fill(~scores.valid_PG, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    size = reward_PG.shape[1]
    kept = [
        p * size + g for p, order in enumerate(ranked_PG[:, :num_kept].tolist()) for g in order if scores.valid_PG[p, g]
    ]
    return sorted(kept)
