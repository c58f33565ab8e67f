"""Proximal policy optimisation for language models (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

The step is `PolicyStep.step`; PPO adds a critic, from whose values each token gets its own advantage (`batch_of`), and
its loss. Shape legend: P prompts, G completions per prompt, B sequences, T completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from tunesmith.base.config.algorithms.ppo import PPOSection
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.core.trace import span
from tunesmith.engine.batch.pack import PolicyBatch, Sequences
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import Critic, ScalarHead, hidden_size
from tunesmith.engine.models.logprob import TokenScores
from tunesmith.engine.models.sharding import shard
from tunesmith.learn.algorithms import advantages, kl, value_loss
from tunesmith.learn.algorithms.policy_loss import UpdateSize
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers import metrics, passes
from tunesmith.learn.trainers.api import Metrics
from tunesmith.learn.trainers.critic import CriticProcess
from tunesmith.learn.trainers.policy_step import Credit, Loss, PolicyStep
from tunesmith.learn.trainers.ptx import MicroLoss
from tunesmith.learn.trainers.rollouts import PolicyTask


@dataclass(slots=True)
class PPO(PolicyStep):
    """The learner: `step` changes the policy, the critic, the optimizer and the KL controller."""

    cfg: PPOSection
    value_head: ScalarHead | None = None
    critic: Critic | None = None
    critic_process: CriticProcess | None = None
    is_value_step: bool = False

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
        learner = cls(section, drawing, policy, reference, optimizer, controller, task.loaded.tokenizer)
        learner = replace(learner, ptx=task.ptx(policy, optimizer), replies=task.reply_loss(policy, optimizer))
        return replace(learner, value_head=value_head, critic=critic, critic_process=process)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The policy and its critic."""
        modules = {"policy": self.policy.module, "value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in modules.items() if module is not None}

    @property
    def is_on_policy(self) -> bool:
        """False: the rewards of the tokens have the log-probs of the old policy, so they are known before an update."""
        return False

    @property
    def needs_old_pass(self) -> bool:
        """True if the engine did not record log-probs and values exactly."""
        return not self.rollouts.is_exact

    def update(
        self,
        batch: PolicyBatch,
        index: int,
        drawn_per_unit: float = 1.0,
        replied: Sequence[LearntSequence] = (),
    ) -> metrics.UpdateStats:
        """As of `PolicyStep`; in the first `value_steps` the critic alone is updated."""
        self.is_value_step = index < self.cfg.value_steps
        return PolicyStep.update(self, batch, index, drawn_per_unit, replied)

    def losses_beside(self, index: int, update: int, replied: Sequence[LearntSequence] = ()) -> list[MicroLoss]:
        """As of `PolicyStep`; none while the critic alone is updated."""
        return [] if index < self.cfg.value_steps else PolicyStep.losses_beside(self, index, update, replied)

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """All completions but those whose reward failed, each with its reward."""
        return Credit(scores.valid_PG, scores.total_PG)

    def kl_in_reward(self, groups: Sequence[Group]) -> tuple[None, None]:
        """Nothing: the KL is part of the reward of each token."""
        return None, None

    def batch_of(
        self,
        sequences: Sequences,
        old: tuple[torch.Tensor, torch.Tensor | None],
        reference_logp_BT: torch.Tensor | None,
        advantage_B: torch.Tensor,
    ) -> PolicyBatch:
        """The batch of the update: the reward `advantage_B` of each completion, at its last token, and the KL of each
        token give advantages and returns by generalised advantage estimation over the values of the critic.
        """
        cfg, mask_BT = self.cfg, sequences.mask_BT
        old_logp_BT, value_BT = old
        if reference_logp_BT is None:  # without KL control the policy is its own reference
            reference_logp_BT = old_logp_BT
        if value_BT is None:
            value_BT = torch.zeros_like(old_logp_BT)
        kl_BT = kl.estimate(cfg.kl.estimator, old_logp_BT, reference_logp_BT)
        score_B, turns = advantage_B.to(kl_BT), sequences.turns
        if turns is not None:  # what was given for a turn is its own reward, the rest that of the last token
            turn_reward_BT = self.rollouts.scorer.weight_of("environment") * turns.reward_BT.to(kl_BT)
            score_B = score_B - turn_reward_BT.sum(dim=1)
        reward_BT = kl.penalised_reward(score_B, kl_BT, mask_BT, self.kl_coef_in_reward)
        if turns is not None:
            reward_BT = reward_BT + turn_reward_BT
        if cfg.whiten_rewards:
            reward_BT = advantages.whiten(reward_BT, mask_BT, shift_mean=False)
        known = reward_BT, value_BT, mask_BT, cfg.gamma
        advantage_BT, return_BT = advantages.gae(*known, cfg.lam, by=cfg.gae)
        if cfg.lam_per_length is not None:
            advantage_BT = advantages.gae_by_length(*known, cfg.lam_per_length).advantage_BT
        if cfg.value_lam is not None:
            return_BT = advantages.gae(*known, cfg.value_lam, by=cfg.gae).return_BT
        if cfg.whiten_advantages:
            advantage_BT = advantages.whiten(advantage_BT, mask_BT)
        return PolicyBatch(sequences, old_logp_BT, reference_logp_BT, advantage_BT, value_BT, return_BT)

    @property
    def kl_coef_in_reward(self) -> float:
        """The KL coefficient of this step if the KL is part of the reward, else 0."""
        return self.kl.value if self.cfg.kl.place == "reward" else 0.0

    def loss(self, micro: PolicyBatch, new: TokenScores, size: UpdateSize) -> Loss:
        """The loss of the policy, and of the critic's values by their weight."""
        cfg, found = self.cfg, PolicyStep.loss(self, micro, new, size)
        if cfg.critic == "none":
            return found
        assert new.value_BT is not None and micro.old_value_BT is not None and micro.return_BT is not None
        mask_BT = micro.sequences.mask_BT
        value, stats = value_loss.clipped(
            new.value_BT, micro.old_value_BT, micro.return_BT, mask_BT, size.num_tokens, cfg.value_clip
        )
        value = cfg.value_coef * value
        return replace(found, loss=value if self.is_value_step else found.loss + value, value=stats)

    def forward(self, sequences: Sequences) -> TokenScores:
        """Log-probs, entropies and values of the completion tokens under the current weights."""
        begun = self.begun_values(sequences)
        temperature = self.rollouts.cfg.temperature
        scores = passes.completion_scores(self.policy, sequences, temperature, self.value_head)
        return scores if begun is None else replace(scores, value_BT=begun())

    def begun_values(self, sequences: Sequences) -> Callable[[], torch.Tensor] | None:
        """The values of the separate critic, perhaps not computed yet; None without one."""
        if self.critic is None:
            return None
        inputs = sequences.ids_BS, sequences.lengths_B, sequences.prompt_lengths_B
        return partial(self.critic, *inputs) if self.critic_process is None else self.critic_process.begin(*inputs)

    @torch.no_grad()
    def old_scores(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(Log-probs of the tokens under the policy that drew them; values), `[B, T]`, without gradient.

        If the engine is exact, its recorded log-probs are used and no forward pass of the policy is made; a separate
        critic is still evaluated.
        """
        size, width = self.cfg.micro_batch_size, sequences.mask_BT.shape[1]
        with span("old_policy"):
            micros = share_of(passes.micro_batches(sequences, size))
            if self.needs_old_pass:
                parts = gathered([self.forward(micro) for micro in micros], "log-probs and values")
                values = [part.value_BT for part in parts if part.value_BT is not None]
                logp_BT = passes.join([part.logp_BT for part in parts], width)
                return logp_BT, passes.join(values, width) if values else None
            if self.critic is not None:
                values = gathered([begun() for m in micros if (begun := self.begun_values(m))], "values")
                return sequences.raw_logp_BT, passes.join(values, width)
            return sequences.raw_logp_BT, sequences.value_BT

    def figures(self, scores: Scores, batch: PolicyBatch, stats: metrics.UpdateStats) -> Metrics:
        """Metrics under TRL's names: rewards with and without the KL, and the KL of the rollout."""
        assert batch.reference_logp_BT is not None
        mask_BT, reward = batch.sequences.mask_BT, scores.metrics()["reward"]
        nats = metrics.kl_per_sequence(batch.old_logp_BT, batch.reference_logp_BT, mask_BT)
        return {
            "objective/kl": nats,
            "objective/entropy": stats.first.entropy_per_sequence,
            "objective/scores": reward,
            "objective/non_score_reward": -self.kl_coef_in_reward * nats,
            "objective/rlhf_reward": reward - self.kl_coef_in_reward * nats,
            "kl": nats * len(mask_BT) / batch.sequences.num_tokens,
        }

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the policy to `folder` in the Hugging Face layout, with its value head beside it."""
        return save_final(self.policy.module, self.tokenizer, folder, card, value_head=self.value_head)
