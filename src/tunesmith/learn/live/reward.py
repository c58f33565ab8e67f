"""Updates by a reward model: it learns from the votes, then the policy makes steps of PPO or GRPO against it.

The learners are those of `trainers`, on the policy, optimizer and engine of the live loop.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.core.seeds import Groups, derive, permutation_of_groups
from tunesmith.base.core.trace import span
from tunesmith.collect.data.collate import EncodedPreference
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.loaded import freeze_lower_layers, keep_lower_layers
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.models.tokenizer import end_token_id, stop_token_ids
from tunesmith.learn.algorithms import kl
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.live.offers import Offers
from tunesmith.learn.live.vote_dpo import NUM_STEPS, VoteDPO
from tunesmith.learn.live.votes import VotedPair, VoteMemory
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers import rollouts
from tunesmith.learn.trainers.api import StepResult
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.ppo import PPO
from tunesmith.learn.trainers.reward import Reward
from tunesmith.learn.trainers.rollouts import Rollouts


@dataclass(slots=True)
class RewardUpdate:
    """A reward model beside the policy, new at each start; its first update learns from all earlier votes.

    Policy, reference and optimizer are those of `learner`, the engine that of `offers`.
    """

    cfg: LiveRecipe
    learner: VoteDPO
    offers: Offers
    memory: VoteMemory
    reward: Reward = field(init=False)
    kl: Controller = field(init=False)
    is_first: bool = True

    def __post_init__(self) -> None:
        cfg, section = self.cfg, self.cfg.reward_model
        device = self.learner.policy.module.device
        model = new_reward_model(cfg.model, device=device, heads=section.heads, seed=cfg.run.seed)
        keep_lower_layers(model.model, section.num_layers)
        if section.num_layers is None:
            freeze_lower_layers(model.model, cfg.model.num_trainable_layers)
        model.model.score.requires_grad_(True)
        optimizer = MasterAdamW(model, cfg.optimizer, total_steps=NUM_STEPS)
        self.reward = Reward(section, model, optimizer, seed=cfg.run.seed)
        control = cfg.ppo.kl if cfg.live.update == "ppo" else cfg.grpo.kl
        self.kl = kl.Controller(control.coef, control.target, control.horizon)

    def steps(
        self,
        votes: Sequence[VotedPair],
        seed: int,
        first_step: int,
        progress: Callable[[str], None],
        weigh: Callable[[Sequence[VotedPair]], list[VotedPair]] = list,
    ) -> Iterator[StepResult]:
        """Train the reward model on `votes`, then make the policy's steps, and yield the result of each.

        `first_step` counts the policy's steps so far; `progress` is called with a state before each step of either.
        `weigh` gives votes their weights.
        """
        accuracy = self.learn_rewards(votes, seed, progress, weigh)
        tokenizer, num_prompts = self.learner.tokenizer, self.cfg.rollout.prompts_per_step
        pessimism = self.cfg.reward_model.pessimism
        model = ModelReward(self.reward.model, "votes", policy_tokenizer=tokenizer, pessimism=pessimism)
        policy = self.policy_learner(Scorer([model], policy_tokenizer=tokenizer))
        for index in range(self.cfg.live.policy_steps):
            train, step = self.offers.prompts.train, first_step + index
            prompts = rollouts.prompts_of_step(train, num_prompts, self.cfg.run.seed, step)
            progress("policy step")
            result = policy.step(prompts, derive(seed, index))
            result.metrics["reward_model/accuracy"] = accuracy
            yield result

    def learn_rewards(
        self,
        votes: Sequence[VotedPair],
        seed: int,
        progress: Callable[[str], None],
        weigh: Callable[[Sequence[VotedPair]], list[VotedPair]] = list,
    ) -> float:
        """Train the reward model; returns its accuracy on the votes, each measured before its step."""
        section = self.cfg.reward_model
        if self.is_first:
            votes, self.is_first = [*self.memory.learnt.values()], False
        votes = weigh(votes)
        stop_ids = stop_token_ids(self.learner.policy.module, self.learner.tokenizer)
        end_ids = [end_token_id(self.learner.tokenizer, is_conversational=is_turn) for is_turn in (False, True)]

        def encoded(some: Iterable[VotedPair]) -> list[EncodedPreference]:
            return [encode_pair(vote, stop_ids, end_ids[vote.prompt.is_conversational]) for vote in some]

        pairs = encoded(votes)
        accuracies: list[float] = []
        for epoch in range(section.num_epochs):
            order = permutation_of_groups(seed, epoch, Groups(pair.prompt_id for pair in pairs))
            for index, chosen in enumerate(chunks(order, section.pairs_per_step)):
                progress("reward model")
                with span("reward_model"):
                    metrics = self.reward.step([pairs[i] for i in chosen], index).metrics
                accuracies.append(metrics.get("accuracy", 0.5))
        if self.reward.model.num_heads > 1:
            self.reward.know(encoded(self.memory.heldout.values()) or pairs)
        return sum(accuracies) / len(accuracies)

    def policy_learner(self, scorer: Scorer) -> PPO | GRPO:
        """PPO or GRPO with the current optimizer, which a rollback replaces."""
        cfg, learner, prompts = self.cfg, self.learner, self.offers.prompts.train
        drawing = Rollouts(self.offers.engine, scorer, cfg.rollout, cfg.run.seed, NUM_STEPS)
        shared = (learner.optimizer, self.kl, learner.tokenizer)
        if cfg.live.update == "ppo":
            return PPO(cfg.ppo, drawing, learner.policy, learner.reference if cfg.ppo.kl.coef > 0 else None, *shared)
        reference = learner.reference if cfg.grpo.kl.coef > 0 else None
        return GRPO(cfg.grpo, drawing, learner.policy, reference, *shared, pool=prompts)


def encode_pair(vote: VotedPair, stop_ids: Sequence[int], end_id: int | None) -> EncodedPreference:
    """Both answers as the reward model scores completions in PPO: one without any of `stop_ids` at its end gets
    `end_id`.
    """
    end = () if end_id is None else (end_id,)
    chosen, rejected = (
        (*one.prompt_ids, *one.completion_ids, *(() if one.completion_ids[-1] in (*stop_ids, *end) else end))
        for one in vote.answers
    )
    ranks = (1, 1 if vote.tie else 2)
    return EncodedPreference(str(vote.prompt.content), (chosen, rejected), ranks, weight=vote.weight)
