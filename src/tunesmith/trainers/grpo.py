"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), RLOO (Ahmadian et al. 2024), and variants.

Several completions are drawn for each prompt, and each is compared with the others of its group: no critic. Groups
whose rewards are all equal have no gradient and are left out. Shape legend: P prompts, G completions per prompt, R
rewards, B sequences (the completions that are left), S positions of prompt and completion, T completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Self

import torch

from tunesmith.algorithms import advantages, policy_loss
from tunesmith.algorithms.kl import Controller
from tunesmith.batch.pack import PolicyBatch, pack
from tunesmith.batch.rollout import Group
from tunesmith.config.algorithms.grpo import GRPOSection
from tunesmith.config.recipe import PolicyRecipe
from tunesmith.core.seeds import derive
from tunesmith.core.trace import span
from tunesmith.models.division import divide
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.loaded import PreTrainedTokenizerBase
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.rewards.scorer import Scores, joined
from tunesmith.schema.records import Prompt
from tunesmith.trainers import metrics, passes, rollouts, setup
from tunesmith.trainers.api import Metrics, StepResult
from tunesmith.trainers.rollouts import DrawingPolicy, PolicyTask, Rollouts


@dataclass(slots=True)
class GRPO(DrawingPolicy):
    """The learner: `step` changes the policy, the optimizer and the KL controller.

    `pool` holds the prompts that dynamic sampling may draw further ones from.
    """

    cfg: GRPOSection
    rollouts: Rollouts
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: MasterAdamW
    kl: Controller
    tokenizer: PreTrainedTokenizerBase
    pool: Sequence[Prompt] = ()

    @classmethod
    def build(cls, task: PolicyTask, cfg: PolicyRecipe) -> Self:
        """The learner before its first step."""
        policy, reference, controller = task.policy_and_reference(cfg.section.kl)
        divide(policy, reference, draws=True)
        optimizer = task.optimizer(policy.module, policy.kernels)
        drawing = task.rollouts(policy, optimizer)
        return cls(
            cfg.section, drawing, policy, reference, optimizer, controller, task.loaded.tokenizer, task.data.train
        )

    @property
    def is_on_policy(self) -> bool:
        """True if a rollout is used for a single update: then the old policy is the one that is updated."""
        return self.cfg.num_epochs * self.cfg.num_minibatches == 1

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """GRPO step `index` (from 0): draw groups, score, compare within each group, update the policy."""
        cfg, temperature = self.cfg, self.rollouts.cfg.temperature
        groups, scores = self.draw(prompts, index)
        batch_rows = (partial(metrics.batch_rows, groups, scores), partial(metrics.sample_rows, groups, scores))
        reference_logp_BT, kl_PG = self.kl_in_reward(groups)
        with span("advantages"):
            advantage_PG = self.compare(scores, kl_PG)
            differs_P = self.differing(scores)  # by the rewards alone: a KL in the reward is no signal of its own
            learnt_PG = scores.valid_PG & differs_P[:, None] & ~left_out(cfg, groups)
            rows = torch.nonzero(learnt_PG.flatten()).flatten().tolist()
        if not rows:  # in no group do the rewards differ
            return StepResult(step_metrics(groups, scores, differs_P, rows, metrics.UpdateStats()), None, *batch_rows)

        with span("pack"):
            sequences = setup.sent(pack(groups, pad_id=0, rows=rows), self.uploader)
            advantage_BT = advantage_PG.flatten()[rows].to(sequences.mask_BT.device)[:, None] * sequences.mask_BT
        sequences = passes.with_frozen_states(self.policy, sequences, cfg.micro_batch_size)
        old_logp_BT = sequences.raw_logp_BT
        if not (self.is_on_policy or self.rollouts.is_exact):
            with span("old_policy"):
                old_logp_BT = passes.logps(self.policy, sequences, temperature, cfg.micro_batch_size)
        if reference_logp_BT is not None:  # computed for all completions, because it is in their rewards
            reference_logp_BT = reference_logp_BT[rows, : sequences.mask_BT.shape[1]]
        elif self.reference is not None:
            with span("reference"):
                reference_logp_BT = passes.logps(self.reference, sequences, temperature, cfg.micro_batch_size)
        batch = PolicyBatch(sequences, old_logp_BT, reference_logp_BT, advantage_BT)
        num_wanted = len(prompts) * scores.valid_PG.shape[1]
        drawn_per_row = min(num_wanted, int(scores.valid_PG.sum())) / len(rows)  # means count what was left out too
        with span("update"):
            stats = self.update(batch, index, drawn_per_row)
        with span("metrics"):
            self.kl.update(stats.first.kl_per_sequence, len(rows))
            figures = {**step_metrics(groups, scores, differs_P, rows, stats), "objective/kl_coef": self.kl.value}
        return StepResult(figures, metrics.worst_report(stats.reports), *batch_rows)

    def update(self, batch: PolicyBatch, index: int, drawn_per_row: float) -> metrics.UpdateStats:
        """Optimizer steps on the minibatches of each epoch over `batch`; in means a row counts as `drawn_per_row`."""
        cfg, stats = self.cfg, metrics.UpdateStats()
        for minibatch in rollouts.minibatches(batch, cfg, derive(self.rollouts.seed, "minibatches", index)):
            num_drawn = drawn_per_row * len(minibatch.sequences.lengths_B)
            size = rollouts.update_size(minibatch.sequences, cfg.micro_batch_size, num_drawn)  # global denominators
            loss_of = partial(self.micro_batch_loss, size=size, is_first=not stats.reports)
            stats.add(*passes.accumulate_rows(self.optimizer, minibatch, cfg.micro_batch_size, loss_of))
        return stats

    def draw(self, prompts: Sequence[Prompt], index: int) -> tuple[list[Group], Scores]:
        """The groups of `prompts` and their scores.

        Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) then draws groups of further prompts, one
        for each group without a gradient, until enough groups have one or the recipe's limit is reached.
        """
        groups: list[Group] = []
        parts: list[Scores] = []
        num_missing, wanted = len(prompts), list(prompts)
        further = rollouts.further_prompts(self.pool, prompts, self.rollouts.seed, index)
        for attempt in range(1 + self.cfg.dynamic_sampling):
            stream = f"refill {attempt}" if attempt else "rollout"
            drawn, scores = self.rollouts.draw(wanted, stream, index)
            groups.extend(drawn)
            parts.append(scores)
            num_missing -= int(self.differing(scores).sum())
            wanted = list(islice(further, num_missing))
            if not wanted:
                break
        return groups, joined(parts)

    def differing(self, scores: Scores) -> torch.Tensor:
        """True for each group with a gradient, `[P]`: its rewards differ, or one of several that are compared alone."""
        if self.cfg.multi_objective_aggregation == "sum_then_normalize":
            return advantages.rewards_differ(scores.total_PG, scores.valid_PG)
        differs_P = torch.zeros(len(scores.total_PG), dtype=torch.bool)
        for weight, part_PG in zip(self.rollouts.scorer.weights, scores.parts.values(), strict=True):
            if weight != 0:
                differs_P |= advantages.rewards_differ(part_PG, scores.valid_PG & ~part_PG.isnan())
        return differs_P

    def kl_in_reward(self, groups: Sequence[Group]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(Log-probs of all completions under the reference, `[P * G, T]`; their KL, `[P, G]`) if the KL is part of the
        reward, else nothing.
        """
        cfg = self.cfg
        if self.reference is None or cfg.kl.place != "reward":
            return None, None
        return passes.sequence_kl(
            self.reference, groups, cfg.kl, self.rollouts.cfg.temperature, cfg.micro_batch_size, self.uploader
        )

    def compare(self, scores: Scores, kl_PG: torch.Tensor | None) -> torch.Tensor:
        """Advantage of each completion by the rewards of its group, less the KL if that is part of it, `[P, G]`."""
        cfg, valid_PG = self.cfg, scores.valid_PG
        if cfg.multi_objective_aggregation == "normalize_then_sum":
            part_RPG = torch.stack(list(scores.parts.values()))
            weights = torch.tensor(self.rollouts.scorer.weights)
            return advantages.normalized_sum(part_RPG, weights, valid_PG).advantage_PG
        reward_PG = scores.total_PG if kl_PG is None else scores.total_PG - self.kl.value * kl_PG.to(scores.total_PG)
        return advantages.group_relative(reward_PG, valid_PG, baseline=cfg.baseline, scale=cfg.scale).advantage_PG

    def micro_batch_loss(
        self, micro: PolicyBatch, size: policy_loss.UpdateSize, *, is_first: bool
    ) -> tuple[torch.Tensor, metrics.MicroStats]:
        """The GRPO loss of one micro-batch, a scalar, with its statistics; `is_first`: of the step's first update."""
        cfg, sequences, drawing = self.cfg, micro.sequences, self.rollouts.cfg
        new = passes.completion_scores(self.policy, sequences, drawing.temperature)
        policy = rollouts.objective(
            cfg,
            drawing.importance,
            micro,
            new,
            kl_coef=self.kl.value,
            denominator=policy_loss.loss_denominator(
                cfg.loss_normalization, sequences.mask_BT, size, drawing.max_new_tokens
            ),
            num_tokens=size.num_tokens,
            on_policy=self.is_on_policy,
        )
        seen = (sequences, new.logp_BT, new.entropy_BT, policy.correction, micro.reference_logp_BT)
        first = metrics.FirstPass.of_batch(*seen) if is_first else None
        return policy.loss, metrics.MicroStats(policy.stats, first=first)


def left_out(cfg: GRPOSection, groups: Sequence[Group]) -> torch.Tensor:
    """True for completions that the length limit ended, `[P, G]`, if the recipe does not learn from them."""
    truncated = [[completion.finish_reason == "length" for completion in group.completions] for group in groups]
    return torch.tensor(truncated) & cfg.mask_truncated_completions


def step_metrics(
    groups: Sequence[Group], scores: Scores, differs_P: torch.Tensor, learnt: Sequence[int], stats: metrics.UpdateStats
) -> Metrics:
    """Metrics of a step under TRL's names. `differs_P` is true for groups whose rewards differ; `learnt` are the
    completions that were learnt, counted over all groups.

    Those of a pass over the completions are of the first update alone: there the policy is that of its begin.
    """
    first = stats.first
    shared = {
        **scores.metrics(),
        "frac_reward_zero_std": (~differs_P).float().mean().item(),
        "groups/num_drawn": float(len(groups)),
        "groups/num_dropped": float((~differs_P).sum().item()),
        **metrics.completion_metrics(groups, learnt),
        "num_tokens": float(sum(len(completion.token_ids) for group in groups for completion in group.completions)),
    }
    if not stats.reports:
        return {**shared, "updates": 0.0, "refused_steps": 0.0}
    nats = {"objective/kl": first.kl_per_sequence, "kl": first.kl_sum / first.num_tokens}
    return {**shared, **(nats if first.has_reference else {}), **stats.metrics()}
