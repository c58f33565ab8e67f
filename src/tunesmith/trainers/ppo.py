"""Proximal policy optimisation for language models (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Shape legend: P prompts, G completions per prompt, B = P * G sequences, S positions of prompt and completion, T
completion tokens. `PPO.step` is the whole algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from tunesmith.algorithms import advantages, kl, policy_loss, value_loss
from tunesmith.algorithms.kl import Controller
from tunesmith.batch.pack import PolicyScores, PPOBatch, Sequences, pack
from tunesmith.config.algorithms.ppo import PPOSection
from tunesmith.config.recipe import PolicyRecipe
from tunesmith.core.seeds import derive
from tunesmith.core.trace import span
from tunesmith.distributed.ranks import gathered, share_of
from tunesmith.models.division import divide
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.heads import Critic, ScalarHead, hidden_size
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.loaded import PreTrainedTokenizerBase
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.models.sharding import shard
from tunesmith.rewards.scorer import Scores
from tunesmith.schema.records import Prompt
from tunesmith.trainers import metrics, passes, rollouts, setup
from tunesmith.trainers.api import Metrics, StepResult
from tunesmith.trainers.critic import CriticProcess
from tunesmith.trainers.rollouts import DrawingPolicy, PolicyTask, Rollouts


@dataclass(slots=True)
class PPO(DrawingPolicy):
    """The learner: `step` changes the policy, the critic, the optimizer and the KL controller."""

    cfg: PPOSection
    rollouts: Rollouts
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: MasterAdamW
    kl: Controller
    tokenizer: PreTrainedTokenizerBase
    value_head: ScalarHead | None = None
    critic: Critic | None = None
    critic_process: CriticProcess | None = None

    @classmethod
    def build(cls, task: PolicyTask, cfg: PolicyRecipe) -> Self:
        """The learner before its first step."""
        section, model = cfg.section, task.loaded.model
        policy, reference, controller = task.policy_and_reference(section.kl)
        value_head = ScalarHead(hidden_size(model)).to(task.device) if section.critic == "shared" else None
        critic = Critic.from_policy(model, cfg.model) if section.critic == "separate" else None
        process = CriticProcess(critic) if critic is not None and section.critic_process else None
        divide(policy, reference, draws=True)
        if critic is not None:
            shard(critic)  # a pipeline has it whole on each rank
        trained = {"policy": model, "value_head": value_head, "critic": critic}
        modules = nn.ModuleDict({name: module for name, module in trained.items() if module is not None})
        optimizer = task.optimizer(modules, policy.kernels)
        drawing = task.rollouts(policy, optimizer, value_head)
        tokenizer = task.loaded.tokenizer
        critics = value_head, critic, process
        return cls(section, drawing, policy, reference, optimizer, controller, tokenizer, *critics)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The policy and its critic."""
        modules = {"policy": self.policy.module, "value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in modules.items() if module is not None}

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """PPO step `index` (from 0): draw, score, estimate advantages, update some epochs, adapt the KL coefficient."""
        cfg = self.cfg
        groups, scores = self.rollouts.draw(prompts, "rollout", index)
        with span("pack"):
            valid = torch.nonzero(scores.valid_PG.flatten()).flatten().tolist()  # not those whose reward failed
            sequences = setup.sent(pack(groups, pad_id=0, rows=valid), self.uploader)
        sequences = passes.with_frozen_states(self.policy, sequences, cfg.micro_batch_size)
        mask_BT = sequences.mask_BT
        with span("old_policy"):  # log-probs and values under the weights that drew the tokens
            old_logp_BT, old_value_BT = self.old_scores(sequences)
        reference_logp_BT = old_logp_BT  # without KL control the policy is its own reference
        if self.reference is not None:
            with span("reference"):
                temperature = self.rollouts.cfg.temperature
                reference_logp_BT = passes.logps(self.reference, sequences, temperature, cfg.micro_batch_size)

        with span("advantages"):
            kl_BT = kl.estimate(cfg.kl.estimator, old_logp_BT, reference_logp_BT)
            kl_in_reward = self.kl.value if cfg.kl.place == "reward" else 0.0
            reward_BT = kl.penalised_reward(scores.total_PG.flatten()[valid].to(kl_BT), kl_BT, mask_BT, kl_in_reward)
            if cfg.whiten_rewards:
                reward_BT = advantages.whiten(reward_BT, mask_BT, shift_mean=False)
            advantage_BT, return_BT = advantages.gae(reward_BT, old_value_BT, mask_BT, cfg.gamma, cfg.lam, by=cfg.gae)
            if cfg.whiten_advantages:
                advantage_BT = advantages.whiten(advantage_BT, mask_BT)
        batch = PPOBatch(sequences, old_logp_BT, reference_logp_BT, advantage_BT, old_value_BT, return_BT)

        with span("update"):
            stats = self.update(batch, index)
        with span("metrics"):
            self.kl.update(metrics.kl_per_sequence(old_logp_BT, reference_logp_BT, mask_BT), len(sequences.lengths_B))
            lengths, coef = metrics.completion_metrics(groups, valid), {"objective/kl_coef": self.kl.value}
            figures = {**step_metrics(scores, batch, kl_in_reward, stats), **lengths, **coef}
        rows_of = (partial(metrics.batch_rows, groups, scores), partial(metrics.sample_rows, groups, scores))
        return StepResult(figures, metrics.worst_report(stats.reports), *rows_of)

    def update(self, batch: PPOBatch, index: int) -> metrics.UpdateStats:
        """Optimizer steps on the minibatches of each epoch over `batch`, until the KL exceeds its target."""
        cfg, stats = self.cfg, metrics.UpdateStats()
        for minibatch in rollouts.minibatches(batch, cfg, derive(self.rollouts.seed, "minibatches", index)):
            size = rollouts.update_size(minibatch.sequences, cfg.micro_batch_size)  # global denominators
            loss_of = partial(self.micro_batch_loss, size=size, is_first=not stats.reports)
            stats.add(*passes.accumulate_rows(self.optimizer, minibatch, cfg.micro_batch_size, loss_of))
            if cfg.target_kl is not None and stats.last_minibatch_kl() > cfg.target_kl:
                stats.stopped_early = True
                break
        return stats

    def micro_batch_loss(
        self, micro: PPOBatch, size: policy_loss.UpdateSize, *, is_first: bool
    ) -> tuple[torch.Tensor, metrics.MicroStats]:
        """The PPO loss of one micro-batch, a scalar, with its statistics; `is_first`: of the step's first update."""
        cfg, mask_BT, drawing = self.cfg, micro.sequences.mask_BT, self.rollouts.cfg
        new = self.forward(micro.sequences)
        policy = rollouts.objective(
            cfg,
            drawing.importance,
            micro,
            new,
            kl_coef=self.kl.value,
            denominator=policy_loss.loss_denominator(cfg.loss_normalization, mask_BT, size, drawing.max_new_tokens),
            num_tokens=size.num_tokens,
        )
        loss, value_stats = policy.loss, None
        if cfg.critic != "none":
            value, value_stats = value_loss.clipped(
                new.value_BT, micro.old_value_BT, micro.return_BT, mask_BT, size.num_tokens, cfg.value_clip
            )
            loss = loss + cfg.value_coef * value
        seen = (micro.sequences, new.logp_BT, new.entropy_BT, policy.correction)
        first = metrics.FirstPass.of_batch(*seen) if is_first else None
        return loss, metrics.MicroStats(policy.stats, value_stats, first)

    def forward(self, sequences: Sequences) -> PolicyScores:
        """Log-probs, entropies and values of the completion tokens under the current weights."""
        begun = self.begun_values(sequences)
        temperature = self.rollouts.cfg.temperature
        scores = passes.completion_scores(self.policy, sequences, temperature, self.value_head)
        value_BT = scores.value_BT if begun is None else begun()
        value_BT = torch.zeros_like(scores.logp_BT) if value_BT is None else value_BT
        return PolicyScores(scores.logp_BT, scores.entropy_BT, value_BT)

    def begun_values(self, sequences: Sequences) -> Callable[[], torch.Tensor] | None:
        """The values of the separate critic, perhaps not computed yet; None without one."""
        if self.critic is None:
            return None
        inputs = sequences.ids_BS, sequences.lengths_B, sequences.prompt_lengths_B
        return partial(self.critic, *inputs) if self.critic_process is None else self.critic_process.begin(*inputs)

    @torch.no_grad()
    def old_scores(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, values) of the tokens under the policy that drew them, without gradient.

        If the engine is exact, its recorded log-probs are used and no forward pass of the policy is made; a separate
        critic is still evaluated.
        """
        size, width = self.cfg.micro_batch_size, sequences.mask_BT.shape[1]
        micros = share_of(passes.micro_batches(sequences, size))
        if not self.rollouts.is_exact:
            parts = gathered([self.forward(micro) for micro in micros], "log-probs and values")
            logp_BT = passes.join([part.logp_BT for part in parts], width)
            return logp_BT, passes.join([part.value_BT for part in parts], width)
        if self.critic is not None:
            values = gathered([begun() for m in micros if (begun := self.begun_values(m))], "values")
            return sequences.raw_logp_BT, passes.join(values, width)
        value_BT = torch.zeros_like(sequences.raw_logp_BT) if sequences.value_BT is None else sequences.value_BT
        return sequences.raw_logp_BT, value_BT

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the policy to `folder` in the Hugging Face layout, with its value head beside it."""
        return save_final(self.policy.module, self.tokenizer, folder, card, value_head=self.value_head)


def step_metrics(scores: Scores, batch: PPOBatch, kl_coef: float, stats: metrics.UpdateStats) -> Metrics:
    """Metrics of a step under TRL's names: rewards, KL of the rollout, updates."""
    mask_BT, num_tokens = batch.sequences.mask_BT, batch.sequences.num_tokens
    assert batch.reference_logp_BT is not None
    nats = metrics.kl_per_sequence(batch.old_logp_BT, batch.reference_logp_BT, mask_BT)
    rewards = scores.metrics()
    return {
        **rewards,
        "objective/kl": nats,
        "objective/entropy": stats.first.entropy_per_sequence,
        "objective/scores": rewards["reward"],
        "objective/non_score_reward": -kl_coef * nats,
        "objective/rlhf_reward": rewards["reward"] - kl_coef * nats,
        "kl": nats * len(mask_BT) / num_tokens,
        **stats.metrics(),
        "num_tokens": float(num_tokens),
    }
